# gemtune: build, test, demo. Everything a fresh machine needs is installed on the way (tools/packages.sh, tools/env.sh).
SHELL := /bin/bash
.DEFAULT_GOAL := build

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gemtune
# One build folder a clone, in the cache; ccache lets a second clone reuse the first one's objects.
BUILD := $(CACHE)/build/$(shell pwd | sha256sum | cut -c1-12)
JOBS ?= $(shell nproc)
CTEST_ARGS ?=

.PHONY: build build-all configure reference test unit parity demo demo-base bench fuzz lint format clean

configure:
	@tools/packages.sh
	@tools/configure.sh "$(BUILD)"

build: configure
	@source "$(BUILD)/environment" && ninja -C "$(BUILD)" -j $(JOBS) $(if $(VERBOSE),-v,--quiet) gemtune
	@tools/starter.sh "$(BUILD)"

# The program and everything the tests drive.
build-all: build
	@source "$(BUILD)/environment" && ninja -C "$(BUILD)" -j $(JOBS) $(if $(VERBOSE),-v,--quiet)

# The Python reference that tests and benchmarks compare with.
reference:
	@tools/env.sh parity >/dev/null
	@tools/env.sh today >/dev/null
	@tools/env.sh cluster >/dev/null

# Every test that needs no GPU and no network beyond the package registries; ends with ctest's summary.
test: build-all reference
	@source "$(BUILD)/environment" && tools/check_layers.sh && ctest --test-dir "$(BUILD)" --output-on-failure -j $(JOBS) $(CTEST_ARGS)

unit: build-all
	@source "$(BUILD)/environment" && ctest --test-dir "$(BUILD)" --output-on-failure -j $(JOBS) -L unit

parity: build-all reference
	@source "$(BUILD)/environment" && ctest --test-dir "$(BUILD)" --output-on-failure -L parity

# From nothing to a trained adapter on real images, on a CPU; the result is runs/demo/report.html.
demo: build
	@examples/fashion/demo.sh

# Makes the demo's tiny base again, from random weights and the package's training photos (examples/fashion/README.md).
demo-base: build
	@examples/fashion/make-base.sh

# Timings beside the Python peers on this machine; figures go to docs/performance.md.
bench: build reference
	@source "$(BUILD)/environment" && "$$GEMTUNE_PARITY_PYTHON" bench/cpu_step.py --gemtune "$(BUILD)/gemtune"

# The parsers under libFuzzer and AddressSanitizer, SECONDS each.
fuzz: configure
	@tools/fuzz.sh $(or $(SECONDS_EACH),60)

lint:
	@tools/check_layers.sh
	@git ls-files '*.cpp' '*.h' | xargs clang-format --dry-run --Werror

format:
	@git ls-files '*.cpp' '*.h' | xargs clang-format -i

clean:
	@rm -rf "$(BUILD)" gemtune
