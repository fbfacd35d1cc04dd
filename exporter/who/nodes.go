package who

import (
	"reflect"
	"time"
)

// NodesPath is where gpu-accounting serves Nodes.
const NodesPath = "/api/v1/nodes/who"

// ClosedHeader is in the answer of an exporter whose live view is not open to
// everyone on its node, with the value ClosedValue. Who passes the answer on
// must then ask for the same proof.
const (
	ClosedHeader = "Gpuledger-Live"
	ClosedValue  = "closed"
)

// NodesVersion is the version of the JSON form of Nodes.
const NodesVersion = 1

// Nodes is who holds what on many nodes, as gpu-accounting gathers it. Nobody's
// command line is in it.
type Nodes struct {
	Version int `json:"version"`
	// At is when the nodes were asked. Each answer has its own.
	At    time.Time `json:"at"`
	Nodes []Answer  `json:"nodes"`
	// Missing names the nodes that gave no answer in time.
	Missing []MissingNode `json:"missing"`
}

// MissingNode is a node that gave no answer.
type MissingNode struct {
	// Node is its name as the ledger has it; empty if it never told one.
	Node string `json:"node"`
	// Target is its address.
	Target string `json:"target"`
	// Message says why.
	Message string `json:"message"`
}

// Publish makes of an answer, whoever it was made for, the one that an unknown
// viewer gets: what Build tells only to the owner of a process or to root is
// taken out, by its name and wherever it stands.
func (a *Answer) Publish() {
	a.ViewerUID = nil
	withdraw(reflect.ValueOf(a).Elem())
}

func withdraw(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			withdraw(v.Elem())
		}
	case reflect.Slice:
		for i := range v.Len() {
			withdraw(v.Index(i))
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).Name == "CommandLine" {
				v.Field(i).SetZero()
				continue
			}
			withdraw(v.Field(i))
		}
	}
}
