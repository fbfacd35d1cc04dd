// Package accounting is the daemon gpu-accounting and its commands: it joins
// collecting, the ledger, billing and reports.
package accounting

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	httpconfig "github.com/prometheus/common/config"

	"gpuledger/accounting/billing"
	"gpuledger/accounting/collect"
	"gpuledger/accounting/web"
	"gpuledger/exporter/strictyaml"
)

// Defaults of the configuration.
const (
	DefaultConfigFile = "/etc/gpuledger/gpu-accounting.yml"
	DefaultListen     = "127.0.0.1:10095"
	DefaultLedger     = "sqlite://" + defaultLedgerPath
	DefaultInterval   = time.Minute
)

const defaultLedgerPath = "/var/lib/gpu-accounting/ledger.db"

const maxConfigBytes = 16 << 20

// Config is the configuration file, checked.
type Config struct {
	Listen     []string
	LedgerPath string // of the SQLite file
	Interval   time.Duration
	Targets    []string
	FileSD     []string
	HTTP       httpconfig.HTTPClientConfig
	Book       *billing.Book
	Admins     []string
	TokensFile string // empty for none
	// CloseLive says that who holds what now isn't for everyone on this machine.
	CloseLive bool
}

// file is the configuration file as it is written.
type file struct {
	Listen listenAddresses `yaml:"listen"`
	Ledger struct {
		URL string `yaml:"url"`
	} `yaml:"ledger"`
	Collect struct {
		Interval string     `yaml:"interval"`
		Targets  []string   `yaml:"targets"`
		FileSD   []string   `yaml:"file_sd"`
		HTTP     httpClient `yaml:"http"`
	} `yaml:"collect"`
	Billing    billing.Config           `yaml:"billing"`
	Accounts   []billing.AccountConfig  `yaml:"accounts"`
	Identities []billing.IdentityConfig `yaml:"identities"`
	Access     struct {
		Admins     []string `yaml:"admins"`
		TokensFile string   `yaml:"tokens_file"`
		OpenLive   *bool    `yaml:"open_live"`
		Proxy      struct {
			Header string `yaml:"header"`
			Socket string `yaml:"socket"`
		} `yaml:"proxy"`
	} `yaml:"access"`
	Metrics struct {
		Cost string `yaml:"cost"`
	} `yaml:"metrics"`
}

// listenAddresses is one address or a list of them.
type listenAddresses []string

// UnmarshalYAML takes both forms.
func (l *listenAddresses) UnmarshalYAML(unmarshal func(any) error) error {
	var one string
	if unmarshal(&one) == nil {
		*l = listenAddresses{one}
		return nil
	}
	return unmarshal((*[]string)(l))
}

// httpClient is the section collect.http. Prometheus's package, which checks
// it, knows no places in files.
type httpClient struct {
	config httpconfig.HTTPClientConfig
	err    error // what is wrong with it as a whole
}

// UnmarshalYAML keeps an error without a place for check, which has one.
func (h *httpClient) UnmarshalYAML(unmarshal func(any) error) error {
	err := unmarshal(&h.config)
	var located yaml.Error
	if err != nil && errors.As(err, &located) {
		return err
	}
	h.err = err
	return nil
}

// configFile knows where in a file a value stands.
type configFile struct {
	name string
	tree *ast.File
}

// at makes an error of what is wrong with the value of a key, such as
// "billing.rates[2].price", with the place of the value, or of the nearest
// thing around it that is there.
func (c *configFile) at(key string, err error) error {
	for path := key; path != ""; path = parentKey(path) {
		yamlPath, pathErr := yaml.PathString("$." + path)
		if pathErr != nil {
			continue
		}
		node, findErr := yamlPath.FilterFile(c.tree)
		if findErr != nil || node == nil {
			continue
		}
		position := firstToken(node).GetToken().Position
		return &placedError{c.name, position.Line, position.Column, key, err}
	}
	return &placedError{c.name, 1, 1, key, err}
}

// placedError is what is wrong at a place of the file.
type placedError struct {
	file         string
	line, column int
	key          string
	err          error
}

func (e *placedError) Error() string {
	return fmt.Sprintf("%s:%d:%d: %s: %v", e.file, e.line, e.column, e.key, e.err)
}

func (e *placedError) Unwrap() error { return e.err }

// inOrder sorts errors as they stand in the file.
func inOrder(errs []error) error {
	place := func(err error) (line, column int) {
		var placed *placedError
		if errors.As(err, &placed) {
			return placed.line, placed.column
		}
		return 0, 0
	}
	slices.SortStableFunc(errs, func(a, b error) int {
		aLine, aColumn := place(a)
		bLine, bColumn := place(b)
		return cmp.Or(cmp.Compare(aLine, bLine), cmp.Compare(aColumn, bColumn))
	})
	return errors.Join(errs...)
}

// firstToken is the node at which a value begins: the token of a mapping is its
// first colon.
func firstToken(node ast.Node) ast.Node {
	for {
		switch n := node.(type) {
		case *ast.MappingNode:
			if len(n.Values) == 0 || n.IsFlowStyle {
				return node
			}
			node = n.Values[0].Key
		case *ast.MappingValueNode:
			node = n.Key
		default:
			return node
		}
	}
}

func parentKey(key string) string {
	at := strings.LastIndexAny(key, ".[")
	if at < 0 {
		return ""
	}
	return key[:at]
}

// LoadConfig reads and checks a configuration file. Each error names file, line
// and column; all that can be found are found at once.
func LoadConfig(name string) (*Config, error) {
	in, err := os.Open(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("configuration file: %w: name one with --config.file; it needs no more than \"ledger: {url: …}\" and one rate", err)
	}
	if err != nil {
		return nil, fmt.Errorf("configuration file: %w", err)
	}
	defer in.Close()
	text, err := io.ReadAll(io.LimitReader(in, maxConfigBytes+1))
	if err != nil {
		return nil, fmt.Errorf("configuration file: %w", err)
	}
	if len(text) > maxConfigBytes {
		return nil, fmt.Errorf("configuration file %s has more than %d bytes", name, maxConfigBytes)
	}
	tree, err := strictyaml.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s%w", name, err)
	}
	where := &configFile{name: name, tree: tree}
	var f file
	f.Collect.HTTP.config = httpconfig.DefaultHTTPClientConfig
	if err := strictyaml.Decode(text, &f); err != nil {
		return nil, fmt.Errorf("%s%w", name, err)
	}
	return f.check(where, filepath.Dir(name))
}

func (f *file) check(where *configFile, dir string) (*Config, error) {
	var errs []error
	wrong := func(key string, err error) { errs = append(errs, where.at(key, err)) }
	c := &Config{
		Listen: f.Listen, Interval: DefaultInterval, FileSD: f.Collect.FileSD, HTTP: f.Collect.HTTP.config,
		Admins: f.Access.Admins, TokensFile: f.Access.TokensFile,
		CloseLive: f.Access.OpenLive != nil && !*f.Access.OpenLive,
	}
	if len(c.Listen) == 0 {
		c.Listen = []string{DefaultListen}
	}
	for i, address := range c.Listen {
		key := "listen"
		if len(c.Listen) > 1 {
			key = fmt.Sprintf("listen[%d]", i)
		}
		if err := web.CheckAddress(address); err != nil {
			wrong(key, err)
		}
	}
	if c.Admins == nil {
		c.Admins = []string{"root"}
	}
	for i, admin := range c.Admins {
		if strings.TrimSpace(admin) == "" {
			wrong(fmt.Sprintf("access.admins[%d]", i), errors.New("must not be empty"))
		}
	}
	ledgerURL := f.Ledger.URL
	if ledgerURL == "" {
		ledgerURL = DefaultLedger
	}
	var err error
	if c.LedgerPath, err = sqlitePath(ledgerURL, dir); err != nil {
		wrong("ledger.url", err)
	}
	if f.Collect.Interval != "" {
		if c.Interval, err = time.ParseDuration(f.Collect.Interval); err != nil {
			wrong("collect.interval", fmt.Errorf("%q is not a duration such as 1m", f.Collect.Interval))
		} else if c.Interval < time.Second || c.Interval > 24*time.Hour {
			wrong("collect.interval", fmt.Errorf("%s is not between 1s and 24h", f.Collect.Interval))
		}
	}
	for i, text := range f.Collect.Targets {
		target, err := collect.ParseTarget(text)
		key := fmt.Sprintf("collect.targets[%d]", i)
		switch {
		case err != nil:
			wrong(key, err)
		case slices.Contains(c.Targets, target):
			wrong(key, fmt.Errorf("%q stands there twice", target))
		default:
			c.Targets = append(c.Targets, target)
		}
	}
	for i, pattern := range f.Collect.FileSD {
		if _, err := filepath.Match(pattern, ""); err != nil || !slices.Contains([]string{".yml", ".yaml", ".json"}, filepath.Ext(pattern)) {
			wrong(fmt.Sprintf("collect.file_sd[%d]", i), fmt.Errorf("%q is not a pattern of files that ends in .yml, .yaml or .json", pattern))
		} else if !filepath.IsAbs(pattern) {
			c.FileSD[i] = filepath.Join(dir, pattern)
		}
	}
	if f.Collect.HTTP.err != nil {
		wrong("collect.http", f.Collect.HTTP.err)
	}
	c.HTTP.SetDirectory(dir)
	if c.TokensFile != "" && !filepath.IsAbs(c.TokensFile) {
		c.TokensFile = filepath.Join(dir, c.TokensFile)
	}
	if f.Access.Proxy.Header != "" || f.Access.Proxy.Socket != "" {
		wrong("access.proxy", billing.ErrNotSupported)
	}
	// Read and without effect, these would promise what nobody keeps.
	if f.Billing.MinimumCoverage != "" {
		wrong("billing.minimum_coverage", billing.ErrNotSupported)
	}
	for i, account := range f.Accounts {
		if account.Managers != nil {
			wrong(fmt.Sprintf("accounts[%d].managers", i), billing.ErrNotSupported)
		}
		if account.Budget != "" {
			wrong(fmt.Sprintf("accounts[%d].budget", i), billing.ErrNotSupported)
		}
	}
	if f.Metrics.Cost != "" {
		wrong("metrics.cost", billing.ErrNotSupported)
	}
	book, err := billing.NewBook(f.Billing, f.Accounts, f.Identities)
	if err != nil {
		errs = append(errs, bookErrors(where, err)...)
	}
	c.Book = book
	if err := inOrder(errs); err != nil {
		return nil, err
	}
	return c, nil
}

// bookErrors gives each error of the price book its place.
func bookErrors(where *configFile, err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var errs []error
		for _, one := range joined.Unwrap() {
			errs = append(errs, bookErrors(where, one)...)
		}
		return errs
	}
	var wrong *billing.ConfigError
	if errors.As(err, &wrong) {
		return []error{where.at(wrong.Key, wrong.Err)}
	}
	return []error{fmt.Errorf("%s: %w", where.name, err)}
}

// sqlitePath is the file of a ledger's URL: sqlite:///ABSOLUTE/PATH, or
// sqlite:PATH beside the configuration file.
func sqlitePath(text, dir string) (string, error) {
	scheme, path, _ := strings.Cut(text, ":")
	switch {
	case scheme == "postgres" || scheme == "postgresql":
		return "", fmt.Errorf("PostgreSQL: %w", billing.ErrNotSupported)
	case scheme != "sqlite":
	case strings.HasPrefix(path, "///"):
		return filepath.Clean(path[2:]), nil
	case path != "" && !strings.HasPrefix(path, "//"):
		if filepath.IsAbs(path) {
			return filepath.Clean(path), nil
		}
		return filepath.Join(dir, path), nil
	}
	return "", fmt.Errorf("%q is not sqlite:///PATH", text)
}
