#!/usr/bin/env bash
# Makes examples/fashion/base/model.safetensors again: random weights, then full fine-tuning on the package's 60,000 training
# photos (apt dataset-fashion-mnist), about half an hour on two cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=${XDG_CACHE_HOME:-$HOME/.cache}/gemtune/demo-base
base=examples/fashion/base
python=$(tools/env.sh parity)/bin/python

if [ ! -d /usr/share/datasets/fashion-mnist ]; then
  echo 'The training photos come from a Debian package. Run: apt-get install -y dataset-fashion-mnist' >&2
  exit 3
fi
mkdir -p "$work"
PYTHONPATH=python "$python" -m gemtune.fashion base-rows --out "$work/base-rows.parquet"
./gemtune make-model --like "$base" --random-weights --tokenizer "$base" --out "$work/random" --seed 42
./gemtune train examples/fashion/make-base.yaml model.path="$work/random" data.train="$work/base-rows.parquet" output.dir="$work/run"
cp "$work/run/final/model.safetensors" "$base/model.safetensors"
./gemtune eval examples/fashion/make-base.yaml model.path="$base" data.eval=examples/fashion/heldout.parquet data.prompt="What is this?" output.dir="$work/run"
