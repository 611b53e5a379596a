"""`auto` leaves memory on GPUs that were not measured, and uses what their runs have measured."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from published_sizes import CONFIG_FIELDS, LLAMA_8B

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.fit import describe_faster, find_fit
from memguard.planner.machine import Machine, detect_machine, keep_measured, load_machine
from memguard.planner.step_settings import AdapterSizes, Work
from memguard.runtime import Runtime
from memguard.workflows.training import memory

LLAMA_70B = ModelSizes.from_json(CONFIG_FIELDS["Llama-3.1-70B"])
GPU = "NVIDIA H100 80GB HBM3"
ONE = MeshShape()
QLORA = Work(seq_len=2048, batch_size=1, adapter=AdapterSizes(r=8, is_nf4=True))
MEASURED = {"is_measured": True}


@pytest.fixture
def h100() -> Machine:
    return load_machine("dgx-h100")


def test_the_fastest_that_leaves_15_percent_is_taken_and_the_faster_one_is_named(
    h100: Machine,
) -> None:
    safe = find_fit(LLAMA_70B, ONE, QLORA, h100)
    brim = find_fit(LLAMA_70B, ONE, QLORA, h100.model_copy(update=MEASURED))
    assert (safe.settings.checkpointing, brim.settings.checkpointing) == ("full", "selective")
    assert safe.needed_bytes <= 0.85 * h100.usable_bytes < brim.needed_bytes <= h100.usable_bytes
    text = describe_faster(LLAMA_70B, safe, QLORA, h100)
    assert text is not None
    assert text.startswith("'auto' leaves 15 % of the memory, as no step was measured on 'H100 SXM")
    assert f"selective with micro_batch_size 1 would need {brim.needed_bytes / 2**30:.1f}" in text
    assert describe_faster(LLAMA_70B, brim, QLORA, h100.model_copy(update=MEASURED)) is None


def test_what_fits_is_taken_where_nothing_leaves_15_percent(h100: Machine) -> None:
    needed = find_fit(LLAMA_70B, ONE, QLORA, h100).needed_bytes
    small = h100.model_copy(update={"memory_gib": needed / 2**30 + h100.reserved_gib + 0.1})
    fit = find_fit(LLAMA_70B, ONE, QLORA, small)
    assert fit.fits
    assert fit.settings.checkpointing == "full"
    assert describe_faster(LLAMA_70B, fit, QLORA, small) is None


def test_a_measured_step_replaces_the_assumed_fragmentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMGUARD_CACHE", str(tmp_path / "new" / "cache"))
    gpus = [(GPU, 79.6)]
    before = detect_machine(gpus=gpus)
    assert (before.is_measured, before.fragmentation) == (False, 0.1)
    fit = find_fit(LLAMA_70B, ONE, QLORA, before)
    measured_bytes = round(1.03 * fit.needed_bytes)
    share = fit.find_fragmentation(measured_bytes)
    assert share is not None
    keep_measured(GPU, share)
    keep_measured(GPU, 0.01)
    after = detect_machine(gpus=gpus)
    assert after.is_measured
    again = find_fit(LLAMA_70B, ONE, replace(QLORA, checkpointing="full"), after)
    assert again.needed_bytes == pytest.approx(measured_bytes, rel=1e-6)
    assert not detect_machine(gpus=[("another", 79.6)]).is_measured
    # A small step tells nothing, and one far from its estimate does not rule out all others.
    assert fit.find_fragmentation(before.usable_bytes // 3) is None
    assert fit.find_fragmentation(10 * before.usable_bytes) == 1.0
    assert fit.find_fragmentation(before.usable_bytes // 2 + 1) == 0.01


@pytest.mark.parametrize("text", ["", "[]", '{"a": "b"}', "{"])
def test_a_damaged_file_is_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("MEMGUARD_CACHE", str(tmp_path))
    (tmp_path / "gpus.json").write_text(text)
    assert not detect_machine(gpus=[(GPU, 79.6)]).is_measured


@pytest.mark.parametrize("is_short", [False, True])
def test_a_run_stores_what_its_step_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    """With stand-ins for a GPU: the step needed 70 GiB, or more than the 78 that there were."""
    monkeypatch.setenv("MEMGUARD_CACHE", str(tmp_path))
    gpu = SimpleNamespace(name=GPU, total_memory=79.6 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * 2**30, gpu.total_memory))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 75 * 2**30)
    monkeypatch.setattr(memory, "read_run_model", lambda _: LLAMA_8B)
    runtime: Any = Runtime(device=torch.device("cuda"))
    config = memory.RunConfig.model_validate(
        {
            "name": "run",
            "model": {"path": "model"},
            "data": {"train": ["documents"], "seq_len": 4096},
            "train": {"batch_size": 2, "micro_batch_size": 2, "activation_checkpointing": "none"},
            "adapter": {"name": "lora", "r": 16},
        }
    )
    memory.keep_measured_memory(config, runtime, ONE, None if is_short else 70 * 2**30)
    stored = json.loads((tmp_path / "gpus.json").read_text())
    assert list(stored) == [GPU]
    machine = detect_machine(gpus=[(GPU, 79.6)])
    work = memory.describe_work(config, device_type="cuda")
    fit = find_fit(LLAMA_8B, ONE, work, machine)
    assert fit.fits != is_short
