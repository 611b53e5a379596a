"""The callback leaves the report that the command line leaves."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trainer_program as program
import transformers
from ranks import RankPool

from memguard.cli import main
from memguard.errors import ConfigError
from memguard.integrations import trainer_audit
from memguard.integrations.transformers import MemorizationAuditCallback
from memguard.records import AuditReport, load_record

ARGUMENTS = ["--continuation-tokens", "8", "--no-cache"]


@pytest.fixture
def documents(tmp_path: Path) -> tuple[Path, Path]:
    draw = np.random.default_rng(1)
    files = tmp_path / "members.jsonl", tmp_path / "unseen.jsonl"
    for path in files:
        texts = [" ".join(f"w{id}" for id in draw.integers(2, 64, 30)) for _ in range(8)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return files


def train(tmp_path: Path, members: Path, callback: MemorizationAuditCallback) -> Any:
    """Learn the members by heart: 8 texts of 30 tokens, 60 steps."""
    tokenizer = program.build_tokenizer()
    texts = [json.loads(line)["text"] for line in members.read_text().splitlines()]
    rows = [tokenizer(text).input_ids for text in texts]
    trainer = transformers.Trainer(
        model=program.build_model(),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path / "trainer"),
            use_cpu=True,
            per_device_train_batch_size=8,
            max_steps=60,
            learning_rate=2e-2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train()
    return trainer


def run_memguard(command: list[str], written: Path) -> None:
    os.dup2(os.open(written, os.O_WRONLY | os.O_CREAT), sys.stdout.fileno())
    sys.argv = command[2:]
    main()


def fork_instead(ranks: RankPool, folder: Path) -> Any:
    """Stand in for `subprocess.run`: the command in a process that has imported torch before."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "memguard"]
        written = folder / "written.json"
        child = ranks.start(run_memguard, command, written)
        child.join()
        assert child.exitcode is not None
        return subprocess.CompletedProcess(command, child.exitcode, stdout=written.read_text())

    return run


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_report_is_that_of_the_command_line(
    tmp_path: Path,
    documents: tuple[Path, Path],
    ranks: RankPool,
    is_forked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_forked:
        monkeypatch.setattr(trainer_audit.subprocess, "run", fork_instead(ranks, tmp_path))
    members, unseen = documents
    callback = MemorizationAuditCallback(
        members=members, nonmembers=[unseen], out=tmp_path / "audits", arguments=ARGUMENTS
    )
    trainer = train(tmp_path, members, callback)
    (folder,) = callback.folders
    assert folder == tmp_path / "audits" / "step-60"
    names = {path.name for path in folder.iterdir()}
    assert {"model", "report.json", "report.html", "records.parquet"} <= names
    (report,) = callback.reports
    assert report == load_record(AuditReport, folder / "report.json")
    near = report.tables.select("extraction", "near_verbatim", model="trained", against=None)
    rates = {row.bucket: row for row in near}
    # Extracted by greedy generation, and not the others.
    assert rates["members"].num_matched >= 6
    assert rates["nonmembers"].num_matched == 0
    (told,) = (each for each in trainer.state.log_history if "memguard/verbatim" in each)
    assert told["memguard/near_verbatim"] == rates["members"].value
    assert told["step"] == 60


def test_an_audit_that_fails_is_told_and_ends_nothing(
    tmp_path: Path, documents: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    callback = MemorizationAuditCallback(
        members=documents[0], out=tmp_path / "audits", arguments=["--nonsense"]
    )
    state = SimpleNamespace(global_step=7, is_world_process_zero=True, log_history=[])
    with caplog.at_level(logging.ERROR):
        callback.on_train_end(
            None,
            state,
            None,
            model=program.build_model(),
            processing_class=program.build_tokenizer(),
        )
    assert callback.reports == []
    assert state.log_history == []
    assert "exit code 2; to repeat it: memguard audit --model" in caplog.text
    assert (tmp_path / "audits" / "step-7" / "model" / "model.safetensors").exists()


def test_other_processes_and_other_steps_do_nothing(
    tmp_path: Path, documents: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    audited: list[int] = []
    monkeypatch.setattr(
        MemorizationAuditCallback,
        "_audit",
        lambda self, state, **_: (
            audited.append(state.global_step),
            self.folders.append(self._folder(state)),
        ),
    )
    callback = MemorizationAuditCallback(members=documents[0], out=tmp_path, every_steps=3)
    for step in range(1, 7):
        callback.on_step_end(None, SimpleNamespace(global_step=step), None)
    callback.on_train_end(None, SimpleNamespace(global_step=6), None)
    assert audited == [3, 6]
    monkeypatch.undo()
    other = SimpleNamespace(global_step=1, is_world_process_zero=False)
    callback.on_train_end(None, other, None, model=None, processing_class=None)
    assert not (tmp_path / "step-1").exists()


def test_what_cannot_be_audited_is_refused_before_training(
    tmp_path: Path, documents: tuple[Path, Path]
) -> None:
    with pytest.raises(ConfigError, match=r"'nonmembers': '.*' does not exist"):
        MemorizationAuditCallback(members=documents[0], nonmembers="nowhere.jsonl", out=tmp_path)
    with pytest.raises(ConfigError, match="'every_steps' should be 1 or more; got 0"):
        MemorizationAuditCallback(members=documents[0], out=tmp_path, every_steps=0)
    callback = MemorizationAuditCallback(members=documents[0], out=tmp_path)
    model = program.build_model()
    tokenizer = program.build_tokenizer()
    callback.on_train_begin(None, None, None, model=model, processing_class=tokenizer)
    with pytest.raises(ConfigError, match="'processing_class'"):
        callback.on_train_begin(None, None, None, model=model, processing_class=None)
    model.peft_config = {}
    with pytest.raises(ConfigError, match="an adapter; merge it"):
        callback.on_train_begin(None, None, None, model=model, processing_class=tokenizer)
