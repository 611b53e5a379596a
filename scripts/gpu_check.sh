#!/usr/bin/env bash
# Run all measurements that need one GPU and print them in one table; then the tests that need one.
# Needs torch >= 2.11 and transformers >= 5.17, no network access; under 9 minutes. Without pytest
# the tests are left out, and the output says so.
#   scripts/gpu_check.sh              on a GPU
#   scripts/gpu_check.sh --dry-run    tiny sizes on the CPU, to check that the script works
# More arguments: scripts/gpu_check.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/gpu_python.sh
exec "$python" scripts/bench/gpu.py "$@"
