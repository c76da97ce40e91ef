#!/usr/bin/env bash
# Makes sure that the Debian packages the build needs are here: installs what is missing when run as root, else prints the
# exact line to run and stops.
set -euo pipefail

packages=(
  g++ make git ccache python3 python3-venv xz-utils
  libfmt-dev nlohmann-json3-dev libyaml-cpp-dev libcli11-dev libssl-dev libgtest-dev
  libjpeg-dev libpng-dev libwebp-dev libgif-dev libtiff-dev liblerc-dev libdeflate-dev liblzma-dev libzstd-dev zlib1g-dev
)
missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

command="apt-get install -y --no-install-recommends ${missing[*]}"
if [ "$(id -u)" != 0 ]; then
  printf 'gemtune needs %d packages that are not installed. Run this, then the same command again:\n\n  sudo %s\n\n' "${#missing[@]}" "$command" >&2
  exit 3
fi
printf 'Installing %s\n' "${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
$command >/dev/null || { apt-get update >/dev/null && $command >/dev/null; }
