"""Whole runs on meshes: the same curve as one process, and on from one mesh to another."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from ranks import RankPool
from run_examples import make_run, read_lines, run_folder, train_checked, write_documents
from tiny_llama import TINY_LLAMA
from torch import distributed

from memguard.config import RunConfig
from memguard.data.documents import load_documents
from memguard.data.identity_key import load_identity_key
from memguard.data.tokenization import hmac_text
from memguard.errors import Interrupted
from memguard.records import AuditReport, load_record
from memguard.records.folders import RunFiles
from memguard.train.metrics import HeldoutMetrics, StepMetrics
from memguard.train.trainer import Trainer
from memguard.workflows.auditing.audit import audit as audit_checked
from memguard.workflows.auditing.checks import AuditArguments, check_audit

pytestmark = pytest.mark.slow

GOLDFISH = [{"name": "goldfish", "k": 3, "context_width": 3}]


def make(
    folder: Path, *, name: str, mesh: dict[str, int] | None = None, **changes: Any
) -> RunConfig:
    """Return a run of 6 steps, with checkpoints after 2, 4 and 6."""
    return make_run(
        folder,
        name=name,
        mitigations=GOLDFISH,
        parallel=mesh or {},
        train={"checkpoint_every_steps": 2, "keep_checkpoints": 5},
        **changes,
    )


def curve(config: RunConfig) -> list[float]:
    steps = read_lines(config, StepMetrics)
    assert [line.step for line in steps] == list(range(1, len(steps) + 1))
    losses = [line.loss for line in steps]
    assert None not in losses
    return [loss for loss in losses if loss is not None]


def heldout(config: RunConfig) -> list[float]:
    return [line.nll for line in read_lines(config, HeldoutMetrics)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_documents(folder / "documents.jsonl", 27)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunConfig:
    return train_checked(make(folder, name="alone"))


@pytest.fixture(scope="module")
def sharded(folder: Path, ranks: RankPool) -> RunConfig:
    config = make(folder, name="sharded", mesh={"z": 2, "x": 2})
    ranks(train_checked, 4, config)
    return config


def test_a_mesh_trains_the_curve_of_one_process(alone: RunConfig, sharded: RunConfig) -> None:
    # fp32: sums in another order, magnified by 6 steps of AdamW.
    np.testing.assert_allclose(curve(sharded), curve(alone), rtol=2e-4)
    np.testing.assert_allclose(heldout(sharded), heldout(alone), rtol=2e-4)


def test_a_mesh_leaves_what_one_process_leaves(alone: RunConfig, sharded: RunConfig) -> None:
    def files(config: RunConfig) -> set[str]:
        run = run_folder(config)
        found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
        return {name for name in found if not name.endswith(".distcp")}

    assert files(sharded) == files(alone)


def test_a_run_goes_on_on_any_mesh(folder: Path, alone: RunConfig, ranks: RankPool) -> None:
    first = make(folder, name="moving", mesh={"data": 2, "x": 2})
    stop_after(ranks, first, 4, 2)
    second = make(folder, name="moving", mesh={"y": 2})
    stop_after(ranks, second, 2, 4)
    third = make(folder, name="moving", audit={"enabled": False})
    train_checked(third)
    assert len(curve(third)) == 6
    np.testing.assert_allclose(curve(third), curve(alone), rtol=2e-4)


def test_ranks_agree_on_what_is_damaged(folder: Path, alone: RunConfig, ranks: RankPool) -> None:
    config = make(folder, name="damaged", mesh={"z": 2}, audit={"enabled": False})
    stop_after(ranks, config, 2, 5)
    run = run_folder(config)
    for file in (
        "prepared/input_ids.npy",
        "metrics.jsonl",
        "checkpoints/step-00000005/__1_0.distcp",
    ):
        content = bytearray((run / file).read_bytes())
        content[len(content) // 2] ^= 1
        (run / file).write_bytes(content)
    ranks(train_checked, 2, config)
    assert RunFiles(run).find_damage("trained") == RunFiles(run).find_damage("prepared") == []
    np.testing.assert_allclose(curve(config), curve(alone), rtol=2e-4)


@pytest.mark.mesh
def test_a_run_goes_on_on_eight_ranks(folder: Path, alone: RunConfig, ranks: RankPool) -> None:
    stop_after(ranks, make(folder, name="growing", mesh={"data": 2, "x": 2}), 4, 2)
    config = make(folder, name="growing", mesh={"z": 2, "y": 2, "x": 2})
    ranks(train_checked, 8, config, timeout_s=250)
    np.testing.assert_allclose(curve(config), curve(alone), rtol=2e-4)


def stop_after(ranks: RankPool, config: RunConfig, world_size: int, step: int) -> None:
    """Run to a checkpoint and end there, as a signal at that step would."""
    ranks(train_until, world_size, config, step)


def train_until(config: RunConfig, step: int) -> None:
    original = Trainer._timed_step

    def timed_step(self: Trainer) -> StepMetrics:
        # One rank only is told, as where a terminal's Ctrl-C reaches some of the processes.
        if self.totals.step + 1 == step and self.runtime.rank == 1:
            self.stop_request.signal_number = signal.SIGTERM
        return original(self)

    # For this process only, which ends with the test.
    Trainer._timed_step = timed_step  # type: ignore[method-assign]
    with pytest.raises(Interrupted) as stopped:
        train_checked(config)
    assert stopped.value.exit_code == 143


def audit(run: Path, out: Path, mesh: str) -> None:
    settings = AuditArguments.read_settings([f"parallel.{axis}" for axis in mesh.split(",")])
    audit_checked(check_audit(AuditArguments(run=run, out=out, settings=settings)))


@pytest.mark.parametrize("mesh", ["z=2,x=2", pytest.param("z=2,y=2", marks=pytest.mark.mesh)])
def test_every_mesh_audits_alike(
    folder: Path, alone: RunConfig, ranks: RankPool, mesh: str
) -> None:
    run = run_folder(alone)
    expected = load_record(AuditReport, run / "audit" / "report.json")
    out = folder / f"audit {mesh}"
    ranks(audit, 4, run, out, mesh)
    report = load_record(AuditReport, out / "report.json")
    assert report.verdict == expected.verdict
    assert report.model == expected.model
    check_scores(out / "records.parquet", run / "audit" / "records.parquet")


def _audit_as_rank(folder: Path, out: Path) -> None:
    if distributed.get_rank():
        # Nothing can be read or made there: only rank 0 has the project's key.
        os.environ["XDG_CONFIG_HOME"] = "/proc/nowhere"
    settings = "audit.continuation_tokens=8 audit.min_documents=4 audit.cache=false parallel.z=2"
    arguments = AuditArguments(
        model=str(folder / "model"),
        members=(str(folder / "documents.jsonl"),),
        out=out,
        style="options",
        settings=AuditArguments.read_settings(settings.split()),
    )
    audit_checked(check_audit(arguments, writes=not distributed.get_rank()))


def test_only_the_first_rank_needs_the_identity_key(
    tiny_folder: Path, ranks: RankPool, session_key: Path, tmp_path: Path
) -> None:
    ranks(_audit_as_rank, 2, tiny_folder, tmp_path / "out")
    report = load_record(AuditReport, tmp_path / "out" / "report.json")
    identity = load_identity_key(session_key)
    assert report.data.identity_key == identity.fingerprint
    documents = load_documents(
        [str(tiny_folder / "documents.jsonl")], setting="x", cache_dir=tmp_path
    ).documents
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "records.parquet").to_pylist()
    assert {row["id"]: row["text_hmac"] for row in rows} == {
        document.id: hmac_text(identity.key, document) for document in documents
    }


_FUSED: dict[str, dict[str, Any]] = {
    "phi3": {**TINY_LLAMA, "model_type": "phi3", "pad_token_id": None},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "n_inner": 64,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
}


@pytest.mark.mesh
@pytest.mark.parametrize("family", _FUSED)
def test_layers_of_several_projections_go_on_and_are_audited_on_a_mesh(
    folder: Path, ranks: RankPool, family: str
) -> None:
    """From a mesh to one process, whose audit another mesh repeats, with a cache of keys."""
    model = {"scratch": {"config": _FUSED[family], "vocab_size": 400}}
    alone = make(folder, name=f"{family}-alone", model=model)
    train_checked(alone)
    config = make(folder, name=f"{family}-moving", mesh={"y": 2, "x": 2}, model=model)
    stop_after(ranks, config, 4, 2)
    train_checked(make(folder, name=f"{family}-moving", model=model, audit={"enabled": False}))
    np.testing.assert_allclose(curve(config), curve(alone), rtol=2e-4)
    run, out = run_folder(alone), folder / f"audit {family}"
    ranks(audit, 2, run, out, "x=2")
    expected = load_record(AuditReport, run / "audit" / "report.json")
    assert load_record(AuditReport, out / "report.json").verdict == expected.verdict
    check_scores(out / "records.parquet", run / "audit" / "records.parquet")


def check_scores(ours: Path, theirs: Path) -> None:
    """Every verdict is the same, every log-probability nearly so."""
    one, other = (pyarrow.parquet.read_table(path).to_pylist() for path in (ours, theirs))
    assert [row["id"] for row in one] == [row["id"] for row in other]
    for a, b in zip(one, other, strict=True):
        for key, value in b.items():
            if isinstance(value, float):
                # fp32 sums in another order, over some tokens.
                assert a[key] == pytest.approx(value, abs=1e-4), (a["id"], key)
            else:
                assert a[key] == value, (a["id"], key)
