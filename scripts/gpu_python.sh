# Find a Python with the libraries of the GPU scripts, without an index; to be sourced from there.
# Sets $python: $MEMGUARD_PYTHON, else .venv, else python3; memguard need not be installed.
# If there is a folder of wheels ($MEMGUARD_PACK, else .gpu; made by scripts/gpu_pack.sh), they are
# unpacked beside it, not installed. Exits with code 3 if something is missing.

script="$(basename "$0" .sh)"
python="${MEMGUARD_PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python; } || python=python3
command -v "$python" >/dev/null || { echo "$script: $python not found" >&2; exit 3; }
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

pack="${MEMGUARD_PACK:-.gpu}"
if compgen -G "$pack/*.whl" >/dev/null; then
  site="$(cd "$pack" && pwd)/site"
  # The folder is made again: two versions of one package in it do not work.
  rm -rf "$site"
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --no-cache-dir --target "$site" "$pack"/*.whl ||
    { echo "$script: the wheels of $pack do not fit $python, see scripts/gpu_pack.sh" >&2; exit 3; }
  # The checkout comes first: the pack's memguard is there for its version.
  export PYTHONPATH="$PYTHONPATH:$site"
fi

# What is imported takes seconds, and the first fact should not: versions alone are read.
missing="$("$python" - <<'END'
import sys
from importlib.metadata import PackageNotFoundError, version

minimum = {"torch": (2, 11), "transformers": (5, 17), "accelerate": (1, 10)}
others = (
    *("huggingface_hub", "safetensors", "numpy", "pandas", "scipy", "pydantic", "pyyaml", "rich"),
    *("typer", "jinja2", "tqdm", "pyarrow", "peft", "datasets", "rapidfuzz", "junitparser"),
)
problems = [] if sys.version_info >= (3, 11) else ["Python 3.11 or newer"]
for name in (*minimum, *others):
    try:
        found = version(name)
    except PackageNotFoundError:
        problems.append(name)
        continue
    needed = minimum.get(name)
    if needed and tuple(int(part) for part in found.split(".")[:2]) < needed:
        problems.append(f"{name} >= {'.'.join(map(str, needed))}, not {found}")
print("; ".join(problems))
END
)"
if [ -n "$missing" ]; then
  echo "$script: $python lacks: $missing (scripts/gpu_pack.sh packs wheels)" >&2
  exit 3
fi
# Settings of speed and memory are not made here: each row has those of memguard's launcher.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
