"""What needs no torch is refused before it is imported."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_examples import write_run

from memguard import errors
from memguard.config import RunConfig
from memguard.errors import ConfigError, ModelError
from memguard.records.run_files import add_hash_line
from memguard.workflows.training.checks import check_row_length, check_run
from memguard.workflows.training.train import train_run

ROOT = Path(__file__).parents[2]
_RUN_ALL = """
import contextlib, io, json, sys
from memguard.cli import main
outcomes = []
for sys.argv in json.loads(sys.argv[1]):
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            main()
        except SystemExit as stop:
            outcomes.append((stop.code, told.getvalue()))
print(json.dumps(outcomes))
"""


def make_run(folder: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate_json(write_run(folder, **changes).read_text())


def mitigated(mitigation: dict[str, Any]) -> dict[str, Any]:
    return {"mitigations": [mitigation]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"dropout": 0.1}}, r"'train.dropout' 0\.1 needs one process: .*; got 2\. R"),
        (
            {"mitigations": [{"name": "dp_sgd"}]},
            r"dp_sgd clips row by row and needs one process; got 2\. Rem",
        ),
        ({"audit": {"device_map": "auto"}}, r"'audit.device_map' needs one process: .*; got 2"),
    ],
)
def test_settings_for_one_process(folder: Path, changes: dict[str, Any], words: str) -> None:
    config = make_run(folder, **changes)
    check_run(config)
    check_run(config, nproc=2, trains=False)
    with pytest.raises(ConfigError, match=words):
        check_run(config, nproc=2)


def test_a_library_that_cannot_be_imported_is_reported_before_documents_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "libraries" / "opacus").mkdir(parents=True)
    (folder / "libraries" / "opacus" / "__init__.py").write_text("import gone_since_then")
    monkeypatch.syspath_prepend(folder / "libraries")
    monkeypatch.delitem(sys.modules, "opacus", raising=False)
    config = make_run(folder, mitigations=[{"name": "dp_sgd"}])
    with pytest.raises(ConfigError, match=r"'opacus>=1.6' \(its import fails: No module named"):
        train_run(check_run(config))
    assert not Path(config.output_dir).exists()


@pytest.mark.parametrize(
    ("changes", "missing", "words"),
    [
        (mitigated({"name": "dp_sgd"}), "opacus", r"dp_sgd needs opacus: pip install 'opacus>=1.6"),
        (mitigated({"name": "deduplicate"}), "rensa", r"needs rensa: pip install 'rensa>=0.5'"),
        (mitigated({"name": "deduplicate", "similarity": "exact"}), "rensa", None),
        ({"optim": {"name": "adamw_8bit"}}, "bitsandbytes", r"'optim.name': adamw_8bit needs bits"),
    ],
)
def test_a_library_that_is_not_installed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    missing: str,
    words: str | None,
) -> None:
    config = make_run(folder, **changes)
    check_run(config)
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == missing else "here")
    if words is None:
        check_run(config)
        return
    with pytest.raises(ConfigError, match=words):
        check_run(config)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"text_config": {"max_position_embeddings": 32}, "max_position_embeddings": 128}, 32),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": "64"}, None),
        ({}, None),
    ],
)
def test_rows_longer_than_the_model_has_positions(
    tmp_path: Path, fields: dict[str, Any], limit: int | None
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    config = make_run(tmp_path, data={"seq_len": 100})
    if limit is None:
        check_row_length(config)
        return
    with pytest.raises(ModelError, match=f"'data.seq_len' must be at most {limit}, .* got 100"):
        check_row_length(config)


def test_commands_refuse_and_compare_without_torch(folder: Path, tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    fake.mkdir()
    for package in ("torch", "transformers", "datasets"):
        (fake / f"{package}.py").write_text(f"raise RuntimeError('{package} was imported')")
    for name in ("one", "two"):
        (folder / name).mkdir()
        run = f"name: {name}\nmodel: {{path: m}}\ndata: {{train: d.jsonl}}\n"
        (folder / name / "config.yaml").write_text(add_hash_line(run))
    os.mkfifo(folder / "pipe.jsonl")
    path = write_run(folder)
    commands, expected = [], []
    audit = ("audit", "--model", folder / "model", "--out", folder / "out", "--members")
    for arguments, code, words in (
        (("train", path, "--nproc", 2, "train.dropout=0.1"), 2, "'train.dropout'"),
        (("train", path, "data.seq_len=129"), 3, "'data.seq_len' must be at most 128"),
        (("train", path, f"data.control={folder}/pipe.jsonl"), 3, "is a FIFO"),
        ((*audit, folder / "pipe.jsonl"), 3, "is a FIFO"),
        (("compare", folder / "one", folder / "two"), 3, "report.json"),
    ):
        commands.append(("memguard", *map(str, arguments)))
        expected.append((code, words))
    ended = subprocess.run(
        [sys.executable, "-c", _RUN_ALL, json.dumps(commands)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(fake), str(ROOT)])},
        capture_output=True,
        text=True,
        check=True,
    )
    outcomes = json.loads(ended.stdout)
    for (found, told), (code, words) in zip(outcomes, expected, strict=True):
        assert (found, "Traceback" in told) == (code, False), told
        assert words in told.splitlines()[-1]


@pytest.mark.slow
def test_what_was_checked_is_made_by_its_check_alone() -> None:
    found = {
        (name, function.name)
        for file in (ROOT / "memguard").rglob("*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and (name := ast.unparse(call.func).split(".")[-1]) in ("CheckedRun", "CheckedAudit")
    }
    assert ("CheckedRun", "check_run") in found
    assert found <= {("CheckedRun", "check_run"), ("CheckedAudit", "check_audit")}
