"""What the starting model said: measured once, the same on every mesh, kept for a resumed run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from ranks import RankPool
from run_examples import (
    copy_run,
    make_run,
    read_lines,
    run_folder,
    stop_after,
    train_checked,
    write_documents,
)

from memguard.config import RunConfig
from memguard.data.corpus import load_corpus
from memguard.data.packing import split_points
from memguard.records.folders import RunFiles
from memguard.train import base_nll
from memguard.train.metrics import StepMetrics

pytestmark = pytest.mark.slow

NGRAMS = [{"name": "ngram_penalty", "n": 4, "margin": 0.3, "weight": 2.0}]
SEQ_LEN = 64


def make(folder: Path, name: str, **changes: Any) -> RunConfig:
    return make_run(
        folder,
        name=name,
        **{
            "mitigations": NGRAMS,
            "data": {"train": str(folder / "documents.jsonl"), "seq_len": SEQ_LEN},
            "optim": {"lr": 1e-2},
            "train": {"epochs": 2, "checkpoint_every_steps": 5},
            "audit": {"enabled": False},
            **changes,
        },
    )


def read_reference(config: RunConfig) -> NDArray[np.float32]:
    reference: NDArray[np.float32] = np.load(run_folder(config) / "reference_nll.npy")
    return reference


def read_steps(config: RunConfig) -> list[StepMetrics]:
    return read_lines(config, StepMetrics)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    # Up to two pieces each.
    write_documents(folder / "documents.jsonl", 40, words=30)
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path) -> RunConfig:
    return train_checked(make(folder, "finished"))


@pytest.mark.quick
def test_it_equals_transformers_on_each_piece(folder: Path, finished: RunConfig) -> None:
    start = make(folder, "start", train={"max_steps": 1}, optim={"lr": 1e-30}, mitigations=[])
    train_checked(start)
    model = transformers.AutoModelForCausalLM.from_pretrained(run_folder(start) / "model")
    corpus, reference = load_corpus(run_folder(finished)), read_reference(finished)
    assert reference.dtype == np.float32
    assert len(reference) == len(corpus.input_ids)
    num_cut = 0
    for index, entry in enumerate(corpus.manifest):
        ids = torch.tensor(corpus.document(index).input_ids.astype(np.int64))
        ours = reference[corpus.offsets[index] : corpus.offsets[index + 1]]
        if not entry.planned_repetitions:
            assert np.isnan(ours).all(), "never trained, never asked"
            continue
        begin = 0
        ends = split_points(len(ids), SEQ_LEN)
        num_cut += len(ends) > 1
        for end in ends:
            piece = ids[None, begin:end]
            with torch.no_grad():
                logits = model(piece).logits[0, :-1]
            theirs = torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="none")
            assert np.isnan(ours[begin])
            # fp32, rows packed otherwise.
            np.testing.assert_allclose(ours[begin + 1 : end], theirs, atol=1e-4)
            begin = end
    assert num_cut > 3


def test_steps_tell_how_much_is_beyond_the_margin(finished: RunConfig) -> None:
    shares = [line.penalised_share for line in read_steps(finished)]
    assert None not in shares
    # Nothing is gained before the first step; what is learnt later is.
    assert shares[0] == 0
    assert (shares[-1] or 0) > 0.3


def test_what_is_gained_stays_nearer_to_the_margin(folder: Path, finished: RunConfig) -> None:
    config = make(folder, "plain", mitigations=[])
    train_checked(config)
    assert not (run_folder(config) / "reference_nll.npy").exists()
    plain, held = read_steps(config), read_steps(finished)
    assert {line.penalised_share for line in plain} == {None}
    assert held[0].loss == plain[0].loss
    # Its loss counts the penalty as well.
    assert (held[-1].loss or 0) > (plain[-1].loss or 0) + 0.3


@pytest.fixture(scope="module")
def stopped(folder: Path) -> RunConfig:
    config = make(folder, "stopped")
    stop_after(7, config)
    return config


def test_a_resumed_run_reads_it(stopped: RunConfig, finished: RunConfig, tmp_path: Path) -> None:
    config = copy_run(stopped, tmp_path)
    path = run_folder(config) / "reference_nll.npy"
    before = path.stat().st_mtime_ns
    train_checked(config)
    assert path.stat().st_mtime_ns == before
    assert [line.loss for line in read_steps(config)] == [
        line.loss for line in read_steps(finished)
    ]


@pytest.mark.parametrize("damage", ["gone", "other-bytes", "other-record", "other-run"])
def test_where_it_is_damaged_it_is_measured_again(
    stopped: RunConfig, finished: RunConfig, tmp_path: Path, damage: str
) -> None:
    config = copy_run(stopped, tmp_path)
    path = run_folder(config) / "reference_nll.npy"
    record = path.with_suffix(".json")
    if damage == "gone":
        path.unlink()
    elif damage == "other-bytes":
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    elif damage == "other-record":
        record.write_text(json.dumps(json.loads(record.read_text()) | {"run_key": "another"}))
    else:
        base_nll._save(np.zeros_like(np.load(path)), "another", run_folder(config))
    if damage != "other-run":
        assert RunFiles(run_folder(config)).find_damage("losses")
    train_checked(config)
    assert RunFiles(run_folder(config)).find_damage("losses") == []
    np.testing.assert_array_equal(read_reference(config), read_reference(finished))
    assert [line.loss for line in read_steps(config)] == [
        line.loss for line in read_steps(finished)
    ]


@pytest.mark.parametrize(
    "mesh", [{"x": 2}, pytest.param({"z": 2, "x": 2}, marks=pytest.mark.mesh)], ids=str
)
def test_every_mesh_measures_the_same(
    folder: Path, finished: RunConfig, ranks: RankPool, mesh: dict[str, int]
) -> None:
    name = "-".join(["sharded", *mesh])
    config = make(folder, name, parallel=mesh)
    ranks(stop_after, 2 ** len(mesh), 7, config)
    # fp32: sums in another order.
    np.testing.assert_allclose(read_reference(config), read_reference(finished), atol=1e-4)
    # It goes on on one process, with what the mesh has measured.
    train_checked(make(folder, name))
    ours, theirs = ([line.loss for line in read_steps(each)] for each in (config, finished))
    np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=2e-3)
