"""Whether a run's blocks are compiled: every decision of `auto`, before the compiler is tried."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_examples import write_run
from published_sizes import LLAMA_8B

from memguard.config import RunConfig
from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.cost import estimate_step
from memguard.planner.fit import find_fit
from memguard.planner.machine import load_machine
from memguard.planner.step_settings import describe_work
from memguard.records.run_files import CompileChoice, load_compile_choice
from memguard.workflows.training import compile as compile_module
from memguard.workflows.training.compile import LONG_RUN_S, decide_compile, estimate_run_s

HOUR_S = 3600.0
KEPT_ON = CompileChoice(is_on=True, reason="the run is planned to take 2:00 h")
KEPT_OFF = CompileChoice(is_on=False, reason="the run began on a CPU")
LORA = {"adapter": {"name": "lora", "r": 4}}


def make(folder: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate_json(write_run(folder, **changes).read_text())


@pytest.mark.parametrize(
    ("changes", "device_type", "kept", "planned_s", "is_on", "reason"),
    [
        ({}, "cuda", None, HOUR_S, True, "planned to take 60:00 min"),
        ({}, "cuda", None, LONG_RUN_S, False, "planned to take 10:00 min, not more than ten"),
        ({}, "cuda", None, None, False, "cannot estimate"),
        ({}, "cpu", None, HOUR_S, False, "on a CPU"),
        (LORA, "cuda", None, HOUR_S, False, "only 'train.compile: true'"),
        ({"train": {"deterministic": True}}, "cuda", KEPT_ON, HOUR_S, False, "deterministic"),
        # A run that was resumed keeps its choice, on any device and with any number of ranks.
        ({}, "cuda", KEPT_OFF, HOUR_S, False, "on a CPU"),
        ({}, "cpu", KEPT_ON, 1.0, True, "planned to take 2:00 h"),
        # What is set is never overruled.
        ({"train": {"compile": True}}, "cpu", KEPT_OFF, 1.0, True, "'train.compile' is true"),
        ({**LORA, "train": {"compile": True}}, "cuda", None, 1.0, True, "is true"),
        ({"train": {"compile": False}}, "cuda", KEPT_ON, HOUR_S, False, "is false"),
        ({**LORA, "train": {"compile": False}}, "cuda", None, HOUR_S, False, "is false"),
    ],
    ids=[
        *("long", "short", "unknown", "cpu", "adapter", "deterministic", "kept off", "kept on"),
        *("true", "true with adapter", "false", "false with adapter"),
    ],
)
def test_decisions(
    tmp_path: Path,
    changes: dict[str, Any],
    device_type: str,
    kept: CompileChoice | None,
    planned_s: float | None,
    is_on: bool,
    reason: str,
) -> None:
    choice = decide_compile(
        make(tmp_path, **changes), device_type=device_type, kept=kept, estimate=lambda: planned_s
    )
    assert choice.is_on == is_on
    assert reason in choice.reason


def test_the_planned_time_is_that_of_a_step_without_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = load_machine("dgx-h100")
    monkeypatch.setattr(compile_module, "load_machine", lambda *_, **__: machine)
    settings = {"micro_batch_size": 1, "activation_checkpointing": "full", "precision": "bf16"}
    config = make(tmp_path, data={"seq_len": 4096}, train={"batch_size": 8, **settings})
    monkeypatch.setattr(compile_module, "read_run_model", lambda _: LLAMA_8B)
    shape = MeshShape(z=8)
    context: Any = SimpleNamespace(runtime=SimpleNamespace(world_size=8), mesh=None)
    context.mesh = SimpleNamespace(shape=shape)
    loader: Any = SimpleNamespace(num_steps=100)
    work = describe_work(config, device_type="cuda")
    assert not work.is_compiled
    fit = find_fit(LLAMA_8B, shape, work, machine)
    step = estimate_step(LLAMA_8B, shape, fit.settings, machine, seq_len=4096)
    assert estimate_run_s(config, loader, context) == pytest.approx(100 * step.step_s, rel=1e-12)
    limited = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 7})})
    assert estimate_run_s(limited, loader, context) == pytest.approx(7 * step.step_s, rel=1e-12)
    # The planner knows no more of other families than their parameters.
    monkeypatch.setattr(compile_module, "read_run_model", lambda _: SimpleNamespace())
    assert estimate_run_s(config, loader, context) is None


@pytest.mark.parametrize(
    "content",
    [None, b"", b"\xff", b"[]", b"{}", b'{"compile": 1}', b'{"compile": {"is_on": true}}'],
)
def test_a_damaged_record_counts_as_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "environment.json").write_bytes(content)
    assert load_compile_choice(tmp_path) is None
