#!/usr/bin/env bash
# Run all measurements that need a GPU and print them in one table.
# Needs one GPU, torch >= 2.11 and transformers >= 5.17, no network access; under 9 minutes.
# Uses $MEMGUARD_PYTHON, else .venv, else python3; memguard need not be installed.
#   scripts/gpu_check.sh              on a GPU
#   scripts/gpu_check.sh --dry-run    tiny sizes on the CPU, to check that the script works
# More arguments: scripts/gpu_check.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
python="${MEMGUARD_PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python; } || python=python3
command -v "$python" >/dev/null || { echo "gpu_check: $python not found" >&2; exit 3; }
missing="$("$python" - <<'END'
import importlib
import sys

minimum = {"torch": (2, 11), "transformers": (5, 17), "accelerate": (1, 10)}
others = ("huggingface_hub", "safetensors", "numpy", "scipy", "pydantic", "yaml", "rich", "datasets")
problems = [] if sys.version_info >= (3, 11) else ["Python 3.11 or newer"]
for name in (*minimum, *others):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        problems.append(f"{name} ({error})")
        continue
    needed = minimum.get(name)
    if needed and tuple(int(part) for part in module.__version__.split(".")[:2]) < needed:
        problems.append(f"{name} >= {'.'.join(map(str, needed))}, not {module.__version__}")
print("; ".join(problems))
END
)"
if [ -n "$missing" ]; then
  echo "gpu_check: $python lacks: $missing" >&2
  exit 3
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Tensor sizes change from step to step; without this setting, memory becomes fragmented.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec "$python" scripts/bench/gpu.py "$@"
