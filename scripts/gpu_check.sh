#!/usr/bin/env bash
# Say what memguard does on one GPU: facts, the most valuable first, each as soon as it is known.
# Needs torch >= 2.11 and transformers >= 5.17, no network access; under 10 minutes. A machine that
# lacks the other libraries takes them from the folder that scripts/gpu_pack.sh makes.
#   scripts/gpu_check.sh                  all steps, on a GPU
#   scripts/gpu_check.sh audit tests      some, in this order
#   scripts/gpu_check.sh --dry-run        tiny sizes on the CPU, to check that the script works
# More arguments: scripts/gpu_check.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/gpu_python.sh
exec "$python" scripts/bench/gpu.py "$@"
