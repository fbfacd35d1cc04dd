# gpuledger: every target says what it does; `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# go-nvml carries deprecated declarations; gcc's warnings about them say
# nothing about this code.
export CGO_CFLAGS := -O2 -g -Wno-deprecated-declarations

VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
REVISION ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
DATE     ?= $(shell git log -1 --format=%cI 2>/dev/null || echo unknown)
PACKAGE  := github.com/prometheus/common/version
STAMP    := -X $(PACKAGE).Version=$(VERSION) -X $(PACKAGE).Revision=$(REVISION) -X $(PACKAGE).BuildDate=$(DATE)
# NVML's symbols are looked up when first called; a linker that binds all of
# them at start would refuse every driver that lacks one.
LDFLAGS  = -s -w $(STAMP) -extldflags=-Wl,-z,lazy
PROGRAMS := gpu-exporter gpu-accounting gwho
TOOLS    := go tool -modfile=.ci/tools/go.mod

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the programs into bin/ and the stand-in NVML library into bin/lab/
	@mkdir -p bin/lab
	go build -trimpath -ldflags '$(LDFLAGS)' -o bin/ $(addprefix ./cmd/,$(PROGRAMS))
	@# Static, because the lab's containers have nothing but this file.
	CGO_ENABLED=0 go build -trimpath -ldflags '-s -w $(STAMP)' -o bin/ ./cmd/gpu-lab
	@$(MAKE) --no-print-directory -s -C lab/nvml
	@cp lab/nvml/build/libnvidia-ml.so.1 bin/lab/
	@ls bin/gpu-exporter bin/gpu-accounting bin/gwho bin/gpu-lab bin/lab/libnvidia-ml.so.1

.PHONY: demo
demo: build ## Simulated GPUs, real processes: gwho, metrics and a CSV (DEMO_SECONDS=60 to end by itself)
	@lab/demo.sh

.PHONY: setup
setup: ## Install what the end-to-end tests need (root on Debian or Ubuntu; SETUP=0 turns it off)
	@.ci/setup

.PHONY: test
test: setup ## Run all tests, race detector on; lists by name what it had to skip
	@$(MAKE) --no-print-directory -s -C lab/nvml
	go vet ./...
	$(TOOLS) gotestsum --format pkgname --format-hide-empty-pkg -- -race -timeout 14m ./...

.PHONY: bench
bench: build ## Measure passes, scrapes and gwho at the usual and the heavy load
	go run ./lab/bench
	go test -run '^$$' -bench . -benchmem ./exporter/... ./accounting/... ./cmd/...

.PHONY: soak
soak: build ## Scrape and churn for SOAK (default 10m) and watch for growth
	SOAK=$${SOAK:-10m} go test -count 1 -timeout 0 -run 'Scrapes' -v ./lab/endtoend

.PHONY: lint
lint: ## Check formatting, vet, staticcheck, and that generated documents are current
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { echo "not formatted (make fmt):"; gofmt -l $$(git ls-files '*.go'); exit 1; }
	go vet ./...
	$(TOOLS) staticcheck ./...
	@$(MAKE) --no-print-directory docs
	@git diff --exit-code -- docs packaging/man

.PHONY: fmt
fmt: ## Format the Go code
	gofmt -w $$(git ls-files '*.go')

.PHONY: docs
docs: ## Generate docs/metrics.md and the manual page from the code
	go run ./exporter/metrics/gendocs > docs/metrics.md
	go test -count 1 -run ManPage ./cmd/gwho -update
