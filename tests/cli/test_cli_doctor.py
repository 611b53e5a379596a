"""`memguard doctor`: what it prints, and its exit code."""

import importlib.metadata
import io
import json
from pathlib import Path
from typing import Any

import pytest
import rich.console
from cli_examples import run_cli, succeed
from unusable_gpus import LINE, pretend_old_driver

from memguard.cli.doctor import render_diagnosis
from memguard.workflows import doctor as workflow
from memguard.workflows.collective_checks import DTYPES, OPERATIONS, Backend, Check
from memguard.workflows.doctor import Diagnosis, Extra, Gpu, Library


def make_backend(**states: Any) -> Backend:
    checks = [
        Check(
            operation=operation,
            dtype=dtype,
            state=states.get(dtype, "ok"),
            reason=None if states.get(dtype, "ok") == "ok" else "Invalid scalar type",
            is_needed=dtype == "fp32",
        )
        for operation in OPERATIONS
        for dtype in DTYPES
    ]
    return Backend(name="gloo", num_ranks=2, reason=None, checks=tuple(checks))


def make_diagnosis(**changes: Any) -> Diagnosis:
    values: dict[str, Any] = {
        "memguard": "0.1.0",
        "python": "3.12.1",
        "platform": "Linux x86_64",
        "libraries": (
            Library(name="torch", version="2.13.0", required=">=2.11", is_ok=True),
            Library(name="peft", version=None, required=">=0.19", is_ok=False),
        ),
        "extras": (
            Extra(
                name="dedup",
                libraries=(Library(name="rensa", version=None, required=">=0.5", is_ok=False),),
                is_installed=False,
                enables="near-copies",
            ),
        ),
        "num_cores": 2,
        "memory_bytes": 24 * 2**30,
        "available_bytes": 20 * 2**30,
        "cuda": "13.0",
        "gpus": (
            Gpu(
                index=0,
                name="NVIDIA H100 80GB HBM3",
                capability="9.0",
                memory_bytes=79 * 2**30,
                free_bytes=78 * 2**30,
                bf16="ok",
                flash="ok",
                varlen="FlashAttention only supports Ampere GPUs or newer",
            ),
        ),
        "backends": (make_backend(bf16="not supported", uint8="hung"),),
        "problems": (),
    }
    return Diagnosis(**values | changes)


def show(render: Any, record: Any, width: int) -> str:
    screen = io.StringIO()
    render(
        record, rich.console.Console(file=screen, width=width, force_terminal=True, no_color=True)
    )
    return screen.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_diagnosis_fits_the_screen(width: int) -> None:
    text = show(render_diagnosis, make_diagnosis(), width)
    plain = rich.text.Text.from_ansi(text).plain
    assert max(map(len, plain.splitlines())) <= width
    for part in ("torch 2.13.0", "peft missing, needs >=0.19", "pip install 'rensa>=0.5'"):
        assert part in plain
    assert "NVIDIA H100 80GB HBM3, capability 9.0, 79.0 GiB, 78.0 GiB free" in plain
    rows = [line.split() for line in plain.splitlines() if line.strip().startswith("broadcast ")]
    assert rows[0] == ["broadcast", "ok", "ok", "no", "ok", "ok", "hung"]
    assert "all-reduce in bf16: not supported: Invalid scalar type" in plain
    assert "All that memguard needs works here." in plain


def test_problems_end_the_screen() -> None:
    text = show(render_diagnosis, make_diagnosis(problems=("peft>=0.19 is required",)), 80)
    assert "All that memguard needs" not in text
    assert text.rstrip().endswith("peft>=0.19 is required")


def test_the_exit_code_tells_whether_all_that_is_needed_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_diagnosis()
    monkeypatch.setattr(workflow, "diagnose", lambda **given: made)
    outcome = succeed("doctor", "--json")
    assert Diagnosis.model_validate_json(outcome.out) == made
    made = make_diagnosis(problems=("gloo: all-reduce in fp32 is hung (no answer)", "another"))
    outcome = run_cli("doctor")
    assert outcome.code == 1
    last = outcome.err.splitlines()[-1]
    assert last.startswith(
        "memguard: something that memguard needs does not work here: gloo: all-reduce"
    )
    assert last.endswith("and 1 more; see the list above")


def test_gpus_that_torch_cannot_use_are_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_old_driver(monkeypatch, tmp_path)
    monkeypatch.setattr(workflow, "check_backend", lambda *_, **__: make_backend())
    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)
    outcome = run_cli("doctor")
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    assert "none that torch can use; its build is for CUDA 13.0" in outcome.out
    assert f"  {LINE}\n" in outcome.out
    last = outcome.err.splitlines()[-1]
    assert last.startswith(f"memguard: something that memguard needs does not work here: {LINE}")
    printed = json.loads(run_cli("doctor", "--json").out)
    assert LINE in Diagnosis.model_validate(printed).problems


@pytest.mark.long
def test_this_machine() -> None:
    outcome = run_cli("doctor", "--json")
    assert outcome.code in (0, 1), outcome.err
    printed = json.loads(outcome.out)
    (gloo,) = (each for each in printed["backends"] if each["name"] == "gloo")
    needed = [check for check in gloo["checks"] if check["is_needed"]]
    assert {check["state"] for check in needed} == {"ok"}
