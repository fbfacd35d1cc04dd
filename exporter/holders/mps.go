package holders

import (
	"path"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/procfs"
)

// The control daemon of MPS starts a server for each user who wants one, under
// that user's uid: what it has of a card is its clients', who are listed
// themselves.
const (
	mpsServer  = "nvidia-cuda-mps-server"
	mpsControl = "nvidia-cuda-mps-control"
)

// startedByMPSDaemon reports an MPS server whose parent is root's control
// daemon on the host. A server that a person started is that person's: in its
// own program anything can be made to run.
func (t *Table) startedByMPSDaemon(server procfs.Process) bool {
	if path.Base(server.Executable) != mpsServer || server.ExecutableUID != 0 || server.ParentPID == 0 {
		return false
	}
	handle, err := t.options.FS.Process(server.ParentPID)
	if err != nil {
		return false
	}
	defer handle.Close()
	parent, err := handle.Read()
	if err != nil || path.Base(parent.Executable) != mpsControl || parent.ExecutableUID != 0 || parent.StartTicks > server.StartTicks {
		return false
	}
	_, inContainer := cgroup.Parse(parent.Cgroup).Container()
	return parent.RealUID == 0 && parent.EffectiveUID == 0 && len(parent.NSPID) <= 1 && !inContainer
}
