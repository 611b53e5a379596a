#!/usr/bin/env bash
# Show a model that recites, and the same with goldfish loss.
# Trains a small model that recites, then the same with goldfish loss, and compares; offline, in a
# few minutes on two cores. Makes .venv if there is none. Arguments override settings.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment ""
export HF_HUB_OFFLINE=1
# The three settings at once: of a model this small, one thread each is faster than all for one.
exec "$venv/bin/memguard" compare quickstart --jobs 3 "$@"
