#!/usr/bin/env bash
# Run the test suite in .venv, which is created if needed.
# Arguments are passed to pytest: '-n 0' runs all tests in one process (to see their output),
# '-m "mesh or slow" --tenth SEED' runs a tenth of the tests that the default run excludes.
# '--changed' runs the tests of what differs from main; '--costs' prints what each file costs;
# '--accept-costs FILE...' writes the costs of FILE... into tests/budget.json, which CI enforces.
# '-m faults' kills runs at random moments, damages their files and fills their disk.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment test
# One thread per process, because tests that start several ranks would compete for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Two workers run a file each at a time, so that its fixtures are created once.
exec "$python" -m pytest -n 2 --dist loadfile "$@"
