# Find a Python with the libraries of the GPU scripts, without installing; to be sourced from there.
# Sets $python: $MEMGUARD_PYTHON, else .venv, else python3; memguard need not be installed.
# Exits with code 3 if something is missing.

script="$(basename "$0" .sh)"
python="${MEMGUARD_PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python; } || python=python3
command -v "$python" >/dev/null || { echo "$script: $python not found" >&2; exit 3; }
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
  echo "$script: $python lacks: $missing" >&2
  exit 3
fi
# Settings of speed and memory are not made here: each row has those of memguard's launcher.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
