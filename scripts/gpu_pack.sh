#!/usr/bin/env bash
# Make the folder of wheels that scripts/gpu_check.sh needs on a machine with a GPU and no package
# index, where torch, transformers, accelerate, peft, pytest and the usual libraries are installed.
# Run this in a checkout on a machine with an index, then take the checkout and the folder there.
#   scripts/gpu_pack.sh                       .gpu/: x86-64, Python 3.12, CUDA 13.0; at most 40 MB
#   scripts/gpu_pack.sh --python 3.11 --cuda 12.8 --into FOLDER
#   scripts/gpu_pack.sh NAME...               these as well, which gpu_check.sh has named as missing
set -euo pipefail
cd "$(dirname "$0")/.."
python_version=3.12 cuda=13.0 into=.gpu machine=x86_64 most_mb=40
# What the libraries named above do not bring: datasets and what it needs, pydantic and what it
# needs, and the rest of memguard's own.
names=(datasets dill multiprocess pydantic pydantic_core annotated-types typing-inspection
  rapidfuzz junitparser evaluate bitsandbytes)
while [ $# -gt 0 ]; do
  case "$1" in
    --python) python_version="$2"; shift 2 ;;
    --cuda) cuda="$2"; shift 2 ;;
    --into) into="$2"; shift 2 ;;
    --machine) machine="$2"; shift 2 ;;
    -*) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
    *) names+=("$1"); shift ;;
  esac
done
python="${MEMGUARD_PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python; } || python=python3
mkdir -p "$into"
rm -rf "$into"/*.whl "$into/site"

# Each name by itself: pip matches the tag of a platform exactly, and needs none of dependencies.
platforms=()
for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do
  platforms+=(--platform "manylinux_${glibc}_$machine")
done
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --python-version "$python_version" --implementation cp "${platforms[@]}" \
  --constraint constraints.txt --dest "$into" "${names[@]}"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$into" .

# Of bitsandbytes only the library of one CUDA: 43 MB become 4.
"$python" - "$into" "${cuda/./}" <<'END'
import sys
import zipfile
from pathlib import Path

folder, cuda = Path(sys.argv[1]), sys.argv[2]
for wheel in folder.glob("bitsandbytes-*.whl"):
    whole = wheel.rename(wheel.with_suffix(".whole"))
    kept = {f"libbitsandbytes_cuda{cuda}.so", "libbitsandbytes_cpu.so"}

    def is_kept(name):
        return not name.endswith(".so") or name.rpartition("/")[2] in kept

    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        names = [name for name in old.namelist() if is_kept(name)]
        libraries = {name.rpartition("/")[2] for name in names if name.endswith(".so")}
        if missing := sorted(kept - libraries):
            sys.exit(f"gpu_pack: bitsandbytes has no {missing[0]}: choose another --cuda")
        for name in names:
            data = old.read(name)
            if name.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(x for x in lines if is_kept(x.partition(",")[0])).encode()
            new.writestr(old.getinfo(name), data, zipfile.ZIP_DEFLATED)
    whole.unlink()
END

size_mb=$(($(cat "$into"/*.whl | wc -c) / 1000000))
ls -l "$into" | awk '/whl$/ { printf "%8.1f MB  %s\n", $5 / 1e6, $NF }'
echo "$into: $size_mb MB of wheels for Python $python_version, CUDA $cuda"
if [ "$size_mb" -gt "$most_mb" ]; then
  echo "gpu_pack: that is more than $most_mb MB" >&2
  exit 1
fi
