package metrics

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/snapshot"
)

// TestDownReasons shows each reason of the snapshot as it is, and free text as
// failed: the label's values are bounded.
func TestDownReasons(t *testing.T) {
	for reason, want := range map[string]string{
		gpu.DownLost: gpu.DownLost, "hung": "hung", "missing": "missing", "failed": "failed", "call 17 said 999": "failed",
	} {
		store := &snapshot.Store{}
		store.Publish(&snapshot.Snapshot{Seq: 1, At: time.Unix(1, 0), Cards: []snapshot.Card{{Identity: gpu.Card{UUID: "GPU-a"}, Reason: reason}}})
		text, err := NewHandler(store, Options{MaxWorkloads: DefaultMaxWorkloads}).Render(expfmt.NewFormat(expfmt.TypeTextPlain), false)
		if err != nil {
			t.Fatal(err)
		}
		if series := `gpu_down_reason{gpu="0",reason="` + want + `",uuid="GPU-a"} 1`; !strings.Contains(string(text), series) {
			t.Errorf("reason %q: no %s", reason, series)
		}
	}
}
