// Package web is the exporter's HTTP side: its listeners, who may read what,
// and the pages that are there on every exporter.
package web

import (
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/spf13/pflag"

	"gpuledger/exporter/snapshot"
)

// Defaults of Options.
const (
	DefaultListenAddress = "127.0.0.1:10094"
	DefaultSocket        = "/run/gpu-exporter/exporter.sock"
)

// Options say what a Server serves, where, and to whom.
type Options struct {
	// ListenAddresses are host:port of the TCP listeners; none is allowed if
	// there is a Socket.
	ListenAddresses []string
	// ConfigFile is Prometheus's web configuration file: TLS, basic auth and
	// client certificates of the TCP listeners. Empty for none.
	ConfigFile string
	// SystemdSocket takes the listeners that systemd passes instead of
	// ListenAddresses.
	SystemdSocket bool
	// Socket is the path of the unix socket; empty for none.
	Socket string
	Access AccessConfig

	// Store is where the newest snapshot is; the exporter is ready once it has
	// one.
	Store *snapshot.Store
	// Metrics serves /metrics, Usage /api/v1/usage and History /api/v1/history,
	// all behind the access rules. A nil one leaves its path out.
	Metrics, Usage, History http.Handler

	Node    string
	Version string
	// Logger must not be nil.
	Logger *slog.Logger
	// OnListen, if not nil, is called once every listener is open.
	OnListen func([]net.Addr)
	// Now may be nil for the wall clock.
	Now func() time.Time
}

// AddFlags adds the flags of the listeners to flags, with o's fields as their
// targets.
func AddFlags(flags *pflag.FlagSet, o *Options) {
	flags.StringSliceVar(&o.ListenAddresses, "web.listen-address", []string{DefaultListenAddress},
		"address to listen on for HTTP; may be given more than once")
	flags.StringVar(&o.ConfigFile, "web.config.file", "",
		"file with TLS, basic auth and client certificates, in the form of Prometheus's web configuration")
	flags.BoolVar(&o.SystemdSocket, "web.systemd-socket", false,
		"use the sockets that systemd passes instead of --web.listen-address")
	flags.StringVar(&o.Socket, "socket", DefaultSocket,
		"unix socket for gwho and collectors on this node; empty for none")
}
