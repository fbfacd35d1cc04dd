package lab

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// line is one line of a scenario in the making.
type line struct{ strings.Builder }

func (l *line) word(words ...any) {
	for _, w := range words {
		if l.Len() > 0 {
			l.WriteByte(' ')
		}
		fmt.Fprint(l, w)
	}
}

func (l *line) text(key, value string) {
	if value != "" {
		l.word(key + "=" + quote(value))
	}
}

func (l *line) number(key string, value int64) {
	if value != 0 {
		l.word(key + "=" + strconv.FormatInt(value, 10))
	}
}

func (l *line) life(from, to time.Duration) {
	if from != 0 {
		l.word("from=" + offset(from))
	}
	if to != 0 {
		l.word("to=" + offset(to))
	}
}

// quote keeps any bytes but NUL on one line, for the library to read back.
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteByte(c)
		case c == 0: // a C string can't hold it
		case c < ' ' || c >= 0x7f:
			fmt.Fprintf(&b, `\x%02x`, c)
		default:
			b.WriteByte(c)
		}
	}
	b.WriteByte('"')
	return b.String()
}

func offset(d time.Duration) string { return fmt.Sprintf("+%dus", max(d, 0).Microseconds()) }

// String is the scenario's text. Equal scenarios have equal texts.
func (s Scenario) String() string {
	var b strings.Builder
	put := func(fill func(*line)) {
		var l line
		fill(&l)
		b.WriteString(l.String())
		b.WriteByte('\n')
	}
	setting := func(name, value string, set bool) {
		if set {
			put(func(l *line) { l.word(name, value) })
		}
	}
	setting("driver", quote(s.DriverVersion), s.DriverVersion != "")
	setting("nvml", quote(s.NVMLVersion), s.NVMLVersion != "")
	setting("cuda", strconv.Itoa(s.CUDAVersion), s.CUDAVersion != 0)
	setting("init_ret", strconv.Itoa(s.InitReturn), s.InitReturn != 0)
	setting("epoch", fmt.Sprintf("%d.%06d", s.Epoch.Unix(), s.Epoch.Nanosecond()/1000), !s.Epoch.IsZero())
	setting("ring", strconv.Itoa(s.RingCapacity), s.RingCapacity != 0)
	for i, g := range s.GPUs {
		put(func(l *line) { g.write(l, i) })
	}
	for _, m := range s.Instances {
		put(m.write)
	}
	for _, p := range s.Processes {
		put(p.write)
	}
	for _, a := range s.Accounts {
		put(a.write)
	}
	for _, c := range s.Changes {
		put(func(l *line) { l.word("at", offset(c.At), "gpu", c.GPU); c.Values.write(l) })
	}
	for _, x := range s.XIDs {
		put(func(l *line) { l.word("at", offset(x.At), "xid", x.GPU, x.Code) })
	}
	for _, f := range s.Faults {
		put(func(l *line) {
			l.word("fault", f.GPU, f.Function, f.Return)
			if f.Count > 0 {
				l.word(f.Count)
			}
		})
	}
	for _, d := range s.Delays {
		put(func(l *line) { l.word("delay", d.GPU, d.Function, d.By.Microseconds()) })
	}
	for _, h := range s.Hangs {
		put(func(l *line) { l.word("hang", h.GPU, h.Function) })
	}
	for _, q := range s.Quirks {
		put(func(l *line) { l.word("quirk", q.GPU, q.Name, q.N) })
	}
	return b.String()
}

func (g GPU) write(l *line, index int) {
	l.word("gpu", index)
	l.text("uuid", g.UUID)
	l.text("name", g.Name)
	l.text("serial", g.Serial)
	l.text("vbios", g.VBIOS)
	l.text("pci", g.PCIBusID)
	l.text("part", g.PartNumber)
	g.Values.write(l)
}

func (p Process) write(l *line) {
	l.word("proc", p.GPU)
	if p.PIDFile != "" {
		l.word("pid=" + quote("@"+p.PIDFile))
	} else {
		l.word("pid=" + strconv.FormatUint(uint64(p.PID), 10))
	}
	if p.Type != "" {
		l.word("type=" + p.Type)
	}
	l.number("mem_bytes", int64(p.MemoryBytes))
	if p.MemoryUnknown {
		l.word("mem_na=1")
	}
	l.number("sm", int64(p.SM))
	l.number("memutil", int64(p.Memory))
	l.number("enc", int64(p.Encoder))
	l.number("dec", int64(p.Decoder))
	if p.MIG {
		l.word(fmt.Sprintf("gi=%d ci=%d", p.GPUInstance, p.ComputeInstance))
	}
	l.life(p.From, p.To)
}

func (m Instance) write(l *line) {
	l.word("mig", m.GPU, fmt.Sprintf("gi=%d ci=%d", m.GPUInstance, m.ComputeInstance))
	l.text("uuid", m.UUID)
	l.text("profile", m.Profile)
	l.number("slices", int64(m.Slices))
	l.number("gi_slices", int64(m.GPUInstanceSlices))
	l.number("mem_total_mib", m.MemoryTotalMiB)
	l.number("mem_used_mib", m.MemoryUsedMiB)
	l.life(m.From, m.To)
}

func (a Account) write(l *line) {
	l.word("acct", a.GPU)
	l.number("pid", int64(a.PID))
	l.number("util", int64(a.UtilizationPercent))
	l.number("memutil", int64(a.MemoryUtilizationPercent))
	l.number("maxmem_mib", a.MaxMemoryMiB)
	l.number("time_ms", a.TimeMS)
	l.number("start_us", a.StartUS)
	if a.Running {
		l.word("running=1")
	}
}
