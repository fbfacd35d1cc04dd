package billing

import (
	"errors"
	"fmt"

	"github.com/goccy/go-yaml/ast"
)

// Text is a scalar as it stands in the file, whether quoted or not. Read as
// numbers, a cost centre 0042 would become 34 and a price 6.10 could become
// 6.1.
type Text string

// UnmarshalYAML takes the scalar's own characters.
func (t *Text) UnmarshalYAML(node ast.Node) error {
	switch node := node.(type) {
	case *ast.NullNode:
		*t = ""
	case *ast.LiteralNode:
		*t = Text(node.Value.Value)
	case ast.ScalarNode:
		*t = Text(node.GetToken().Value)
	default:
		return fmt.Errorf("%s: a %s where text is wanted", node.GetPath(), node.Type())
	}
	return nil
}

// Config is the section "billing" of the configuration file.
type Config struct {
	Timezone        string       `yaml:"timezone"`         // IANA name; UTC if empty
	Currency        string       `yaml:"currency"`         // ISO 4217; XXX (none) if empty
	Mode            string       `yaml:"mode"`             // "charge" (default) or "showback"
	MinimumCoverage Text         `yaml:"minimum_coverage"` // ratio 0–1; "0.95" if empty
	Rates           []RateConfig `yaml:"rates"`

	// Known keys without an implementation. They are refused with that reason:
	// a tariff that is read and not applied would be a wrong bill.
	Tariffs []any `yaml:"tariffs"`
	Classes []any `yaml:"classes"`
	Pools   []any `yaml:"pools"`
}

// RateConfig is one price of one rate. Entries of the same name are one
// history: they differ in From and Price only.
type RateConfig struct {
	Name  string `yaml:"name"`
	GPU   string `yaml:"gpu"`   // glob over the GPU model: * any text, ? any character; "*" if empty
	Per   string `yaml:"per"`   // "gpu_hour", also if empty
	Price Text   `yaml:"price"` // decimal; "0" is free
	From  string `yaml:"from"`  // first local day, YYYY-MM-DD; always, if empty
}

// AccountConfig is one element of the section "accounts": who pays.
type AccountConfig struct {
	Name       string         `yaml:"name"`
	CostCentre Text           `yaml:"cost_centre"` // copied to the statement's lines
	Managers   []string       `yaml:"managers"`
	Projects   []string       `yaml:"projects"`
	Members    []MemberConfig `yaml:"members"`
	Budget     Text           `yaml:"budget"` // decimal, a month
}

// MemberConfig is a user's membership of an account.
type MemberConfig struct {
	User string `yaml:"user"`
	UID  *int64 `yaml:"uid"`  // only the user with this uid; any if absent
	Node string `yaml:"node"` // only on this node; any if empty
	From string `yaml:"from"` // first local day; always, if empty
	// Until is the first local day on which it no longer holds.
	Until string `yaml:"until"`
	// Share is "100%" (default): the account pays for the user; or "0%": it
	// pays only for rows of its projects, another account for the rest.
	Share string `yaml:"share"`
}

// IdentityConfig is one element of the section "identities": a user of a node
// who is known elsewhere by another name.
type IdentityConfig struct {
	Node string `yaml:"node"` // any node if empty
	User string `yaml:"user"`
	As   string `yaml:"as"`
}

// ConfigError is a value of the configuration that can't be used.
type ConfigError struct {
	// Key is the value's place in the file, such as "billing.rates[2].price":
	// a YAML path, once "$." is put before it.
	Key string
	Err error
}

func (e *ConfigError) Error() string { return e.Key + ": " + e.Err.Error() }

// Unwrap gives the reason.
func (e *ConfigError) Unwrap() error { return e.Err }

// ErrNotSupported is the reason of a ConfigError for what the configuration
// knows and this version can't do.
var ErrNotSupported = errors.New("not supported yet")

// problems collects the errors of a configuration, so that one run shows all.
type problems struct{ errs []error }

func (p *problems) add(key string, err error) {
	p.errs = append(p.errs, &ConfigError{Key: key, Err: err})
}

func (p *problems) addf(key, format string, args ...any) { p.add(key, fmt.Errorf(format, args...)) }

func (p *problems) err() error { return errors.Join(p.errs...) }
