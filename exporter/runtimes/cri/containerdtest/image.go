package containerdtest

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"os/exec"
	"testing"

	"gpuledger/lab/labtest"
)

// imageArchive is Image as docker save would write it.
func imageArchive(t testing.TB) []byte {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		labtest.Missing(t, "busybox")
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	layer := archive(t, []entry{
		{tar.Header{Name: "bin/", Typeflag: tar.TypeDir, Mode: 0o755}, nil},
		{tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, program},
		{tar.Header{Name: "bin/sh", Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil},
		{tar.Header{Name: "bin/sleep", Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil},
		{tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755}, nil},
		{tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:0::/:/bin/sh\n")},
	})
	digest := sha256.Sum256(layer)
	config := document(t, map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"User": "1000", "Cmd": []string{"/bin/sleep", "1000000"}, "Labels": map[string]string{"owner": "image-author"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(digest[:])}},
	})
	manifest := document(t, []map[string]any{{"Config": "config.json", "RepoTags": []string{Image}, "Layers": []string{"layer.tar"}}})
	return archive(t, []entry{
		{tar.Header{Name: "config.json", Typeflag: tar.TypeReg, Mode: 0o644}, config},
		{tar.Header{Name: "layer.tar", Typeflag: tar.TypeReg, Mode: 0o644}, layer},
		{tar.Header{Name: "manifest.json", Typeflag: tar.TypeReg, Mode: 0o644}, manifest},
	})
}

type entry struct {
	header tar.Header
	data   []byte
}

func archive(t testing.TB, entries []entry) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, e := range entries {
		e.header.Size = int64(len(e.data))
		if err := w.WriteHeader(&e.header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(e.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func document(t testing.TB, value any) []byte {
	t.Helper()
	data, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
