"""`auto` in a run's settings: what it becomes on a CPU and on made-up GPUs."""

from pathlib import Path
from typing import Any

import pytest
from cli_examples import write_run
from published_sizes import LLAMA_8B

from memguard.config import RunConfig
from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.fit import find_fit
from memguard.planner.machine import Machine, load_machine
from memguard.planner.step_settings import describe_work
from memguard.workflows.training.memory import resolve_auto

NEEDS_BATCH: dict[str, Any] = {"data": {"seq_len": 4096}, "train": {"batch_size": 64}}


def make(folder: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate_json(write_run(folder, **changes).read_text())


def resolve(
    config: RunConfig,
    *,
    sizes: ModelSizes | None = LLAMA_8B,
    machine: Machine | None = None,
    num_gpus: int = 8,
) -> RunConfig:
    return resolve_auto(
        config,
        device_type="cuda",
        sizes=sizes,
        machine=machine or load_machine("dgx-h100"),
        world_size=num_gpus,
    )


def test_on_a_cpu_auto_is_all_rows_in_fp32(tmp_path: Path) -> None:
    config = make(tmp_path)
    assert config.train.micro_batch_size == config.train.precision == "auto"
    resolved = resolve_auto(config, device_type="cpu", sizes=None, machine=None, world_size=4)
    train = resolved.train
    assert (train.micro_batch_size, train.checkpointing, train.precision) == (None, "none", "fp32")
    assert train.count_micro_rows(6) == 6
    assert resolved.model_copy(update={"train": config.train}) == config


def test_unresolved_settings_are_a_mistake_of_the_program(tmp_path: Path) -> None:
    train = make(tmp_path).train
    with pytest.raises(AssertionError, match="auto is resolved by"):
        _ = train.checkpointing
    with pytest.raises(AssertionError, match="auto is resolved by"):
        train.count_micro_rows(6)


def test_on_gpus_the_planner_chooses(tmp_path: Path) -> None:
    config = make(tmp_path, **NEEDS_BATCH)
    train = resolve(config).train
    assert train.precision == "bf16"
    work = describe_work(config, device_type="cuda")
    assert (work.micro_batch_size, work.checkpointing, work.compute_bytes) == (None, None, 2)
    machine = load_machine("dgx-h100")
    fit = find_fit(LLAMA_8B, MeshShape(z=8), work, machine)
    assert fit.fits
    assert train.micro_batch_size == fit.micro_batch_size
    assert train.checkpointing == fit.settings.checkpointing
    # The next larger micro-batch of these 8 rows does not fit, or there is none.
    assert train.micro_batch_size is not None
    larger = describe_work(
        make(
            tmp_path,
            data={"seq_len": 4096},
            train={
                "batch_size": 64,
                "micro_batch_size": 2 * train.count_micro_rows(8),
                "activation_checkpointing": train.checkpointing,
            },
        ),
        device_type="cuda",
    )
    is_whole = train.count_micro_rows(8) == 8
    assert is_whole or not find_fit(LLAMA_8B, MeshShape(z=8), larger, machine).fits


def test_less_memory_means_smaller_micro_batches_or_more_recomputation(tmp_path: Path) -> None:
    config = make(tmp_path, **NEEDS_BATCH)
    machine = load_machine("dgx-h100")
    rows = []
    for memory_gib in (200, 80, 30):
        small = machine.model_copy(update={"memory_gib": memory_gib})
        train = resolve(config, machine=small).train
        fixed = make(tmp_path, **NEEDS_BATCH).model_copy(update={"train": train})
        work = describe_work(fixed, device_type="cuda")
        assert find_fit(LLAMA_8B, MeshShape(z=8), work, small).fits, memory_gib
        rows.append((train.checkpointing, train.micro_batch_size))
    assert len(set(rows)) == 3


def test_what_the_user_sets_stays(tmp_path: Path) -> None:
    given = {"micro_batch_size": 2, "activation_checkpointing": "full", "precision": "fp32"}
    config = make(tmp_path, data={"seq_len": 4096}, train={"batch_size": 64, **given})
    assert resolve(config).train == config.train
    config = make(
        tmp_path,
        data={"seq_len": 4096},
        train={"batch_size": 64, "micro_batch_size": None, "activation_checkpointing": "full"},
    )
    assert resolve(config).train.micro_batch_size is None
    config = make(tmp_path, data={"seq_len": 4096}, train={"batch_size": 64, "micro_batch_size": 8})
    assert resolve(config).train.micro_batch_size == 8


def test_a_model_of_unknown_memory_starts_with_one_row(tmp_path: Path) -> None:
    train = resolve(make(tmp_path, **NEEDS_BATCH), sizes=None).train
    assert (train.micro_batch_size, train.checkpointing) == (1, "full")


def test_dp_sgd_has_no_micro_batches(tmp_path: Path) -> None:
    config = make(tmp_path, mitigations=[{"name": "dp_sgd"}], **NEEDS_BATCH)
    assert describe_work(config, device_type="cuda").micro_batch_size == 1
    resolved = resolve(config, num_gpus=1)
    assert resolved.train.micro_batch_size is None
    # The run's own config.yaml must be valid again.
    assert RunConfig.model_validate(resolved.model_dump(mode="json")) == resolved
    with pytest.raises(
        ValueError, match=r"dp_sgd cannot be combined with 'train.micro_batch_size'"
    ):
        make(tmp_path, mitigations=[{"name": "dp_sgd"}], train={"micro_batch_size": 4})


def test_the_mesh_is_checked_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must divide 'train\.batch_size', 64 rows"):
        resolve(make(tmp_path, **NEEDS_BATCH), num_gpus=7)
