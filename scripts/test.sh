#!/usr/bin/env bash
# Run the test suite.
# In .venv, which it makes if there is none. Arguments go on to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment test
# One thread a process: tests that start several ranks would fight for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "$python" -m pytest "$@"
