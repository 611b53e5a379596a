"""Whole runs with audits inside: they change nothing by themselves, and a budget is kept."""

from pathlib import Path
from typing import Any

import pytest
from ranks import RankPool
from run_examples import (
    Killed,
    assert_same_weights,
    copy_run,
    kill_after,
    make_run,
    read_lines,
    read_losses,
    read_report,
    run_folder,
    stop_after,
    train_checked,
    write_documents,
)

from memguard.config import RunConfig
from memguard.data.loader import Batch
from memguard.errors import ConfigError, RecordError
from memguard.model.causal_lm import CausalLM
from memguard.records import ResultRow, WatchedLine
from memguard.runtime import detect_runtime
from memguard.train.metrics import EndMetrics, StepMetrics
from memguard.train.prefetch import Prefetcher
from memguard.train.trainer import Trainer
from memguard.workflows.auditing.checks import AuditArguments, check_audit
from memguard.workflows.auditing.resources import open_resources
from memguard.workflows.auditing.target import plan_run

pytestmark = pytest.mark.slow

LIMIT = 0.1
TIGHTEN = {"limit": LIMIT, "action": "tighten"}
STOP = {"limit": LIMIT, "action": "stop"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budgets")
    write_documents(folder / "documents.jsonl", 40, words=14)
    return folder


def make(
    folder: Path,
    name: str,
    budget: dict[str, Any] | None,
    *,
    audit_at_end: bool = True,
    **train: Any,
) -> RunConfig:
    return make_run(
        folder,
        name=name,
        # Often enough to be learnt by heart, beside others that are not.
        data={
            "study": {"num_repetitions": [0, 100], "documents_per_bucket": 10},
            "background": ["remainder"],
            "heldout_documents": 5,
            "canaries": {"count": 0},
        },
        optim={"lr": 1e-2},
        train={"epochs": 1, "audit_every_steps": 10, "checkpoint_every_steps": None, **train},
        audit={"enabled": audit_at_end, "dtype": "fp32"},
        budget=budget,
    )


def read_audits(config: RunConfig) -> list[WatchedLine]:
    return read_lines(config, WatchedLine)


def read_end(config: RunConfig) -> EndMetrics:
    (end,) = read_lines(config, EndMetrics)
    return end


def row_of(line: WatchedLine, metric: str) -> ResultRow:
    """Return a rate of the only trained bucket."""
    (bucket,) = line.trained
    (row,) = (row for row in line.results if (row.metric, row.bucket) == (metric, bucket))
    return row


def share_learnt(line: WatchedLine) -> float:
    share = row_of(line, "learned").value
    assert share is not None
    return share


@pytest.fixture(scope="module")
def watched(folder: Path) -> RunConfig:
    return train_checked(make(folder, "watched", None))


@pytest.fixture(scope="module")
def tightened(folder: Path) -> RunConfig:
    return train_checked(make(folder, "tightened", TIGHTEN, audit_at_end=False))


@pytest.fixture(scope="module")
def stopped(folder: Path) -> RunConfig:
    return train_checked(make(folder, "stopped", STOP))


def test_looking_changes_nothing(folder: Path, watched: RunConfig) -> None:
    config = make(folder, "unwatched", None, audit_at_end=False, audit_every_steps=None)
    stop_after(23, config)
    # To the bit, after three audits of the other one.
    assert read_losses(config) == read_losses(watched)[:23]
    assert not read_audits(config)


def test_the_last_audit_is_the_one_of_the_report(watched: RunConfig) -> None:
    audits = read_audits(watched)
    assert [audit.step for audit in audits[:3]] == [0, 10, 20]
    assert share_learnt(audits[-1]) > 0.5
    report = read_report(watched)
    rows = [row for row in audits[-1].results if "verbatim" in row.metric]
    assert len(rows) == 2 * len(report.tables.buckets)
    for row in rows:
        final = report.tables.find("extraction", row.metric, row.bucket)
        assert final is not None
        assert (row.num_documents, row.num_matched) == (final.num_documents, final.num_matched)
    assert report.training is not None
    assert report.training.watched == [audit.to_step() for audit in audits]
    watched_rows = [row for row in report.tables.results if row.step is not None]
    assert watched_rows == [row for audit in audits for row in audit.results]
    assert "During training" in (run_folder(watched) / "audit" / "report.html").read_text()


def test_a_tightened_run_ends_within_its_limit(tightened: RunConfig, watched: RunConfig) -> None:
    assert share_learnt(read_audits(watched)[-1]) > LIMIT
    last = read_audits(tightened)[-1]
    assert share_learnt(last) <= LIMIT
    assert last.num_tightened[last.trained[0]] > 0
    end = read_end(tightened)
    assert end.step == read_end(watched).step
    assert end.num_kept_tokens < end.num_supervised_tokens
    assert end.stopped_by is None


def test_a_near_verbatim_budget_that_would_gather_for_each_token_is_refused_before_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []

    def fits(self: CausalLM, *, reserved_bytes: int = 0) -> bool:
        reserved.append(reserved_bytes)
        return False

    monkeypatch.setattr(CausalLM, "fits_gathered", fits)
    config = make(folder, "gathers", TIGHTEN | {"metric": "near_verbatim"}, audit_at_end=False)
    with pytest.raises(ConfigError, match=r"'budget\.metric' near_verbatim generates text"):
        train_checked(config)
    # Gradients and moments of all weights come later.
    assert reserved[0] >= 12 * 1000
    assert not (run_folder(config) / "metrics.jsonl").exists()


def test_an_attacker_is_told_that_more_was_dropped(
    tightened: RunConfig, watched: RunConfig
) -> None:
    found = []
    for config in (tightened, watched):
        planned = plan_run(check_audit(AuditArguments(run=run_folder(config))))
        context = open_resources(*planned, config.audit, detect_runtime(), lambda *_: None)
        found.append(context.num_tightened)
    last = read_audits(tightened)[-1]
    assert found == [sum(last.num_tightened.values()), 0]
    assert found[0] > 0


def test_a_stopped_run_keeps_the_last_weights_within_the_limit(
    stopped: RunConfig, watched: RunConfig
) -> None:
    audits, end = read_audits(stopped), read_end(stopped)
    assert (end.stopped_by, end.kept_by) == ("budget", "budget")
    assert audits[-1].over_limit == ["x100"]
    assert end.step == audits[-2].step
    report = read_report(stopped)
    assert report.training is not None
    assert (report.training.num_steps, report.training.stopped_by) == (end.step, "budget")
    # The audit at the end asks the same documents of the weights that were kept.
    near = report.tables.find("extraction", "near_verbatim", *audits[-2].trained)
    assert near is not None
    assert near.num_matched == row_of(audits[-2], "near_verbatim").num_matched
    # Until then it was the plain run.
    before = [line for line in read_audits(watched) if line.step <= end.step]
    assert [line.results for line in before] == [line.results for line in audits[:-1]]


class NothingAhead(Prefetcher):
    """Builds each batch when it is taken."""

    def start(self, step: int) -> None:
        """Start nothing."""

    def peek(self) -> Batch | None:
        """Return none: nothing was started."""
        return None

    def take(self, step: int) -> Batch:
        """Build the batch now."""
        return self._build(step)


def build_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer._timed_step

    def timed_step(self: Trainer) -> StepMetrics:
        # Nothing was ahead, so the labels of this step were not sent in the one before.
        self._labels = None
        return original(self)

    monkeypatch.setattr("memguard.train.trainer.Prefetcher", NothingAhead)
    monkeypatch.setattr(Trainer, "_timed_step", timed_step)


@pytest.mark.parametrize(
    "budget", [TIGHTEN, pytest.param(STOP, marks=pytest.mark.long)], ids=["tighten", "stop"]
)
def test_an_interrupted_run_decides_the_same(
    folder: Path,
    tightened: RunConfig,
    stopped: RunConfig,
    budget: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"interrupted-{budget['action']}"
    config = make(folder, name, budget, audit_at_end=False, keep_checkpoints=1)
    whole = tightened if budget is TIGHTEN else stopped
    # After the first documents have gone up, and between two audits.
    step = read_end(stopped).step + 3
    with monkeypatch.context() as patch:
        # Batches that were built ahead in the other run must have the labels after its audits.
        build_nothing_ahead(patch)
        stop_after(step, config)
    train_checked(config)
    assert_same_weights(config, whole)
    assert read_end(config).step == read_end(whole).step


@pytest.mark.long
def test_a_run_killed_before_its_first_checkpoint_begins_again(
    folder: Path, tightened: RunConfig
) -> None:
    config = make(folder, "killed-early", TIGHTEN, audit_at_end=False)
    kill_after(13, config)
    assert [audit.step for audit in read_audits(config)] == [0, 10]
    train_checked(config)
    assert_same_weights(config, tightened)
    audits = [audit.model_copy(update={"audit_s": 0}) for audit in read_audits(config)]
    assert audits == [each.model_copy(update={"audit_s": 0}) for each in read_audits(tightened)]


def test_a_stopped_run_killed_before_its_export_keeps_its_weights(
    folder: Path, stopped: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = read_end(stopped)
    # One checkpoint between the last audit within the limit and the one beyond it.
    newer = end.step + 5
    config = make(folder, "killed-late", STOP, checkpoint_every_steps=newer)

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("memguard.workflows.training.train.save_manifest", die)
        with pytest.raises(Killed):
            train_checked(config)
    assert (run_folder(config) / "checkpoints" / f"step-{newer:08d}").is_dir()
    train_checked(config)
    assert read_end(config).step == end.step
    assert [each.step for each in read_audits(config)] == [
        each.step for each in read_audits(stopped)
    ]
    assert_same_weights(config, stopped)
    report = read_report(config)
    assert report.dose_response, "the tally is that of the weights"


def test_a_run_goes_on_only_with_what_it_has_asked_so_far(folder: Path) -> None:
    config = make(folder, "other", TIGHTEN)
    stop_after(12, config)
    for audit in ({"continuation_tokens": 6}, {"prefix_tokens": 6}):
        other = config.model_copy(update={"audit": config.audit.model_copy(update=audit)})
        with pytest.raises(ConfigError, match=r"'audit.suite' and the lengths in 'audit'"):
            train_checked(other)


def test_a_run_that_has_ended_can_be_audited_otherwise(stopped: RunConfig, tmp_path: Path) -> None:
    changed = {"audit": stopped.audit.model_copy(update={"continuation_tokens": 6})}
    config = copy_run(stopped, tmp_path).model_copy(update=changed)
    train_checked(config)
    assert_same_weights(config, stopped)
    report = read_report(config)
    assert report.method.continuation_tokens == 6


@pytest.mark.parametrize(
    "keep", [1, pytest.param(5, marks=pytest.mark.long)], ids=["the only one", "others before it"]
)
def test_a_stopped_run_whose_weights_are_damaged_says_so(
    folder: Path, stopped: RunConfig, keep: int
) -> None:
    config = make(folder, f"damaged-{keep}", STOP, keep_checkpoints=keep)
    last_good = read_end(stopped).step
    stop_after(last_good + 3, config)
    checkpoints = run_folder(config) / "checkpoints"
    assert len(list(checkpoints.iterdir())) == max(keep, 2)
    (checkpoints / f"step-{last_good:08d}" / "manifest.json").unlink()
    with pytest.raises(RecordError, match=rf"weights of step {last_good}, .* delete that folder"):
        train_checked(config)
    assert not (run_folder(config) / "model").exists()


def test_a_limit_broken_before_the_first_audit_is_told(folder: Path, stopped: RunConfig) -> None:
    late = read_end(stopped).step + 30
    config = make(folder, "late", STOP, audit_every_steps=late)
    with pytest.raises(ConfigError, match=rf"'train.audit_every_steps' must be below {late}"):
        train_checked(config)
    assert not (run_folder(config) / "model").exists()


@pytest.mark.parametrize("budget", [TIGHTEN, STOP], ids=["tighten", "stop"])
def test_a_budget_that_would_act_after_the_last_step_is_refused(
    folder: Path, budget: dict[str, Any]
) -> None:
    config = make(folder, "too-late", budget, audit_every_steps=100)
    with pytest.raises(ConfigError, match=r"is 100, and the run has 100 steps: .* Lower it"):
        train_checked(config)
    assert not (run_folder(config) / "metrics.jsonl").exists()


@pytest.mark.mesh
def test_ranks_decide_alike(folder: Path, ranks: RankPool, tightened: RunConfig) -> None:
    config = make(folder, "sharded", TIGHTEN).model_copy(
        update={"parallel": tightened.parallel.model_copy(update={"z": 2, "x": 2, "data": 1})}
    )
    ranks(train_checked, 4, config)
    ours, theirs = read_audits(config), read_audits(tightened)
    assert [audit.step for audit in ours] == [audit.step for audit in theirs]
    # Sums in another order: a token more or less, seldom a document.
    for one, other in zip(ours, theirs, strict=True):
        assert share_learnt(one) == pytest.approx(share_learnt(other), abs=0.2)
    assert share_learnt(ours[-1]) <= LIMIT


def test_a_budget_needs_audits(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"set 'train.audit_every_steps'"):
        make(folder, "blind", TIGHTEN, audit_every_steps=None)
