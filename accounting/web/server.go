// Package web is the HTTP side of gpu-accounting: health, metrics, who holds
// what on all nodes, and for admins reports and status.
package web

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/common/version"
	toolkit "github.com/prometheus/exporter-toolkit/web"
	"golang.org/x/sync/errgroup"

	"gpuledger/accounting/billing"
	"gpuledger/exporter/who"
)

// ErrBadRequest is wrapped by errors that are the caller's fault.
var ErrBadRequest = errors.New("bad request")

// Document is a finished answer.
type Document struct {
	ContentType string
	Name        string // file name to save it under
	Body        []byte
}

// Options say what a server serves.
type Options struct {
	// Report writes the statement of a month YYYY-MM; the present month, if
	// empty. An error that wraps ErrBadRequest or billing.ErrPeriod is told to
	// the caller.
	Report func(ctx context.Context, month, format string, bom bool) (Document, error)
	// Status returns a value that is shown as JSON.
	Status func(ctx context.Context) (any, error)
	// Nodes returns who.Nodes as JSON; with all, also what nodes tell of
	// themselves that have closed their live view.
	Nodes func(ctx context.Context, all bool) ([]byte, error)
	// Ready returns why the daemon can't work, or nil.
	Ready   func(ctx context.Context) error
	Access  *Access
	Metrics *Metrics
	Log     *slog.Logger
}

// requestTimeout bounds one answer.
const requestTimeout = 2 * time.Minute

// Handler returns the routes.
func Handler(o Options) (http.Handler, error) {
	gin.SetMode(gin.ReleaseMode)
	router := gin.New()
	if err := router.SetTrustedProxies(nil); err != nil {
		return nil, err
	}
	router.HandleMethodNotAllowed = true
	router.Use(func(c *gin.Context) {
		ctx, cancel := context.WithTimeout(c.Request.Context(), requestTimeout)
		defer cancel()
		c.Request = c.Request.WithContext(ctx)
		c.Header("X-Content-Type-Options", "nosniff")
		c.Next()
		o.Metrics.request(c.Writer.Status())
	}, gin.CustomRecoveryWithWriter(nil, func(c *gin.Context, reason any) {
		o.Log.Error("A request ended in a panic", "path", c.FullPath(), "err", reason)
		fail(c, http.StatusInternalServerError, "internal error: see the log of gpu-accounting")
	}))
	landing, err := toolkit.NewLandingPage(toolkit.LandingConfig{
		Name: "gpu-accounting", Description: "Who used which GPU, and what it costs", Version: version.Version,
		Links: []toolkit.LandingLinks{
			{Address: "/metrics", Text: "Metrics"},
			{Address: who.NodesPath, Text: "Who holds what", Description: "on all nodes, live (gwho --nodes shows it as a table)"},
			{Address: "/api/v1/report?format=table", Text: "This month's report", Description: "for admins"},
			{Address: "/api/v1/status", Text: "Status", Description: "for admins"},
			{Address: "/-/healthy", Text: "Health"}, {Address: "/-/ready", Text: "Readiness"},
		},
		Profiling: "false",
	})
	if err != nil {
		return nil, fmt.Errorf("landing page: %w", err)
	}
	router.GET("/", gin.WrapH(landing))
	router.GET("/-/healthy", func(c *gin.Context) { c.String(http.StatusOK, "gpu-accounting is healthy.\n") })
	router.GET("/-/ready", func(c *gin.Context) {
		if err := o.Ready(c.Request.Context()); err != nil {
			o.Log.Error("Not ready", "err", err)
			c.String(http.StatusServiceUnavailable, "gpu-accounting can't reach its ledger.\n")
			return
		}
		c.String(http.StatusOK, "gpu-accounting is ready.\n")
	})
	router.GET("/metrics", func(c *gin.Context) {
		var body bytes.Buffer
		if err := o.Metrics.Write(c.Request.Context(), &body); err != nil {
			o.internal(c, err)
			return
		}
		c.Data(http.StatusOK, "text/plain; version=0.0.4; charset=utf-8", body.Bytes())
	})
	router.GET(who.NodesPath, o.Access.live, o.nodes)
	api := router.Group("/api/v1", o.Access.adminsOnly)
	api.GET("/report", o.report)
	api.GET("/status", func(c *gin.Context) {
		status, err := o.Status(c.Request.Context())
		if err != nil {
			o.internal(c, err)
			return
		}
		c.JSON(http.StatusOK, status)
	})
	router.NoRoute(func(c *gin.Context) { fail(c, http.StatusNotFound, "there is nothing here") })
	return router, nil
}

func (o Options) report(c *gin.Context) {
	for name := range c.Request.URL.Query() {
		if name != "month" && name != "format" && name != "bom" {
			fail(c, http.StatusBadRequest, fmt.Sprintf("unknown parameter %.100q: there are month, format and bom", name))
			return
		}
	}
	document, err := o.Report(c.Request.Context(), c.Query("month"), c.DefaultQuery("format", "csv"), c.Query("bom") == "1")
	switch {
	case errors.Is(err, ErrBadRequest) || errors.Is(err, billing.ErrPeriod):
		fail(c, http.StatusBadRequest, err.Error())
	case err != nil:
		o.internal(c, err)
	default:
		if document.Name != "" {
			c.Header("Content-Disposition", `attachment; filename="`+document.Name+`"`)
		}
		c.Data(http.StatusOK, document.ContentType, document.Body)
	}
}

func (o Options) internal(c *gin.Context, err error) {
	if c.Request.Context().Err() == nil {
		o.Log.Error("A request failed", "path", c.FullPath(), "err", err)
	}
	fail(c, http.StatusInternalServerError, "internal error: see the log of gpu-accounting")
}

func fail(c *gin.Context, code int, message string) {
	c.AbortWithStatusJSON(code, gin.H{"error": message})
}

// shutdownTime is how long requests in flight may take once the daemon stops.
const shutdownTime = 3 * time.Second

// Serve serves on all listeners until the context is done, and stops within
// five seconds then. TLS and basic auth of a web configuration file apply to TCP; on unix
// sockets the kernel says who is there.
func Serve(ctx context.Context, listeners []net.Listener, handler http.Handler, webConfigFile string, log *slog.Logger) error {
	group, ctx := errgroup.WithContext(ctx)
	noConfig := ""
	for _, listener := range listeners {
		server := &http.Server{
			Handler: handler, ConnContext: withPeer, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
			ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second,
			WriteTimeout: requestTimeout + 30*time.Second, IdleTimeout: 5 * time.Minute, MaxHeaderBytes: 64 << 10,
		}
		flags := &toolkit.FlagConfig{WebConfigFile: &webConfigFile}
		if listener.Addr().Network() == "unix" {
			flags.WebConfigFile = &noConfig
		}
		group.Go(func() error {
			if err := toolkit.Serve(listener, server, flags, log); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("serve on %s: %w", listener.Addr(), err)
			}
			return nil
		})
		group.Go(func() error {
			<-ctx.Done()
			stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
			defer cancel()
			if err := server.Shutdown(stop); err != nil {
				log.Warn("Requests were cut off", "err", err)
				return server.Close()
			}
			return nil
		})
	}
	return group.Wait()
}

// CheckAddress accepts HOST:PORT, an empty host being all of them, and
// unix:///PATH.
func CheckAddress(address string) error {
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		if !strings.HasPrefix(path, "/") {
			return fmt.Errorf("%q is not unix:///PATH", address)
		}
		return nil
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("%q is neither HOST:PORT nor unix:///PATH", address)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("%q has no port from 0 to 65535", address)
	}
	return nil
}

// Listen opens listeners for addresses HOST:PORT and unix:///PATH. A socket that
// an ended process left behind is replaced; every user may connect to it,
// because the peer's uid is what decides.
func Listen(ctx context.Context, addresses []string) (_ []net.Listener, err error) {
	var listeners []net.Listener
	defer func() {
		if err != nil {
			for _, listener := range listeners {
				err = errors.Join(err, listener.Close())
			}
		}
	}()
	var config net.ListenConfig
	for _, address := range addresses {
		if err := CheckAddress(address); err != nil {
			return listeners, fmt.Errorf("listen: %w", err)
		}
		path, isUnix := strings.CutPrefix(address, "unix://")
		network := "tcp"
		if isUnix {
			network, address = "unix", path
			if err := removeStale(ctx, path); err != nil {
				return listeners, err
			}
		}
		listener, err := config.Listen(ctx, network, address)
		if err != nil {
			return listeners, fmt.Errorf("listen: %w", err)
		}
		listeners = append(listeners, listener)
		if isUnix {
			if err := os.Chmod(path, 0o666); err != nil {
				return listeners, fmt.Errorf("listen on %s: %w", path, err)
			}
		}
	}
	return listeners, nil
}

func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("listen on %s: %w", path, err)
	}
	if info.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("listen on %s: there is a file that is no socket: remove it, or name another path", path)
	}
	dialer := net.Dialer{Timeout: time.Second}
	if connection, err := dialer.DialContext(ctx, "unix", path); err == nil {
		return errors.Join(fmt.Errorf("listen on %s: another process serves there", path), connection.Close())
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("listen on %s: %w", path, err)
	}
	return nil
}
