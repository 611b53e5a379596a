"""The dry run: says what training then does, shows the first row, leaves nothing behind."""

import io
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import rich.console
from cli_examples import make_texts, read_json, run_cli, write_jsonl, write_run, write_texts
from rich.cells import cell_len

from memguard.cli.dry_run_screen import SHOWN_TOKENS, render_dry_run
from memguard.config import load_run_config
from memguard.data.identity_key import load_identity_key
from memguard.errors import ConfigError, DataError, ModelError
from memguard.planner.dry_run import DryRun
from memguard.records import AuditReport, load_manifest
from memguard.runtime import Console
from memguard.train.metrics import EndMetrics, read_metrics
from memguard.workflows.training import dry_run as dry_run_module
from memguard.workflows.training.checks import check_run
from memguard.workflows.training.data import prepare_run
from memguard.workflows.training.dry_run import DryRunResult, dry_run

pytestmark = pytest.mark.slow

GOLDFISH = [{"name": "goldfish", "k": 3}]


@pytest.fixture(autouse=True)
def asides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, so that a test sees what is left of them."""
    folder = tmp_path / "asides"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def rehearse(path: Path, *overrides: str) -> tuple[DryRunResult, str]:
    """Run it; also return what was said meanwhile."""
    said = io.StringIO()
    run = check_run(load_run_config(path, overrides), trains=False, writes=False)
    result = dry_run(run, Console(rich.console.Console(file=said)))
    return result, said.getvalue()


def prepare(path: Path, *overrides: str) -> None:
    run = check_run(load_run_config(path, overrides), trains=False)
    prepare_run(run, Console(rich.console.Console(file=io.StringIO())))


def look_at(folder: Path) -> dict[str, Any]:
    """Every file under a folder, with what is in it and when it was written."""
    return {
        str(path.relative_to(folder)): path.is_file() and (path.read_bytes(), path.stat().st_mtime)
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a dumb one rich takes 80 columns, whatever it is told.
    monkeypatch.setenv("TERM", "xterm-256color")


class Screen(io.StringIO):
    """Standard output, on a terminal or not."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def show(result: DryRunResult, *, width: int = 80, **settings: Any) -> str:
    screen = Screen(is_terminal=bool(settings.get("force_terminal")))
    render_dry_run(result, rich.console.Console(file=screen, width=width, **settings))
    return screen.getvalue()


def strip_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def say(result: DryRunResult, topic: str) -> str:
    remarks = [*result.record.remarks, *result.record.tokenizer]
    return " | ".join(f"{r.level}: {r.text}" for r in remarks if r.topic == topic)


def check_steps(record: DryRun, run: Path) -> None:
    end = next(line for line in read_metrics(run / "metrics.jsonl") if isinstance(line, EndMetrics))
    assert record.length.num_steps == end.step
    assert record.length.num_rows == record.labels.num_rows == end.num_rows
    assert record.labels.num_supervised == end.num_supervised_tokens
    assert record.labels.num_kept == end.num_kept_tokens


@pytest.mark.quick
def test_training_does_what_the_dry_run_says(folder: Path) -> None:
    path = write_run(
        folder,
        mitigations=GOLDFISH,
        data={"control_fraction": 0.1},
        train={"epochs": 2, "checkpoint_every_steps": 5},
        audit={"base": False, "max_documents_per_bucket": 40},
    )
    record = rehearse(path)[0].record
    run = folder / "runs" / "run"
    assert not run.parent.exists()
    trained = run_cli("train", path)
    assert trained.code == 0

    check_steps(record, run)

    assert len(list((run / "checkpoints").iterdir())) == 2
    (disk,) = (remark.text for remark in record.remarks if remark.topic == "disk")
    assert "at most 3 at a time" in disk  # The third is written before the first is deleted.

    tables = AuditReport.model_validate(read_json(run / "audit" / "report.json")).tables
    for bucket in record.buckets:
        entries = [e for e in load_manifest(run / "manifest.jsonl") if e.bucket == bucket.bucket]
        assert bucket.num_documents == len(entries)
        assert bucket.num_tokens == sum(entry.num_tokens for entry in entries)
        row = tables.find("extraction", "verbatim", bucket.bucket)
        assert row is not None
        assert bucket.num_audited == row.num_documents
        if row.num_matched == 0:
            assert bucket.if_none is not None
            assert bucket.if_none.ci == pytest.approx(row.ci)


def test_canaries_are_counted_as_they_are_trained(folder: Path) -> None:
    write_texts(folder / "many.jsonl", 200, words=20)
    path = write_run(
        folder,
        mitigations=GOLDFISH,
        data={"train": f"{folder}/many.jsonl", "canaries": {"num_repetitions": 5}},
        audit={"enabled": False},
    )
    result, said = rehearse(path)
    record = result.record
    assert run_cli("train", path).code == 0

    run = folder / "runs" / "run"
    check_steps(record, run)
    manifest = load_manifest(run / "manifest.jsonl")
    fed = sum(entry.num_tokens * (entry.num_repetitions or 0) for entry in manifest)
    assert record.length.num_tokens == fed

    assert (record.documents.num_documents, record.documents.num_canaries) == (200, 8)
    given = [entry for entry in manifest if entry.role != "canary"]
    assert record.documents.num_tokens == sum(entry.num_tokens for entry in given)
    buckets = {bucket.bucket: bucket for bucket in record.buckets}
    assert list(buckets) == ["control", "trained", "canary-out", "canary-in"]
    for name, repetitions in (("canary-in", 5), ("canary-out", 0)):
        entries = [entry for entry in manifest if entry.bucket == name]
        assert buckets[name].num_documents == len(entries)
        assert buckets[name].num_tokens == sum(entry.num_tokens for entry in entries)
        assert buckets[name].planned_repetitions == repetitions
        assert buckets[name].num_audited is None, "scored apart, not among the documents"
        assert f"{name} {len(entries)} (" in said
        assert re.search(rf"{name} +{len(entries)} +[\d,]+ +{repetitions} ", show(result))
    # Where there are none, that is said beforehand too.
    assert (
        "no canaries, which need at least 160 trained documents" in rehearse(write_run(folder))[1]
    )


def test_it_leaves_nothing_behind_also_where_it_is_interrupted(
    folder: Path, asides: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearse(write_run(folder))
    assert not (folder / "runs").exists()
    assert not list(asides.iterdir())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dry_run_module, "may_share_rows", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rehearse(write_run(folder))
    assert not list(asides.iterdir())
    assert not (folder / "runs").exists()


def test_what_was_prepared_before_is_read_and_stays(folder: Path, asides: Path) -> None:
    path = write_run(folder)
    prepare(path)
    before = look_at(folder / "runs")
    result, said = rehearse(path)
    assert "60 prepared before, unchanged" in said
    # Other settings: prepared anew, but aside.
    other, said = rehearse(path, "data.max_document_tokens=64")
    assert "preparing again" in said
    assert other.record.documents.num_tokens < result.record.documents.num_tokens
    assert look_at(folder / "runs") == before
    assert not list(asides.iterdir())


def test_it_makes_no_identity_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training makes it; another one than that of the run is a mistake that it tells."""
    path = write_run(folder)
    key = folder / "my.key"
    rehearse(path, f"data.identity_key={key}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    rehearse(path)
    assert not key.exists()
    assert not (folder / "config").exists()
    prepare(path, f"data.identity_key={key}")
    assert "60 prepared before, unchanged" in rehearse(path, f"data.identity_key={key}")[1]
    other = folder / "other.key"
    load_identity_key(other, say=lambda _: None)
    told = f"has the fingerprint .*, and '{folder}/runs/run' the key of fingerprint"
    with pytest.raises(ConfigError, match=told):
        rehearse(path, f"data.identity_key={other}")
    with pytest.raises(ConfigError, match=f"must not be in '{folder}/runs/run'"):
        rehearse(path, f"data.identity_key={folder}/runs/run/my.key")


def test_a_run_that_was_begun_is_not_disturbed(folder: Path) -> None:
    path = write_run(folder)
    prepare(path)
    (folder / "runs" / "run" / "metrics.jsonl").write_text("")
    before = look_at(folder / "runs")
    result, _ = rehearse(path, "data.seq_len=64")
    said = say(result, "run")
    assert said.startswith("warning: Training will stop with this error: ")
    assert "data.seq_len (128 there, 64 here)" in said
    assert "Training will stop with this error" in show(result)
    (folder / "documents.jsonl").unlink()
    write_texts(folder / "documents.jsonl", 50)
    # As training would say it: of the run's folder, not of a temporary one.
    with pytest.raises(DataError, match=f"have changed since training began in '{folder}/runs/run"):
        rehearse(path)
    assert look_at(folder / "runs") == before


def test_mistakes_are_told_as_by_training(folder: Path) -> None:
    path = write_run(folder)
    for override, kind in (
        ("model.path=nowhere/at-all", ModelError),
        (f"data.train={folder}/none.jsonl", DataError),
        ("data.seq_len=999", ModelError),
    ):
        with pytest.raises(kind) as told:
            rehearse(path, override)
        outcome = run_cli("train", path, override, "name=other")
        assert outcome.code == kind.exit_code
        assert str(told.value) in outcome.err


def test_a_model_drawn_from_nothing_has_its_tokenizer_trained(folder: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    scratch = {"scratch": {"config": config, "vocab_size": 300}}
    record = rehearse(write_run(folder, model={"path": None, **scratch}))[0].record
    # Two embeddings, two blocks (q and o, k and v of half the heads, FFN, norms), a norm.
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert record.num_trained == 2 * 300 * 32 + 2 * block + 32


def test_weak_audits_are_told(folder: Path) -> None:
    result, _ = rehearse(write_run(folder), "train.max_steps=1")
    told = say(result, "audit").replace("\u00a0", " ")
    assert "If none of the 12 control documents is extracted, up to 26.5 % of unseen" in told
    assert "To lower this bound: add documents to 'data.train', or name your own in" in told
    assert "ends the run after 1 of" in say(result, "steps")
    unreached = [b for b in result.record.buckets if b.num_audited is None]
    assert [bucket.bucket for bucket in unreached] == ["trained, 0 times"]
    assert f"{unreached[0].num_documents} documents are not reached" in say(result, "steps")
    result, _ = rehearse(write_run(folder), "data.control_fraction=0")
    assert "There is no control" in say(result, "audit")
    result, _ = rehearse(write_run(folder), "audit.enabled=false")
    assert not say(result, "audit")
    assert all(bucket.if_none is None for bucket in result.record.buckets)


def test_a_disk_too_small_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = dry_run_module.shutil.disk_usage(folder)._replace(free=999)
    monkeypatch.setattr(dry_run_module.shutil, "disk_usage", lambda _: usage)
    result, _ = rehearse(write_run(folder))
    assert "999 B are free" in say(result, "disk")
    assert "warning: Checkpoints take" in show(result)


HOSTILE = "\x1b[31mred\x1b]0;title\x07 \u202eevil\u202c \u200b日本 🙂 [bold]x[/bold]"


@pytest.fixture(scope="module")
def chat(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> DryRunResult:
    """Conversations whose users write what steers terminals."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "model").symlink_to(tiny_folder / "model")
    texts = make_texts(80, words=12)
    rows = [
        {
            "id": f"c{number}\x1b[2J",
            "messages": [
                {"role": "user", "content": f"{HOSTILE}\n{texts[number]}"},
                {"role": "assistant", "content": texts[number + 40]},
            ],
        }
        for number in range(40)
    ]
    write_jsonl(folder / "documents.jsonl", rows)
    data = {"seq_len": 128, "max_document_tokens": 128}
    path = write_run(folder, mitigations=GOLDFISH, data=data, audit={"continuation_tokens": 4})
    return rehearse(path, "data.seq_len=128")[0]


def test_the_first_row_is_coloured_on_a_terminal(chat: DryRunResult) -> None:
    screen = show(chat, force_terminal=True, color_system="256")
    assert "48;5;22" in screen or "48;5;28" in screen  # supervised
    assert "48;5;88" in screen or "48;5;124" in screen  # dropped
    plain = strip_styles(screen)
    for state in ("supervised", "dropped", "ignored"):
        assert re.search(rf"\d +{state} ", plain)
    assert "<user>" in plain
    assert "document 'c" in plain or "document 1 of" in plain


def test_hostile_text_does_not_reach_the_terminal(chat: DryRunResult) -> None:
    plain = strip_styles(show(chat, force_terminal=True, color_system="256"))
    assert "\x1b" not in plain
    assert "\x07" not in plain
    assert "\u202e" not in plain
    assert "[U+001B]" in plain
    assert "↵" in plain
    # rich's markup is text.
    assert "[bold]" in plain.replace("\n  ", "")


def test_elsewhere_no_text_is_shown(chat: DryRunResult) -> None:
    screen = show(chat)
    assert "\x1b" not in screen
    assert "printed only on a terminal" in screen
    word = make_texts(80, words=12)[0].split()[0]
    assert "user>" not in screen
    assert word not in screen
    written = chat.record.model_dump_json()
    assert word not in written
    assert "red" not in json.loads(written)["documents"]
    assert type(chat.record).model_validate_json(written) == chat.record


def test_no_color_is_kept_to(chat: DryRunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = show(chat, force_terminal=True, color_system="256")
    assert not re.search(r"\x1b\[[0-9;]*(3|4)8;5", screen)
    # What is dropped is struck out still.
    assert "\x1b[9m" in screen


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("terminal", [True, False])
def test_lines_fit(chat: DryRunResult, width: int, terminal: bool) -> None:
    screen = show(chat, width=width, force_terminal=terminal, color_system="256")
    for line in strip_styles(screen).splitlines():
        assert cell_len(line) <= width, line
    for title in ("First row", "Training", "Documents and audit"):
        assert f"\n{title}\n" in strip_styles(screen)


def test_long_rows_are_cut(folder: Path) -> None:
    write_texts(folder / "long.jsonl", 40, words=200)
    overrides = [f"data.train={folder}/long.jsonl", "data.seq_len=128"]
    result, _ = rehearse(write_run(folder), *overrides)
    assert "more tokens" not in show(result, force_terminal=True)
    (piece,) = result.first_row.pieces
    longer = type(piece)(
        id=piece.id,
        bucket=piece.bucket,
        start=0,
        num_document_tokens=5 * len(piece.tokens),
        tokens=piece.tokens * 5,
    )
    row = type(result.first_row)(pieces=(longer, longer), num_padding=0)
    screen = show(DryRunResult(record=result.record, first_row=row), force_terminal=True)
    hidden = 10 * len(piece.tokens) - SHOWN_TOKENS
    assert f"... and {hidden:,} more tokens" in strip_styles(screen)
    assert "document 1 of 2" in strip_styles(screen)
    assert "document 2 of 2" not in strip_styles(screen)


def test_colour_that_is_forced_into_a_file_brings_no_text(
    chat: DryRunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = strip_styles(show(chat))
    assert "not shown: text of your documents is printed only on a terminal" in screen
    for piece in chat.first_row.pieces:
        assert "".join(token.text for token in piece.tokens[:20]) not in screen
