"""The folder of wheels for a machine without an index; pip is a stand-in that fetches nothing."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PIP = """
import json, os, sys, zipfile
from pathlib import Path

arguments = sys.argv[1:]
into = Path(arguments[arguments.index("--dest" if "download" in arguments else "--wheel-dir") + 1])
name = "bitsandbytes-1.0" if "download" in arguments else "memguard_llm-0.1"
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(arguments) + "\\n")
with zipfile.ZipFile(into / f"{name}-py3-none-any.whl", "w") as wheel:
    ends = ("cpu", "cuda128", "cuda130")
    libraries = [f"bitsandbytes/libbitsandbytes_{end}.so" for end in ends]
    lines = []
    for path in ["bitsandbytes/__init__.py", *libraries]:
        wheel.writestr(path, os.urandom(int(os.environ["BYTES"])))
        lines.append(f"{path},sha256=x,9\\n")
    wheel.writestr(f"{name}.dist-info/RECORD", "".join(lines))
"""


def pack(folder: Path, *arguments: str, num_bytes: int = 9) -> "subprocess.CompletedProcess[str]":
    (folder / "pip.py").write_text(PIP)
    python = folder / "python"
    real = f"exec {sys.executable} -S"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *"-m pip "*) shift 2; {real} {folder}/pip.py "$@" ;; esac\n'
        f'{real} "$@"\n'
    )
    python.chmod(0o755)
    return subprocess.run(
        ["bash", "scripts/gpu_pack.sh", "--into", str(folder / "pack"), *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "MEMGUARD_PYTHON": str(python),
            "CALLS": str(folder / "calls.jsonl"),
            "BYTES": str(num_bytes),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_of_bitsandbytes_one_library_of_cuda_is_kept(tmp_path: Path) -> None:
    done = pack(tmp_path, "--python", "3.11", "--cuda", "12.8", "seaborn")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "pack").glob("bitsandbytes-*")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        record = packed.read(names[-1]).decode()
    kept = ["__init__.py", "libbitsandbytes_cpu.so", "libbitsandbytes_cuda128.so"]
    assert [Path(name).name for name in names] == [*kept, "RECORD"]
    assert [line.partition(",")[0] for line in record.splitlines()] == names[:-1]
    download, _ = map(json.loads, (tmp_path / "calls.jsonl").read_text().splitlines())
    assert download[download.index("--python-version") + 1] == "3.11"
    assert {"datasets", "rapidfuzz", "seaborn"} < set(download)
    assert "0 MB of wheels for Python 3.11, CUDA 12.8" in done.stdout


def test_an_unknown_cuda_and_a_large_pack_are_refused(tmp_path: Path) -> None:
    done = pack(tmp_path, "--cuda", "9.9")
    assert done.returncode == 1
    assert "bitsandbytes has no libbitsandbytes_cuda99.so" in done.stderr
    done = pack(tmp_path, num_bytes=6_000_000)
    assert done.returncode == 1
    assert "that is more than 40 MB" in done.stderr
