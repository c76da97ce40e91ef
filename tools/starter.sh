#!/usr/bin/env bash
# tools/starter.sh BUILD_DIR: leaves ./gemtune in the clone's root. It starts the built program from any directory and with
# any HOME.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
cat > gemtune.new <<END
#!/bin/sh
[ "\$1" != gke ] || exec "$build/gemtune-gke" "\$@"
exec "$build/gemtune" "\$@"
END
chmod +x gemtune.new
mv gemtune.new gemtune
