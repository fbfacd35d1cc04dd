package slurm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"gpuledger/exporter/procfs/text"
)

const (
	// controllerTimeout is less than Slurm's own programs wait.
	controllerTimeout = 5 * time.Second
	maxAnswerBytes    = 1 << 20
	maxNameBytes      = 256
)

// record is what the controller says of a job.
type record struct {
	id                      string
	uid                     int64 // -1 if not told
	account, partition, qos string
	running                 bool
	gpus                    []int // as Slurm counts this node's
}

// errNoJob is a job that the controller does not have any more.
var errNoJob = errors.New("no such job")

// errNoPrograms is a node without Slurm's programs: slurmctld is not asked.
var errNoPrograms = errors.New("no squeue or scontrol")

// controller asks slurmctld, by the programs that come with Slurm.
type controller struct {
	directory string // of the programs; empty for PATH
	node      string // as Slurm calls it
}

// jobFormat has first what Slurm has checked, then what a user may have chosen
// freely, each on a line of its own: account and name.
const jobFormat = "%A|%U|%T|%P|%q\n%a\n%j"

// ask asks for one job by its number.
func (c controller) ask(ctx context.Context, job string) (record, error) {
	output, err := c.run(ctx, "squeue", "-h", "-t", "all", "-j", job, "-o", jobFormat)
	if err != nil {
		return record{}, err
	}
	r, account, name, err := parseQueue(output)
	if err != nil {
		return record{}, err
	}
	if output, err = c.run(ctx, "scontrol", "-o", "show", "job", "-d", job); err != nil {
		return record{}, err
	}
	r.gpus = parseDetail(output, account, name, c.node)
	return r, nil
}

func (c controller) run(ctx context.Context, program string, arguments ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, controllerTimeout)
	defer cancel()
	command := exec.CommandContext(ctx, filepath.Join(c.directory, program), arguments...)
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	command.WaitDelay = time.Second
	var output, problems limited
	command.Stdout, command.Stderr = &output, &problems
	err := command.Run()
	switch {
	case ctx.Err() != nil:
		return "", fmt.Errorf("%s: no answer of slurmctld within %s", program, controllerTimeout)
	case err == nil:
		return output.String(), nil
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return "", errNoPrograms
	case strings.Contains(problems.String(), "Invalid job id"): // gone for longer than MinJobAge
		return "", errNoJob
	}
	return "", fmt.Errorf("%s: %w: %s", program, err, text.Clean(strings.TrimSpace(problems.String()), 256))
}

// parseQueue reads squeue's answer in jobFormat.
func parseQueue(output string) (r record, account, name string, err error) {
	checked, rest, _ := strings.Cut(output, "\n")
	account, name, _ = strings.Cut(rest, "\n")
	name = strings.TrimSuffix(name, "\n")
	fields := strings.Split(checked, "|")
	if checked == "" {
		return r, "", "", errNoJob
	}
	if len(fields) != 5 {
		return r, "", "", fmt.Errorf("squeue: %q is not of the form that was asked for", text.Clean(checked, 80))
	}
	uid, err := strconv.ParseUint(fields[1], 10, 32)
	if err != nil {
		return r, "", "", fmt.Errorf("squeue: uid: %w", err)
	}
	running := slices.Contains([]string{"RUNNING", "SUSPENDED", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT", "CONFIGURING"}, fields[2])
	return record{
		id: text.Clean(fields[0], maxNameBytes), uid: int64(uid), running: running,
		partition: told(fields[3]), qos: told(fields[4]), account: told(account),
	}, account, name, nil
}

// parseDetail reads which GPUs of a node a job has from scontrol -o show job -d.
// The line has fields parted by blanks, and holds texts that a user chose: the
// name and the account, which are known and cut out, and paths and comments,
// which come after everything that is read here. What cannot be told for certain
// is not told.
func parseDetail(output, account, name, node string) []int {
	line, _, _ := strings.Cut(output, "\n")
	_, line, found := strings.Cut(line, " JobName="+name+" UserId=")
	if !found {
		return nil
	}
	if _, line, found = strings.Cut(line, " Account="+account+" QOS="); !found {
		return nil
	}
	line, _, _ = strings.Cut(line, " Command=")
	for rest := line; ; {
		_, after, found := strings.Cut(rest, " Nodes=")
		if !found {
			return nil
		}
		rest = after
		nodes, fields, _ := strings.Cut(after, " ")
		if names, err := expand(nodes); err != nil || !slices.Contains(names, node) {
			continue
		}
		fields, _, _ = strings.Cut(fields, " Nodes=")
		_, gres, _ := strings.Cut(" "+fields, " GRES=")
		gres, _, _ = strings.Cut(gres, " ")
		return gpusOf(gres)
	}
}

// told is a name, empty where Slurm has none.
func told(value string) string {
	if value == "(null)" || value == "N/A" {
		return ""
	}
	return text.Clean(value, maxNameBytes)
}

// limited keeps the beginning of what is written to it.
type limited struct{ bytes.Buffer }

// Write takes everything and keeps what fits.
func (l *limited) Write(p []byte) (int, error) {
	if room := maxAnswerBytes - l.Len(); room > 0 {
		_, _ = l.Buffer.Write(p[:min(room, len(p))]) // never fails
	}
	return len(p), nil
}

// gpusOf reads which GPUs of a node a job has: gpu:a100:2(IDX:0-1,3),shard:1(…).
// Shards of a GPU are not counted: they say of no GPU that it is the job's.
func gpusOf(gres string) []int {
	var gpus []int
	for gres != "" {
		item := gres
		if i := outerComma(gres); i >= 0 {
			item, gres = gres[:i], gres[i+1:]
		} else {
			gres = ""
		}
		_, index, found := strings.Cut(item, "(IDX:")
		if !strings.HasPrefix(item, "gpu:") && !strings.HasPrefix(item, "gpu(") || !found {
			continue
		}
		numbers, err := expand("[" + strings.TrimSuffix(index, ")") + "]")
		if err != nil {
			continue
		}
		for _, number := range numbers {
			if n, err := strconv.Atoi(number); err == nil {
				gpus = append(gpus, n)
			}
		}
	}
	return gpus
}

func outerComma(s string) int {
	depth := 0
	for i, c := range s {
		switch c {
		case '(':
			depth++
		case ')':
			depth--
		case ',':
			if depth == 0 {
				return i
			}
		}
	}
	return -1
}
