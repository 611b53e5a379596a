"""Whole runs of mixtures of experts: from mesh to mesh, and audited on a mesh."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import RankPool
from run_examples import make_run, write_documents
from test_train_mesh import audit, check_scores, curve, stop_after

from memguard.config import RunConfig
from memguard.records import AuditReport, load_record
from memguard.workflows.train import train_run

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Ranks along z of 2 do not divide them.
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**_COMMON, "model_type": "mixtral"},
    "gpt_oss": {**_COMMON, "model_type": "gpt_oss", "head_dim": 8},
}


def make(folder: Path, family: str, **changes: Any) -> RunConfig:
    """Return a run with checkpoints after every second step."""
    return make_run(
        folder,
        model={"scratch": {"config": FAMILIES[family], "vocab_size": 400}},
        train={"checkpoint_every_steps": 2, "keep_checkpoints": 5},
        **changes,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_documents(folder / "documents.jsonl", 24)
    return folder


@pytest.mark.mesh
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_on_other_meshes(folder: Path, ranks: RankPool, family: str) -> None:
    audits = {"enabled": False}
    alone = make(folder, family, name=f"{family}-alone", audit=audits)
    train_run(alone)
    name = f"{family}-moving"
    first = make(folder, family, name=name, parallel={"z": 2, "x": 2}, audit=audits)
    stop_after(ranks, first, 4, 2)
    second = make(folder, family, name=name, parallel={"y": 2}, audit=audits)
    stop_after(ranks, second, 2, 4)
    third = make(folder, family, name=name, audit=audits)
    train_run(third)
    # fp32: sums in another order, magnified by steps of AdamW.
    np.testing.assert_allclose(curve(third), curve(alone), rtol=2e-4)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["x=2", "y=2"])
def test_a_mesh_gives_the_verdicts_of_one_process(folder: Path, ranks: RankPool, mesh: str) -> None:
    alone = make(folder, "gpt_oss", name=f"audited-{mesh[0]}")
    train_run(alone)
    run = Path(alone.output_dir) / alone.name
    out = folder / f"audit {mesh}"
    ranks(audit, 2, run, out, mesh)
    expected = load_record(AuditReport, run / "audit" / "report.json")
    report = load_record(AuditReport, out / "report.json")
    assert report.verdict == expected.verdict
    check_scores(out / "records.parquet", run / "audit" / "records.parquet")


def test_a_loss_that_is_not_trained_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for changes in ({"output_router_logits": True}, {}):
        scratch = {"config": {**FAMILIES["mixtral"], **changes}, "vocab_size": 400}
        config = make_run(
            folder,
            name=f"router-{len(changes)}",
            model={"scratch": scratch},
            train={"max_steps": 1},
            audit={"enabled": False},
        )
        train_run(config)
        message = "the load-balancing loss of its experts is not part of the training loss"
        printed = capsys.readouterr()
        assert (message in printed.out + printed.err) == bool(changes)
