"""`memguard plan` of a run with default settings only, for published models on 8 to 32 H100."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_examples import Outcome, run_cli
from published_sizes import CONFIG_FIELDS


def plan(folder: Path, model: str, num_gpus: int, *arguments: object) -> Outcome:
    """Plan a run that sets only name, model, data and batch, and whose files do not exist."""
    path = folder / "mine.yaml"
    settings = {
        "name": "mine",
        "model": {"path": str(folder / "not-downloaded")},
        "data": {"train": [str(folder / "not-there.jsonl")], "seq_len": 4096},
        "train": {"batch_size": 64},
    }
    path.write_text(yaml.safe_dump(settings))
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG_FIELDS[model]))
    machine = ("--machine", "dgx-h100", "--gpus", num_gpus)
    return run_cli("plan", path, "--model", config, *machine, "--no-documents", *arguments)


@pytest.mark.parametrize(
    ("model", "num_gpus"), [("Llama-3.1-8B", 8), ("Qwen3-32B", 8), ("Llama-3.1-70B", 32)]
)
def test_the_default_mesh_fits(tmp_path: Path, model: str, num_gpus: int) -> None:
    outcome = plan(tmp_path, model, num_gpus, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    printed = json.loads(outcome.out)
    mesh = printed["requested"]
    assert mesh["fits"]
    assert [mesh[axis] for axis in ("data", "z", "y", "x")] == [1, num_gpus, 1, 1]
    assert (printed["precision"], printed["batch_size"], printed["seq_len"]) == ("bf16", 64, 4096)
    assert mesh["micro_batch_size"] * mesh["num_micro_batches"] == 64 // num_gpus
    # The same with the chosen settings written out.
    chosen = (
        f"train.micro_batch_size={mesh['micro_batch_size']}",
        f"train.activation_checkpointing={mesh['activation_checkpointing']}",
        "train.precision=bf16",
    )
    again = json.loads(plan(tmp_path, model, num_gpus, "--json", *chosen).out)
    assert again["requested"] == mesh


@pytest.mark.parametrize(
    "changes",
    [(), ("train.micro_batch_size=64", "train.activation_checkpointing=none")],
    ids=["auto", "chosen"],
)
def test_70b_on_8_gpus_is_refused_with_a_number_that_would_do(
    tmp_path: Path, changes: tuple[str, ...]
) -> None:
    outcome = plan(tmp_path, "Llama-3.1-70B", 8, "--json", *changes)
    assert outcome.code == 2
    printed: dict[str, Any] = json.loads(outcome.out)
    assert not printed["requested"]["fits"]
    assert printed["num_fitting"] == 0
    (line,) = outcome.err.splitlines()
    found = re.search(
        r"use (\d+) GPUs as \(data=1, z=(\d+), y=(\d+), x=(\d+)\) with activation_checkpointing "
        r"(\w+) and micro_batch_size (\d+), ",
        line,
    )
    assert found
    num_gpus, z, y, x = map(int, found.groups()[:4])
    assert num_gpus == printed["enough"]["num_gpus"] == z * y * x
    settings = (
        *(f"parallel.z={z}", f"parallel.y={y}", f"parallel.x={x}"),
        f"train.activation_checkpointing={found[5]}",
        f"train.micro_batch_size={found[6]}",
    )
    assert plan(tmp_path, "Llama-3.1-70B", num_gpus, *settings).code == 0
    # On one node less no mesh fits.
    fewer = plan(tmp_path, "Llama-3.1-70B", num_gpus - 8, "--json")
    assert fewer.code == 2
    assert json.loads(fewer.out)["num_fitting"] == 0


@pytest.mark.parametrize(("precision", "word"), [("auto", "bf16"), ("fp32", "fp32")])
def test_the_screen_says_what_was_chosen(tmp_path: Path, precision: str, word: str) -> None:
    outcome = plan(tmp_path, "Llama-3.1-8B", 8, f"train.precision={precision}")
    assert outcome.code == 0
    assert f"a step of 64 rows, 4,096 tokens per row, {word}" in outcome.out
    lines = outcome.out.splitlines()
    heading = next(number for number, line in enumerate(lines) if "recompute" in line)
    data, z, y, x, mode, rows, *_ = lines[heading + 1].split()
    assert (data, z, y, x) == ("1", "8", "1", "1")
    assert mode in ("none", "selective", "full")
    assert 8 % int(rows) == 0


def test_on_a_cpu_auto_is_all_rows_in_fp32(tmp_path: Path) -> None:
    arguments = ("--machine", "this-machine", "--gpus", 1)
    outcome = plan(tmp_path, "Llama-3.1-8B", 1, *arguments, "--json")
    printed = json.loads(outcome.out)
    if "CPU" not in printed["gpu"]:
        pytest.skip("this machine has GPUs, for which auto is resolved as above")
    assert printed["precision"] == "fp32"
    assert printed["requested"]["micro_batch_size"] == 64
    assert printed["requested"]["activation_checkpointing"] == "none"
