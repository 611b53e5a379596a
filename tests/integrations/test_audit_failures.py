"""An audit that fails, or runs on what it does not expect, does not end training.

On several processes, an error on one of them ends the audit on all: none waits in a collective.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import kind_runs
import kinds
import numpy as np
import pytest
import torch
import transformers
from kind_runs import Trained
from kinds import Training
from ranks import RankPool
from torch import distributed
from transformers.models.llama.modeling_llama import LlamaMLP

from memguard import api
from memguard.audit.scoring import ModelScorer
from memguard.errors import ConfigError
from memguard.records import AuditReport, load_record

# Trainers and peft warn of what these tests mean: other processes, no GPU, tied weights.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
_LONG = pytest.mark.long
_ERROR = "the test's error"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kinds.save_base(tmp_path_factory.mktemp("failures") / "base")


@dataclass(frozen=True, kw_only=True)
class Logged:
    """A training without audits and the same with them, and what was logged as an error."""

    plain: Trained
    audited: Trained
    errors: list[str]


@contextmanager
def collect_errors() -> Iterator[list[str]]:
    """Yield a list that has, at the end, the lines of memguard on audits that failed."""
    errors: list[str] = []
    with contextlib.redirect_stderr(io.StringIO()) as written:
        yield errors
    lines = written.getvalue().splitlines()
    errors += [line for line in lines if "memguard" in line and "failed" in line]
    assert "Traceback" not in written.getvalue()


@contextmanager
def fail_once(where: str) -> Iterator[None]:
    """Let the first audit fail while it scores, or inside a decoder layer."""
    owner: Any = ModelScorer if where == "scorer" else LlamaMLP
    name = "_score_batch" if where == "scorer" else "forward"
    original = getattr(owner, name)
    is_left = True

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_left
        # In training mode it is that of a step.
        if is_left and not getattr(self, "training", False):
            is_left = False
            raise RuntimeError(_ERROR)
        return original(self, *args, **kwargs)

    with mock.patch.object(owner, name, fail):
        yield
    assert not is_left, "it failed"


def train_failing(training: Training, where: str) -> Logged:
    """Train with an audit every two steps, of which the first fails on the last rank."""
    plain = kind_runs.train(replace(training, output=training.output / "plain"))
    is_last = not distributed.is_initialized() or distributed.get_rank() == 1
    with collect_errors() as errors, fail_once(where) if is_last else nullcontext():
        audited = kind_runs.train(training, {"every_steps": 2})
    return Logged(plain=plain, audited=audited, errors=errors)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("ddp", "scorer"),
        ("fsdp2", "layer"),
        pytest.param("plain", "scorer", marks=_LONG),
        pytest.param("lora", "layer", marks=_LONG),
        pytest.param("fsdp2", "scorer", marks=_LONG),
        pytest.param("ddp", "layer", marks=_LONG),
        pytest.param("ddp_lora", "scorer", marks=_LONG),
        pytest.param("fsdp2_lora", "scorer", marks=_LONG),
        pytest.param("fsdp2_lora", "layer", marks=_LONG),
        pytest.param("nf4_lora", "scorer", marks=_LONG),
    ],
)
def test_an_error_ends_the_audit_and_not_the_training(
    kind: str, where: str, base: Path, tmp_path: Path, ranks: RankPool
) -> None:
    training = Training(kind=kind, base=base, output=tmp_path, steps=4)
    results = kinds.call(ranks, kind, train_failing, training, where)
    errors = [error for result in results for error in result.errors]
    assert all("audit of step 2" in error for error in errors)
    assert max(len(result.errors) for result in results) == 1, "one line"
    assert any("RuntimeError at test_audit_failures.py" in error for error in errors), errors
    for result in results:
        assert result.audited.num_steps == 4
        assert result.audited.losses == result.plain.losses, "bit by bit"
        assert result.audited.weights == result.plain.weights
        assert result.audited.num_sharded == result.plain.num_sharded
    # The next audit is whole.
    (folder,) = results[0].audited.folders
    assert folder.name == "step-4"
    assert (folder / "report.html").exists()


def train_with(
    training: Training, audit: Mapping[str, Any], change: Any = None
) -> tuple[Any, list[str]]:
    """Train with one audit at the end; return the callback and what was logged as an error."""
    callback = kind_runs.make_callback(training, audit)
    trainer = kinds.open_trainer(training, [callback])
    if change is not None:
        change(trainer)
    with collect_errors() as errors:
        trainer.train()
    assert trainer.state.global_step == training.steps
    return callback, errors


def test_a_document_longer_than_the_model_is_audited_in_part(base: Path, tmp_path: Path) -> None:
    longest = " ".join(kinds.draw_documents(5))
    max_tokens = 64

    def change(trainer: Any) -> None:
        row = trainer.processing_class(longest).input_ids
        assert len(row) > max_tokens == trainer.model.config.max_position_embeddings
        kept = row[:max_tokens]
        trainer.train_dataset = [*trainer.train_dataset, {"input_ids": kept, "labels": kept}]

    # Each row is a batch, since rows of two lengths are none.
    training = Training(kind="plain", base=base, output=tmp_path, steps=7, batch=1)
    callback, errors = train_with(training, {"members": [*kinds.members(), longest]}, change)
    assert errors == []
    (folder,) = callback.folders
    scores = api.AuditResult(folder=folder, report=callback.reports[0]).to_pandas()
    (row,) = scores.query(f"num_tokens > {max_tokens}").itertuples()
    assert row.bucket.startswith("members")
    assert row.prefix_tokens + row.continuation_tokens <= max_tokens
    assert len(scores) == 13


def test_a_tokenizer_without_padding_is_enough(base: Path, tmp_path: Path) -> None:
    def change(trainer: Any) -> None:
        trainer.processing_class.pad_token = None
        trainer.data_collator = transformers.default_data_collator

    training = Training(kind="plain", base=base, output=tmp_path, steps=2)
    callback, errors = train_with(training, {}, change)
    assert errors == []
    (report,) = callback.reports
    assert report.verdict.level


def test_of_two_adapters_the_active_one_is_audited(base: Path, tmp_path: Path) -> None:
    def change(trainer: Any) -> None:
        second = trainer.model.peft_config["default"]
        trainer.model.add_adapter("second", second)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B.second" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        trainer.model.set_adapter(active)

    logprobs = {}
    for active in ("default", "second"):
        training = Training(kind="lora", base=base, output=tmp_path / active, steps=2)
        callback, errors = train_with(training, {"base": "adapter-off"}, change)
        assert errors == []
        (report,) = callback.reports
        assert f"adapter '{active}'" in report.model.name
        (line,) = report.tables.select("extraction", "logprob", model="trained", against=None)[:1]
        logprobs[active] = line.value
    assert logprobs["default"] != logprobs["second"]


def test_steps_beyond_the_end_leave_the_audit_at_the_end(base: Path, tmp_path: Path) -> None:
    training = Training(kind="plain", base=base, output=tmp_path, steps=2)
    callback, errors = train_with(training, {"every_steps": 100})
    assert errors == []
    assert [folder.name for folder in callback.folders] == ["step-2"]
    report = load_record(AuditReport, callback.folders[0] / "report.json")
    assert report == callback.reports[0]


@pytest.mark.parametrize("every_steps", [pytest.param(2, marks=_LONG), None])
def test_the_report_of_the_best_model_is_that_of_its_step(
    every_steps: int | None, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end the Trainer loads another checkpoint than that of the last step."""
    training = Training(kind="plain", base=base, output=tmp_path, steps=4, evaluates=True)
    callback = kind_runs.make_callback(training, {"every_steps": every_steps})
    trainer = kinds.open_trainer(training, [callback])
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-2", "the other texts are never as likely again"
    names = [folder.name for folder in callback.folders]
    assert names == (["step-2"] if every_steps is None else ["step-2", "step-4"])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.endswith("step-2/report.html"), "also where a later step was audited too"
    report = callback.reports[0]
    saved = api.audit(
        model=best, members=kinds.members(), nonmembers=kinds.nonmembers(), **kind_runs.SETTINGS
    )
    scores = [
        each.to_pandas().sort_values("id")["extraction.logprob"]
        for each in (api.AuditResult(folder=callback.folders[0], report=report), saved)
    ]
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-4)  # fp32, the same weights


def train_beside_a_base(training: Training) -> None:
    """Train with a folder as the base, which is refused before the first step."""
    with pytest.raises(ConfigError, match="'base': each process would load"):
        kind_runs.train(training, {"base": training.base})


def test_a_base_that_each_process_would_load_is_refused_before_training(
    base: Path, tmp_path: Path, ranks: RankPool
) -> None:
    training = Training(kind="fsdp2", base=base, output=tmp_path, steps=2)
    kinds.call(ranks, "fsdp2", train_beside_a_base, training)
