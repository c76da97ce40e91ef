#!/usr/bin/env bash
# Checks what ARCHITECTURE.md says about layers: who may include whom, where Torch may not be seen, how long a file may be.
# Prints each violation as FILE:LINE: what, and exits 1 when there is one.
# Usage: tools/check_layers.sh [ROOT]
set -uo pipefail
cd "${1:-$(dirname "$0")/..}" || exit 2

# The layers that each layer's files may include, besides their own.
declare -A sees=(
  [base]=""
  [recipe]="base"
  [ops]="base"
  [dist]="base"
  [io]="base"
  [data]="base recipe io"
  [model]="base ops io"
  [train]="base recipe ops dist io data model"
  [cluster]="base recipe"
  [app]="base recipe ops dist io data model train cluster"
)
torch_header='^[[:space:]]*#[[:space:]]*include[[:space:]]*[<"](torch|ATen|c10|caffe2|ops/torch\.h)'
longest=1000
violations=0

complain() {
  printf '%s\n' "$1"
  violations=$((violations + 1))
}

# path/to/file.cpp → its layer; "" outside of layers.
layer_of() {
  case "$1" in
    src/*/*) local rest="${1#src/}"; printf '%s' "${rest%%/*}" ;;
    app/*) printf 'app' ;;
  esac
}

mapfile -t files < <(find src app tests bench -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null | sort)
[ "${#files[@]}" -gt 0 ] || { echo "no sources under $(pwd)"; exit 2; }

for file in "${files[@]}"; do
  lines=$(wc -l <"$file")
  [ "$lines" -le "$longest" ] || complain "$file:$lines: $lines lines, at most $longest; split it"

  layer=$(layer_of "$file")
  [ -n "$layer" ] || continue
  if [ -z "${sees[$layer]+known}" ]; then
    complain "$file:1: layer $layer is not in tools/check_layers.sh; add what it may see"
    continue
  fi
  # A test may use what its layer may use, and nothing more.
  while IFS=: read -r number include; do
    [ -n "$number" ] || continue
    path=$(sed -E 's/^[^"]*"([^"]*)".*/\1/' <<<"$include")
    target="${path%%/*}"
    [ "$target" != "$path" ] || continue
    [ -n "${sees[$target]+known}" ] && [ "$target" != "$layer" ] || continue
    case " ${sees[$layer]} " in
      *" $target "*) ;;
      *) complain "$file:$number: $layer includes \"$path\"; $layer sees ${sees[$layer]:-no other layer}" ;;
    esac
  done < <(grep -nE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' "$file")

  case "$layer:$file" in
    base:*|recipe:*|cluster:*|*.cu|*.cuh)
      while IFS=: read -r number include; do
        [ -n "$number" ] || continue
        why="layer $layer knows no Torch"
        case "$file" in *.cu|*.cuh) why="a .cu sees raw pointers only" ;; esac
        complain "$file:$number: Torch header; $why"
      done < <(grep -nE "$torch_header" "$file")
      ;;
  esac
done

if [ "$violations" -gt 0 ]; then
  echo "$violations layering violation(s)"
  exit 1
fi
echo "layers: ${#files[@]} files in order"
