#!/usr/bin/env bash
# Run the default tier of the tests (tests/tiers.py) in .venv, which is created if needed.
# Arguments are passed to pytest: '-n 0' runs all tests in one process (to see their output),
# '-m slow' what only a part of runs in CI, '-m ""' all tests;
# '-m "mesh or long" --tenth SEED' a tenth of the cases, '-m slow --third SEED' a third of the files.
# '--changed' runs the tests of what differs from main, slow ones too; '--costs' prints each file's;
# '--accept-costs FILE...' writes the costs of FILE... into tests/budget.json, which CI enforces.
# '-m faults' kills runs at random moments, damages their files and fills their disk.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment test
# One thread per process, because tests that start several ranks would compete for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Compile once, not at each run: that is a tenth of the time.
unset PYTHONDONTWRITEBYTECODE
# Two workers run a file each at a time, so that its fixtures are created once.
exec "$python" -m pytest -n 2 --dist loadfile "$@"
