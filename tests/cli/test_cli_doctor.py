"""`memguard doctor`: what it prints, and its exit code."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import rich.console
from cli_examples import run_cli, succeed
from unusable_gpus import LINE, pretend_old_driver

from memguard.cli.doctor_screen import render_diagnosis, render_families
from memguard.workflows import doctor as workflow
from memguard.workflows.backends import Backend, Check
from memguard.workflows.capacity import Capacity
from memguard.workflows.collective_checks import DTYPES, OPERATIONS
from memguard.workflows.doctor import Diagnosis, Extra, Gpu, Library
from memguard.workflows.families import Families, Family


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
                libraries=(Library(name="rensa", version=None, required="", is_ok=False),),
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
        "capacities": (
            make_capacity("all weights", model="Llama 3.2 3B", tokens_per_s=12053.9),
            make_capacity("LoRA", model="Qwen2.5 32B", num_gpus=2),
            make_capacity("QLoRA", reason="without bitsandbytes"),
        ),
        "problems": (),
    }
    return Diagnosis(**values | changes)


def make_capacity(kind: Any, **changes: Any) -> Capacity:
    values: dict[str, Any] = {
        "kind": kind,
        "model": None,
        "num_parameters": 10**9,
        "needed_bytes": 54 * 2**30,
        "usable_bytes": 76 * 2**30,
        "tokens_per_s": None,
        "seq_len": 2048,
        "num_gpus": 1,
        "reason": None,
    }
    return Capacity(**values | changes)


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
    for part in ("torch 2.13.0", "peft missing, needs >=0.19", "pip install 'memguard[dedup]'"):
        assert part in plain
    assert "NVIDIA H100 80GB HBM3, capability 9.0, 79.0 GiB, 78.0 GiB free" in plain
    rows = [line.split() for line in plain.splitlines() if line.strip().startswith("broadcast ")]
    assert rows[0] == ["broadcast", "ok", "ok", "no", "ok", "ok", "hung"]
    assert "all-reduce in bf16: not supported: Invalid scalar type" in plain
    assert "All that memguard needs works here." in plain


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_ends_with_what_the_machine_can_train(width: int) -> None:
    plain = rich.text.Text.from_ansi(show(render_diagnosis, make_diagnosis(), width)).plain
    assert max(map(len, plain.splitlines())) <= width
    end = " ".join(plain.partition("All that memguard needs works here.")[2].split())
    assert end.startswith("What this machine can train, by estimate all weights up to Llama 3.2 3B")
    assert "up to Llama 3.2 3B, 54.0 GiB of 76.0 GiB, about 12,000 tokens/s" in end
    assert "LoRA up to Qwen2.5 32B, 54.0 GiB of 76.0 GiB on each of 2 GPUs QLoRA" in end
    assert "QLoRA nothing: without bitsandbytes" in end
    assert "rows of 2,048 tokens" in end
    assert "Nothing was trained or timed" in end
    assert end.endswith("memguard plan --model PATH/config.json")


def test_problems_end_the_screen() -> None:
    text = show(render_diagnosis, make_diagnosis(problems=("peft>=0.19 is required",)), 80)
    assert "All that memguard needs" not in text
    assert text.rstrip().endswith("peft>=0.19 is required")


def make_family(name: str, group: Any, **changes: Any) -> Family:
    values: dict[str, Any] = {
        "model_type": name,
        "model_class": "C",
        "group": group,
        "is_compared": False,
        "has_run": True,
        "reason": None if group == "any mesh" else f"why {name}",
        "condition": None,
    }
    return Family(**values | changes)


def make_families(*families: Family) -> Families:
    groups = ("any mesh", "data and z", "one process", "none", "unknown")
    counts = {group: sum(each.group == group for each in families) for group in groups}
    return Families(transformers="5.23.0", counts=counts, num_compared=1, families=families)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_families(width: int) -> None:
    table = make_families(
        make_family("llama", "any mesh", is_compared=True),
        make_family("jais2", "any mesh"),
        make_family(
            "bert", "data and z", condition="is_decoder: true in config.json", reason="x" * 300
        ),
        make_family("gpt2", "data and z"),
        make_family("xlnet", "none"),
        make_family("dbrx", "unknown"),
    )
    plain = rich.text.Text.from_ansi(show(render_families, table, width)).plain
    assert max(map(len, plain.splitlines())) <= width
    compared, uncompared = plain.index("llama"), plain.index("jais2")
    assert (
        plain.index("compare their numbers") < compared < plain.index("not compared") < uncompared
    )
    assert ["gpt2", "why", "gpt2"] in [line.split() for line in plain.splitlines()]
    assert "is_decoder: true in config.json:" in plain
    end = " ".join(plain.split()).partition("6 model types of ")[2]
    assert end == "transformers 5.23.0: 2 any mesh, 2 data and z, 1 none, 1 unknown"


def test_names_need_the_table() -> None:
    outcome = run_cli("doctor", "llama")
    assert outcome.code == 2
    assert outcome.err == "'TYPE' needs --models: memguard doctor --models llama\n"
    assert run_cli("doctor", "--models", "--nproc", "2").code == 2


def test_types_are_printed_as_one_json_object() -> None:
    outcome = succeed("doctor", "--models", "llama", "bloom", "--json")
    printed = json.loads(outcome.out)
    assert printed["kind"] == "families"
    assert [(each["model_type"], each["group"]) for each in printed["families"]] == [
        ("llama", "any mesh"),
        ("bloom", "data and z"),
    ]
    outcome = run_cli("doctor", "--models", "lama")
    assert outcome.code == 2
    assert "did you mean llama" in outcome.err


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
    outcome = run_cli("doctor")
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    assert "none that torch can use; its build is for CUDA 13.0" in outcome.out
    assert f"  {LINE}\n" in outcome.out
    last = outcome.err.splitlines()[-1]
    assert last.startswith(f"memguard: something that memguard needs does not work here: {LINE}")
    printed = json.loads(run_cli("doctor", "--json").out)
    assert LINE in Diagnosis.model_validate(printed).problems


@pytest.mark.slow
def test_this_machine() -> None:
    outcome = run_cli("doctor", "--json")
    assert outcome.code in (0, 1), outcome.err
    printed = json.loads(outcome.out)
    (gloo,) = (each for each in printed["backends"] if each["name"] == "gloo")
    needed = [check for check in gloo["checks"] if check["is_needed"]]
    assert {check["state"] for check in needed} == {"ok"}
