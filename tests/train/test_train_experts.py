"""Whole runs of mixtures of experts: from mesh to mesh, audited on a mesh, with router losses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import RankPool
from run_examples import make_run, run_folder, train_checked, write_documents
from test_train_mesh import audit, check_scores, curve, stop_after

from memguard.config import RunConfig
from memguard.records import AuditReport, load_record
from memguard.records.run_files import find_weights_folder
from memguard.train.metrics import StepMetrics, read_metrics

pytestmark = pytest.mark.slow

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
    write_documents(folder / "documents.jsonl", 27)
    return folder


@pytest.mark.mesh
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_on_other_meshes(folder: Path, ranks: RankPool, family: str) -> None:
    audits = {"enabled": False}
    alone = make(folder, family, name=f"{family}-alone", audit=audits)
    train_checked(alone)
    name = f"{family}-moving"
    first = make(folder, family, name=name, parallel={"z": 2, "x": 2}, audit=audits)
    stop_after(ranks, first, 4, 2)
    second = make(folder, family, name=name, parallel={"y": 2}, audit=audits)
    stop_after(ranks, second, 2, 4)
    third = make(folder, family, name=name, audit=audits)
    train_checked(third)
    # fp32: sums in another order, magnified by steps of AdamW.
    np.testing.assert_allclose(curve(third), curve(alone), rtol=2e-4)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["x=2", "y=2"])
def test_a_mesh_gives_the_verdicts_of_one_process(folder: Path, ranks: RankPool, mesh: str) -> None:
    alone = make(folder, "gpt_oss", name=f"audited-{mesh[0]}")
    train_checked(alone)
    run = run_folder(alone)
    out = folder / f"audit {mesh}"
    ranks(audit, 2, run, out, mesh)
    expected = load_record(AuditReport, run / "audit" / "report.json")
    report = load_record(AuditReport, out / "report.json")
    assert report.verdict == expected.verdict
    check_scores(out / "records.parquet", run / "audit" / "records.parquet")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"output_router_logits": True}, "added to the training loss, times 0.001"),
        (
            {"model_type": "afmoe", "output_router_logits": True},
            "transformers has no load-balancing loss for this model",
        ),
    ],
    ids=["off", "on", "of another family"],
)
def test_a_load_balancing_loss_is_trained_or_named(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    changes: dict[str, Any],
    message: str | None,
) -> None:
    config = make_run(
        folder,
        name=f"router-{request.node.callspec.id}".replace(" ", "-"),
        model={"scratch": {"config": {**FAMILIES["mixtral"], **changes}, "vocab_size": 400}},
        train={"max_steps": 2},
    )
    train_checked(config)
    run = run_folder(config)
    printed = capsys.readouterr()
    if message is None:
        assert "load-balancing" not in printed.out + printed.err
    else:
        assert message in printed.out + printed.err
    lines = [line for line in read_metrics(run / "metrics.jsonl") if isinstance(line, StepMetrics)]
    values = [line.router_loss for line in lines]
    if message is not None and "added" in message:
        # 2 of 3 experts: 2 if they are chosen equally often, at most 3.
        assert all(value is not None and 1.9 < value < 3 for value in values)
    else:
        assert values == [None, None]
    exported = json.loads((find_weights_folder(run) / "config.json").read_text())
    assert exported.get("output_router_logits", False) == ("output_router_logits" in changes)
    assert (run / "audit" / "report.json").exists()
