# A thin front. CMake builds; the scripts in tools/ install, fetch and check.
.PHONY: help demo test test-all build wheel bench bench-full bench-serve bench-python soak lint format clean

help:           ## this list
	@sed -n 's/^\([a-z-]*\): *## */  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

pagedkv := build/release/bin/pagedkv

demo:           ## set up, build what answers, fetch SmolLM2 (98 MB) and answer a question
	@tools/build release pagedkv_cli
	@model=$$(tools/model smollm2) && \
	  $(pagedkv) run -m "$$model" -p "What is the capital of France?" --temp 0

test:           ## set up, build and run all tests: C++, and the Python package on numpy
	@tools/build release
	@PAGEDKV_TEST_MODEL=$$(tools/model smollm2) && export PAGEDKV_TEST_MODEL && \
	  ctest --preset release --output-on-failure -j "$$(nproc)" && tools/python-tests

test-all:       ## the same with torch, transformers and mlx-lm: installs 6 GB into the cache, once, and fetches Gemma 3 (253 MB)
	@tools/build release
	@PAGEDKV_TEST_MODEL=$$(tools/model smollm2) && export PAGEDKV_TEST_MODEL && \
	  PAGEDKV_TEST_GEMMA=$$(tools/model gemma3) && export PAGEDKV_TEST_GEMMA && \
	  ctest --preset release --output-on-failure -j "$$(nproc)" && tools/python-tests --all

build:          ## set up and build
	@tools/build release

bench:          ## measure, 10 minutes at most; records, report and plots land in build/bench
	@tools/build release
	@tools/bench

bench-full:     ## the same with all cases and models, 40 minutes at most
	@tools/build release
	@tools/bench --full

bench-serve:    ## the server, and llama-cpp-python's in turn with it, under the same load; 10 minutes
	@tools/build release
	@tools/setup --peer
	@tools/bench-serve

bench-python:   ## transformers' generate() with pagedkv beside its own caches, and what a call from Python costs; 25 minutes
	@tools/build release
	@tools/setup --package-all
	@mkdir -p build/bench
	@PYTHONPATH=build/release/python "$$(tools/setup --package-all-python)" bench/python/call_overhead.py \
	  >build/bench/python-calls.json
	@for options in "" "--linear onednn" "--intermediate 1024 --vocab 4096" "--context 16384 --rounds 5" \
	  "--batch 8 --rounds 5" "--batch 8 --rounds 5 --linear onednn"; do \
	  echo "generate $$options" >&2; \
	  PYTHONPATH=build/release/python "$$(tools/setup --package-all-python)" bench/python/transformers_generate.py \
	    $$options >"build/bench/python-generate$$(echo $$options | tr -d ' ').json" || exit 1; \
	done

wheel:          ## build the Python package into build/dist
	@tools/python-tests --wheel-only

soak:           ## ten minutes of mixed load on the server, with a pool that is too small
	@tools/build release
	@PAGEDKV_TEST_MODEL=$$(tools/model smollm2) PAGEDKV_BIN=$(pagedkv) PAGEDKV_SOAK_SECONDS=600 \
	  python3 -B tests/server/soak_test.py

lint:           ## layers, format, clang-tidy
	@tools/build release
	@tools/layers
	@tools/format --check
	@tools/tidy

format:         ## rewrite our C++ with clang-format
	@tools/setup
	@tools/format

clean:          ## remove build/ (the cache of tools/setup stays)
	rm -rf build
