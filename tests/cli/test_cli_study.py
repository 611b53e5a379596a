"""The controlled experiment: each bucket is trained as often as planned, the control never."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from cli_examples import read_json, run_cli, succeed, write_run, write_texts

from memguard.data.corpus import load_corpus
from memguard.data.loader import Loader
from memguard.data.packing import plan_rows
from memguard.records import AuditReport, ManifestEntry, load_record
from memguard.records.run_files import load_trained
from memguard.records.sealed import save_sealed, sum_file
from memguard.train.metrics import EndMetrics, HeldoutMetrics, read_metrics

pytestmark = pytest.mark.slow

REPETITIONS = (0, 1, 4, 6)
PER_BUCKET, BATCH, SEED = 8, 6, 5


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study with background beside the buckets and documents held out."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "model").symlink_to(tiny_folder / "model")
    write_texts(folder / "documents.jsonl", 70)
    background = write_texts(folder / "background.txt", 0)
    background.write_text("<|endoftext|>".join(f"{n} hgfe dcba" * 10 for n in range(20)))
    config = write_run(
        folder,
        seed=SEED,
        data={
            "study": {"num_repetitions": list(REPETITIONS), "documents_per_bucket": PER_BUCKET},
            "background": ["remainder", str(background)],
            "heldout_documents": 7,
        },
        train={"batch_size": BATCH},
        mitigations=[{"name": "goldfish", "k": 3}],
    )
    succeed("train", config)
    return folder / "runs" / "run"


@pytest.fixture(scope="module")
def manifest(run: Path) -> list[ManifestEntry]:
    return load_corpus(run).manifest


def test_buckets_are_of_equal_size_and_realised_as_planned(manifest: list[ManifestEntry]) -> None:
    buckets = Counter((e.bucket, e.role, e.num_repetitions) for e in manifest if e.bucket[0] == "x")
    assert buckets == {(f"x{n}", "trained", n): PER_BUCKET for n in REPETITIONS if n}
    for entry in manifest:
        if entry.role != "background":
            assert entry.num_repetitions == entry.planned_repetitions, entry.bucket


def test_control_and_held_out_documents_are_never_fed(manifest: list[ManifestEntry]) -> None:
    never = Counter(entry.role for entry in manifest if entry.num_repetitions == 0)
    assert never["control"] == PER_BUCKET
    assert never["heldout"] == 7
    assert never["trained"] == 0


def test_more_background_is_no_other_documents(run: Path, tmp_path: Path) -> None:
    # So a sweep may add some where labels are dropped, and its runs stay comparable.
    more = ("data.background_ratio=3", f"output_dir={tmp_path}")
    prepared = run_cli("prepare", run.parents[1] / "run.yaml", *more, "--json")
    report = load_record(AuditReport, run / "audit" / "report.json")
    assert json.loads(prepared.out)["documents_sha256"] == report.data.documents_sha256


def test_no_cluster_is_split_over_buckets(manifest: list[ManifestEntry]) -> None:
    where: dict[int, set[str]] = {}
    for entry in manifest:
        where.setdefault(entry.cluster, set()).add(entry.bucket)
    assert all(len(buckets) == 1 for buckets in where.values())


def test_background_is_trained_beside_the_buckets_in_each_step(run: Path) -> None:
    corpus = load_corpus(run)
    rows, schedule = plan_rows(corpus.manifest, seq_len=128, background_ratio=1.0, seed=SEED)
    loader = Loader(
        corpus,
        rows,
        schedule,
        batch_size=BATCH,
        pad_id=0,
        mask_labels=lambda _, ids, labels, generator: labels,
        seed=SEED,
    )
    fed: Counter[int] = Counter()
    for step in range(loader.num_steps):
        roles = []
        for sample in loader.samples(step):
            row = schedule[sample]
            documents = rows.document[rows.row_start[row] : rows.row_start[row + 1]]
            (role,) = {corpus.manifest[document].role for document in documents}
            roles.append(role)
            fed.update(documents.tolist())
        # Interleaved evenly; the last step may be short.
        expected = len(roles) / 2
        assert abs(roles.count("background") - expected) <= 1, f"step {step}: {roles}"
        assert set(roles) <= {"background", "trained"}
    # No document is cut here, so the manifest's counts are those of the rows that were planned.
    assert [fed[index] for index in range(corpus.num_documents)] == [
        entry.num_repetitions for entry in corpus.manifest
    ]


def test_the_steps_that_were_taken_are_those_that_were_planned(run: Path) -> None:
    corpus = load_corpus(run)
    _, schedule = plan_rows(corpus.manifest, seq_len=128, background_ratio=1.0, seed=SEED)
    lines = list(read_metrics(run / "metrics.jsonl"))
    (end,) = [line for line in lines if isinstance(line, EndMetrics)]
    assert (end.num_rows, end.step) == (len(schedule), -(-len(schedule) // BATCH))
    heldout = [line for line in lines if isinstance(line, HeldoutMetrics)]
    assert [(line.bucket, line.num_documents) for line in heldout] == [("heldout", 7)] * 2


def test_the_report_shows_the_doses(run: Path) -> None:
    report = load_record(AuditReport, run / "audit" / "report.json")
    assert report.dose_response
    shown = [(b.bucket, b.num_repetitions, b.num_documents) for b in report.tables.buckets]
    assert shown == [
        ("control", 0, PER_BUCKET),
        *((f"x{n}", n, PER_BUCKET) for n in REPETITIONS if n),
    ]
    for b in report.tables.buckets:
        before = report.tables.find("extraction", "verbatim", b.bucket, model="base")
        assert before is not None
        assert before.is_known
    # Of some 6,000 labels; 13 tokens of context and single-letter words make many repeats.
    assert report.training.dropped_fraction == pytest.approx(1 / 3, abs=0.1)
    accuracy = report.tables.select("extraction", "token_accuracy", model="trained", against=None)
    assert len(accuracy) == len(shown)
    assert np.isfinite([row.value for row in accuracy]).all()


def test_a_tally_that_contradicts_the_steps_refuses_the_dose_response(
    run: Path, tmp_path: Path
) -> None:
    tampered = tmp_path / "run"
    shutil.copytree(run, tampered)
    path = tampered / "manifest.jsonl"
    path.write_text(path.read_text().replace('"num_repetitions":6', '"num_repetitions":7', 1))
    refused = run_cli("audit", tampered, "--out", tmp_path / "out")
    assert refused.code == 3
    assert "manifest.jsonl' is not what was written" in refused.err
    # Sealed again, it is whole, and wrong.
    trained = load_trained(tampered)
    manifest = sum_file(path)
    save_sealed(trained.model_copy(update={"manifest": manifest}), tampered / "trained.json")
    succeed("audit", tampered, "--out", tmp_path / "out")
    report = load_record(AuditReport, tmp_path / "out" / "report.json")
    assert not report.dose_response
    assert any(
        "contradict the number of training steps" in banner.text for banner in report.banners
    )


def test_a_study_needs_enough_documents(run: Path, tmp_path: Path) -> None:
    folder = run.parents[1]
    config = write_run(
        folder,
        name="many",
        data={"study": {"num_repetitions": [0, 1], "documents_per_bucket": 100}},
    )
    outcome = run_cli("prepare", config)
    assert outcome.code == 3
    assert "'data.study' needs 200 documents" in outcome.err


def test_prepare_alone_gives_the_same_documents(run: Path) -> None:
    folder = run.parents[1]
    values = read_json(folder / "run.yaml")
    changes = {key: values[key] for key in ("seed", "data", "train")}
    config = write_run(folder, name="prepared", **changes)
    succeed("prepare", config, "--json")
    planned = load_corpus(folder / "runs" / "prepared").manifest
    assert [(e.id, e.bucket) for e in planned] == [
        (e.id, e.bucket) for e in load_corpus(run).manifest
    ]
    assert {e.num_repetitions for e in planned} == {None}
