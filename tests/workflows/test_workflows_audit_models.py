"""The models of an audit are hashed by all ranks together, with the sums of one process."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from ranks import RankPool
from tiny_adapters import save_adapter
from torch import distributed as dist

from memguard.config import AuditConfig, FormatConfig
from memguard.errors import ConfigError, MemguardError
from memguard.hf.identity import sum_model
from memguard.records.sealed import FileSum, sum_file
from memguard.runtime import Console, Runtime, shared_sums
from memguard.workflows.auditing.checks import ForeignModel
from memguard.workflows.auditing.models import choose_dtype, refuse_equal_base, sum_models
from memguard.workflows.auditing.trained_counts import TrainedCounts


def make_target(folder: Path) -> Any:
    return SimpleNamespace(
        model=str(folder / "adapter"),
        base=str(folder / "base"),
        reference="someone/on-the-hub",
        adapter_base=str(folder / "base"),
    )


def sum_and_note(folder: Path) -> tuple[Any, list[str]]:
    runtime = Runtime(
        device=torch.device("cpu"), rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    read: list[str] = []

    def note(path: Path) -> FileSum:
        read.append(str(path.relative_to(folder)))
        return sum_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_sums, "sum_file", note)
        try:
            return sum_models(make_target(folder), runtime), read
        except MemguardError as error:
            return type(error).__name__, read


def test_ranks_share_the_files_of_all_models(ranks: RankPool, tmp_path: Path) -> None:
    save_adapter(tmp_path)
    base = str(tmp_path / "base")
    expected = {
        str(tmp_path / "adapter"): sum_model(tmp_path / "adapter", base=base),
        base: sum_model(tmp_path / "base"),
    }
    assert sum_models(make_target(tmp_path), Runtime()) == expected
    results = ranks(sum_and_note, 2, tmp_path)
    assert [sums for sums, _ in results] == [expected] * 2
    assert all(read for _, read in results), "both have a share"
    # Once, although the adapter's base is also audited.
    read = sorted(name for _, names in results for name in names)
    assert read == sorted(
        ["adapter/adapter_config.json", "adapter/adapter_model.safetensors",
         "base/config.json", "base/model.safetensors"]
    )  # fmt: skip


def test_a_model_without_weights_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    save_adapter(tmp_path)
    (tmp_path / "base" / "model.safetensors").unlink()
    results = ranks(sum_and_note, 2, tmp_path)
    assert results == [("ModelError", []), ("OtherRankFailed", [])]


@pytest.mark.parametrize(
    ("base", "fields", "is_refused"),
    [
        ("copy", {}, True),
        ("org/model", {"model": "org/model"}, True),  # Not hashed.
        ("org/other", {"model": "org/model"}, False),
        ("other", {}, False),
        (None, {}, False),
        # A training that was counted and changed nothing: its base is what it says.
        (
            "copy",
            {"counts": TrainedCounts(num_repetitions={}, num_runs=0, num_unmatched=0, num_equal=0)},
            False,
        ),
    ],
)
def test_a_base_with_the_weights_of_the_model_is_refused(
    base: str | None, fields: dict[str, Any], is_refused: bool
) -> None:
    given = {"model": "model", "members": (), "nonmembers": (), "form": FormatConfig(), "seed": 0}
    source = ForeignModel(**{**given, "style": "options", "counts": None, **fields}, base=base)
    hashes = {"model": "a", "copy": "a", "other": "b", "org/model": None, "org/other": None}
    refused = pytest.raises(ConfigError, match="so nothing it produces counts")
    with refused if is_refused else nullcontext():
        refuse_equal_base(SimpleNamespace(source=source), hashes)


@pytest.mark.parametrize(
    ("wanted", "device", "capability", "peer_is_slow", "expected"),
    [
        ("auto", "cpu", (9, 0), False, "fp32"),
        ("auto", "cuda", (7, 5), False, "fp32"),
        ("auto", "cuda", (8, 0), False, "bf16"),
        ("auto", "cuda", (12, 0), False, "bf16"),
        ("auto", "cuda", (9, 0), True, "fp32"),
        ("fp32", "cuda", (9, 0), False, "fp32"),
        ("bf16", "cpu", (9, 0), True, "bf16"),
    ],
)
def test_the_dtype_is_that_in_which_every_rank_is_fast(
    wanted: Literal["auto", "fp32", "bf16"],
    device: str,
    capability: tuple[int, int],
    peer_is_slow: bool,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runtime = Runtime(device=torch.device(device))
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch.object(Runtime, "agree_any", lambda _, flag: flag or peer_is_slow),
    ):
        chosen = choose_dtype(AuditConfig(dtype=wanted), runtime, Console())
    assert chosen == AuditConfig(dtype=expected)
    # What nobody has set is said.
    shown = capsys.readouterr()
    is_said = "'audit.dtype' fp32 leaves fewer near-ties" in shown.out + shown.err
    assert is_said == (wanted == "auto" and expected == "bf16")
