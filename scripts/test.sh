#!/usr/bin/env bash
# Run the test suite.
# In .venv, which it makes if there is none. Arguments go on to pytest: '-n 0' runs all tests in one
# process (to see what they print), '-m "mesh or slow" --tenth SEED' a tenth of those left out.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment test
# One thread a process: tests that start several ranks would fight for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Two workers, half of the tests each, in order, so that a file's fixtures are mostly made once; the
# one that is done first takes over half of what the other has left.
exec "$python" -m pytest -n 2 --dist worksteal "$@"
