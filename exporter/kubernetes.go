package exporter

import (
	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/runtimes/cri"
	"gpuledger/exporter/runtimes/kubelet"
)

// kubernetes is what tells of pods: one directory over all CRI engines, so that
// what the disk says is believed only once none of them answers, and the
// kubelets.
func (o Options) kubernetes() ([]*runtimes.Directory, []runtimes.Granter) {
	var engines []*runtimes.Directory
	var granters []runtimes.Granter
	watch := kubelet.Options{Logger: o.Logger}
	if sockets := o.Config.Runtimes.CRI; len(sockets) > 0 {
		disk := runtimes.NewBundles(sockets)
		client := cri.NewClient(sockets, disk)
		engines = append(engines, runtimes.NewDirectory(client, o.Logger))
		watch.Pods, watch.PodByUID = client.Pods, disk.Pod
	}
	for _, socket := range o.Config.Runtimes.Kubelet {
		watch.Socket, watch.Checkpoint = socket, kubelet.CheckpointBeside(socket)
		granters = append(granters, kubelet.New(watch))
	}
	return engines, granters
}
