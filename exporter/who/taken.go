package who

import (
	"fmt"
	"path"
	"slices"

	"gpuledger/exporter/snapshot"
)

// taken says of a card with memory that no listed process explains who may
// have it, or what releases it.
func taken(out *Card, c *snapshot.Card, viewer Viewer, source string) {
	out.Suspects, out.SuspectsRemedies = []Suspect{}, []string{}
	bytes, known := c.UnattributedMemoryBytes.Get()
	if c.Search.Verdict == snapshot.SearchNone || !known {
		return
	}
	for i := range c.Suspects {
		out.Suspects = append(out.Suspects, suspect(&c.Suspects[i], viewer))
	}
	out.SuspectsVerdict = c.Search.Verdict
	out.SuspectsMessage = size(bytes) + " is used by no process that NVML lists: " + verdict(c, source)
	if total, known := totalBytes(c); known && bytes >= total/takenShare && !out.MIG {
		for i := range out.Devices {
			out.Devices[i].Free = false
		}
	}
	if c.Search.Verdict == snapshot.SearchNobody {
		out.SuspectsRemedies = remedies(out, c)
	}
}

// takenShare: with a 32nd of a card's memory in unknown hands, or more, the
// card is not called free.
const takenShare = 32

func totalBytes(c *snapshot.Card) (uint64, bool) {
	if c.Reading == nil {
		return 0, false
	}
	return c.Reading.MemoryTotalBytes.Get()
}

func verdict(c *snapshot.Card, source string) string {
	s := c.Search
	nobody := "nobody"
	if slices.ContainsFunc(c.Holders, func(h snapshot.Holder) bool { return h.PID != 0 }) {
		nobody = "nobody else"
	}
	switch s.Verdict {
	case snapshot.SearchFound:
		text := "these may have it"
		if !slices.ContainsFunc(c.Suspects, func(s snapshot.Suspect) bool { return s.Strength == "strong" || s.Strength == "likely" }) {
			text = nobody + " has the GPU open; at most these may have it"
		}
		if s.Hidden > 0 || s.HidePID {
			text += ". " + hidden(s, source)
		}
		return text
	case snapshot.SearchNobody:
		return nobody + " has the GPU open, so the driver keeps what somebody left who is gone"
	case snapshot.SearchHidden:
		return nobody + " has the GPU open whom we may look into. " + hidden(s, source)
	case snapshot.SearchFailed:
		return "processes could not be looked at: " + s.Error
	}
	return "looking for who has it"
}

// hidden says how many processes could not be looked into, and what helps.
func hidden(s snapshot.Search, source string) string {
	text := fmt.Sprintf("%d processes are hidden", s.Hidden)
	switch {
	case s.HidePID:
		text = "Others' processes are hidden (hidepid)"
	case s.Hidden == 1:
		text = "1 process is hidden"
	}
	if source == SourceExporter {
		return text + " from gpu-exporter: run it as root with CAP_SYS_PTRACE"
	}
	return text + " from us: run gwho as root, or gpu-exporter on this node"
}

// remedies are what releases memory that nobody has, the mildest first. What
// is true of which card is in docs/taken.md.
func remedies(out *Card, c *snapshot.Card) []string {
	all := []string{"see what went wrong: dmesg -T | grep -iE 'xid|nvrm'"}
	listed, mps := 0, false
	for _, h := range c.Holders {
		if h.PID == 0 {
			continue
		}
		mps = mps || h.Process.MPS || path.Base(h.Command) == mpsServerComm
		if !h.System {
			listed++
		}
	}
	if mps {
		all = append(all, "MPS keeps memory for its clients: once they have ended, echo quit | nvidia-cuda-mps-control")
	}
	if listed > 0 {
		text := "1 process is on the GPU: wait until it ends. The memory may be its own in part, and a reset needs the GPU free"
		if listed > 1 {
			text = fmt.Sprintf("%d processes are on the GPU: wait until they end. The memory may be theirs in part, and a reset needs the GPU free", listed)
		}
		return append(all, text)
	}
	return append(all,
		fmt.Sprintf("let go of the GPU: stop what watches it or keeps it ready (gpu-exporter, DCGM, nvidia-persistenced), and as root nvidia-smi -i %d -pm 0. The driver gives everything back once nobody has the GPU open", out.Index),
		fmt.Sprintf("if that is not enough, as root nvidia-smi --gpu-reset -i %d. Jobs on other GPUs go on, but not on GPUs older than Ampere that NVLink joins to this one", out.Index),
		"reboot only if the reset fails",
	)
}

// mpsServerComm is nvidia-cuda-mps-server as the kernel cuts it.
const mpsServerComm = "nvidia-cuda-mps"

func size(bytes uint64) string {
	if bytes < 1<<30 {
		return fmt.Sprintf("%d MiB", bytes>>20)
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}

func suspect(s *snapshot.Suspect, viewer Viewer) Suspect {
	out := Suspect{
		PID: s.PID, User: s.Workload.User, Kind: s.Workload.Kind, Workload: s.Workload.Name, Command: s.Command,
		AttributedBy: s.Workload.AttributedBy, Reason: s.Reason, Why: s.Why, Strength: s.Strength,
		StartedAt: instant(s.StartedAt), Zombie: s.Zombie, Pending: s.Pending,
		ContainerID: s.Detail.ContainerID, ContainerName: s.Detail.ContainerName, Image: s.Detail.Image,
		PodNamespace: s.Detail.PodNamespace, PodName: s.Detail.PodName, SlurmJob: s.Detail.SlurmJob, Unit: s.Detail.Unit,
	}
	if s.Workload.UID >= 0 {
		out.UID = new(s.Workload.UID)
	}
	if s.CommandLine != "" && viewer.sees(s.Workload.UID) {
		out.CommandLine = new(s.CommandLine)
	}
	return out
}
