package runtimes

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// put writes a file and the directories above it.
func put(t *testing.T, content string, path ...string) {
	t.Helper()
	whole := filepath.Join(path...)
	if err := os.MkdirAll(filepath.Dir(whole), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(whole, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestBundles(t *testing.T) {
	root := t.TempDir()
	state, crio := filepath.Join(root, "containerd"), filepath.Join(root, "overlay-containers")
	logs, links := filepath.Join(root, "pods"), filepath.Join(root, "containers")
	b := &Bundles{ContainerdStates: []string{filepath.Join(root, "none"), state}, CRIOContainers: crio, PodLogs: logs, ContainerLogs: links}
	id := func(digit string) string { return strings.Repeat(digit, 64) }
	containerd := func(namespace, digit, content string) {
		put(t, content, state, "io.containerd.runtime.v2.task", namespace, id(digit), "config.json")
	}
	const kube = `"io.kubernetes.cri.container-name":"main","io.kubernetes.cri.sandbox-name":"train-0",
		"io.kubernetes.cri.sandbox-namespace":"vision","io.kubernetes.cri.sandbox-uid":"u-1","io.kubernetes.cri.image-name":"torch:2"`
	containerd("k8s.io", "1", `{"process":{"args":["secret"]},"annotations":{"io.kubernetes.cri.container-type":"container",`+kube+`}}`)
	containerd("k8s.io", "2", `{"annotations":{"io.kubernetes.cri.container-type":"sandbox",`+kube+`}}`)
	containerd("default", "3", `{"annotations":{"nerdctl/name":"train\u0007","nerdctl/namespace":"default"}}`)
	containerd("default", "4", `{}`)
	containerd("moby", "5", `{"annotations":{"nerdctl/name":"not ours"}}`)
	containerd("k8s.io", "6", `{"annotations":`)
	containerd("k8s.io", "7", `{"annotations":{"x":"`+strings.Repeat("a", maxBundleBytes)+`"}}`)
	put(t, `{"annotations":{"io.kubernetes.cri-o.ContainerType":"container","io.kubernetes.cri-o.ImageName":"quay.io/torch:2",
		"io.kubernetes.cri-o.Labels":"{\"io.kubernetes.container.name\":\"main\",\"io.kubernetes.pod.name\":\"infer-0\",\"io.kubernetes.pod.namespace\":\"web\",\"io.kubernetes.pod.uid\":\"u-2\"}"}}`,
		crio, id("8"), "userdata", "config.json")
	put(t, `{"annotations":{"io.kubernetes.cri-o.ContainerType":"sandbox"}}`, crio, id("9"), "userdata", "config.json")
	put(t, `{"annotations":{"io.podman.annotations.pids-limit":"2048"}}`, crio, id("a"), "userdata", "config.json")
	put(t, "", logs, "batch_sweep-7_u-3", "main", "0.log")
	if err := os.MkdirAll(links, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{
		"sweep-7_batch_main-" + id("b") + ".log": filepath.Join(logs, "batch_sweep-7_u-3", "main", "0.log"),
		"odd-" + id("c") + ".log":                "x",
		"gone_batch_side-" + id("d") + ".log":    filepath.Join(logs, "other_gone_u-9", "side", "0.log"),
	} {
		if err := os.Symlink(target, filepath.Join(links, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct{ digit, want string }{
		{"1", "containerd main torch:2 vision/train-0 u-1"},
		{"2", "none"}, {"3", "containerd train\uFFFD "}, {"4", "containerd  "}, {"5", "none"}, {"6", "trouble"}, {"7", "trouble"},
		{"8", "crio main quay.io/torch:2 web/infer-0 u-2"},
		{"9", "none"}, {"a", "none"},
		{"b", "containerd main  batch/sweep-7 u-3"},
		{"c", "none"},
		{"d", "containerd side  batch/gone "}, // a link that says otherwise is not believed
		{"e", "none"},
	} {
		c, err := b.Container(t.Context(), id(test.digit))
		got := c.Runtime + " " + c.Name + " " + c.Image
		if c.Pod != nil {
			got += " " + c.Pod.Namespace + "/" + c.Pod.Name + " " + c.Pod.UID
		}
		switch {
		case errors.Is(err, ErrNoSuchContainer):
			got = "none"
		case err != nil:
			got = "trouble"
		}
		if got != test.want {
			t.Errorf("container %s…: %q, want %q (%v)", test.digit, got, test.want, err)
		}
	}
	if pod, err := b.Pod("u-3"); err != nil || pod.Namespace != "batch" || pod.Name != "sweep-7" {
		t.Errorf("pod by uid: %+v, %v", pod, err)
	}
	if _, err := b.Pod("u-4"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("unknown pod: %v", err)
	}
	if _, err := (&Bundles{}).Container(t.Context(), id("1")); !errors.Is(err, ErrNoSuchContainer) {
		t.Errorf("no directory at all: %v", err)
	}
}
