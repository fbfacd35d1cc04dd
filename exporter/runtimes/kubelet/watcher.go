// Package kubelet knows which GPUs a node's kubelet gave to which pods: from its
// pod-resources socket, or from its checkpoint on disk.
package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/procfs/text"
	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/runtimes/cri"
)

// DefaultSocket is where a kubelet serves pod-resources unless told otherwise.
const DefaultSocket = "/var/lib/kubelet/pod-resources/kubelet.sock"

// CheckpointBeside is where the kubelet whose pod-resources socket that is keeps
// its checkpoint.
func CheckpointBeside(socket string) string {
	return filepath.Join(filepath.Dir(filepath.Dir(socket)), "device-plugins", "kubelet_internal_checkpoint")
}

const (
	askEvery    = 10 * time.Second
	callTimeout = 5 * time.Second
	// maxAllocations bounds what a kubelet can make us keep.
	maxAllocations = 1024
	maxNameBytes   = 256
	// restartWithin is how long a kubelet that has started may leave out pods that
	// it has not heard of yet. From a pod that runs no GPU is taken.
	restartWithin = 2 * time.Minute
)

// Options of a Watcher.
type Options struct {
	// Socket is pod-resources'; Checkpoint is read while the socket does not
	// answer and has never done so. Empty ones are left out.
	Socket, Checkpoint string
	// Pods tells what engines have of pods, by namespace/name; nil if there is
	// none to ask.
	Pods func(context.Context) (map[string]runtimes.PodState, error)
	// PodByUID finds a pod's names where engines cannot tell; may be nil.
	PodByUID func(uid string) (runtimes.Pod, error)
	Every    time.Duration    // 0 for 10 s
	Logger   *slog.Logger     // nil for none
	Now      func() time.Time // nil for the clock
}

// Watcher is a runtimes.Granter over one kubelet.
type Watcher struct {
	options Options
	client  podresources.PodResourcesListerClient
	failure error // why there is no client

	// Only Run's goroutine uses these.
	given    []allocation // as of the kubelet's last answer
	answered bool
	pods     map[string]runtimes.PodState // as of the engines' last answer
	seen     map[string]bool              // pods that an engine has had

	mutex      sync.Mutex
	grants     []runtimes.Grant
	generation uint64
	state      runtimes.State
	asked      bool
}

// New returns a watcher. It does nothing before Run.
func New(options Options) *Watcher {
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	if options.Now == nil {
		options.Now = time.Now
	}
	if options.Every == 0 {
		options.Every = askEvery
	}
	w := &Watcher{options: options, seen: map[string]bool{}}
	var connection *grpc.ClientConn
	if connection, w.failure = cri.Dial(options.Socket); w.failure == nil {
		w.client = podresources.NewPodResourcesListerClient(connection)
	}
	return w
}

// Engine is kubelet.
func (w *Watcher) Engine() string { return "kubelet" }

// Grants are the GPUs that pods have now.
func (w *Watcher) Grants() []runtimes.Grant {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.grants
}

// Generation grows whenever Grants may have changed.
func (w *Watcher) Generation() uint64 {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.generation
}

// State is how the kubelet did at the last try. asked is false where there is
// none.
func (w *Watcher) State() (state runtimes.State, asked bool) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.state, w.asked
}

// Run asks the kubelet until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	ticker := time.NewTicker(w.options.Every)
	defer ticker.Stop()
	for {
		w.look(ctx)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

func (w *Watcher) look(ctx context.Context) {
	begun := time.Now()
	given, err := w.list(ctx)
	if ctx.Err() != nil {
		return
	}
	took := time.Since(begun)
	noKubelet := errors.Is(err, runtimes.ErrNoEngine)
	w.readPods(ctx, err == nil || w.answered || w.checkpointThere())
	switch {
	case err == nil:
		w.given, w.answered = append(given, w.left(given)...), true
	case w.answered:
		// A kubelet that is away takes no GPU back: its last word stands.
	default:
		from, checkpointErr := w.checkpoint()
		if checkpointErr == nil {
			w.given = from
		} else if !errors.Is(checkpointErr, fs.ErrNotExist) {
			err = errors.Join(err, checkpointErr)
			noKubelet = false
		}
	}
	w.publish(w.joined())
	w.report(took, err, noKubelet && !w.answered)
}

// left are the allocations that the kubelet no longer lists, of pods that still
// run by an engine's word.
func (w *Watcher) left(given []allocation) []allocation {
	now := w.options.Now()
	listed := map[string]bool{}
	for i := range given {
		given[i].listedAt = now
		listed[given[i].key()] = true
	}
	var left []allocation
	for _, a := range w.given {
		state, there := w.pods[a.key()]
		if there && !state.Ended && !listed[a.key()] && now.Sub(a.listedAt) < restartWithin && len(given)+len(left) < maxAllocations {
			left = append(left, a)
		}
	}
	return left
}

// readPods keeps what was known where no engine answers.
func (w *Watcher) readPods(ctx context.Context, needed bool) {
	if !needed || w.options.Pods == nil {
		return
	}
	pods, err := w.options.Pods(ctx)
	if err == nil {
		w.pods = pods
		return
	}
	if !errors.Is(err, runtimes.ErrNoEngine) {
		w.options.Logger.Debug("not every engine says which containers are in which pods", "err", err)
	}
	if len(pods) == 0 {
		return
	}
	// What the engines that answered do not have, another may.
	for _, a := range w.given {
		state, known := w.pods[a.key()]
		if _, told := pods[a.key()]; known && !told {
			pods[a.key()] = state
		}
	}
	w.pods = pods
}

// list asks the kubelet.
func (w *Watcher) list(ctx context.Context) ([]allocation, error) {
	socket := w.options.Socket
	if w.failure != nil {
		return nil, w.failure
	}
	if _, err := os.Stat(socket); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("kubelet on %s: %w", socket, runtimes.ErrNoEngine)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := w.client.List(ctx, &podresources.ListPodResourcesRequest{})
	if status.Code(err) == codes.DeadlineExceeded {
		return nil, fmt.Errorf("kubelet on %s: no answer within %v", socket, callTimeout)
	}
	if err != nil {
		return nil, fmt.Errorf("kubelet on %s: %s; check that it runs and that root asks", socket, text.Clean(status.Convert(err).Message(), 256))
	}
	var all []allocation
	for _, pod := range answer.GetPodResources() {
		for _, container := range pod.GetContainers() {
			devices := given(container)
			if len(devices) == 0 || len(all) == maxAllocations {
				continue
			}
			all = append(all, allocation{
				pod:       runtimes.Pod{Namespace: text.Clean(pod.GetNamespace(), maxNameBytes), Name: text.Clean(pod.GetName(), maxNameBytes)},
				container: text.Clean(container.GetName(), maxNameBytes), devices: devices,
			})
		}
	}
	return all, nil
}

// joined are the grants that the allocations amount to, by what the engines say
// of their pods. The kubelet goes on listing pods that have ended
// (kubernetes#132020); a pod that an engine had and has no more has ended too.
func (w *Watcher) joined() []runtimes.Grant {
	var grants []runtimes.Grant
	seen := map[string]bool{}
	for _, a := range w.given {
		state, there := w.pods[a.key()]
		if there && a.pod.UID != "" && a.pod.UID != state.Pod.UID {
			there = false // a namesake
		}
		had := w.seen[a.id()]
		seen[a.id()] = had || there
		// A checkpoint keeps what ended pods had until the next pod is given
		// something.
		stale := a.pod.UID != "" && w.pods != nil
		if there && state.Ended || !there && (had || stale) {
			continue
		}
		uid, since := a.pod.UID, time.Time{}
		if there {
			uid, since = state.Pod.UID, state.Since
		}
		levels := []cgroup.Level{{Kind: cgroup.LevelPod, System: cgroup.RuntimeKubernetes, ID: uid}}
		if id := state.Containers[a.container]; there && id != "" {
			levels = append(levels, cgroup.Level{Kind: cgroup.LevelContainer, System: cgroup.RuntimeKubernetes, ID: id})
		}
		pod := a.pod
		pod.UID = uid
		grants = append(grants, runtimes.Grant{
			Devices: a.devices, Exclusive: true, Levels: levels, UID: -1, Since: since, Pod: &pod, Container: a.container,
		})
		if pod.Name == "" { // of a checkpoint, and nobody knows it by name
			grants[len(grants)-1].Pod = nil
		}
	}
	w.seen = seen
	return grants
}

func (w *Watcher) publish(grants []runtimes.Grant) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if !reflect.DeepEqual(w.grants, grants) {
		w.grants = grants
		w.generation++
	}
}

// report keeps the state, and logs only when it changes.
func (w *Watcher) report(took time.Duration, err error, none bool) {
	state := runtimes.State{Up: err == nil, Duration: took}
	if err != nil {
		state.Error = err.Error()
	}
	w.mutex.Lock()
	before := w.state
	w.state, w.asked = state, !none
	w.mutex.Unlock()
	switch {
	case none:
	case err != nil && before.Error == "":
		w.options.Logger.Warn("the kubelet does not say which pods have which GPUs; what it said last stands", "err", err)
	case err == nil && before.Error != "":
		w.options.Logger.Info("the kubelet says which pods have which GPUs", "grants", len(w.Grants()))
	}
}

// allocation is what one container of a pod was given.
type allocation struct {
	pod       runtimes.Pod // UID only from a checkpoint
	container string
	devices   []runtimes.Device
	listedAt  time.Time // when the kubelet last listed it
}

func (a allocation) key() string { return a.pod.Namespace + "/" + a.pod.Name }

// id tells a pod from its namesakes where that is known.
func (a allocation) id() string { return a.key() + "/" + a.pod.UID }
