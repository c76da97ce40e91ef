#!/usr/bin/env bash
# tools/configure.sh BUILD_DIR: configures the build against the pinned environments and writes BUILD_DIR/environment, which
# puts cmake, ninja and ctest of the pinned environment on the path.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1

tools=$(tools/env.sh build)
parity=$(tools/env.sh --path parity)  # made by `make test`
today=$(tools/env.sh --path today)
cluster=$(tools/env.sh --path cluster)
mkdir -p "$build"
# Sources are compiled through this link, so that every clone shows ccache the same paths below its build folder.
ln -sfn "$PWD" "$build/source"
cat > "$build/environment.new" <<END
export PATH="$tools/bin:\$PATH"
export GEMTUNE_PARITY_PYTHON="$parity/bin/python"
export GEMTUNE_TODAY_PYTHON="$today/bin/python"
export GEMTUNE_CLUSTER_PYTHON="$cluster/bin/python"
export CCACHE_BASEDIR="$build"
export CCACHE_SLOPPINESS="pch_defines,time_macros,include_file_mtime,include_file_ctime"
END
mv "$build/environment.new" "$build/environment"
source "$build/environment"
stamp=$(printf '%s\n' "$tools" "$parity" "$PWD" | sha256sum | cut -c1-12)
if [ ! -f "$build/build.ninja" ] || [ "$(cat "$build/configured" 2>/dev/null)" != "$stamp" ]; then
  cmake -G Ninja -S "$build/source" -B "$build" -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache -DGEMTUNE_PYTHON="$tools/bin/python" \
    -DGEMTUNE_PARITY_PYTHON="$parity/bin/python" > "$build/configure.log" 2>&1 || { cat "$build/configure.log" >&2; exit 3; }
  printf '%s\n' "$stamp" > "$build/configured"
fi
