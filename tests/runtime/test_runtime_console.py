"""The console: lines where there is no terminal, a bar where there is one; names of places."""

import io
import re
from pathlib import Path

import pytest
import rich.console
import torch

from memguard import runtime
from memguard.runtime import Console, console, format_duration


def console_to(text: io.StringIO, *, terminal: bool) -> Console:
    return Console(rich.console.Console(file=text, force_terminal=terminal, width=80))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, which stands still."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89.4, "89 s"), (90, "1:30 min"), (185, "3:05 min"), (7380, "2:03 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_progress_is_a_line_now_and_then_without_a_terminal(now: list[float]) -> None:
    text = io.StringIO()
    with console_to(text, terminal=False).progress("audit", 100, "documents") as advance:
        for _ in range(100):
            now[0] += 0.5
            advance(1, "")
    lines = text.getvalue().splitlines()
    assert lines[0] == "audit: 6 of 100 documents, 47 s left"
    assert lines[1].startswith("audit: 26 of 100 documents")
    assert lines[-1] == "audit: 100 of 100 documents (done)"
    assert len(lines) == 6  # after 3 s, every 10 of 50 seconds, and at the end


def test_a_line_is_due_also_while_no_unit_is_done(now: list[float]) -> None:
    text = io.StringIO()
    with console_to(text, terminal=False).progress("tokenise", 60, "documents") as advance:
        for _ in range(8):
            now[0] += 1
            advance(0, "")
        assert text.getvalue() == "tokenise: 0 of 60 documents\n"


def test_a_detail_that_would_wrap_is_left_out(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = io.StringIO()
    with console_to(text, terminal=True).progress("audit", 100, "documents") as advance:
        for detail in ("x" * 60, "short"):
            now[0] += 10
            advance(1, detail)
    first, second, _ = text.getvalue().splitlines()
    assert first == "audit: 1 of 100 documents, 16:30 min left"
    assert second.endswith(" left (short)")


def test_rows_are_lines_without_a_terminal(now: list[float]) -> None:
    text = io.StringIO()
    with console_to(text, terminal=False).rows() as rows:
        for second in range(100):
            now[0] = float(second)
            rows.show("a", f"step {second // 40}")
            rows.show("b", "audit" if second else "")
        rows.remove("a")
    assert not rows.is_live
    # Every 20 s where something has changed.
    assert text.getvalue().splitlines() == ["a: step 0", "b: audit", "a: step 1", "a: step 2"]


def test_rows_of_a_terminal_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = io.StringIO()
    with console_to(text, terminal=True).rows() as rows:
        rows.show("a", "loss [bold]1.0[/bold]", done=3, total=4)
        rows.show("b", "audit")
        assert rows.is_live
        rows.remove("a")
        rows.remove("a")
        before = len(text.getvalue())
    after = text.getvalue()[before:]
    assert "audit" in after
    assert "loss" not in after


def test_short_work_says_nothing_without_a_terminal() -> None:
    text = io.StringIO()
    with console_to(text, terminal=False).progress("audit", 3, "documents") as advance:
        advance(3, "")
    assert text.getvalue() == ""


def test_a_phase_says_its_time_unless_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.time, "monotonic", iter([1.0, 96.0, 0.0]).__next__)
    text = io.StringIO()
    with console_to(text, terminal=False).phase("audit"):
        pass
    with pytest.raises(ZeroDivisionError), console_to(text, terminal=False).phase("export"):
        raise ZeroDivisionError
    assert text.getvalue() == "time: audit 1:35 min\n"


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert not console_to(io.StringIO(), terminal=True).live


def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = io.StringIO()
    with console_to(text, terminal=True).progress("train", 4, "steps") as advance:
        for _ in range(4):
            advance(1, "loss [bold]1.0[/bold]")
    assert "4/4" in text.getvalue()
    assert "[bold]1.0" in text.getvalue(), "details are text, not markup"


def test_messages_are_text_not_markup() -> None:
    text = io.StringIO()
    console_to(text, terminal=False).info("documents: [red]a[/red] " + "x" * 100)
    assert text.getvalue() == "documents: [red]a[/red] " + "x" * 100 + "\n"


def test_long_messages_wrap_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    path = "/a-folder/" + "x" * 90
    text = io.StringIO()
    long = f"{'word ' * 14}is-one-word-too '{path}' ends\nnext"
    console_to(text, terminal=True).warn(long)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue())
    assert shown.splitlines() == [
        f"warning: {'word ' * 14}".rstrip(),
        "  is-one-word-too",
        f"  '{path}'",
        "  ends",
        "next",
    ]
    assert shown.count("\n") == 5


def test_other_ranks_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setenv("RANK", "1")
    # Some clusters number machines with it; those who start ranks set both.
    console_to(text, terminal=False).warn("a")
    assert text.getvalue() == "warning: a\n"
    monkeypatch.setenv("LOCAL_RANK", "1")
    other = console_to(text, terminal=True)
    other.warn("b")
    other.info("c")
    with other.progress("train", 2, "steps") as advance:
        advance(1, "")
    assert text.getvalue() == "warning: a\n"


def test_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MEMGUARD_CACHE", raising=False)
    assert runtime.default_cache_dir() == tmp_path / "memguard"
    monkeypatch.setenv("MEMGUARD_CACHE", str(tmp_path / "other"))
    assert runtime.default_cache_dir() == tmp_path / "other"


def test_environment_and_memory_are_told() -> None:
    described = runtime.describe_environment(torch.device("cpu"), world_size=4)
    assert described["world_size"] == "4"
    assert described["torch"] == torch.__version__
    assert all(isinstance(value, str) and value for value in described.values())
    memory = runtime.measure_memory(torch.device("cpu"))
    assert memory.allocated_bytes > 2**20
    assert (memory.reserved_bytes, memory.num_alloc_retries) == (None, None)


def test_memory_of_a_gpu_is_that_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = {
        "allocated_bytes.all.peak": 5,
        "reserved_bytes.all.peak": 7,
        "num_alloc_retries": 2,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics)
    memory = runtime.measure_memory(torch.device("cuda"))
    assert memory.allocated_bytes == 5
    assert (memory.reserved_bytes, memory.num_alloc_retries) == (7, 2)


def test_lines_come_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = io.StringIO()
    shown = console_to(text, terminal=True)
    with shown.progress("train", 4, "steps") as advance:
        advance(2, "")
        shown.info("step 2/4")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue()).replace("\r", "\n").splitlines()
    assert lines.index("step 2/4") < max(n for n, line in enumerate(lines) if "2/4 " in line)
