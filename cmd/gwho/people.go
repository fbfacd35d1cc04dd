package main

import (
	"context"
	"log/slog"
	"sync"

	"gpuledger/exporter/holders"
	"gpuledger/exporter/owner"
	"gpuledger/exporter/procfs"
	"gpuledger/exporter/runtimes"
)

// dockerSocket is where a Docker engine listens unless told otherwise.
const dockerSocket = "/var/run/docker.sock"

// containerdSockets are where containerd's are, whose state is beside them.
var containerdSockets = []string{"/run/containerd/containerd.sock", "/run/k3s/containerd/containerd.sock"}

// people is the table of who is behind the PIDs, with what looks names up
// running beside it.
type people struct {
	*holders.Table
	proc *procfs.FS
	stop context.CancelFunc
	done sync.WaitGroup
}

// newPeople starts a table. It knows the rules every site has; a site's own
// are the exporter's to know.
func newPeople(ctx context.Context, root string) (*people, error) {
	proc, err := procfs.Open(root)
	if err != nil {
		return nil, err
	}
	quiet := slog.New(slog.DiscardHandler)
	p := &people{proc: proc, Table: holders.New(holders.Options{
		FS: proc, Owner: owner.DefaultConfig(), Accounts: owner.NewHostAccounts(quiet),
		Engines: []*runtimes.Directory{
			runtimes.NewDirectory(runtimes.NewDockerClient(dockerSocket), quiet),
			// Podman's by what is on disk: asking would start its service.
			runtimes.NewDirectory(runtimes.NewPodmanFiles(runtimes.DefaultPodmanRunRoot, runtimes.DefaultPodmanGraphRoot, proc), quiet),
			// Pods by what is on disk: asking would take gRPC, which takes longer
			// to start than all the rest.
			runtimes.NewDirectory(runtimes.NewBundles(containerdSockets), quiet),
		}, Personal: runtimes.NewPersonal(proc, quiet), Logger: quiet,
	})}
	ctx, p.stop = context.WithCancel(ctx)
	p.done.Go(func() { p.Table.Run(ctx) })
	return p, nil
}

// Close ends the look-ups and gives all descriptors back.
func (p *people) Close() {
	p.stop()
	p.done.Wait()
	p.Table.Close()
}
