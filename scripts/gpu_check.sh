#!/usr/bin/env bash
# Every measurement that needs a GPU, in one table.
# Needs one GPU, torch >= 2.11, transformers >= 5.17 and nothing from the network; under 9 minutes.
# Runs in $MEMGUARD_PYTHON, in .venv, or in the python3 at hand; memguard need not be installed.
#   scripts/gpu_check.sh              on a GPU
#   scripts/gpu_check.sh --dry-run    tiny sizes on the CPU, to see that it works
# More arguments: scripts/gpu_check.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
python="${MEMGUARD_PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python; } || python=python3
command -v "$python" >/dev/null || { echo "gpu_check: there is no $python" >&2; exit 3; }
missing="$("$python" - <<'END'
import importlib
import sys

least = {"torch": (2, 11), "transformers": (5, 17), "accelerate": (1, 10)}
others = ("huggingface_hub", "safetensors", "numpy", "scipy", "pydantic", "yaml", "rich", "datasets")
problems = [] if sys.version_info >= (3, 11) else ["Python 3.11 or newer"]
for name in (*least, *others):
    try:
        found = importlib.import_module(name)
    except ImportError as error:
        problems.append(f"{name} ({error})")
        continue
    wanted = least.get(name)
    if wanted and tuple(int(part) for part in found.__version__.split(".")[:2]) < wanted:
        problems.append(f"{name} >= {'.'.join(map(str, wanted))}, not {found.__version__}")
print("; ".join(problems))
END
)"
if [ -n "$missing" ]; then
  echo "gpu_check: $python lacks: $missing" >&2
  exit 3
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Sizes of the pieces change from step to step; without this, memory is lost between them.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec "$python" scripts/bench/gpu.py "$@"
