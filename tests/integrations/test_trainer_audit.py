"""The callback audits the model of a `Trainer` where it is; what it says, logs and refuses.

Kinds of models are in test_audit_kinds.py, what training computes in test_audit_unchanged.py.
"""

import re
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import trainer_program as program
import transformers

from memguard import api
from memguard.errors import ConfigError, DataError, ModelError
from memguard.integrations import trainer_audit
from memguard.integrations.transformers import MemorizationAuditCallback
from memguard.records import AuditReport, load_record
from memguard.runtime import console
from memguard.workflows.auditing import audit as audit_module

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"continuation_tokens": 8, "cache": False}


MEMBERS, UNSEEN = program.draw_words(1), program.draw_words(3)


class Reporter(transformers.TrainerCallback):
    """Receives what reporters such as TensorBoard receive."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def build_trainer(
    tmp_path: Path, *, callbacks: Sequence[Any] = (), max_steps: int = 60, **arguments: Any
) -> transformers.Trainer:
    """Learn the members by heart in 60 steps: 8 texts of 30 tokens."""
    tokenizer = program.build_tokenizer()
    rows = [tokenizer(text).input_ids for text in MEMBERS]
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    settings = program.USUAL | {
        "output_dir": str(tmp_path / "trainer"),
        "per_device_train_batch_size": 8,
        "max_steps": max_steps,
        "learning_rate": 2e-2,
        **arguments,
    }
    return transformers.Trainer(
        model=program.build_model(),
        args=transformers.TrainingArguments(**settings),
        train_dataset=dataset,
        eval_dataset=dataset,
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


def make_callback(tmp_path: Path, **arguments: Any) -> MemorizationAuditCallback:
    given = {"members": MEMBERS, "nonmembers": UNSEEN, "out": tmp_path / "audits", **SETTINGS}
    return MemorizationAuditCallback(**{**given, **arguments})


def count_steps(callback: MemorizationAuditCallback) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in callback.folders]


def read_repetitions(callback: MemorizationAuditCallback) -> int | None:
    buckets = callback.reports[-1].tables.buckets
    return next(bucket.num_repetitions for bucket in buckets if bucket.role == "trained")


def test_training_that_begins_again_adds_to_the_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = make_callback(tmp_path)
    trainer = build_trainer(tmp_path, callbacks=[callback], max_steps=2, auto_find_batch_size=True)
    for expected in (2, 4):
        trainer.train()
        assert read_repetitions(callback) == expected
    # Memory is short after one step of a third training: two steps of the halved batch follow.
    step, calls = trainer.training_step, iter(range(100))

    def fail_second(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("CUDA out of memory.")
        return step(*args, **kwargs)

    monkeypatch.setattr(trainer, "training_step", fail_second)
    trainer.train()
    assert read_repetitions(callback) == 4 + 1 + 1


DATED = "w{{ strftime_now('%d') }} {% for m in messages %}{{ m.content + ' <eos> ' }}{% endfor %}"


def test_all_audits_of_a_training_write_the_day_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [{"role": "user", "content": "w2 " * 9}]
    rows = [{"messages": [*asked, {"role": "assistant", "content": text}]} for text in MEMBERS]
    seen = []
    for steps, day in enumerate((date(2026, 11, 28), date(2026, 12, 5)), start=1):
        clock = SimpleNamespace(today=lambda day=day: day, fromisoformat=date.fromisoformat)
        monkeypatch.setattr(trainer_audit, "date", clock)
        callback = make_callback(tmp_path, members=datasets.Dataset.from_list(rows), nonmembers=())
        saving = {"save_strategy": "steps", "save_steps": 1}
        trainer = build_trainer(tmp_path, callbacks=[callback], max_steps=steps, **saving)
        trainer.processing_class.chat_template = DATED
        trainer.train(resume_from_checkpoint=steps > 1)
        seen.append(callback.reports[-1].data.documents_sha256)
    assert seen[0] == seen[1]


@pytest.mark.quick
def test_the_report_is_that_of_the_saved_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = make_callback(tmp_path)
    trainer = build_trainer(tmp_path, callbacks=[callback])
    trainer.train()
    said = capsys.readouterr().err
    (folder,), (report,) = callback.folders, callback.reports
    assert folder == tmp_path / "audits" / "step-60"
    names = {path.name for path in folder.iterdir()}
    assert {"report.json", "report.html", "records.parquet", "results.parquet"} <= names
    assert report == load_record(AuditReport, folder / "report.json")
    # A finding is followed by its id from the callback to the command line.
    assert report.findings
    assert all(finding.text_hmac is not None for finding in report.findings)
    trainer.save_model(str(tmp_path / "saved"))
    saved = api.audit(
        model=tmp_path / "saved",
        members=MEMBERS,
        nonmembers=UNSEEN,
        out=tmp_path / "again",
        **SETTINGS,
    ).report
    assert saved.verdict == report.verdict
    assert saved.data == report.data
    ids = [{finding.text_hmac for finding in one.findings} for one in (report, saved)]
    assert ids[0] == ids[1]
    assert report.verdict.level == "memorized"
    key = ("probe", "metric", "bucket", "statistic", "num_documents", "num_matched")
    counts = [
        [[getattr(row, name) for name in key] for row in one.tables.results]
        for one in (report, saved)
    ]
    assert counts[0] == counts[1]
    (logged,) = (line for line in trainer.state.log_history if "memguard/audit_s" in line)
    assert logged["memguard/members/near_verbatim"] >= 0.75
    assert logged["memguard/nonmembers/near_verbatim"] == 0
    assert logged["step"] == 60
    assert re.search(r"step 60 audited in \d+ s; audits took \d+ % of the time", said)
    last = said.strip().splitlines()[-1]
    assert last == f"memguard: the last report is {folder / 'report.html'}"
    assert "exit code" not in said


def test_audits_come_when_they_are_asked_for_and_once_a_step(tmp_path: Path) -> None:
    reporter = Reporter()
    trainer = build_trainer(
        tmp_path, callbacks=[reporter], max_steps=4, eval_strategy="steps", eval_steps=3
    )
    callback = make_callback(tmp_path, every_steps=2, on_evaluate=True, trainer=trainer)
    trainer.add_callback(callback)
    trainer.train()
    # The last step is one of every two, and is not audited again at the end.
    assert count_steps(callback) == [2, 3, 4]
    scores = [log for log in reporter.logs if "memguard/members/near_verbatim" in log]
    assert len(scores) == 3
    percents = [log["memguard/audit_percent"] for log in scores]
    assert all(0 < percent < 100 for percent in percents)


def test_a_notebook_shows_the_last_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards: list[Any] = []
    shown = SimpleNamespace(display=cards.append)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr(console, "is_notebook", lambda: True)
    callback = make_callback(tmp_path, nonmembers=(), every_steps=1)
    build_trainer(tmp_path, callbacks=[callback], max_steps=2).train()
    assert count_steps(callback) == [1, 2]
    said = capsys.readouterr().err
    for line in ("step 1 audited in", "step 2 audited in"):
        assert line in said
    control = "memguard: without 'nonmembers' there is no control, so that no verdict can be red"
    assert said.splitlines()[-1] == control
    (card,) = cards
    assert repr(card).startswith("<AuditResult ")
    assert "step-2/report.html" in card._repr_html_()


def test_training_ends_where_a_bucket_exceeds_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = make_callback(tmp_path, every_steps=15, stop_above={"near_verbatim": 0.5})
    trainer = build_trainer(tmp_path, callbacks=[callback], max_steps=200)
    trainer.train()
    stopped = trainer.state.global_step
    assert stopped < 200
    assert count_steps(callback)[-1] == stopped
    said = capsys.readouterr().err
    assert f"training ends after step {stopped}" in said
    assert "of the documents of 'members' are extracted (near_verbatim)" in said


def test_a_limit_that_cannot_be_judged_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "memguard.audit.decoding.Decoder.find_obstacle", lambda self: "weights are far away"
    )
    callback = make_callback(tmp_path, every_steps=1, stop_above={"near_verbatim": 0.5})
    build_trainer(tmp_path, callbacks=[callback], max_steps=1).train()
    said = capsys.readouterr().err
    assert "'stop_above' cannot judge near_verbatim of step 1: " in said
    assert "weights are far away" in said
    assert callback.reports[0].verdict.level == "inconclusive"


def test_an_audit_that_fails_is_one_line_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(audit_module, "save_scores", fail)
    callback = make_callback(tmp_path, every_steps=1)
    trainer = build_trainer(tmp_path, callbacks=[callback], max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert callback.reports == [] == callback.folders
    lines = [line for line in capsys.readouterr().err.splitlines() if "failed" in line]
    assert [line.split(":")[2].strip() for line in lines] == [
        "the audit of step 1 failed",
        "the audit of step 2 failed",
    ]
    assert "No space left on device" in lines[0]


def test_what_cannot_be_audited_is_refused_before_training(tmp_path: Path) -> None:
    def begin(given: dict[str, Any], *, deepspeed: Any = None, **beside: Any) -> None:
        arguments = {"model": program.build_model(), "processing_class": program.build_tokenizer()}
        make_callback(tmp_path, **given).on_train_begin(
            SimpleNamespace(deepspeed=deepspeed),
            SimpleNamespace(global_step=0, is_world_process_zero=True),
            None,
            **arguments | beside,
        )

    class FullyShardedDataParallel(torch.nn.Module):
        """The name is what is recognised: FSDP1 cannot be used on a CPU."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    key = tmp_path / "my.key"
    begin({"identity_key": key})
    assert key.exists(), "made before training, where a mistake can still be mended"
    key.chmod(0o644)
    sharded = FullyShardedDataParallel(program.build_model())
    zero = {"zero_optimization": {"stage": 3}}
    elsewhere = "; save it and run `memguard audit"
    for kind, message, given, beside in (
        (ConfigError, r"identity key .* \(mode 0644\): chmod 600", {"identity_key": key}, {}),
        (ConfigError, "'identity_key' should be a valid string", {"identity_key": 5}, {}),
        (ConfigError, r"'every_steps' should be greater .* to 1; got 0", {"every_steps": 0}, {}),
        (ConfigError, "'stop_above' should give near_verb", {"stop_above": {"exposure": 0.1}}, {}),
        (ConfigError, "'trainer' should be a Trainer or", {"trainer": "x"}, {}),
        (ConfigError, "'nonmembers' should be paths", {"nonmembers": iter(["a"])}, {}),
        (ConfigError, "'every_steps' should be", {"every_steps": "2"}, {}),
        (ConfigError, "'every_steps' should be", {"every_steps": 1.5}, {}),
        (ConfigError, "'seed' should be", {"seed": "x"}, {}),
        (ConfigError, "'stop_above", {"stop_above": {"verbatim": "x"}}, {}),
        (ConfigError, "'stop_above", {"stop_above": ["verbatim"]}, {}),
        (ConfigError, r"'arguments' is no argument .* give each", {"arguments": ["--suite"]}, {}),
        (DataError, r"--members.*nowhere.jsonl", {"members": "nowhere.jsonl"}, {}),
        (ConfigError, "'processing_class'", {}, {"processing_class": None}),
        (ConfigError, "continuation_token", {"continuation_token": 8}, {}),
        (ConfigError, f"sharded by DeepSpeed{elsewhere}", {}, {"deepspeed": zero}),
        (ModelError, "has no adapter of peft", {"base": "adapter-off"}, {}),
        (ModelError, f"sharded by FSDP1{elsewhere}", {}, {"model": sharded}),
    ):
        with pytest.raises(kind, match=message):
            begin(given, **beside)
