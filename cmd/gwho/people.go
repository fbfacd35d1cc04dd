package main

import (
	"context"
	"errors"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
)

type people struct{}
type info struct {
	Detail               snapshot.Detail
	Command, CommandLine string
	StartedAt            time.Time
	Zombie               bool
}

func newPeople(context.Context, string) (*people, error)           { return nil, errors.New("not yet") }
func (*people) Close()                                             {}
func (*people) Refresh(context.Context, gpu.Pass)                  {}
func (*people) Keys(gpu.Reading) map[uint32]meter.ProcessKey       { return nil }
func (*people) Attribute(meter.ProcessKey) (a meter.Attribution)   { return }
func (*people) Info(meter.ProcessKey) (i info)                     { return }
func (*people) Collectors() (c map[string]snapshot.CollectorState) { return }
