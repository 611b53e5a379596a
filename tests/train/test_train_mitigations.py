"""Each mitigation through a whole run: it trains, and does what it says."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_examples import make_run, read_lines, run_folder, train_checked, write_documents

from memguard.config import RunConfig
from memguard.records import AuditReport, load_manifest, load_record
from memguard.train.metrics import EndMetrics, StepMetrics

pytestmark = pytest.mark.slow

LOSSES: list[Any] = [
    {"name": "label_smoothing"},
    pytest.param({"name": "focal"}, marks=pytest.mark.long),
    pytest.param({"name": "confidence_penalty"}, marks=pytest.mark.long),
    pytest.param({"name": "loss_clipping", "floor": 5.3}, marks=pytest.mark.long),
    {"name": "flooding", "level": 5.3},
    {"name": "neftune"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mitigations")
    write_documents(folder / "documents.jsonl", 60, words=20)
    return folder


def train(folder: Path, name: str, mitigations: list[dict[str, Any]], **optim: Any) -> RunConfig:
    return train_checked(
        make_run(
            folder,
            name=name,
            mitigations=mitigations,
            audit={"enabled": False},
            optim=optim,
            train={"epochs": 6, "log_every_steps": 1},
        )
    )


def read_losses(config: RunConfig) -> list[float]:
    losses = [line.loss for line in read_lines(config, StepMetrics)]
    return [loss for loss in losses if loss is not None]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[float]:
    return read_losses(train(folder, "plain", []))


@pytest.mark.parametrize("setting", LOSSES, ids=lambda each: str(each["name"]))
def test_losses_are_other_ones_and_are_learned(
    folder: Path, plain: list[float], setting: dict[str, Any]
) -> None:
    losses = read_losses(train(folder, str(setting["name"]), [setting]))
    assert len(losses) == len(plain) > 10
    # The same rows and weights; only what they count is another. Clipping and flooding begin where
    # losses fall to their level.
    if setting["name"] not in ("loss_clipping", "flooding"):
        assert losses[0] != plain[0]
    assert losses[-1] != pytest.approx(plain[-1], rel=1e-6)
    assert losses[-1] < losses[0]


def test_a_mask_of_letters_drops_its_share(folder: Path) -> None:
    config = train(folder, "letters", [{"name": "goldfish", "k": 3, "normalise": "text"}])
    (end,) = read_lines(config, EndMetrics)
    # A few thousand labels, in texts of which every one is seen six times.
    assert end.num_kept_tokens / end.num_supervised_tokens == pytest.approx(2 / 3, abs=0.05)


def test_dropout_drops_its_share(folder: Path) -> None:
    config = train(folder, "dropout", [{"name": "token_dropout", "rate": 0.25}])
    (end,) = read_lines(config, EndMetrics)
    share = end.num_kept_tokens / end.num_supervised_tokens
    # Three standard deviations of a binomial share.
    assert abs(share - 0.75) < 3 * (0.1875 / end.num_supervised_tokens) ** 0.5


def test_copies_are_not_fed_and_are_told(tmp_path: Path) -> None:
    pytest.importorskip("rensa", reason="of the extra 'dedup'")
    source = write_documents(tmp_path / "documents.jsonl", 60, words=40)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    copies = ({"id": f"copy-{n}", "text": f"{rows[n]['text']} again"} for n in range(20))
    source.write_text("".join(f"{json.dumps(row)}\n" for row in (*rows, *copies)))
    config = make_run(tmp_path, mitigations=[{"name": "deduplicate"}])
    train_checked(config)
    folder = run_folder(config)
    manifest = load_manifest(folder / "manifest.jsonl")
    removed = [entry for entry in manifest if entry.role == "removed"]
    assert {entry.num_repetitions for entry in removed} == {0}
    assert 10 < len(removed) <= 20
    assert all(entry.id.startswith("copy-") for entry in removed)
    report = load_record(AuditReport, folder / "audit" / "report.json")
    assert report.training is not None
    assert report.training.num_removed == len(removed)
    assert {bucket.bucket for bucket in report.tables.buckets} == {"trained", "control"}
    page = (folder / "audit" / "report.html").read_text(encoding="utf-8")
    assert "Copies removed" in page
