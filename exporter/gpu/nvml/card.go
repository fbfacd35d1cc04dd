package nvml

import (
	"math"
	"strings"
	"unicode"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpuledger/exporter/gpu"
)

// request is one order to read a card.
type request struct {
	pass   uint64 // the pass the reading is for
	device gonvml.Device
	index  int
	// session changes when NVML was started again or handles went stale:
	// what is known about the card is read anew then.
	session uint64
	samples sampleMark
	driver  driverTraits
}

// driverTraits are the habits of the loaded driver that a reading depends on.
type driverTraits struct {
	// brokenProcessLists is why process lists can't be asked for; see there.
	brokenProcessLists string
}

// result is what came of a request.
type result struct {
	uuid    string
	pass    uint64
	reading gpu.Reading
	samples sampleMark
	// stale handles mean that cards or instances were changed under us.
	stale bool
	// whole is a return code about NVML as a whole, SUCCESS if there was none.
	whole     gonvml.Return
	wholeCall function
}

// cardReader reads one card. It belongs to that card's worker alone, so that
// a call that hangs holds up nothing but its own card.
type cardReader struct {
	library      *library
	now          func() gpu.Instant
	uuid         string
	firstSamples bool // as of Options

	session uint64
	fixed   fixed
	// unsupported are the metrics the card said it does not have.
	unsupported map[string]bool

	// The reading being made:
	device   gonvml.Device
	out      *result
	stopped  bool // no call is worth making any more
	listed   []listedProcess
	fields   [1]gonvml.FieldValue
	dropping map[string]int64
}

// fixed is what does not change while a card works; it is read once a session.
type fixed struct {
	read              bool
	card              gpu.Card
	thresholds        map[string]int64
	pcieGenerationMax gpu.Optional[int64]
	pcieWidthMax      gpu.Optional[int64]
	fans              int
	// migSlices and migDevices are read when MIG is first seen on.
	migSlices  int64
	migDevices int
}

// read makes one reading. It may hang for as long as a call into the driver does.
func (c *cardReader) read(order request) result {
	out := result{uuid: c.uuid, pass: order.pass, samples: order.samples}
	out.reading.At = c.now()
	c.device, c.out, c.stopped, c.dropping = order.device, &out, false, nil
	if c.session != order.session || c.unsupported == nil {
		c.session = order.session
		c.unsupported = map[string]bool{}
		c.fixed.read = false
	}
	if !c.fixed.read {
		c.readFixed()
	}
	reading := &out.reading
	reading.Card = c.fixed.card
	reading.Card.UUID, reading.Card.Index = c.uuid, order.index

	c.readMIGMode(reading)
	// Processes and samples come first: they are what the time stamp is for.
	c.readProcesses(reading, order.driver)
	if reading.State == gpu.StateGood {
		c.readSamples(reading, &out.samples)
		c.readMetrics(reading)
		c.checkIdentity()
	}
	if reading.State != gpu.StateGood {
		*reading = gpu.Reading{Card: reading.Card, At: reading.At, State: reading.State, Reason: reading.Reason}
		out.samples = order.samples
	}
	reading.DroppedValues = c.dropping
	reading.TookUS = c.now().MonotonicUS - reading.At.MonotonicUS
	c.out = nil
	return out
}

// fail ends the reading for a return code of a call it can't do without.
func (c *cardReader) fail(f function, ret gonvml.Return) {
	if c.stopped {
		return
	}
	c.stopped = true
	if ret == gonvml.ERROR_INVALID_ARGUMENT {
		c.out.stale = true
	}
	if reason, down := downReason(ret, true); down {
		c.out.reading.State, c.out.reading.Reason = gpu.StateDown, reason
		return
	}
	c.failed(failure(f, ret))
}

// checkIdentity throws the reading away if the handle has come to stand for
// another card, as it can where cards come and go under a running NVML: one
// person's use must not be written down on another's card.
func (c *cardReader) checkIdentity() {
	uuid, known := ask(c, metric{"uuid", fnGetUUID}, func() (string, gonvml.Return) { return c.library.uuid(c.device) })
	if known && printable(uuid) != c.uuid {
		c.out.stale = true
		c.failed("its handle answers for another card now: cards are counted anew")
	}
}

func (c *cardReader) failed(reason string) {
	c.stopped = true
	c.out.reading.State, c.out.reading.Reason = gpu.StateFailed, reason
}

// condemned ends the reading if a return code, of whatever call, says that the
// card or NVML as a whole has stopped working.
func (c *cardReader) condemned(f function, ret gonvml.Return) bool {
	if ofWholeNVML(ret) {
		c.out.whole, c.out.wholeCall = ret, f
		c.failed(failure(f, ret))
		return true
	}
	if reason, down := downReason(ret, false); down {
		c.stopped = true
		c.out.reading.State, c.out.reading.Reason = gpu.StateDown, reason
		return true
	}
	return false
}

// metric names a value a card may lack, as it is counted when dropped.
type metric struct {
	name string
	f    function
}

// ask gets one metric: never again in this session once the card has said
// that it does not have it, and not at all once the reading has ended.
func ask[T any](c *cardReader, m metric, call func() (T, gonvml.Return)) (value T, known bool) {
	if c.stopped || c.unsupported[m.name] {
		return value, false
	}
	value, ret := call()
	if ret == gonvml.SUCCESS {
		return value, true
	}
	var none T
	if c.condemned(m.f, ret) {
		return none, false
	}
	switch ret {
	case gonvml.ERROR_NOT_SUPPORTED, gonvml.ERROR_FUNCTION_NOT_FOUND, gonvml.ERROR_DEPRECATED, gonvml.ERROR_ARGUMENT_VERSION_MISMATCH:
		c.unsupported[m.name] = true
	}
	return none, false
}

// drop counts a value thrown away.
func (c *cardReader) drop(name string) { c.dropMany(name, 1) }

func (c *cardReader) dropMany(name string, count int64) {
	if c.dropping == nil {
		c.dropping = map[string]int64{}
	}
	c.dropping[name] += count
}

// within keeps a value that can be and counts one that can't.
func (c *cardReader) within(name string, value, least, most int64) gpu.Optional[int64] {
	if value < least || value > most {
		c.drop(name)
		return gpu.Optional[int64]{}
	}
	return gpu.Some(value)
}

func (c *cardReader) readFixed() {
	card := &c.fixed.card
	l, d := c.library, c.device
	keep := func(into *string, m metric, call func(gonvml.Device) (string, gonvml.Return)) {
		if text, known := ask(c, m, func() (string, gonvml.Return) { return call(d) }); known {
			*into = printable(text)
		}
	}
	keep(&card.Name, metric{"name", fnGetName}, l.name)
	keep(&card.Serial, metric{"serial", fnGetSerial}, l.serial)
	keep(&card.VBIOS, metric{"vbios", fnGetVbiosVersion}, l.vbios)
	if pci, known := ask(c, metric{"pci", fnGetPciInfo}, func() (gonvml.PciInfo, gonvml.Return) { return l.pci(d) }); known {
		card.PCIBusID = busID(pci)
	}
	card.Minor = c.askInt(metric{"minor_number", fnGetMinorNumber}, l.minorNumber, 0, mostMinorNumber)
	card.AccountingMode = gpu.Optional[bool]{}
	if mode, known := ask(c, metric{"accounting_mode", fnGetAccountingMode}, func() (gonvml.EnableState, gonvml.Return) { return l.accountingMode(d) }); known {
		card.AccountingMode = gpu.Some(mode == gonvml.FEATURE_ENABLED)
	}
	c.fixed.thresholds = nil
	for _, t := range thresholds {
		value, known := ask(c, metric{t.metric, fnGetTemperatureThreshold}, func() (uint32, gonvml.Return) {
			return l.temperatureThreshold(d, t.threshold)
		})
		if !known || value == 0 {
			continue // 0 is how some cards say that they have no such threshold
		}
		if celsius, sane := c.within(t.metric, int64(int32(value)), leastCelsius, mostCelsius).Get(); sane {
			if c.fixed.thresholds == nil {
				c.fixed.thresholds = map[string]int64{}
			}
			c.fixed.thresholds[t.name] = celsius
		}
	}
	c.fixed.pcieGenerationMax = c.askInt(metric{"pcie_generation_max", fnGetMaxPcieLinkGeneration}, l.pcieGenerationMax, 1, mostPCIeGeneration)
	c.fixed.pcieWidthMax = c.askInt(metric{"pcie_width_max", fnGetMaxPcieLinkWidth}, l.pcieWidthMax, 1, mostPCIeWidth)
	c.fixed.fans = 0
	if fans, known := c.askInt(metric{"fans", fnGetNumFans}, l.fanCount, 0, mostFans).Get(); known {
		c.fixed.fans = int(fans)
	}
	c.fixed.migSlices, c.fixed.migDevices = 0, 0
	c.fixed.read = !c.stopped
}

// askInt gets a metric that is one whole number, within its range.
func (c *cardReader) askInt(m metric, call func(gonvml.Device) (int, gonvml.Return), least, most int64) gpu.Optional[int64] {
	value, known := ask(c, m, func() (int, gonvml.Return) { return call(c.device) })
	if !known {
		return gpu.Optional[int64]{}
	}
	return c.within(m.name, int64(value), least, most)
}

func (c *cardReader) readMIGMode(reading *gpu.Reading) {
	mode, known := ask(c, metric{"mig_mode", fnGetMigMode}, func() (int, gonvml.Return) { return c.library.migMode(c.device) })
	if !known {
		return
	}
	on := gpu.Some(mode == gonvml.DEVICE_MIG_ENABLE)
	if before := c.fixed.card.MIGMode; before.Known && before != on {
		// What a card has depends on the mode, so ask for everything again.
		clear(c.unsupported)
		c.fixed.migSlices, c.fixed.migDevices = 0, 0
	}
	c.fixed.card.MIGMode = on
	reading.Card.MIGMode = on
}

// busID is the card's address as NVML prints it.
func busID(pci gonvml.PciInfo) string {
	var text strings.Builder
	for _, b := range pci.BusId {
		if b == 0 {
			break
		}
		text.WriteByte(byte(b))
	}
	return printable(text.String())
}

// printable makes text from outside safe to show and to send on: valid UTF-8
// and no control characters.
func printable(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text))
}

// toInt64 is a count as the int64 it is kept in; what does not fit is out of
// every range.
func toInt64(value uint64) int64 {
	if value > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(value)
}
