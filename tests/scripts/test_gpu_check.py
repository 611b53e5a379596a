"""The GPU check runs dry, says what is missing, and counts arithmetic as a model is built."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ranks import RankPool
from script_calls import load_script, run_script

ROOT = Path(__file__).parents[2]


def run(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "MEMGUARD_PYTHON": sys.executable,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        ["bash", "scripts/gpu_check.sh", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def script() -> ModuleType:
    module: ModuleType = load_script("bench/gpu")
    return module


@pytest.mark.slow
def test_a_dry_run_fills_every_row(script: ModuleType) -> None:
    done = run("--dry-run", "--peak-tflops", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    _, checked, measured, *_ = done.stdout.split("\n\n")
    assert checked.count("  ok\n") + checked.endswith("  ok") == 3
    for name in script.ROWS:
        (line,) = (line for line in measured.splitlines() if line.startswith(f"{name}  "))
        assert "%" in line, line
    assert done.stdout.splitlines()[-1].startswith("PASS")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").write_text("raise ImportError('none here')")
    (tmp_path / "transformers.py").write_text("__version__ = '5.16.3'")
    # What takes seconds to import, and is not looked into before the script itself begins.
    (tmp_path / "torch.py").write_text("__version__ = '2.11.0'")
    (tmp_path / "datasets.py").touch()
    done = run("--dry-run", path=str(tmp_path))
    assert done.returncode == 3
    assert "accelerate (none here)" in done.stderr
    assert "transformers >= 5.17, not 5.16.3" in done.stderr
    assert "torch" not in done.stderr


NO_GPU = "gpu_check: torch sees no GPU"


def test_without_a_gpu_it_says_so(ranks: RankPool) -> None:
    done = run_script(ranks, "bench/gpu")
    assert done.code == 3
    assert done.err.splitlines()[-1].startswith(NO_GPU)


@pytest.mark.slow
def test_without_a_gpu_the_shell_says_so() -> None:
    done = run()
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith(NO_GPU)


def test_the_arithmetic_of_a_token_is_that_of_the_matmuls(script: ModuleType) -> None:
    sizes = script.TINY
    model = script.draw_llama(sizes, torch.device("meta"))
    matmuls = [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and "embed_tokens" not in name
    ]
    attention = 6 * sizes.num_layers * sizes.hidden * sizes.seq_len
    assert sizes.flop_per_token(1.0) == 6 * sum(matmuls) + attention
    head = 6 * sizes.lm * sizes.hidden
    assert sizes.flop_per_token(1.0) - sizes.flop_per_token(0.5) == head / 2


def test_layers_fit_the_memory(script: ModuleType) -> None:
    sizes = script.Sizes()
    assert script.count_layers(sizes, 0) == 1
    counts = [script.count_layers(sizes, gib * 2**30) for gib in (80, 139, 192)]
    assert counts == sorted(set(counts))
    # Weights, gradients and moments alone, in fp32.
    for count, gib in zip(counts, (80, 139, 192), strict=True):
        stored = count * sizes.layer_parameters + 2 * sizes.lm * sizes.hidden
        assert 16 * stored < gib * 2**30
