package main

import (
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestDocumentNamesEveryFlag holds docs/accounting.md to the commands and their
// flags.
func TestDocumentNamesEveryFlag(t *testing.T) {
	data, err := os.ReadFile("../../docs/accounting.md")
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	flags, commands := 0, 0
	var walk func(*cobra.Command)
	walk = func(command *cobra.Command) {
		command.InitDefaultHelpFlag()
		command.InitDefaultVersionFlag()
		command.LocalFlags().VisitAll(func(flag *pflag.Flag) {
			flags++
			if !strings.Contains(text, "`--"+flag.Name+"`") && !strings.Contains(text, "`--"+flag.Name+"=") {
				t.Errorf("flag --%s of %q is not in the document", flag.Name, command.CommandPath())
			}
		})
		if !command.HasSubCommands() && !command.Hidden {
			commands++
			if !strings.Contains(text, "\n"+command.CommandPath()+" ") {
				t.Errorf("command %q is not in the document's list", command.CommandPath())
			}
		}
		for _, sub := range command.Commands() {
			walk(sub)
		}
	}
	walk(newRoot())
	if flags < 15 || commands < 6 {
		t.Errorf("only %d flags and %d commands were found", flags, commands)
	}
}
