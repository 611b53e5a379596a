"""Which step's weights a run ends with, and when held-out loss ends it."""

from pathlib import Path
from typing import Any

import pytest
from ranks import RankPool
from run_examples import (
    assert_same_weights,
    kill_after,
    make_run,
    read_lines,
    read_report,
    run_folder,
    train_checked,
    write_documents,
)

from memguard.config import RunConfig
from memguard.data.corpus import load_corpus
from memguard.hf.load import load_model
from memguard.model.checks import build_causal_lm
from memguard.records.run_files import list_checkpoints
from memguard.runtime import Runtime
from memguard.train.heldout import HeldoutLoss
from memguard.train.metrics import EndMetrics, HeldoutMetrics
from memguard.workflows.compare import render_folder

BEST = {"heldout_every_steps": 3, "keep": "best", "export": "best"}


def losses_of(**nll_by_step: float) -> HeldoutLoss:
    nothing: Any = None
    losses = {int(step[1:]): nll for step, nll in nll_by_step.items()}
    return HeldoutLoss(lm=nothing, corpus=nothing, seq_len=8, runtime=Runtime(), nll_by_step=losses)


def test_the_base_model_is_no_step_to_keep() -> None:
    losses = losses_of(s0=1.0, s5=3.0, s10=2.0, s15=2.0, s20=4.0)
    assert (losses.best_step, losses.num_worse) == (10, 2)
    assert losses_of(s0=1.0).best_step is None


@pytest.mark.parametrize(
    ("export", "last_good_step", "kept"),
    [
        ("last", None, (20, "last")),
        ("best", None, (10, "heldout")),
        ("last", 15, (15, "budget")),
        ("best", 15, (10, "heldout")),
        # What was best came after the last weights within the limit.
        ("best", 5, (5, "budget")),
    ],
)
def test_one_table_decides(export: Any, last_good_step: int | None, kept: Any) -> None:
    losses = losses_of(s0=4.0, s5=3.0, s10=2.0, s15=2.5, s20=3.0)
    assert losses.choose_step(20, export=export, last_good_step=last_good_step) == kept


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    write_documents(tmp_path / "documents.jsonl", 30, words=20)
    return tmp_path


def make(folder: Path, name: str, *, audit: bool = False, **train: Any) -> RunConfig:
    return make_run(
        folder,
        name=name,
        # Few documents, many times: a model that overfits.
        data={"heldout_documents": 8},
        optim={"lr": 2e-2},
        train={"epochs": 10, "batch_size": 4, "checkpoint_every_steps": None, **train},
        audit={"enabled": audit},
    )


def read_heldout(config: RunConfig) -> dict[int, float]:
    return {line.step: line.nll for line in read_lines(config, HeldoutMetrics)}


def measure_exported(config: RunConfig, step: int) -> float:
    """Measure the held-out loss of a run's model on one process, in fp32 as in training."""
    heldout = HeldoutLoss(
        lm=build_causal_lm(load_model(str(run_folder(config) / "model"))),
        corpus=load_corpus(run_folder(config)),
        seq_len=128,
        runtime=Runtime(),
    )
    measured = heldout.measure(step)
    assert measured is not None
    return measured.nll


def test_the_best_step_is_exported_and_audited(documents: Path) -> None:
    config = train_checked(make(documents, "best", audit=True, stop_after_worse=2, **BEST))
    (end,) = read_lines(config, EndMetrics)
    losses = read_heldout(config)
    assert end.step == min((step for step in losses if step), key=lambda step: losses[step])
    assert (end.last_step, end.stopped_by, end.kept_by) == (end.step + 6, "heldout", "heldout")
    training = read_report(config).training
    assert training is not None
    assert (training.num_steps, training.heldout_nll) == (end.step, losses[end.step])
    assert measure_exported(config, end.step) == pytest.approx(losses[end.step], abs=1e-6)
    page = (run_folder(config) / "audit" / "report.html").read_text()
    assert f"The model is that of step {end.step} of {end.last_step} taken" in page
    names = [path.name for path in list_checkpoints(run_folder(config) / "checkpoints")]
    assert f"step-{end.step:08d}" in names


@pytest.mark.slow
def test_a_run_that_ends_early_saves_the_step_that_it_exports(documents: Path) -> None:
    settings = {**BEST, "export": "last", "stop_after_worse": 1}
    config = train_checked(make(documents, "early", **settings))
    (end,) = read_lines(config, EndMetrics)
    assert (end.step, end.stopped_by, end.kept_by) == (end.last_step, "heldout", "last")
    names = [path.name for path in list_checkpoints(run_folder(config) / "checkpoints")]
    assert names[-1] == f"step-{end.step:08d}"


@pytest.mark.slow
def test_measuring_changes_no_weight_and_a_killed_run_decides_the_same(
    documents: Path,
) -> None:
    plain = train_checked(make(documents, "plain", max_steps=12))
    every = train_checked(make(documents, "every", max_steps=12, heldout_every_steps=1))
    assert_same_weights(plain, every)
    whole = train_checked(make(documents, "whole", checkpoint_every_steps=4, **BEST))
    killed = make(documents, "killed", checkpoint_every_steps=4, **BEST)
    kill_after(10, killed)
    train_checked(killed)
    assert_same_weights(killed, whole)
    assert read_heldout(killed) == read_heldout(whole)


@pytest.mark.mesh
def test_a_mesh_measures_and_keeps_the_same(documents: Path, ranks: RankPool) -> None:
    def on_mesh_of_4(name: str, **train: Any) -> RunConfig:
        config = make(documents, name, **train)
        parallel = config.parallel.model_copy(update={"x": 2, "z": 2, "data": 1})
        return config.model_copy(update={"parallel": parallel})

    on_mesh = on_mesh_of_4("mesh", **BEST)
    plain = on_mesh_of_4("plain-mesh", max_steps=12)
    every = on_mesh_of_4("every-mesh", max_steps=12, heldout_every_steps=1)
    for config in (on_mesh, plain, every):
        ranks(train_checked, 4, config)
    assert_same_weights(plain, every)
    (end,), losses = read_lines(on_mesh, EndMetrics), read_heldout(on_mesh)
    assert (end.step, end.kept_by) == (min(losses, key=lambda step: losses[step]), "heldout")
    assert measure_exported(on_mesh, end.step) == pytest.approx(losses[end.step], abs=1e-6)


@pytest.mark.slow
def test_a_run_that_was_not_audited_has_a_page(documents: Path) -> None:
    config = make(documents, "page", heldout_every_steps=1, max_steps=3)
    kill_after(2, config)
    # As `memguard report` beside a run that is still trained.
    page = render_folder(run_folder(config)).read_text()
    assert "Training is at step 1. What the model memorized was not measured" in page
    assert "exported" not in page
    train_checked(config)
    page = render_folder(run_folder(config)).read_text()
    assert "Training has ended." in page
    assert "exported: 3" in page
