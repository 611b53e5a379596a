#!/usr/bin/env bash
# Compare meshes of 2, 4 or 8 GPUs with one GPU and with transformers' Trainer (FSDP): numbers, speed
# and overlap of communication with computation. Needs what gpu_check.sh needs; under 30 minutes.
#   scripts/gpu_check_many.sh              on the visible GPUs
#   scripts/gpu_check_many.sh --dry-run    tiny sizes on CPU processes, to check that the script works
# More arguments: scripts/gpu_check_many.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/gpu_python.sh
exec "$python" scripts/bench/gpu_many.py "$@"
