"""Adapters as settings of `memguard compare`, and runs with adapters that are fixed."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_examples import read_json, succeed, write_run, write_sweep, write_texts

from memguard.config import load_run_config
from memguard.records.audit_files import save_audit_files

SETTINGS: list[dict[str, Any]] = [
    {"name": "full"},
    {
        "name": "lora",
        "overrides": {"adapter": {"name": "lora", "r": 2}, "optim.lr": 1e-3},
        "mitigations": [{"name": "goldfish", "k": 2}],
    },
]


@pytest.mark.long
def test_adapters_are_settings_of_a_sweep(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", 30, words=20)
    file = write_sweep(tmp_path, SETTINGS, num_repetitions=[0, 1], train={"batch_size": 4})
    succeed("compare", file)
    assert (tmp_path / "small/full/model").is_dir()
    assert (tmp_path / "small/lora/adapter").is_dir()
    comparison = read_json(tmp_path / "small" / "comparison.json")
    assert [each["setting"] for each in comparison["runs"]] == ["full", "lora"]
    page = (tmp_path / "small" / "comparison.html").read_text(encoding="utf-8")
    assert "adapter (lora (r 2))" in page
    # The same runs, compared as finished ones.
    runs = [tmp_path / "small" / setting["name"] for setting in SETTINGS]
    again = succeed("compare", *runs, "--out", tmp_path / "again", "--json")
    compared = json.loads(again.out)
    assert compared["tables"] == comparison["tables"]
    overrides = compared["runs"][1]["overrides"]
    assert (overrides["adapter.name"], overrides["adapter.r"]) == ("lora", 2)


def recite(run: Path) -> None:
    """Let the report say that three trained documents are extracted."""
    report, scores = read_json(run / "audit/report.json"), run / "audit/records.parquet"
    report["verdict"] |= {"level": "memorized", "reason": "control"}
    (run / "audit/report.json").write_text(json.dumps(report))
    table = pq.read_table(scores)
    roles = table.column("role").to_pylist()
    extracted = [
        role == "trained" and roles[:row].count("trained") < 3 for row, role in enumerate(roles)
    ]
    place = table.schema.get_field_index("extraction.near_verbatim")
    pq.write_table(table.set_column(place, "extraction.near_verbatim", pa.array(extracted)), scores)
    save_audit_files(run / "audit", has_card=True)


@pytest.mark.long
def test_a_run_with_adapters_is_fixed(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(tiny_folder / "model")
    write_texts(tmp_path / "documents.jsonl", 60)
    settings = write_run(tmp_path, adapter={"name": "lora", "r": 2}, train={"epochs": 1})
    succeed("train", settings)
    run = tmp_path / "runs" / "run"
    recite(run)
    succeed("compare", run, "--fix")
    again = load_run_config(run.with_name("run-fix") / "config.yaml")
    # The same adapters are trained from the same base.
    assert again.adapter == load_run_config(run / "config.yaml").adapter
    assert (run.with_name("run-fix") / "adapter").is_dir()
