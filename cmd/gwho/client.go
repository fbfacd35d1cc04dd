package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"gpuledger/exporter/who"
)

const (
	askTimeout = 5 * time.Second
	maxAnswer  = 64 << 20 // bytes
)

// tokenHeader is the exporter's; importing its server for that would make
// gwho slow to start.
const tokenHeader = "X-Gpuledger-Token"

// errNoExporter says that there is no exporter at the socket.
var errNoExporter = errors.New("no gpu-exporter here")

// refused is an answer of the exporter that is not 200.
type refused struct {
	status  int
	message string
}

func (r refused) Error() string { return r.message }

// ask gets the answer from where the flags say.
func ask(ctx context.Context, o options) (who.Answer, error) {
	if o.url != "" {
		a, err := askURL(ctx, o)
		if known := (exit{}); err != nil && !errors.As(err, &known) {
			err = exit{exitMissing, err}
		}
		return a, err
	}
	if o.socket == "" {
		return direct(ctx, o)
	}
	a, err := askSocket(ctx, o.socket)
	var no refused
	switch {
	case err == nil:
		return a, nil
	case ctx.Err() != nil:
		return who.Answer{}, ctx.Err()
	case o.socketGiven:
		return who.Answer{}, exit{exitMissing, fmt.Errorf("gpu-exporter at --socket %s: %w", o.socket, err)}
	case errors.As(err, &no) && no.status == http.StatusForbidden:
		// The site has closed it; going around that is not for us.
		return who.Answer{}, exit{exitMissing, err}
	}
	a, directErr := direct(ctx, o)
	if directErr == nil && !errors.Is(err, errNoExporter) {
		a.Missing = append(a.Missing, who.Missing{What: who.MissingExporter,
			Message: fmt.Sprintf("gpu-exporter at %s gave no answer, so the cards were read without it: %v", o.socket, err)})
	}
	return a, directErr
}

func askSocket(ctx context.Context, path string) (who.Answer, error) {
	transport, request, err := socketRequest(path, who.Path)
	if err != nil {
		return who.Answer{}, err
	}
	defer transport.CloseIdleConnections()
	a, err := fetch(ctx, transport, request)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return a, fmt.Errorf("%w: %w", errNoExporter, err)
	}
	return a, err
}

func askURL(ctx context.Context, o options) (who.Answer, error) {
	transport, request, err := urlRequest("--url", o.url, who.Path, o.tokenFile)
	if err != nil {
		return who.Answer{}, exit{exitUsage, err}
	}
	defer transport.CloseIdleConnections()
	a, err := fetch(ctx, transport, request)
	if err != nil {
		return who.Answer{}, fmt.Errorf("gpu-exporter at %s: %w", redacted(o.url), err)
	}
	return a, nil
}

// socketRequest asks for a path over a unix socket.
func socketRequest(socket, path string) (*http.Transport, *http.Request, error) {
	request, err := http.NewRequest(http.MethodGet, "http://socket"+path, nil)
	return &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}, request, err
}

// urlRequest asks for a path, which may have a query, at an address that name
// has given, with the token of a file if there is one.
func urlRequest(name, address, path, tokenFile string) (*http.Transport, *http.Request, error) {
	// Not the text: it may hold a password.
	wrong := fmt.Errorf("%s takes http://host:port or https://host:port", name)
	base, err := url.Parse(address)
	if err != nil || base.Host == "" || base.Scheme != "http" && base.Scheme != "https" {
		return nil, nil, wrong
	}
	path, query, _ := strings.Cut(path, "?")
	target := base.JoinPath(path)
	target.RawQuery = query
	request, err := http.NewRequest(http.MethodGet, target.String(), nil)
	if err != nil {
		return nil, nil, wrong
	}
	if tokenFile != "" {
		token, err := os.ReadFile(tokenFile)
		if err != nil {
			return nil, nil, fmt.Errorf("--token-file: %w", err)
		}
		request.Header.Set(tokenHeader, strings.TrimSpace(string(token)))
	}
	return http.DefaultTransport.(*http.Transport).Clone(), request, nil
}

// redacted is an address without its password.
func redacted(address string) string {
	base, err := url.Parse(address)
	if err != nil {
		return "?"
	}
	return base.Redacted()
}

// fetch gets an exporter's answer.
func fetch(ctx context.Context, transport http.RoundTripper, request *http.Request) (who.Answer, error) {
	body, err := fetchBody(ctx, transport, request, asked{"gpu-exporter", askTimeout, maxAnswer})
	if err != nil {
		return who.Answer{}, err
	}
	var a who.Answer
	if err := json.Unmarshal(body, &a); err != nil {
		return who.Answer{}, fmt.Errorf("the answer is not one of gpu-exporter: %w", err)
	}
	return a, checkVersion("exporter", a.Version, who.Version)
}

func checkVersion(speaker string, has, wants int) error {
	if has != wants {
		return fmt.Errorf("the %s speaks version %d of the answer, this gwho version %d: use the gwho of the same release", speaker, has, wants)
	}
	return nil
}

// asked is who is asked, how long that may take, and how many bytes the answer
// may have.
type asked struct {
	program string
	within  time.Duration
	most    int64
}

// fetchBody gets the body of an answer that is 200.
func fetchBody(ctx context.Context, transport http.RoundTripper, request *http.Request, of asked) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, of.within)
	defer cancel()
	client := &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error {
		return errors.New("it answers with a redirect; give the address that it redirects to")
	}}
	response, err := client.Do(request.WithContext(ctx))
	if err != nil {
		var wrapped *url.Error
		if errors.As(err, &wrapped) {
			err = wrapped.Err // the caller says where, and without the password
		}
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("no answer within %s: %w", of.within, err)
		}
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, of.most+1))
	if err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	if int64(len(body)) > of.most {
		return nil, fmt.Errorf("the answer is larger than %d MiB", of.most>>20)
	}
	if response.StatusCode != http.StatusOK {
		var failure who.Failure
		if json.Unmarshal(body, &failure) != nil || failure.Error == "" {
			failure.Error = "is this a " + of.program + "?"
		}
		return nil, refused{response.StatusCode, fmt.Sprintf("%s: %s", response.Status, failure.Error)}
	}
	return body, nil
}
