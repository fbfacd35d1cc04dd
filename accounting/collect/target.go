package collect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/prometheus/common/config"

	"gpuledger/accounting/ledger"
	"gpuledger/exporter/usage"
)

// Trailers of a page of usage.
const (
	trailerNextCursor      = "Next-Cursor"
	trailerCompleteThrough = "Complete-Through"
)

// Bounds of one request.
const (
	requestTimeout = time.Minute
	maxPageBytes   = 64 << 20
	maxCursorBytes = 1024
	maxErrorBytes  = 300
)

// errGone says that the target's journal does not have the row the cursor names.
var errGone = errors.New("the journal does not have the row that the cursor names")

// ParseTarget checks a target's address: http://HOST:PORT, https://HOST:PORT or
// unix:///PATH/TO/SOCKET, and nothing more.
func ParseTarget(text string) (string, error) {
	u, err := url.Parse(text)
	if err != nil {
		return "", fmt.Errorf("target %q: not a URL such as http://gpu01:10094", text)
	}
	bare := u.User == nil && u.RawQuery == "" && u.Fragment == ""
	switch {
	case u.User != nil:
		return "", errors.New("a target holds a password: put it into collect.http.basic_auth, where it is kept out of logs")
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && (u.Path == "" || u.Path == "/") && bare:
		return u.Scheme + "://" + u.Host, nil
	case u.Scheme == "unix" && u.Host == "" && strings.HasPrefix(u.Path, "/") && bare:
		return "unix://" + u.Path, nil
	}
	return "", fmt.Errorf("target %q is neither http://HOST:PORT, https://HOST:PORT nor unix:///PATH", text)
}

// client asks one target for pages.
type client struct {
	target string
	base   string
	http   *http.Client
}

func newClient(target string, httpConfig config.HTTPClientConfig) (*client, error) {
	options := []config.HTTPClientOption{config.WithUserAgent("gpu-accounting"), config.WithIdleConnTimeout(5 * time.Minute)}
	base := target
	if path, ok := strings.CutPrefix(target, "unix://"); ok {
		base = "http://unix"
		options = append(options, config.WithDialContextFunc(func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "unix", path)
		}))
	} else {
		options = append(options, config.WithDialContextFunc((&net.Dialer{Timeout: 10 * time.Second}).DialContext))
	}
	c, err := config.NewClientFromConfig(httpConfig, "collect", options...)
	if err != nil {
		return nil, fmt.Errorf("HTTP client for %s: %w", target, err)
	}
	return &client{target: target, base: base, http: c}, nil
}

// page asks for the rows after a cursor.
func (c *client) page(ctx context.Context, cursor string) (page ledger.Page, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	query := url.Values{"limit": {fmt.Sprint(BatchRows)}}
	if cursor != "" {
		query.Set("after", cursor)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+"/api/v1/usage?"+query.Encode(), nil)
	if err != nil {
		return page, err
	}
	response, err := c.http.Do(request)
	if err != nil {
		return page, err
	}
	defer func() { err = errors.Join(err, response.Body.Close()) }()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusGone:
		return page, errGone
	default:
		said, _ := io.ReadAll(io.LimitReader(response.Body, maxErrorBytes)) // a reason is a help, not a need
		return page, fmt.Errorf("%s answers %s: %q", c.target, response.Status, strings.TrimSpace(string(said)))
	}
	page.Source = c.target
	body := &io.LimitedReader{R: response.Body, N: maxPageBytes + 1}
	err = ReadRows(body, func(rows []usage.Row, bad []ledger.BadLine) error {
		if len(page.Rows)+len(page.BadLines) > 0 && len(rows)+len(bad) > 0 {
			return fmt.Errorf("%s sends more than the %d rows that were asked for", c.target, BatchRows)
		}
		page.Rows, page.BadLines = rows, bad
		return nil
	})
	if body.N <= 0 {
		return page, fmt.Errorf("%s sends a page of more than %d bytes", c.target, maxPageBytes)
	}
	if err != nil {
		return page, fmt.Errorf("%s: %w", c.target, err)
	}
	// Without its trailers a page was cut off, whatever the transport says.
	page.Cursor = response.Trailer.Get(trailerNextCursor)
	if len(response.Trailer.Values(trailerNextCursor)) == 0 {
		return page, fmt.Errorf("%s: the page was cut off: it has no trailer %s (does a proxy between drop trailers?)", c.target, trailerNextCursor)
	}
	if len(page.Cursor) > maxCursorBytes {
		return page, fmt.Errorf("%s: a cursor of %d bytes", c.target, len(page.Cursor))
	}
	if text := response.Trailer.Get(trailerCompleteThrough); text != "" {
		if page.CompleteThrough, err = time.Parse(time.RFC3339, text); err != nil {
			return page, fmt.Errorf("%s: trailer %s: %w", c.target, trailerCompleteThrough, err)
		}
	}
	return page, nil
}
