#!/usr/bin/env bash
# Makes one of the project's pinned Python environments and prints its folder.
#
#   tools/env.sh build     torch, pyarrow, cmake, ninja: what the program is built against and runs from
#   tools/env.sh parity    the Python reference of the parity tests, layered over `build`
#   tools/env.sh today     today's transformers and peft, layered over `build`
#   tools/env.sh cluster   checks of manifests and Dockerfile, layered over `build`
#
#   tools/env.sh --path NAME   only prints where it is or will be
#
# An environment lives in ${XDG_CACHE_HOME:-~/.cache}/gemtune/env/NAME-KEY; KEY is a hash of the pins and of the
# interpreter, so a second clone finds it ready and a changed pin makes a new one.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { printf 'tools/env.sh: %s\n' "$*" >&2; exit 3; }

only_path=no
if [ "${1:-}" = --path ]; then only_path=yes; shift; fi
name=${1:-}
case "$name" in build|parity|today|cluster) ;; *) printf 'usage: tools/env.sh [--path] build|parity|today|cluster\n' >&2; exit 2 ;; esac

python=${GEMTUNE_BASE_PYTHON:-python3}
command -v "$python" >/dev/null || die "$python is not installed; install python3 and python3-venv"

pins=(requirements/build.txt)
[ "$name" = build ] || pins+=("requirements/$name.txt")
version=$("$python" -c 'import sys, sysconfig; print(sys.version_info[:2], sysconfig.get_platform())')
key=$( { cat "${pins[@]}"; printf '%s' "$version"; } | sha256sum | cut -c1-12)
root=${XDG_CACHE_HOME:-$HOME/.cache}/gemtune/env
env=$root/$name-$key
if [ "$only_path" = yes ] || [ -f "$env/.complete" ]; then printf '%s\n' "$env"; exit 0; fi

[ "$name" = build ] || base=$("$0" build)
mkdir -p "$root"
exec 9>"$root/$name-$key.lock"
flock 9
if [ -f "$env/.complete" ]; then printf '%s\n' "$env"; exit 0; fi

free_kib=$(df -Pk "$root" | awk 'NR==2 {print $4}')
if [ "$name" = build ]; then need_kib=$((8 * 1024 * 1024)); else need_kib=$((3 * 1024 * 1024)); fi
[ "$free_kib" -ge "$need_kib" ] || die "$root has $((free_kib/1024)) MiB free, the $name environment needs $((need_kib/1024)) MiB; free some disk or set XDG_CACHE_HOME"

printf 'Installing the pinned %s environment in %s (once a machine)\n' "$name" "$env" >&2
rm -rf "$env"
"$python" -m venv "$env" >&2 || die "$python cannot make virtual environments; install python3-venv"
if [ "$name" != build ]; then
  site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/gemtune_build_environment.pth"
fi
"$env/bin/python" -m pip install --quiet --disable-pip-version-check -r "requirements/$name.txt" >&2 \
  || die "pip could not install requirements/$name.txt (its message is above)"
touch "$env/.complete"
printf '%s\n' "$env"
