"""Forgetting, whole: a model recites, is made to forget a part, and keeps the rest."""

from pathlib import Path
from typing import Any

import pytest
from run_examples import make_run, read_report, run_folder, train_checked, write_documents

from memguard.config import RunConfig
from memguard.records import AuditReport, BucketRow, ResultRow
from memguard.runtime import Console
from memguard.train.metrics import HeldoutMetrics, read_metrics
from memguard.workflows.training.checks import check_run
from memguard.workflows.training.dry_run import dry_run

pytestmark = pytest.mark.slow

_NUM_FORGOTTEN = 8
WAYS: list[dict[str, Any]] = [{"name": "npo", "beta": 0.02}, {"name": "gradient_ascent"}]


def bucket_of(report: AuditReport, role: str) -> BucketRow:
    (bucket,) = (bucket for bucket in report.tables.buckets if bucket.role == role)
    return bucket


def verbatim_of(report: AuditReport, bucket: BucketRow, model: str = "trained") -> ResultRow:
    row = report.tables.find("extraction", "verbatim", bucket.bucket, model=model)
    assert row is not None
    assert row.num_matched is not None
    return row


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents to train on, the first of which are to be forgotten, and others never trained."""
    folder = tmp_path_factory.mktemp("forget")
    source = write_documents(folder / "documents.jsonl", 50, words=14)
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join(lines[:30]))
    (folder / "forget.jsonl").write_text("".join(lines[:_NUM_FORGOTTEN]))
    (folder / "control.jsonl").write_text("".join(lines[30:40]))
    (folder / "heldout.jsonl").write_text("".join(lines[40:]))
    return folder


def make(folder: Path, name: str, *, epochs: int, lr: float, **changes: Any) -> RunConfig:
    data = {
        "control": str(folder / "control.jsonl"),
        "heldout": str(folder / "heldout.jsonl"),
        "canaries": {"count": 0},
        **changes.pop("data", {}),
    }
    train = {"epochs": epochs, "batch_size": 4}
    return make_run(folder, name=name, data=data, train=train, optim={"lr": lr}, **changes)


@pytest.fixture(scope="module")
def reciting(folder: Path) -> RunConfig:
    """A model that knows its documents by heart."""
    return train_checked(make(folder, "reciting", epochs=100, lr=1e-2, audit={"enabled": False}))


@pytest.mark.parametrize(
    "way",
    [WAYS[0], pytest.param(WAYS[1], marks=pytest.mark.long)],
    ids=lambda way: str(way["name"]),
)
def test_it_forgets_and_keeps_the_rest(
    folder: Path, reciting: RunConfig, way: dict[str, Any]
) -> None:
    config = make(
        folder,
        str(way["name"]),
        model={"path": str(run_folder(reciting) / "model"), "scratch": None},
        data={"forget": str(folder / "forget.jsonl"), "forget_repetitions": 6},
        mitigations=[way],
        epochs=5,
        lr=3e-3,
    )
    train_checked(config)
    report = read_report(config)
    forgotten, kept = bucket_of(report, "forget"), bucket_of(report, "trained")
    assert (forgotten.bucket, forgotten.num_repetitions) == ("forget", 6)
    assert forgotten.num_documents == _NUM_FORGOTTEN
    assert kept.num_documents == 30 - _NUM_FORGOTTEN
    # It was recited, and is not any more; what is retained still is.
    assert verbatim_of(report, forgotten, "base").num_matched == _NUM_FORGOTTEN
    assert verbatim_of(report, forgotten).num_matched <= 1
    assert verbatim_of(report, kept).num_matched >= 0.9 * kept.num_documents
    assert verbatim_of(report, bucket_of(report, "control")).num_matched == 0
    # What was never learnt gets worse by a tenth at most.
    lines = read_metrics(run_folder(config) / "metrics.jsonl")
    before, after = (line.nll for line in lines if isinstance(line, HeldoutMetrics))
    assert after < 1.1 * before
    # It stands beside what was trained, not among it.
    assert report.verdict.bucket == "trained"
    assert {trend.doses for trend in report.tables.tests} == {(0, 5)}
    (told,) = (banner.text for banner in report.banners if "was to be forgotten" in banner.text)
    assert f"of {_NUM_FORGOTTEN} of its documents" in told
    assert f"{_NUM_FORGOTTEN} from the model before training" in told
    assert "to be forgotten" in (run_folder(config) / "audit" / "report.html").read_text()


def test_what_a_run_cut_short_has_not_reached_is_asked_for_too(
    folder: Path, reciting: RunConfig
) -> None:
    whole = make(
        folder,
        "cut",
        model={"path": str(run_folder(reciting) / "model"), "scratch": None},
        data={"forget": str(folder / "forget.jsonl")},
        mitigations=[{"name": "gradient_ascent"}],
        audit={"min_documents": 1},
        epochs=1,
        lr=1e-4,
    )
    train = whole.train.model_copy(update={"batch_size": 3, "max_steps": 1})
    config = whole.model_copy(update={"train": train})
    train_checked(config)
    report = read_report(config)
    size = {bucket.bucket: bucket.num_documents for bucket in report.tables.buckets}
    reached, missed = size["forget, 1 times"], size["forget, 0 times"]
    assert reached + missed == _NUM_FORGOTTEN
    assert reached > 0
    assert missed > 0


def test_a_dry_run_shows_what_is_to_be_forgotten(folder: Path, reciting: RunConfig) -> None:
    config = make(
        folder,
        "foreseen",
        model={"path": str(run_folder(reciting) / "model"), "scratch": None},
        data={"forget": str(folder / "forget.jsonl"), "forget_repetitions": 6},
        mitigations=[{"name": "npo"}],
        epochs=5,
        lr=1e-4,
    )
    record = dry_run(check_run(config), Console()).record
    by_role = {bucket.role: bucket for bucket in record.buckets}
    assert list(by_role) == ["control", "trained", "forget", "heldout"]
    forgotten = by_role["forget"]
    assert (forgotten.num_documents, forgotten.num_audited) == (_NUM_FORGOTTEN, _NUM_FORGOTTEN)
    assert forgotten.planned_repetitions == 6
    assert record.documents.num_left_out == _NUM_FORGOTTEN
