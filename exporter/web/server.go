package web

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"time"

	toolkit "github.com/prometheus/exporter-toolkit/web"
	"golang.org/x/sync/errgroup"
)

// Time-outs of the listeners. Together the last two keep Run within the five
// seconds that the exporter has to stop.
const (
	readHeaderTimeout = 5 * time.Second
	readTimeout       = 10 * time.Second
	writeTimeout      = 60 * time.Second
	idleTimeout       = 75 * time.Second
	shutdownTimeout   = 3 * time.Second
	maxHeaderBytes    = 16 << 10
)

// Server is the exporter's HTTP side. Make it with New and start it once with
// Run.
type Server struct {
	options Options
	handler http.Handler
}

// New checks the options: the web configuration file and the tokens file must
// be good, and there must be something to listen on.
func New(o Options) (*Server, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if len(o.ListenAddresses) == 0 && !o.SystemdSocket && o.Socket == "" {
		return nil, errors.New("nothing to listen on: give --web.listen-address, --web.systemd-socket or --socket")
	}
	if err := toolkit.Validate(o.ConfigFile); err != nil {
		return nil, fmt.Errorf("web configuration file %s: %w", o.ConfigFile, err)
	}
	access, err := newAccess(o)
	if err != nil {
		return nil, err
	}
	handler, err := routes(o, access)
	if err != nil {
		return nil, err
	}
	return &Server{options: o, handler: handler}, nil
}

// Run opens the listeners and serves until ctx ends; it then returns nil within
// five seconds, whatever clients do. It returns an error if a listener cannot
// be opened or fails.
func (s *Server) Run(ctx context.Context) error {
	listeners, err := s.listen()
	if err != nil {
		return err
	}
	addresses := make([]net.Addr, len(listeners))
	for i, l := range listeners {
		addresses[i] = l.Addr()
	}

	// Whatever ends first, the end of ctx or a listener, ends the others.
	group, groupCtx := errgroup.WithContext(ctx)
	for _, l := range listeners {
		// One server a listener: the web configuration file is for TCP only,
		// and the toolkit puts itself into the server it serves.
		bounded := newBoundedListener(l, s.options.Logger)
		server := &http.Server{
			Handler:           s.handler,
			ReadHeaderTimeout: readHeaderTimeout,
			ReadTimeout:       readTimeout,
			WriteTimeout:      writeTimeout,
			IdleTimeout:       idleTimeout,
			MaxHeaderBytes:    maxHeaderBytes,
			ErrorLog:          slog.NewLogLogger(s.options.Logger.Handler(), slog.LevelDebug),
			ConnContext:       withPeer,
			ConnState:         bounded.track,
		}
		serving := make(chan struct{})
		group.Go(func() error {
			defer close(serving)
			return s.serve(bounded, server)
		})
		group.Go(func() error {
			<-groupCtx.Done()
			s.stop(server, bounded)
			<-serving
			return nil
		})
	}
	if s.options.OnListen != nil {
		s.options.OnListen(addresses)
	}
	return group.Wait()
}

func (s *Server) serve(l net.Listener, server *http.Server) error {
	configFile := s.options.ConfigFile
	if l.Addr().Network() == "unix" {
		configFile = ""
	}
	err := toolkit.Serve(l, server, &toolkit.FlagConfig{WebConfigFile: &configFile}, s.options.Logger)
	if err == nil || errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return fmt.Errorf("serve HTTP on %s: %w", l.Addr(), err)
}

// stop lets requests in work finish, but not for long.
func (s *Server) stop(server *http.Server, l net.Listener) {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	if err := server.Shutdown(ctx); err != nil {
		s.options.Logger.Warn("Closing connections with requests in work", "address", l.Addr().String(), "err", err)
		server.Close()
	}
	// Serve may not have got as far as taking the listener over.
	l.Close()
}

// listen opens all listeners or none.
func (s *Server) listen() (listeners []net.Listener, err error) {
	defer func() {
		if err != nil {
			for _, l := range listeners {
				l.Close()
			}
			listeners = nil
		}
	}()
	if s.options.SystemdSocket {
		if listeners, err = listenSystemd(); err != nil {
			return listeners, err
		}
	} else {
		for _, address := range s.options.ListenAddresses {
			l, err := listenTCP(address)
			if err != nil {
				return listeners, err
			}
			listeners = append(listeners, l)
		}
	}
	passed := func(l net.Listener) bool { return l.Addr().String() == s.options.Socket }
	if s.options.Socket != "" && !slices.ContainsFunc(listeners, passed) {
		l, err := listenUnix(s.options.Socket, s.options.Logger)
		if err != nil {
			return listeners, err
		}
		listeners = append(listeners, l)
	}
	return listeners, nil
}
