package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpuledger/exporter/strictyaml"
	"gpuledger/exporter/who"
)

// Where gpu-accounting is, unless told otherwise.
const (
	defaultServer     = "http://127.0.0.1:10095"
	defaultConfigFile = "/etc/gpuledger/gwho.yml"
	serverVariable    = "GWHO_SERVER"
)

const (
	// nodesTimeout is for a large site's answer over a slow line; to put it
	// together takes two seconds.
	nodesTimeout = 30 * time.Second
	maxNodes     = 256 << 20 // bytes
	maxConfig    = 64 << 10  // bytes
)

// showNodes shows who holds what on all nodes.
func showNodes(ctx context.Context, o options, selectors []string, stdout io.Writer) (int, error) {
	a, err := askNodes(ctx, o)
	if err != nil {
		return exitOK, err
	}
	a, unknown := keepCards(a, o.cards)
	if len(unknown) > 0 {
		return exitOK, exit{exitUsage, fmt.Errorf("--gpu %s: no node has such a card", strings.Join(unknown, ","))}
	}
	a, nothing := selectNodes(a, selectors)
	if o.free {
		a = keepFree(a)
	}
	text := ""
	if o.json {
		body, err := json.MarshalIndent(a, "", "  ")
		if err != nil {
			return exitOK, exit{exitMissing, fmt.Errorf("print the answer: %w", err)}
		}
		text = string(body) + "\n"
	} else {
		width, terminal := terminalWidth(stdout)
		text = nodesTable(a, o.free, tableOptions{Width: width, Verbose: o.verbose, Zone: time.Local,
			Colour: terminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"})
		for _, name := range nothing {
			text += clean(name) + ": on no GPU of these nodes\n"
		}
	}
	if _, err := io.WriteString(stdout, text); err != nil {
		return exitOK, exit{exitMissing, fmt.Errorf("print the answer: %w", err)}
	}
	if len(a.Missing) > 0 || slices.ContainsFunc(a.Nodes, func(n who.Answer) bool { return n.Error != "" || !n.Complete() }) {
		return exitMissing, nil
	}
	return exitOK, nil
}

// findServer finds out where gpu-accounting is: the flag, the environment, the
// configuration file. A token of the file is for the server of the file.
func (o options) findServer() (address, tokenFile string, err error) {
	if given := cmp.Or(o.server, os.Getenv(serverVariable)); given != "" {
		return given, o.tokenFile, nil
	}
	file, err := os.Open(o.configFile)
	if errors.Is(err, fs.ErrNotExist) && o.configFile == defaultConfigFile {
		return defaultServer, o.tokenFile, nil
	}
	if err != nil {
		return "", "", err
	}
	defer file.Close()
	var config struct {
		Server    string `yaml:"server"`
		TokenFile string `yaml:"token_file"`
	}
	text, err := io.ReadAll(io.LimitReader(file, maxConfig))
	if err != nil {
		return "", "", fmt.Errorf("%s: %w", o.configFile, err)
	}
	if err := strictyaml.Decode(text, &config); err != nil {
		return "", "", fmt.Errorf("%s%w", o.configFile, err)
	}
	if config.TokenFile != "" && !filepath.IsAbs(config.TokenFile) {
		config.TokenFile = filepath.Join(filepath.Dir(o.configFile), config.TokenFile)
	}
	return cmp.Or(config.Server, defaultServer), cmp.Or(o.tokenFile, config.TokenFile), nil
}

func askNodes(ctx context.Context, o options) (a who.Nodes, err error) {
	address, tokenFile, err := o.findServer()
	if err != nil {
		return a, exit{exitUsage, err}
	}
	var transport *http.Transport
	var request *http.Request
	where := address
	if path, isUnix := strings.CutPrefix(address, "unix://"); isUnix {
		transport, request, err = socketRequest(path, who.NodesPath)
	} else {
		where = redacted(address)
		transport, request, err = urlRequest("--server or $"+serverVariable+", where it is not unix:///path,", address, who.NodesPath, tokenFile)
	}
	if err != nil {
		return a, exit{exitUsage, err}
	}
	defer transport.CloseIdleConnections()
	body, err := fetchBody(ctx, transport, request, asked{"gpu-accounting", nodesTimeout, maxNodes})
	var no refused
	switch {
	case errors.As(err, &no) && no.status == http.StatusNotFound:
		err = errors.New("it knows nothing of nodes: it is older than this gwho, or is no gpu-accounting")
	case err == nil:
		if err = json.Unmarshal(body, &a); err != nil {
			err = fmt.Errorf("the answer is not one of gpu-accounting: %w", err)
		} else {
			err = checkVersion("gpu-accounting", a.Version, who.NodesVersion)
		}
	}
	if err != nil {
		return a, exit{exitMissing, fmt.Errorf("gpu-accounting at %s: %w; another is named with --server, %s or in %s", where, err, serverVariable, o.configFile)}
	}
	for _, node := range a.Nodes {
		if node.Version != who.Version {
			return a, exit{exitMissing, fmt.Errorf("%s: %w", node.Node, checkVersion("exporter", node.Version, who.Version))}
		}
	}
	return a, nil
}

// keepCards keeps the cards that --gpu names, and returns those that no node has.
func keepCards(a who.Nodes, cards []string) (who.Nodes, []string) {
	if len(cards) == 0 {
		return a, nil
	}
	known := map[string]bool{}
	nodes := []who.Answer{}
	for _, node := range a.Nodes {
		kept, unknown := who.Filter{Cards: cards}.Apply(node)
		for _, card := range cards {
			known[card] = known[card] || !slices.Contains(unknown, card)
		}
		if len(kept.Cards) > 0 {
			nodes = append(nodes, kept)
		}
	}
	a.Nodes = nodes
	return a, slices.DeleteFunc(slices.Clone(cards), func(card string) bool { return known[card] })
}

// selectNodes keeps what the selectors name: nodes, cards, people and
// workloads. It returns also those that name nothing.
func selectNodes(a who.Nodes, selectors []string) (_ who.Nodes, nothing []string) {
	var names, cards, people []string
	for _, each := range selectors {
		_, unknown := keepCards(a, []string{each})
		switch {
		case slices.ContainsFunc(a.Nodes, func(n who.Answer) bool { return n.Node == each }),
			slices.ContainsFunc(a.Missing, func(m who.MissingNode) bool { return m.Node == each }):
			names = append(names, each)
		case len(unknown) == 0:
			cards = append(cards, each)
		default:
			people = append(people, each)
		}
	}
	if len(names) > 0 {
		a.Nodes = slices.DeleteFunc(slices.Clone(a.Nodes), func(n who.Answer) bool { return !slices.Contains(names, n.Node) })
		a.Missing = slices.DeleteFunc(slices.Clone(a.Missing), func(m who.MissingNode) bool { return !slices.Contains(names, m.Node) })
	}
	a, _ = keepCards(a, cards)
	if len(people) == 0 {
		return a, nil
	}
	found := map[string]bool{}
	a = keepDevices(a, func(d *who.Device) bool {
		d.Holders = slices.DeleteFunc(slices.Clone(d.Holders), func(h who.Holder) bool {
			matches := false
			for _, name := range people {
				if h.Named(name) {
					matches, found[name] = true, true
				}
			}
			return !matches
		})
		return len(d.Holders) > 0
	})
	return a, slices.DeleteFunc(people, func(name string) bool { return found[name] })
}

// keepFree keeps what nobody holds.
func keepFree(a who.Nodes) who.Nodes {
	return keepDevices(a, func(d *who.Device) bool { return d.Free })
}

// keepDevices keeps the devices that keep says, and of nodes that have none left
// only what they lack.
func keepDevices(a who.Nodes, keep func(*who.Device) bool) who.Nodes {
	nodes := []who.Answer{}
	for _, node := range a.Nodes {
		cards := []who.Card{}
		for _, card := range node.Cards {
			devices := []who.Device{}
			for _, device := range card.Devices {
				if keep(&device) {
					devices = append(devices, device)
				}
			}
			if card.Devices = devices; len(devices) > 0 {
				cards = append(cards, card)
			}
		}
		if node.Cards = cards; len(cards) > 0 || node.Error != "" || !node.Complete() {
			nodes = append(nodes, node)
		}
	}
	a.Nodes = nodes
	return a
}

// nodesTable shows all nodes to people: a line for each card or instance.
func nodesTable(a who.Nodes, free bool, o tableOptions) string {
	last := column{title: "WHO", least: 24}
	if free {
		last = column{title: "UUID"}
	}
	devices := newLayout(0, []column{
		{title: "NODE", least: 8}, {title: "GPU", right: true}, {title: "NAME", least: 10}, {title: "STATE"},
		{title: "UTIL", right: true}, {title: "MEMORY", right: true}, last,
	})
	var lines [][]cell
	count, unheld := 0, 0
	var missing []string
	for _, node := range a.Nodes {
		name := cmp.Or(clean(node.Node), unknown)
		add := func(card who.Card, cells []cell, holders []who.Device, uuid string) {
			tail := cell{uuid, plain}
			if !free {
				tail = cell{holderNames(holders), plain}
			}
			index := strconv.Itoa(card.Index)
			if card.Index < 0 {
				index = unknown
			}
			line := []cell{{name, bold}, {index, plain}, cells[1], cells[2], cells[3], cells[4], tail}
			devices.fit(line)
			lines = append(lines, line)
			count++
			if slices.ContainsFunc(holders, func(d who.Device) bool { return d.Free }) {
				unheld++
			}
		}
		for _, card := range node.Cards {
			if !card.MIG || len(card.Devices) == 0 || card.State != who.CardUp {
				add(card, cardLine(card), card.Devices, clean(card.UUID))
				continue
			}
			for _, device := range card.Devices {
				add(card, instanceLine(device), []who.Device{device}, clean(device.UUID))
			}
		}
		if node.Error != "" && !slices.ContainsFunc(node.Missing, func(m who.Missing) bool { return m.Message == node.Error }) {
			missing = append(missing, name+": "+clean(node.Error))
		}
		for _, m := range node.Missing {
			text := name + ": "
			if m.Card != nil && *m.Card >= 0 {
				text += "GPU " + strconv.Itoa(*m.Card) + ": "
			}
			missing = append(missing, text+clean(m.Message))
		}
	}
	for _, m := range a.Missing {
		missing = append(missing, cmp.Or(clean(m.Node), clean(m.Target))+": "+clean(m.Message))
	}
	if o.Width > 0 {
		devices.shrink(o.Width)
	}
	var b strings.Builder
	heading := fmt.Sprintf("%s  %s, %s, %d free", a.At.In(o.Zone).Format("2006-01-02 15:04:05 MST"), plural(len(a.Nodes), "node"), plural(count, "GPU"), unheld)
	if len(a.Missing) > 0 {
		heading += fmt.Sprintf(", %s missing", plural(len(a.Missing), "node"))
	}
	b.WriteString(bounded(heading, faint, o) + "\n")
	if len(lines) > 0 {
		b.WriteString("\n" + devices.render(devices.title(), o.Width, o.Colour) + "\n")
	}
	for _, line := range lines {
		b.WriteString(devices.render(line, o.Width, o.Colour) + "\n")
	}
	if len(missing) > 0 {
		b.WriteString("\n")
	}
	for _, text := range missing {
		b.WriteString(paint("! "+text, red, o.Colour) + "\n")
	}
	return b.String()
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

// holderNames are the workloads that hold a device or were given it, each once,
// with for how long all of its processes have been idle.
func holderNames(devices []who.Device) string {
	type held struct {
		name     string
		idle     int64 // seconds; -1 unless all its processes are known to be idle
		assigned bool
	}
	var list []held
	for _, d := range devices {
		for _, h := range d.Holders {
			if !h.Holds && !h.Assigned {
				continue
			}
			name := cmp.Or(clean(h.User), unknown)
			if h.Workload != "" {
				name += " " + clean(h.Kind) + ":" + clean(h.Workload)
			}
			idle := int64(-1)
			if h.IdleSeconds != nil && *h.IdleSeconds > 0 {
				idle = *h.IdleSeconds
			}
			at := slices.IndexFunc(list, func(l held) bool { return l.name == name })
			if at < 0 {
				list = append(list, held{name, idle, h.Assigned})
				continue
			}
			list[at].idle = min(list[at].idle, idle)
			list[at].assigned = list[at].assigned && h.Assigned
		}
	}
	names := make([]string, len(list))
	for i, l := range list {
		names[i] = l.name
		switch {
		case l.assigned:
			names[i] += " (no process)"
		case l.idle >= int64(idleHint/time.Second):
			names[i] += " (idle " + duration(time.Duration(min(l.idle, 1e9))*time.Second) + ")"
		}
	}
	return strings.Join(names, ", ")
}
