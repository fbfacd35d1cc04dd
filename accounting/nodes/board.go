// Package nodes asks every exporter who holds what, and puts their answers
// together. A node that is slow or away is named as missing and never waited
// for; many askers cost one round.
package nodes

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"gpuledger/accounting/collect"
	"gpuledger/accounting/ledger"
	"gpuledger/exporter/procfs/text"
	"gpuledger/exporter/who"
)

// Bounds of a round.
const (
	// Within is how long a round takes at most: what has not answered then is
	// missing.
	Within = 2 * time.Second
	// Kept is how long a round serves further askers.
	Kept = 2 * time.Second
	// atOnce is how many nodes are asked at the same time.
	atOnce = 256
	// maxAnswerBytes is some thousand holders.
	maxAnswerBytes = 4 << 20
	// maxMessage bounds why a node is missing.
	maxMessage = 300
	// ledgerTime is how long the ledger may take to say what nodes are called.
	ledgerTime = 300 * time.Millisecond
)

// Options configure a Board.
type Options struct {
	// Collector has the targets and the connections to them.
	Collector *collect.Collector
	// Known returns what the ledger knows of targets: what their nodes are
	// called, and whether they answered when they were last pulled from.
	Known func(ctx context.Context) ([]ledger.Target, error)
	Log   *slog.Logger
	Now   func() time.Time
}

// Board has the newest round.
type Board struct {
	options Options

	mu     sync.Mutex
	round  *round
	asking map[string]bool // targets whose answer to an earlier round is still out
	failed map[string]bool // targets that did not answer when they were last asked
}

// NewBoard returns a board. It asks nobody until somebody asks it.
func NewBoard(options Options) *Board {
	return &Board{options: options, asking: map[string]bool{}, failed: map[string]bool{}}
}

// round is one question to all nodes.
type round struct {
	done  chan struct{}
	ended time.Time // once done
	// all and open are who.Nodes as JSON: with the nodes that have closed their
	// live view, and without.
	all, open []byte
	err       error
}

// Who returns who holds what on all nodes, as the JSON of who.Nodes, at most Kept
// old. Without all, nodes whose live view is closed are among the missing: who
// may not ask them is not told by us. The bytes are shared and must not be
// changed. The error is ctx's.
func (b *Board) Who(ctx context.Context, all bool) ([]byte, error) {
	b.mu.Lock()
	r := b.round
	if r == nil || !r.ended.IsZero() && b.options.Now().Sub(r.ended).Abs() > Kept {
		r = &round{done: make(chan struct{})}
		b.round = r
		// Whoever asked first may go away; the round is everybody's.
		go b.run(context.WithoutCancel(ctx), r)
	}
	b.mu.Unlock()
	select {
	case <-r.done:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if all {
		return r.all, r.err
	}
	return r.open, r.err
}

// reply is what one target said.
type reply struct {
	target string
	node   string
	answer json.RawMessage // of who.Answer; nil if there is none
	closed bool
	err    error
}

func (b *Board) run(ctx context.Context, r *round) {
	asked := b.options.Now()
	ctx, cancel := context.WithTimeout(ctx, Within)
	defer cancel()
	known := b.known(ctx)
	targets := b.inOrder(known)
	replies := b.ask(ctx, targets)

	all, err := compose(asked, targets, replies, known, true)
	open, openErr := compose(asked, targets, replies, known, false)
	b.mu.Lock()
	defer b.mu.Unlock()
	r.all, r.open, r.err, r.ended = all, open, errors.Join(err, openErr), b.options.Now()
	close(r.done)
}

func (b *Board) known(ctx context.Context) map[string]ledger.Target {
	known := map[string]ledger.Target{}
	ctx, cancel := context.WithTimeout(ctx, ledgerTime)
	defer cancel()
	list, err := b.options.Known(ctx)
	if err != nil {
		b.options.Log.Warn("The ledger does not say what nodes are called; missing ones are named by address", "err", err)
	}
	for _, target := range list {
		known[target.URL] = target
	}
	return known
}

// inOrder puts last who will probably not answer, so that they can't take the
// turns of those who will.
func (b *Board) inOrder(known map[string]ledger.Target) []string {
	targets := b.options.Collector.Targets()
	b.mu.Lock()
	defer b.mu.Unlock()
	maps.DeleteFunc(b.failed, func(target string, _ bool) bool {
		_, is := slices.BinarySearch(targets, target)
		return !is
	})
	doubtful := func(target string) int {
		if b.failed[target] || known[target].LastError != "" {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(targets, func(x, y string) int { return cmp.Compare(doubtful(x), doubtful(y)) })
	return targets
}

var errStillAsked = errors.New("it has not answered the question before this one yet")

// ask asks all targets, and returns what came until ctx ended.
func (b *Board) ask(ctx context.Context, targets []string) map[string]reply {
	came := make(chan reply, len(targets)) // so that a late one holds nobody up
	next := make(chan string, len(targets))
	for _, target := range targets {
		next <- target
	}
	close(next)
	for range min(atOnce, len(targets)) {
		go func() {
			for target := range next {
				if ctx.Err() != nil {
					return
				}
				came <- b.askOne(ctx, target)
			}
		}()
	}
	replies := make(map[string]reply, len(targets))
	for len(replies) < len(targets) {
		select {
		case reply := <-came:
			replies[reply.target] = reply
		case <-ctx.Done():
			return replies
		}
	}
	return replies
}

func (b *Board) askOne(ctx context.Context, target string) reply {
	b.mu.Lock()
	busy := b.asking[target]
	b.asking[target], b.failed[target] = true, true
	b.mu.Unlock()
	if busy {
		return reply{target: target, err: errStillAsked}
	}
	answer, closed, err := fetch(ctx, b.options.Collector, target)
	b.mu.Lock()
	delete(b.asking, target)
	if err == nil {
		delete(b.failed, target)
	}
	b.mu.Unlock()
	if err != nil {
		return reply{target: target, err: err}
	}
	raw, err := json.Marshal(answer)
	return reply{target: target, node: answer.Node, answer: raw, closed: closed, err: err}
}

// fetch gets one node's answer, as everybody may see it: over a unix socket it
// comes with command lines, because we are root there.
func fetch(ctx context.Context, collector *collect.Collector, target string) (answer who.Answer, closed bool, err error) {
	response, err := collector.Get(ctx, target, who.Path)
	if err != nil {
		return answer, false, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxAnswerBytes+1))
	if err != nil {
		return answer, false, fmt.Errorf("read the answer: %w", err)
	}
	if len(body) > maxAnswerBytes {
		return answer, false, fmt.Errorf("its answer is larger than %d MiB", maxAnswerBytes>>20)
	}
	if response.StatusCode != http.StatusOK {
		var failure who.Failure
		if json.Unmarshal(body, &failure) != nil {
			failure.Error = "is this a gpu-exporter?"
		}
		return answer, false, fmt.Errorf("it answers %d: %s", response.StatusCode, failure.Error)
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return answer, false, fmt.Errorf("the answer is not one of gpu-exporter: %w", err)
	}
	if answer.Version != who.Version {
		return answer, false, fmt.Errorf("it speaks version %d of the answer, this gpu-accounting version %d", answer.Version, who.Version)
	}
	answer.Publish()
	return answer, response.Header.Get(who.ClosedHeader) == who.ClosedValue, nil
}

// compose is the JSON of who.Nodes. Answers are put in as they are: together
// they may be tens of megabytes.
func compose(asked time.Time, targets []string, replies map[string]reply, known map[string]ledger.Target, all bool) ([]byte, error) {
	frame := who.Nodes{Version: who.NodesVersion, At: asked.UTC(), Nodes: []who.Answer{}, Missing: []who.MissingNode{}}
	var answers []reply
	for _, target := range targets {
		reply, came := replies[target]
		message := ""
		switch {
		case !came:
			message = fmt.Sprintf("no answer within %s", Within)
		case reply.err != nil:
			message = explain(reply.err)
		case reply.closed && !all:
			message = "its live view is closed (access.open_live): ask as an admin of gpu-accounting"
		default:
			answers = append(answers, reply)
			continue
		}
		frame.Missing = append(frame.Missing, who.MissingNode{Node: cmp.Or(known[target].Node, reply.node), Target: target, Message: message})
	}
	slices.SortFunc(answers, func(x, y reply) int { return cmp.Or(cmp.Compare(x.node, y.node), cmp.Compare(x.target, y.target)) })
	slices.SortFunc(frame.Missing, func(x, y who.MissingNode) int {
		return cmp.Or(cmp.Compare(x.Node, y.Node), cmp.Compare(x.Target, y.Target))
	})
	text, err := json.Marshal(frame)
	if err != nil {
		return nil, fmt.Errorf("nodes: %w", err)
	}
	const list = `"nodes":[`
	before, after, _ := bytes.Cut(text, []byte(list))
	size := len(text)
	for _, each := range answers {
		size += len(each.answer) + 1
	}
	out := append(make([]byte, 0, size), before...)
	out = append(out, list...)
	for i, each := range answers {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, each.answer...)
	}
	return append(out, after...), nil
}

// explain says in a line why a node is missing. The target stands beside it.
func explain(err error) string {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Sprintf("no answer within %s", Within)
	}
	return text.Clean(err.Error(), maxMessage)
}
