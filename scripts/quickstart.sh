#!/usr/bin/env bash
# Train a small model that memorizes, and the same with goldfish loss, and compare them.
# Runs offline. Creates .venv if needed. Arguments override settings.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment plots
export HF_HUB_OFFLINE=1
# Where the home cannot be written, what would lie there lies beside .venv's packages: texts that were
# read, and the identity key of these public ones.
can_write() { mkdir -p -m 700 "$1" 2>/dev/null && [ -w "$1" ]; }
beside="$(cd "$venv" && pwd)"
config="${XDG_CONFIG_HOME:-${HOME:-}/.config}/memguard"
if [ ! -e "$config/memguard-identity.key" ] && ! can_write "$config"; then
  set -- {pretrain,run}.data.identity_key="$beside/memguard-identity.key" "$@"
fi
cache="${MEMGUARD_CACHE:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/memguard}"
can_write "$cache" || export MEMGUARD_CACHE="$beside/cache"
# Both settings in parallel: for a model this small, one thread each is faster than all for one.
exec "$venv/bin/memguard" compare quickstart --jobs 2 "$@"
