package runtimes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"gpuledger/exporter/runtimes/dockertest"
)

// TestDockerOnDisk compares what dockerd says with what it wrote down.
func TestDockerOnDisk(t *testing.T) {
	engine := dockertest.Start(t, "--live-restore")
	engine.Import(t, "with-user:test", "USER 1000", "LABEL owner=image-author")
	data := t.TempDir()
	c := engine.Run(t, "--name", "train", "--label", "gpuledger.user=alice", "--volume", data+":/data",
		"--device", cardFile(t, 0)+":/dev/nvidia0", "with-user:test", "/bin/sleep", "1000")
	client, files := NewDockerClient(engine.Socket), NewDockerFiles(t.TempDir(), engine.DataRoot)
	asked, err := client.Container(t.Context(), c.ID)
	if err != nil {
		t.Fatal(err)
	}
	read, err := files.Container(t.Context(), c.ID)
	if err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(asked) != fmt.Sprint(read) || read.Name != "train" || read.ImageLabels["owner"] != "image-author" || read.PID != c.PID ||
		!slices.Equal(read.Binds, []string{data}) {
		t.Errorf("dockerd says\n%+v\nthe disk\n%+v", asked, read)
	}
	if _, err := files.Container(t.Context(), someID); !errors.Is(err, ErrNoSuchContainer) {
		t.Errorf("unknown id: %v", err)
	}
	engine.Kill(t)
	d := NewDirectory(WithFiles(client, files), nil)
	run(t, d)
	eventually(t, "the disk names it while dockerd is dead", func() bool { c, _ := d.Lookup(c.ID); return c.Name == "train" })
	if state, _ := d.State(); state.Up {
		t.Errorf("state %+v", state)
	}
	engine.StartAgain(t)
	eventually(t, "dockerd names it again", func() bool { _, s := d.Lookup(c.ID); state, _ := d.State(); return s == StatusFound && state.Up })
}

func TestAssignedByDocker(t *testing.T) {
	engine := dockertest.Start(t, "--live-restore", "--add-runtime", "nvidia=runc")
	engine.Import(t, "cuda:test", "ENV NVIDIA_VISIBLE_DEVICES=all")
	before := engine.Run(t, "--name", "before", "--runtime", "nvidia", "--env", "NVIDIA_VISIBLE_DEVICES=0,GPU-5e", "cuda:test", "/bin/sleep", "1000")
	engine.Run(t, "--name", "inherited", "--runtime", "nvidia", "cuda:test", "/bin/sleep", "1000")
	engine.Run(t, "--name", "no-runtime", "--env", "NVIDIA_VISIBLE_DEVICES=0", "cuda:test", "/bin/sleep", "1000")
	proc := hostProc(t)
	a := NewAssigned(NewDockerClient(engine.Socket), runsIn(proc), nil)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = a.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	of := func() map[string][]Device {
		all := map[string][]Device{}
		for _, grant := range a.Grants() {
			all[grant.Levels[0].ID] = grant.Devices
		}
		return all
	}
	eventually(t, "the one that ran before is found", func() bool { return len(of()) == 1 })
	if got := of()[before.ID]; !slices.Equal(got, []Device{ByIndex(0), ByUUID("GPU-5e")}) {
		t.Errorf("devices %+v", got)
	}
	later := engine.Run(t, "--name", "later", "--runtime", "nvidia", "--env", "NVIDIA_VISIBLE_DEVICES=all", dockertest.Image, "/bin/sleep", "1000")
	eventually(t, "one that begins is found", func() bool { return slices.Equal(of()[later.ID], []Device{AllDevices()}) })
	engine.Docker(t, "rm", "-f", "later")
	eventually(t, "its end is seen", func() bool { return len(of()) == 1 })
	engine.Kill(t)
	eventually(t, "the stream has ended", func() bool { _, err := NewDockerClient(engine.Socket).List(t.Context()); return err != nil })
	if len(of()) != 1 {
		t.Error("it is gone with dockerd, and it still runs")
	}
	engine.StartAgain(t)
	again := engine.Run(t, "--name", "again", "--runtime", "nvidia", "--env", "NVIDIA_VISIBLE_DEVICES=1", dockertest.Image, "/bin/sleep", "1000")
	eventually(t, "containers are listed again", func() bool { return slices.Equal(of()[again.ID], []Device{ByIndex(1)}) && len(of()) == 2 })
}

func TestDeviceRequests(t *testing.T) {
	for _, test := range []struct {
		host  string
		want  []Device
		image string
	}{
		{host: `{}`},
		{host: `{"DeviceRequests":[{"Driver":"","Count":-1,"Capabilities":[["gpu"]]}]}`, want: []Device{AllDevices()}},
		{host: `{"DeviceRequests":[{"Driver":"nvidia","Count":2}]}`, want: []Device{ByIndex(0), ByIndex(1)}},
		{host: `{"DeviceRequests":[{"Count":0,"DeviceIDs":["3","GPU-1"],"Capabilities":[["gpu"]]}]}`, want: []Device{ByIndex(3), ByUUID("GPU-1")}},
		{host: `{"DeviceRequests":[{"Driver":"cdi","DeviceIDs":["nvidia.com/gpu=1","vendor.com/nic=1"]}]}`, want: []Device{ByIndex(1)}},
		{host: `{"DeviceRequests":[{"Driver":"amd","Count":-1,"Capabilities":[["gpu"]]}]}`},
		{host: `{"DeviceRequests":[{"Count":-1,"Capabilities":[["tpu"]]}]}`},
		{host: `{"Devices":[{"PathOnHost":"/dev/nvidia2"},{"PathOnHost":"/dev/nvidiactl"},{"PathOnHost":"/dev/fuse"},{"PathOnHost":"2"}]}`, want: []Device{ByMinor(2)}},
		{host: `{"Runtime":"nvidia"}`, want: []Device{ByIndex(5)}, image: `[]`},
		{host: `{"Runtime":"nvidia"}`, image: `["NVIDIA_VISIBLE_DEVICES=5"]`},
		{host: `{"Runtime":"nvidia"}`, want: []Device{ByIndex(5)}, image: `["NVIDIA_VISIBLE_DEVICES=all"]`},
		{host: `{"Runtime":"runc"}`, image: `[]`},
	} {
		var answer inspected
		if err := json.Unmarshal([]byte(`{"Id":"x","Config":{"Env":["NVIDIA_VISIBLE_DEVICES=5"]},"HostConfig":`+test.host+`}`), &answer); err != nil {
			t.Fatal(err)
		}
		image := new(imageConfig)
		if test.image != "" {
			if err := json.Unmarshal([]byte(test.image), &image.Config.Env); err != nil {
				t.Fatal(err)
			}
		}
		if got := answer.container("docker", image).Devices; !slices.Equal(got, test.want) {
			t.Errorf("%s, image %s: %+v, want %+v", test.host, test.image, got, test.want)
		}
	}
	if got := visibleDevices([]string{"NVIDIA_VISIBLE_DEVICES=all"}, nil, false); got != nil {
		t.Errorf("all, of an unknown image: %+v", got)
	}
}

// TestHostileAnswers has an engine say what people can make it say.
func TestHostileAnswers(t *testing.T) {
	labels := map[string]string{"nul": "a\x00b", "escape": "\x1b[2Jred\x1b[0m", "long": strings.Repeat("x", 10_000), "\x1bkey\n": "v", "bidi": "a\u202eb"}
	for i := range 10_000 {
		labels[fmt.Sprintf("z%05d", i)] = strings.Repeat("y", 1000)
	}
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/version":
			_ = json.NewEncoder(w).Encode(map[string]string{"ApiVersion": "1.44"})
		case strings.HasPrefix(r.URL.Path, "/v1.44/containers/"):
			few := map[string]string{}
			for key, value := range labels {
				if len(few) < 3000 || key[0] != 'z' {
					few[key] = value
				}
			}
			_ = json.NewEncoder(w).Encode(map[string]any{
				"Id": someID, "Name": "/\x1b]0;owned\a\nname", "Image": "sha256:x",
				"Config": map[string]any{"Image": strings.Repeat("i", 10_000), "User": "\x00root", "Labels": few},
			})
		default:
			http.NotFound(w, r)
		}
	})
	c, err := client.Container(t.Context(), someID)
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	clean := func(what, s string, limit int) {
		total += len(s)
		if len(s) > limit || strings.ContainsAny(s, "\x00\x1b\a\n\u202e") {
			t.Errorf("%s is %d bytes long: %.80q", what, len(s), s)
		}
	}
	clean("name", c.Name, maxNameBytes)
	clean("image", c.Image, maxNameBytes)
	clean("user", c.User, maxNameBytes)
	for key, value := range c.Labels {
		clean("key", key, maxNameBytes)
		clean("label "+key, value, maxLabelBytes)
	}
	if len(c.Labels) > maxLabels || total > maxLabelsBytes+3*maxNameBytes || c.Labels["escape"] == "" || c.Labels["nul"] == "" {
		t.Errorf("%d labels of %d bytes in all: %.300q", len(c.Labels), total, c.Labels)
	}
}
