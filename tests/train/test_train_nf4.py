"""A whole run on a base in NF4 that is shared over z: resumed, audited, merged."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from cli_examples import succeed
from loaded_forms import measure_form
from ranks import RankPool
from run_examples import make_run, run_folder, train_checked, write_documents
from test_train_adapters import make, read_adapters
from test_train_mesh import audit, check_scores, curve, heldout, stop_after

from memguard.config import RunConfig
from memguard.hf.merged_weights import open_merged
from memguard.records import AuditReport, load_record
from memguard.records.folders import RunFiles
from memguard.records.run_files import load_trained

_ADAPTER = {"name": "lora", "r": 4, "lora_alpha": 8, "use_dora": True, "quantization": "nf4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents and a base model; 44 weights in a row end within blocks."""
    folder = tmp_path_factory.mktemp("nf4")
    write_documents(folder / "documents.jsonl", 27)
    train_checked(make_run(folder, name="base", audit={"enabled": False}, train={"epochs": 1}))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunConfig:
    return train_checked(make(folder, name="alone", adapter=_ADAPTER))


@pytest.mark.long
def test_a_run_over_z_is_resumed_audited_and_merged(
    folder: Path, alone: RunConfig, ranks: RankPool
) -> None:
    config = make(folder, name="sharded", adapter=_ADAPTER, mesh={"z": 2})
    stop_after(ranks, config, 2, 2)
    stop_after(ranks, make(folder, name="sharded", adapter=_ADAPTER, mesh={"data": 2}), 2, 4)
    ranks(train_checked, 2, config)
    # fp32: sums in another order, magnified by 6 steps of AdamW.
    np.testing.assert_allclose(curve(config), curve(alone), rtol=2e-4)
    run = run_folder(config)
    assert load_trained(run).base_quantization == "nf4"
    assert RunFiles(run).find_damage("trained") == []
    ours, theirs = read_adapters(config), read_adapters(alone)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-4)
    # The loss that training measured last is that of base and adapter, and of the merged weights.
    succeed("audit", run, "--out", folder / "one")
    report = load_record(AuditReport, folder / "one/report.json")
    assert report.model.adapter is not None
    assert report.model.adapter.description.endswith("base in nf4")
    for form in ("stored", "merged"):
        assert measure_form(run, form) == pytest.approx(heldout(config)[-1], abs=1e-5)
    ranks(audit, 2, run, folder / "two", "z=2")
    check_scores(folder / "two/records.parquet", folder / "one/records.parquet")
    ended = succeed("export", run, folder / "merged", "--merge", "--json")
    assert json.loads(ended.out)["difference"]["largest"] < 1e-4
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")
    source, _ = open_merged(run / "adapter")
    assert len(source.layers) == 2 * 7
    assert merged.num_parameters() > 0
