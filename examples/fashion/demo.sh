#!/usr/bin/env bash
# The demo: adapts the tiny base to write product lines, scores it before and after on held-out pictures, writes a report.
set -euo pipefail
cd "$(dirname "$0")/../.."
run=runs/demo
rm -rf "$run"
./gemtune train examples/fashion/demo.yaml output.dir="$run"
./gemtune eval examples/fashion/demo.yaml output.dir="$run" --checkpoint "$run/final" --compare-base
./gemtune report "$run"
printf '\nOpen %s/%s/report.html in a browser.\n' "$PWD" "$run"
