package kubelet

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"

	"gpuledger/exporter/procfs/text"
	"gpuledger/exporter/runtimes"
)

const maxCheckpointBytes = 16 << 20

// checkpointFile is what a kubelet's device manager writes for itself. Its form
// is nobody's promise: what is not as expected is left out.
type checkpointFile struct {
	Data struct {
		PodDeviceEntries []struct {
			PodUID, ContainerName string
			// DeviceIDs are by NUMA node, and were a plain list before 1.20.
			DeviceIDs json.RawMessage
		}
	}
}

func (w *Watcher) checkpointThere() bool {
	if w.options.Checkpoint == "" {
		return false
	}
	_, err := os.Stat(w.options.Checkpoint)
	return err == nil
}

// checkpoint reads what a kubelet that does not answer has written.
func (w *Watcher) checkpoint() ([]allocation, error) {
	if w.options.Checkpoint == "" {
		return nil, fs.ErrNotExist
	}
	file, err := os.Open(w.options.Checkpoint)
	if err != nil {
		return nil, fmt.Errorf("kubelet's checkpoint: %w", err)
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxCheckpointBytes+1))
	if err != nil {
		return nil, fmt.Errorf("kubelet's checkpoint: %w", err)
	}
	if len(data) > maxCheckpointBytes {
		return nil, fmt.Errorf("kubelet's checkpoint %s is longer than %d bytes", w.options.Checkpoint, maxCheckpointBytes)
	}
	return w.readCheckpoint(data)
}

func (w *Watcher) readCheckpoint(data []byte) ([]allocation, error) {
	var file checkpointFile
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("kubelet's checkpoint %s: %w", w.options.Checkpoint, err)
	}
	type place struct{ uid, container string }
	given := map[place]*devices{}
	for _, entry := range file.Data.PodDeviceEntries {
		at := place{text.Clean(entry.PodUID, maxNameBytes), text.Clean(entry.ContainerName, maxNameBytes)}
		for _, id := range deviceIDs(entry.DeviceIDs) {
			device, ok := pluginDevice(id)
			if ok && given[at] == nil {
				if len(given) == maxAllocations {
					break
				}
				given[at] = &devices{}
			}
			if ok {
				given[at].add(device, true)
			}
		}
	}
	byUID := make(map[string]runtimes.Pod, len(w.pods))
	for _, state := range w.pods {
		byUID[state.Pod.UID] = state.Pod
	}
	var all []allocation
	for at, some := range given {
		pod, known := byUID[at.uid]
		if !known && w.options.PodByUID != nil {
			found, err := w.options.PodByUID(at.uid)
			if err == nil {
				pod = found
			} else if !errors.Is(err, fs.ErrNotExist) {
				w.options.Logger.Debug("no name for a pod", "uid", at.uid, "err", err)
			}
		}
		pod.UID, pod.Labels, pod.Annotations = at.uid, nil, nil
		all = append(all, allocation{pod: pod, container: at.container, devices: *some})
	}
	slices.SortFunc(all, func(a, b allocation) int {
		return cmp.Or(cmp.Compare(a.pod.UID, b.pod.UID), cmp.Compare(a.container, b.container))
	})
	return all, nil
}

func deviceIDs(raw json.RawMessage) []string {
	var byNode map[string][]string
	if json.Unmarshal(raw, &byNode) == nil {
		var all []string
		for _, node := range slices.Sorted(maps.Keys(byNode)) {
			all = append(all, byNode[node]...)
		}
		return all
	}
	var list []string
	if json.Unmarshal(raw, &list) != nil {
		return nil
	}
	return list
}
