package child

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"gpuledger/exporter/gpu"
)

// The wire: one frame a pass. A frame is a header of 16 bytes (magic, length of
// the payload, its CRC-32C, and four bytes of zero; little endian) and a
// payload, which is the next piece of one gob stream. The frame is there so
// that anything but our own child is found out at once and costs no memory.
const (
	headerBytes = 16
	magic       = uint32(0x31504c47) // "GLP1"

	// MaxPassBytes is the size of the largest pass on the wire. A thousand
	// processes on each of sixteen cards are about a megabyte.
	MaxPassBytes = 64 << 20
)

// ErrGarbage is a stream that is not one of passes.
var ErrGarbage = errors.New("not a stream of passes")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encoder writes passes.
type encoder struct {
	w       io.Writer
	frame   bytes.Buffer
	payload *gob.Encoder
}

func newEncoder(w io.Writer) *encoder {
	e := &encoder{w: w}
	e.payload = gob.NewEncoder(&e.frame)
	return e
}

// encode writes one pass with a single Write.
func (e *encoder) encode(pass *gpu.Pass) error {
	e.frame.Reset()
	var header [headerBytes]byte
	e.frame.Write(header[:])
	if err := e.payload.Encode(pass); err != nil {
		return fmt.Errorf("encode pass: %w", err)
	}
	frame := e.frame.Bytes()
	payload := frame[headerBytes:]
	if len(payload) > MaxPassBytes {
		return fmt.Errorf("encode pass: %d bytes are more than the %d a pass may have", len(payload), MaxPassBytes)
	}
	binary.LittleEndian.PutUint32(frame[0:], magic)
	binary.LittleEndian.PutUint32(frame[4:], uint32(len(payload)))
	binary.LittleEndian.PutUint32(frame[8:], crc32.Checksum(payload, castagnoli))
	if _, err := e.w.Write(frame); err != nil {
		return fmt.Errorf("write pass: %w", err)
	}
	return nil
}

// decoder reads passes.
type decoder struct {
	r       *bufio.Reader
	buffer  bytes.Buffer
	payload *gob.Decoder
}

func newDecoder(r io.Reader) *decoder {
	d := &decoder{r: bufio.NewReaderSize(r, 64<<10)}
	// gob reads from the payload at hand only: it meets its end, never the pipe.
	d.payload = gob.NewDecoder(&d.buffer)
	return d
}

// decode reads the next pass. It returns io.EOF at the end between two passes
// and an error that wraps ErrGarbage for whatever no child of ours has written.
func (d *decoder) decode() (gpu.Pass, error) {
	var header [headerBytes]byte
	if _, err := io.ReadFull(d.r, header[:]); err != nil {
		if errors.Is(err, io.EOF) {
			return gpu.Pass{}, io.EOF
		}
		return gpu.Pass{}, fmt.Errorf("read pass: %w", err)
	}
	length := binary.LittleEndian.Uint32(header[4:])
	if binary.LittleEndian.Uint32(header[0:]) != magic || binary.LittleEndian.Uint32(header[12:]) != 0 {
		return gpu.Pass{}, fmt.Errorf("read pass: %w: it begins with %q", ErrGarbage, header[:])
	}
	if length > MaxPassBytes {
		return gpu.Pass{}, fmt.Errorf("read pass: %w: a pass of %d bytes is too long", ErrGarbage, length)
	}
	d.buffer.Reset()
	// The buffer grows with what really comes, whatever the header promises.
	if n, err := io.CopyN(&d.buffer, d.r, int64(length)); err != nil {
		return gpu.Pass{}, fmt.Errorf("read pass: %d of %d bytes: %w", n, length, noEOF(err))
	}
	if crc32.Checksum(d.buffer.Bytes(), castagnoli) != binary.LittleEndian.Uint32(header[8:]) {
		return gpu.Pass{}, fmt.Errorf("read pass: %w: checksum does not match", ErrGarbage)
	}
	var pass gpu.Pass
	if err := d.payload.Decode(&pass); err != nil {
		return gpu.Pass{}, fmt.Errorf("read pass: %w: %w", ErrGarbage, noEOF(err))
	}
	if d.buffer.Len() != 0 {
		return gpu.Pass{}, fmt.Errorf("read pass: %w: %d bytes are left over", ErrGarbage, d.buffer.Len())
	}
	return pass, nil
}

// noEOF keeps an end in the middle from being taken for a proper one.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
