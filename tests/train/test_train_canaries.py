"""Canaries through a whole run: fed as planned, and the manifest proves what received loss."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from run_examples import make_run, read_report, run_folder, train_checked, write_documents

from memguard.config import RunConfig
from memguard.records import ManifestEntry, load_manifest
from memguard.train.metrics import EndMetrics, StepMetrics, read_metrics
from memguard.train.trainer import Trainer

pytestmark = pytest.mark.slow

GOLDFISH = {"name": "goldfish", "k": 3, "context_width": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("canaries")
    # 180 are trained, 20 the control: nine canaries.
    write_documents(folder / "documents.jsonl", 200, words=20)
    return folder


def make(folder: Path, name: str, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {"audit": {"enabled": False}, **changes}
    return make_run(folder, name=name, **values)


def read_canaries(config: RunConfig) -> list[ManifestEntry]:
    manifest = load_manifest(run_folder(config) / "manifest.jsonl")
    others = [entry for entry in manifest if entry.role != "canary"]
    for entry in others:
        counted = (entry.num_supervised_tokens, entry.num_loss_tokens, entry.num_losses)
        assert counted == (None, None, None), "counted for canaries only"
    return manifest[len(others) :]


@pytest.fixture(scope="module")
def plain(folder: Path) -> RunConfig:
    data = {"canaries": {"count": 8}}
    return train_checked(make(folder, "plain", audit={"enabled": True}, data=data))


def test_every_token_of_every_winner_received_loss_each_time(plain: RunConfig) -> None:
    canaries = read_canaries(plain)
    assert len(canaries) == 8
    winners = [entry for entry in canaries if entry.bucket == "canary-in"]
    assert 0 < len(winners) < 8
    for entry in canaries:
        assert entry.num_supervised_tokens is not None
        # Six pairs with their spaces; EOS, which is supervised too, is not counted.
        assert 12 <= entry.num_supervised_tokens <= 18
        assert entry.num_repetitions == entry.planned_repetitions == 2 * (entry in winners)
        trained = entry.num_supervised_tokens if entry in winners else 0
        assert entry.num_loss_tokens == trained
        assert entry.num_losses == 2 * trained


def test_the_audit_of_documents_leaves_canaries_out(plain: RunConfig) -> None:
    report = read_report(plain)
    names = [b.bucket for b in report.tables.buckets if b.role in ("trained", "control")]
    rows = [row for row in report.tables.select("extraction", "verbatim") if row.bucket in names]
    assert sum(row.num_documents for row in rows if row.model == "trained") == 200
    assert report.data.num_documents == 200
    assert "canaries" not in report.data.sources
    assert report.dose_response, "the tally is complete"


@pytest.mark.parametrize("mode", ["hash", pytest.param("static", marks=pytest.mark.long), "random"])
def test_the_record_shows_what_a_mitigation_dropped(folder: Path, mode: str) -> None:
    config = make(
        folder,
        mode,
        mitigations=[{**GOLDFISH, "mode": mode}],
        data={"canaries": {"num_repetitions": 6}},
        train={"epochs": 1},
    )
    train_checked(config)
    winners = [entry for entry in read_canaries(config) if entry.bucket == "canary-in"]
    for entry in winners:
        assert entry.num_repetitions == 6
        assert entry.num_supervised_tokens is not None
        assert entry.num_loss_tokens is not None
        assert entry.num_losses is not None
        if mode == "random":
            # A token is dropped each of six times once in 729 times.
            assert entry.num_loss_tokens >= entry.num_supervised_tokens - 2
            assert entry.num_losses < 6 * entry.num_loss_tokens
        else:
            assert 0 < entry.num_loss_tokens < entry.num_supervised_tokens
            assert entry.num_losses == 6 * entry.num_loss_tokens
    # All labels of the run, beside which the canaries' are few.
    lines = read_metrics(Path(config.output_dir) / mode / "metrics.jsonl")
    end = next(line for line in lines if isinstance(line, EndMetrics))
    assert sum(entry.num_losses or 0 for entry in winners) < end.num_kept_tokens


def test_a_resumed_run_has_the_same_record(
    folder: Path, plain: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"data": {"canaries": {"count": 8}}, "train": {"checkpoint_every_steps": 4}}
    config = make(folder, "resumed", **settings)

    def stop(self: Trainer, line: StepMetrics, _: object) -> None:
        if line.step == 10:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_show", stop)
        with pytest.raises(KeyboardInterrupt):
            train_checked(config)
    train_checked(config)
    metrics = read_metrics(Path(config.output_dir) / "resumed" / "metrics.jsonl")
    assert sum(isinstance(line, StepMetrics) for line in metrics) > 10
    for one, other in zip(read_canaries(config), read_canaries(plain), strict=True):
        assert one == other


def test_a_run_cut_short_shows_who_was_reached(folder: Path) -> None:
    data = {"canaries": {"num_repetitions": 20}}
    config = make(folder, "short", data=data, train={"max_steps": 9, "batch_size": 2})
    train_checked(config)
    winners = [entry for entry in read_canaries(config) if entry.bucket == "canary-in"]
    counts = {entry.num_repetitions for entry in winners}
    assert max(count or 0 for count in counts) < 20
    for entry in winners:
        assert entry.num_supervised_tokens is not None
        assert entry.num_repetitions is not None
        assert entry.num_losses == entry.num_repetitions * entry.num_supervised_tokens
        assert entry.num_loss_tokens == entry.num_supervised_tokens * (entry.num_repetitions > 0)


def test_an_export_that_is_gone_is_written_again_without_a_step(folder: Path) -> None:
    config = make(folder, "export", train={"max_steps": 2})
    train_checked(config)
    run = Path(config.output_dir) / "export"
    before = (run / "metrics.jsonl").read_text()
    shutil.rmtree(run / "model")
    train_checked(config)
    assert (run / "model" / "config.json").exists()
    assert (run / "metrics.jsonl").read_text() == before
