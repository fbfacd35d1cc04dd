package nvml

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// defaultLibrary is the name the driver's library is installed under.
const defaultLibrary = "libnvidia-ml.so.1"

// library is the one NVML of this process, behind guards. A process can use
// one library only: symbols are bound once, for the whole process, and the
// library can't be unloaded once a function of it has been called.
type library struct {
	path string
	api  gonvml.Interface

	// symbols is nil until the library is loaded; nothing is callable then.
	symbols atomic.Pointer[symbols]
	// panics counts calls that ended in a panic inside go-nvml.
	panics atomic.Int64

	opening sync.Mutex
	opened  *dl.DynamicLibrary
}

func newLibrary(path string) *library {
	if path == "" {
		path = defaultLibrary
	}
	return &library{path: path, api: gonvml.New(gonvml.WithLibraryPath(path))}
}

// errNotNVML is a file that loads and isn't NVML.
var errNotNVML = errors.New("it has no nvmlInit")

// open loads the library and takes stock of its symbols. It makes no NVML
// call. go-nvml itself throws the reason for a failed load away, so the
// library is opened here first; the handle is kept, as unloading is no use.
func (l *library) open() error {
	l.opening.Lock()
	defer l.opening.Unlock()
	if l.opened == nil {
		opened := dl.New(l.path, dl.RTLD_LAZY|dl.RTLD_GLOBAL)
		if err := opened.Open(); err != nil {
			return fmt.Errorf("load NVML: %w", err)
		}
		l.opened = opened
	}
	taken := takeSymbols(func(symbol string) bool { return l.opened.Lookup(symbol) == nil }, l.symbols.Load())
	if !taken.callable[fnInit] {
		return fmt.Errorf("load NVML: %s: %w", l.path, errNotNVML)
	}
	l.symbols.Store(taken)
	return nil
}

// snapshot takes stock again, through the handle go-nvml itself has opened.
func (l *library) snapshot() {
	l.opening.Lock()
	defer l.opening.Unlock()
	extensions := l.api.Extensions()
	l.symbols.Store(takeSymbols(func(symbol string) bool { return extensions.LookupSymbol(symbol) == nil }, l.symbols.Load()))
}

// returnPanicked is this package's own code for a call that ended in a panic.
const returnPanicked gonvml.Return = -1

// guarded is the one way to NVML. It calls only what the loaded library has
// (else NVML's own FUNCTION_NOT_FOUND is the answer) and turns a panic inside
// go-nvml, which trusts the counts a driver writes, into a return code.
func guarded[T any](l *library, f function, call func() (T, gonvml.Return)) (value T, ret gonvml.Return) {
	have := l.symbols.Load()
	if have == nil || !have.callable[f] {
		return value, gonvml.ERROR_FUNCTION_NOT_FOUND
	}
	defer func() {
		if recover() != nil {
			l.panics.Add(1)
			var none T
			value, ret = none, returnPanicked
		}
	}()
	return call()
}

// nothing is the value of calls that give none.
type nothing = struct{}
