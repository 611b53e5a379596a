"""What a run gives to its process group and its mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_adapters import save_adapter
from tiny_families import build

from memguard.config import ParallelConfig, RunConfig
from memguard.errors import ConfigError
from memguard.parallel.model_sizes import ModelSizes
from memguard.runtime import Runtime
from memguard.workflows.common import setup
from memguard.workflows.training.checks import check_processes

SIZES = ModelSizes(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    is_tied=False,
)


def test_the_time_limit_of_a_collective_is_that_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the group of all ranks and of the groups of each axis."""
    runtime, limits = Runtime(world_size=2), []

    @contextmanager
    def start(timeout: timedelta) -> Iterator[Runtime]:
        limits.append(timeout)
        yield runtime

    def build(*_: Any, timeout: timedelta) -> None:
        limits.append(timeout)

    monkeypatch.setattr(setup, "detect_runtime", lambda: runtime)
    monkeypatch.setattr(setup, "start_runtime", start)
    monkeypatch.setattr(setup, "build_mesh", build)
    with setup.open_distributed(ParallelConfig(x=2, timeout_minutes=7), SIZES):
        pass
    assert limits == [timedelta(minutes=7)] * 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_frozen_base_is_stored_in_the_precision_of_the_run(
    precision: str, tmp_path: Path
) -> None:
    build("llama").save_pretrained(tmp_path)
    config = RunConfig.model_validate(
        {
            "name": "x",
            "model": {"path": str(tmp_path)},
            "data": {"train": "a.jsonl"},
            "adapter": {"name": "lora", "r": 2, "target_modules": ["q_proj"]},
            "train": {"precision": precision, "activation_checkpointing": "none"},
        }
    )
    context = setup.DistributedContext(runtime=Runtime(), mesh=None)
    model = setup.start_model(config, None, context).lm.model
    stored = torch.bfloat16 if precision == "bf16" else torch.float32
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert parameter.dtype == (torch.float32 if "lora_" in name else stored), name


def test_an_adapter_of_an_adapter_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    values = {"name": "x", "model": {"path": str(tmp_path / "adapter")}, "data": {"train": "a"}}
    config = RunConfig.model_validate({**values, "adapter": {"name": "lora"}})
    with pytest.raises(ConfigError, match="must not be an adapter if 'adapter' is set"):
        check_processes(config, 1)
