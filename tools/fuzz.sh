#!/usr/bin/env bash
# tools/fuzz.sh [SECONDS]: libFuzzer with AddressSanitizer on the parsers of files that come from elsewhere, SECONDS each
# (60 unless given). A crash leaves its input in the work folder and ends with an error.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
work=${XDG_CACHE_HOME:-$HOME/.cache}/gemtune/fuzz
command -v clang++ >/dev/null || { echo 'fuzzing needs clang: apt-get install -y clang libclang-rt-14-dev' >&2; exit 3; }
mkdir -p "$work"

base=(src/base/{file,json,log,text}.cpp)
declare -A sources=(
  [safetensors]="${base[*]} src/io/safetensors.cpp"
  [tokenizer]="${base[*]} $(echo src/data/{added_tokens,bpe,tokenizer,tokenizer_files,tokenizer_source,tokenizer_tables}.cpp)"
)
for name in "${!sources[@]}"; do
  # shellcheck disable=SC2086
  clang++ -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -DFMT_HEADER_ONLY -Isrc \
    "tests/fuzz/fuzz_$name.cpp" ${sources[$name]} -lcrypto -lpthread -o "$work/$name"
  mkdir -p "$work/corpus-$name"
  printf '%s: %s s\n' "$name" "$seconds"
  (cd "$work" && ASAN_OPTIONS=detect_leaks=0 "./$name" -max_total_time="$seconds" -rss_limit_mb=4096 -print_final_stats=1 "corpus-$name" 2>&1 | grep -E 'stat::number_of_executed_units|ERROR|SUMMARY' ; exit "${PIPESTATUS[0]}")
done
