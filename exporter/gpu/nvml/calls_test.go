package nvml

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

func parseFolder(t *testing.T, folder string, keep func(name string) bool) map[string]*ast.File {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]*ast.File{}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") || !keep(filepath.Base(name)) {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files[filepath.Base(name)] = file
	}
	if len(files) == 0 {
		t.Fatalf("no Go files in %s", folder)
	}
	return files
}

// selectorsIn visits every x.Name in a piece of source.
func selectorsIn(node ast.Node, visit func(*ast.SelectorExpr)) {
	ast.Inspect(node, func(n ast.Node) bool {
		if selector, ok := n.(*ast.SelectorExpr); ok {
			visit(selector)
		}
		return true
	})
}

// methodsOfNVML are the names through which go-nvml's interfaces reach the
// library. Methods of our own that are called the same would be reported too.
func methodsOfNVML() map[string]bool {
	names := map[string]bool{}
	for _, in := range []reflect.Type{
		reflect.TypeFor[gonvml.Interface](), reflect.TypeFor[gonvml.Device](), reflect.TypeFor[gonvml.EventSet](),
		reflect.TypeFor[gonvml.GpuInstance](), reflect.TypeFor[gonvml.ComputeInstance](), reflect.TypeFor[gonvml.GpmSample](),
		reflect.TypeFor[gonvml.Unit](), reflect.TypeFor[gonvml.VgpuInstance](), reflect.TypeFor[gonvml.VgpuTypeId](),
	} {
		for method := range in.Methods() {
			names[method.Name] = true
		}
	}
	// These reach no driver: the list of symbols, and go-nvml's text for codes.
	delete(names, "Extensions")
	delete(names, "ErrorString")
	return names
}

// Every call of go-nvml in this package stands in guarded, under the name by
// which the manifest declares it.
func TestEveryCallIsGuarded(t *testing.T) {
	constants := functionConstants(t)
	methods := methodsOfNVML()
	allowed := map[*ast.SelectorExpr]bool{}
	used := map[string]bool{}
	files := parseFolder(t, ".", func(string) bool { return true })
	for name, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			callee, ok := call.Fun.(*ast.Ident)
			if !ok || callee.Name != "guarded" || len(call.Args) != 3 {
				return true
			}
			constant, ok := call.Args[1].(*ast.Ident)
			if !ok {
				t.Errorf("%s: guarded without a constant", name)
				return true
			}
			index := slices.Index(constants, constant.Name)
			if index < 0 {
				t.Fatalf("%s: %s is not declared", name, constant.Name)
			}
			inside := 0
			selectorsIn(call.Args[2], func(selector *ast.SelectorExpr) {
				if !methods[selector.Sel.Name] {
					return
				}
				inside++
				if want := manifest[index].method; selector.Sel.Name != want {
					t.Errorf("%s: calls %s as %s, which is declared to call %s", name, selector.Sel.Name, constant.Name, want)
				}
				allowed[selector] = true
			})
			if inside != 1 {
				t.Errorf("%s: %s: %d calls of go-nvml in one guard", name, constant.Name, inside)
			}
			if used[constant.Name] {
				t.Errorf("%s: %s is used twice", name, constant.Name)
			}
			used[constant.Name] = true
			return true
		})
	}
	for name, file := range files {
		// Two short names have other owners too: gpu.Optional's Get, which
		// unlike a GPM sample's takes no argument, and the fields named Free.
		calls := map[*ast.SelectorExpr]*ast.CallExpr{}
		ast.Inspect(file, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok {
				if selector, ok := call.Fun.(*ast.SelectorExpr); ok {
					calls[selector] = call
				}
			}
			return true
		})
		selectorsIn(file, func(selector *ast.SelectorExpr) {
			call := calls[selector]
			if selector.Sel.Name == "Get" && call != nil && len(call.Args) == 0 || selector.Sel.Name == "Free" && call == nil {
				return
			}
			on, isName := selector.X.(*ast.Ident)
			if methods[selector.Sel.Name] && !allowed[selector] {
				t.Errorf("%s: %s is called without guard", name, selector.Sel.Name)
			}
			// Functions of the package itself: only those that call nothing.
			if isName && on.Name == "gonvml" && methodlessFunction(selector.Sel.Name) {
				t.Errorf("%s: gonvml.%s is called without guard", name, selector.Sel.Name)
			}
		})
	}
	for _, constant := range constants {
		if !used[constant] {
			t.Errorf("%s is declared and never called", constant)
		}
	}
}

// methodlessFunction says whether gonvml.NAME is a function that ends in the
// library: go-nvml has one per method of its library.
func methodlessFunction(name string) bool {
	_, is := reflect.TypeFor[gonvml.Interface]().MethodByName(name)
	return is
}

// functionConstants are the names of the constants of type function, in order.
func functionConstants(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, file := range parseFolder(t, ".", func(name string) bool { return name == "symbols.go" }) {
		for _, declaration := range file.Decls {
			general, ok := declaration.(*ast.GenDecl)
			if !ok || general.Tok != token.CONST {
				continue
			}
			for _, spec := range general.Specs {
				for _, name := range spec.(*ast.ValueSpec).Names {
					if strings.HasPrefix(name.Name, "fn") {
						names = append(names, name.Name)
					}
				}
			}
		}
	}
	if len(names) != int(functionCount) {
		t.Fatalf("%d names for %d functions", len(names), functionCount)
	}
	return names
}

// The manifest says what go-nvml's own source says: which symbols each method
// ends in, and in which order go-nvml moves from version to version.
func TestManifestIsWhatGoNVMLCalls(t *testing.T) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	folder := filepath.Join(strings.TrimSpace(string(out)), "pkg", "nvml")
	if _, err := os.Stat(folder); err != nil {
		t.Fatal(err)
	}
	functions, methods := map[string]*ast.FuncDecl{}, map[string]*ast.FuncDecl{}
	moves := map[string][]string{}
	for _, file := range parseFolder(t, folder, func(name string) bool { return !strings.HasSuffix(name, "_mock.go") }) {
		for _, declaration := range file.Decls {
			switch d := declaration.(type) {
			case *ast.FuncDecl:
				if d.Recv == nil {
					functions[d.Name.Name] = d
				} else if receiver, ok := receiverName(d); ok {
					methods[receiver+"."+d.Name.Name] = d
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					value, ok := spec.(*ast.ValueSpec)
					if ok && d.Tok == token.VAR && len(value.Names) == 1 && len(value.Values) == 1 {
						if first, ok := value.Values[0].(*ast.Ident); ok {
							moves[value.Names[0].Name] = append([]string{first.Name}, moves[value.Names[0].Name]...)
						}
					}
				}
			}
		}
	}
	ast.Inspect(methods["library.updateVersionedSymbols"], func(n ast.Node) bool {
		if assign, ok := n.(*ast.AssignStmt); ok && assign.Tok == token.ASSIGN {
			to, isName := assign.Lhs[0].(*ast.Ident)
			from, isFunction := assign.Rhs[0].(*ast.Ident)
			if isName && isFunction && to.Name != "err" {
				moves[to.Name] = append(moves[to.Name], from.Name)
			}
		}
		return true
	})
	// symbols follows what a body calls down to C.
	var symbols func(node ast.Node, seen map[string]bool) []string
	symbols = func(node ast.Node, seen map[string]bool) []string {
		var found []string
		ast.Inspect(node, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr:
				if on, ok := n.X.(*ast.Ident); ok && on.Name == "C" && strings.HasPrefix(n.Sel.Name, "nvml") && functionSymbol(n.Sel.Name) {
					found = append(found, n.Sel.Name)
				}
			case *ast.Ident:
				if seen[n.Name] {
					return true
				}
				if versions := moves[n.Name]; len(versions) > 1 {
					seen[n.Name] = true
					for _, version := range versions {
						found = append(found, symbols(functions[version].Body, seen)...)
					}
				} else if function := functions[n.Name]; function != nil && function.Body != nil && strings.Contains(strings.ToLower(n.Name), "nvml") || function != nil && strings.HasPrefix(n.Name, "device") {
					seen[n.Name] = true
					found = append(found, symbols(function.Body, seen)...)
				}
			}
			return true
		})
		return found
	}
	for f, e := range manifest {
		var body ast.Node
		var where string
		for _, receiver := range []string{"nvmlDevice", "library"} {
			if method := methods[receiver+"."+e.method]; method != nil {
				body, where = method.Body, receiver
				break
			}
		}
		if body == nil {
			t.Errorf("%d: go-nvml has no method %s", f, e.method)
			continue
		}
		switch e.method {
		case "GetTemperatureV": // a handler; its V1 makes the call
			body = methods["TemperatureHandler.V1"].Body
		case "EventSetWait":
			body = methods["nvmlEventSet.Wait"].Body
		case "EventSetFree":
			body = methods["nvmlEventSet.Free"].Body
		}
		got := slices.Compact(symbols(body, map[string]bool{}))
		if !slices.Equal(got, e.versions) {
			t.Errorf("%s.%s calls %v, declared are %v", where, e.method, got, e.versions)
		}
	}
}

// functionSymbol tells C functions from C types.
func functionSymbol(name string) bool {
	return !strings.HasSuffix(name, "_t") && !strings.HasSuffix(name, "_st")
}

func receiverName(d *ast.FuncDecl) (string, bool) {
	switch receiver := d.Recv.List[0].Type.(type) {
	case *ast.Ident:
		return receiver.Name, true
	case *ast.StarExpr:
		name, ok := receiver.X.(*ast.Ident)
		if ok {
			return name.Name, true
		}
	}
	return "", false
}
