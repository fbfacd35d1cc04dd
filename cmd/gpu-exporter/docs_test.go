package main

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"gpuledger/exporter"
	"gpuledger/exporter/history"
	"gpuledger/exporter/web"
	"gpuledger/exporter/who"
)

// TestDocumentationNamesEverything holds docs/exporter.md to the flags and to
// the keys of the configuration file.
func TestDocumentationNamesEverything(t *testing.T) {
	data, err := os.ReadFile("../../docs/exporter.md")
	if err != nil {
		t.Fatal(err)
	}
	document := string(data)

	flags := 0
	var walk func(*cobra.Command)
	walk = func(command *cobra.Command) {
		command.InitDefaultHelpFlag()
		command.InitDefaultVersionFlag()
		check := func(flag *pflag.Flag) {
			flags++
			if !strings.Contains(document, "`--"+flag.Name+"`") && !strings.Contains(document, "`--"+flag.Name+"=") {
				t.Errorf("flag --%s of %q is not in the document", flag.Name, command.CommandPath())
			}
		}
		command.LocalFlags().VisitAll(check)
		if command.Runnable() && !command.Hidden && !strings.Contains(document, command.CommandPath()) {
			t.Errorf("command %q is not in the document", command.CommandPath())
		}
		for _, sub := range command.Commands() {
			walk(sub)
		}
	}
	walk(newRoot())
	if flags < 15 {
		t.Errorf("only %d flags were found", flags)
	}

	keys := yamlKeys(reflect.TypeFor[exporter.Config]())
	if len(keys) < 20 {
		t.Errorf("only %d keys were found: %v", len(keys), keys)
	}
	for _, key := range keys {
		if !strings.Contains(document, "`"+key+"`") && !strings.Contains(document, "### "+key+"\n") {
			t.Errorf("key %s of the configuration file is not in the document", key)
		}
	}

	for _, command := range exporter.DefaultConfig().Owner.SystemCommands {
		if !strings.Contains(document, "`"+command+"`") {
			t.Errorf("the system's program %s is not in the document", command)
		}
	}
	for _, path := range []string{who.Path, history.Path, web.MetricsPath, web.UsagePath, web.HealthyPath, web.ReadyPath} {
		if !strings.Contains(document, "`"+path+"`") && !strings.Contains(document, "`"+path+"?") {
			t.Errorf("path %s is not in the document", path)
		}
	}
}

// yamlKeys are the keys of a configuration, its sections' and lists' too.
func yamlKeys(t reflect.Type) []string {
	for t.Kind() == reflect.Slice || t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	var keys []string
	for i := range t.NumField() {
		field := t.Field(i)
		key, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		if key == "" || key == "-" {
			continue
		}
		keys = append(keys, key)
		keys = append(keys, yamlKeys(field.Type)...)
	}
	return keys
}

// TestDocumentedConfigurationIsOne loads the document's own example.
func TestDocumentedConfigurationIsOne(t *testing.T) {
	data, err := os.ReadFile("../../docs/exporter.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), "```yaml\n")
	example, _, found := strings.Cut(rest, "```")
	if !found {
		t.Fatal("the document has no example of a configuration file")
	}
	path := t.TempDir() + "/exporter.yml"
	if err := os.WriteFile(path, []byte(example), 0o600); err != nil {
		t.Fatal(err)
	}
	config, err := exporter.LoadConfig(path)
	if err != nil {
		t.Fatal(err)
	}
	// Where the document says "as above", the example is the default.
	defaults := exporter.DefaultConfig()
	for name, pair := range map[string][2]any{
		"steps":             {config.Owner.Steps, defaults.Owner.Steps},
		"trusted_steps":     {config.Owner.TrustedSteps, defaults.Owner.TrustedSteps},
		"pod annotations":   {config.Owner.PodOwnerAnnotations, defaults.Owner.PodOwnerAnnotations},
		"pod labels":        {config.Owner.PodOwnerLabels, defaults.Owner.PodOwnerLabels},
		"home_path_labels":  {config.Owner.HomePathLabels, defaults.Owner.HomePathLabels},
		"environment_keys":  {config.Owner.EnvironmentKeys, defaults.Owner.EnvironmentKeys},
		"generic_owners":    {config.Owner.GenericOwners, defaults.Owner.GenericOwners},
		"owner_labels":      {config.Owner.OwnerLabels, defaults.Owner.OwnerLabels},
		"project_sources":   {config.Owner.ProjectSources, defaults.Owner.ProjectSources},
		"class_sources":     {config.Owner.ClassSources, defaults.Owner.ClassSources},
		"minimum_human_uid": {config.Owner.MinimumHumanUID, defaults.Owner.MinimumHumanUID},
		"nobody_uids":       {config.Owner.NobodyUIDs, defaults.Owner.NobodyUIDs},
		"runtimes":          {config.Runtimes, defaults.Runtimes},
	} {
		if !reflect.DeepEqual(pair[0], pair[1]) {
			t.Errorf("%s: the document has %v, the default is %v", name, pair[0], pair[1])
		}
	}
}
