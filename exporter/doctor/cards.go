package doctor

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"gpuledger/exporter"
	"gpuledger/exporter/gpu"
)

// readingTime is what one pass over the cards takes at most.
const readingTime = time.Second

// enoughPasses without an error show what there is to see.
const enoughPasses = 4

// cards reads the cards once, in a child process as the exporter does.
func cards(ctx context.Context, h *host) []Finding {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var last *gpu.Pass
	good := 0
	err := h.Source.Run(ctx, func(pass gpu.Pass) {
		if ctx.Err() != nil {
			return
		}
		last = &pass
		if pass.Error == "" {
			good++
		}
		// A pass that used up its time is about NVML still starting. Cards that
		// give no answer get some passes more.
		took := time.Duration(exporter.Now().MonotonicUS-pass.At.MonotonicUS) * time.Microsecond
		if pass.Error == "" && (len(pass.Readings) >= pass.Expected || good == enoughPasses) || pass.Error != "" && took < readingTime {
			cancel()
		}
	})
	if last == nil {
		return []Finding{noNVML(fmt.Sprint(err))}
	}
	if last.Error != "" {
		return []Finding{noNVML(last.Error)}
	}
	driver := last.Driver
	found := []Finding{ok("nvml", fmt.Sprintf("the library loads and fits the driver: driver %s, CUDA %s, NVML %s",
		orUnknown(driver.DriverVersion), orUnknown(driver.CUDAVersion), orUnknown(driver.NVMLVersion)))}
	return slices.Concat(found, answers(last), modes(last.Readings))
}

func orUnknown(version string) string {
	if version == "" {
		return "unknown"
	}
	return version
}

// noNVML says beside NVML's own reason what the host shows of the driver.
func noNVML(reason string) Finding {
	var state []string
	if text, err := os.ReadFile("/sys/module/nvidia/version"); err == nil {
		state = append(state, "kernel module nvidia "+strings.TrimSpace(string(text))+" is loaded")
	} else {
		state = append(state, "kernel module nvidia is not loaded")
	}
	if _, err := os.Stat("/dev/nvidiactl"); err != nil {
		state = append(state, "there is no /dev/nvidiactl")
	}
	return Finding{
		Check: "nvml", Level: Problem, Found: strings.TrimSuffix(reason, "; trying again") + " (" + strings.Join(state, ", ") + ")",
		Consequence: "no card can be read; time is unobserved",
		Remedy:      "nvidia-smi must work first: modprobe nvidia, dkms status; after an update of the driver reboot; in a container: --gpus all; another place: --nvml.library-path=FILE",
	}
}

// answers says which cards can be read.
func answers(pass *gpu.Pass) []Finding {
	var bad []string
	good := 0
	for i := range pass.Readings {
		if r := &pass.Readings[i]; r.State == gpu.StateGood {
			good++
		} else {
			bad = append(bad, fmt.Sprintf("GPU %d (%s): %s", r.Card.Index, r.Card.UUID, r.Reason))
		}
	}
	for _, uuid := range pass.Hung {
		bad = append(bad, uuid+": does not answer")
	}
	if missing := pass.Expected - good - len(bad); missing > 0 {
		bad = append(bad, fmt.Sprintf("%d more gave no answer", missing))
	}
	switch {
	case len(bad) > 0:
		return []Finding{{
			Check: "nvml.cards", Level: Problem, Found: fmt.Sprintf("%d of %d cards can be read; %s", good, pass.Expected, strings.Join(bad, "; ")),
			Consequence: "the others are shown as down, or their time is unobserved",
			Remedy:      "dmesg | grep -i -e xid -e nvrm; nvidia-smi -q; then reset the card or reboot",
		}}
	case pass.Expected == 0:
		return []Finding{{
			Check: "nvml.cards", Level: Problem, Found: "NVML counts no card",
			Consequence: "there is nothing to meter", Remedy: "lspci -d 10de:; in a container: --gpus all",
		}}
	}
	return []Finding{ok("nvml.cards", fmt.Sprintf("all %d cards can be read", good))}
}

// modes are settings of cards that matter to who reads them.
func modes(readings []gpu.Reading) []Finding {
	var transient, unaccounted, accounted, cut []string
	for i := range readings {
		r := &readings[i]
		index := fmt.Sprint(r.Card.Index)
		if on, known := r.Card.PersistenceMode.Get(); known && !on {
			transient = append(transient, index)
		}
		switch on, known := r.Card.AccountingMode.Get(); {
		case known && on:
			accounted = append(accounted, index)
		case known:
			unaccounted = append(unaccounted, index)
		}
		if r.SlicesTotal > 0 {
			cut = append(cut, index)
		}
	}
	var found []Finding
	if len(transient) > 0 {
		found = append(found, Finding{
			Check: "nvml.persistence", Level: Warning, Found: "persistence mode is off on GPU " + strings.Join(transient, ", "),
			Consequence: "a card without processes is switched off and on again for each user: seconds of waiting, and settings are lost",
			Remedy:      "systemctl enable --now nvidia-persistenced, or: nvidia-smi -pm 1",
		})
	} else if len(readings) > 0 {
		found = append(found, ok("nvml.persistence", "no card has persistence mode off"))
	}
	if len(unaccounted) > 0 {
		found = append(found, ok("nvml.accounting", "accounting mode is off on GPU "+strings.Join(unaccounted, ", ")+
			"; it would show processes shorter than a sample to nvidia-smi, and the exporter neither needs nor switches it (nvidia-smi -am 1)"))
	} else if len(accounted) > 0 {
		found = append(found, ok("nvml.accounting", "accounting mode is on"))
	}
	if len(cut) > 0 {
		found = append(found, ok("nvml.mig", "MIG is on on GPU "+strings.Join(cut, ", ")+": instances are metered; their activity is not known"))
	}
	return found
}
