#!/usr/bin/env bash
# Train a small model that memorizes, and the same with goldfish loss, and compare them.
# Runs offline, in a few minutes on two cores. Creates .venv if needed. Arguments override settings.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment ""
export HF_HUB_OFFLINE=1
# Three settings in parallel: for a model this small, one thread each is faster than all for one.
exec "$venv/bin/memguard" compare quickstart --jobs 3 "$@"
