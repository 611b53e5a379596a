"""What an audit says of its work: at most so much, and how much of it is done."""

import io
from typing import Any

import pytest
import rich.console

from memguard.audit.bounds import AuditBounds, ProbeBound
from memguard.runtime import Console, console
from memguard.workflows.audit_progress import show_progress

BOUNDS = AuditBounds(
    models=("trained", "base"),
    bounds=[
        ProbeBound(
            probe="extraction", model=model, passages=617, tokens=28_000, decoded=5_000
        )
        for model in ("trained", "base")
    ],
)  # fmt: skip


def _show(**settings: Any) -> str:
    said = io.StringIO()
    screen = rich.console.Console(file=said, width=80, **settings)
    with show_progress(Console(screen)) as (show, meter):
        meter.expect(BOUNDS)
        show("model", 5, 10)
        meter.end("trained")
        meter.start_round("base", {}, waiting=["extraction"])
        show("base model", 5, 10)
        meter.end("base")
    return said.getvalue()


def test_lines_say_the_most_work_and_the_share_that_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "_FIRST_LINE_S", 0)
    monkeypatch.setattr(console, "_LINE_EVERY_S", 0)
    lines = _show().splitlines()
    assert lines[0] == (
        "audit: at most 1,234 passages, 56,000 tokens and 10,000 generated tokens on 2 models"
    )
    first, second = (next(line for line in lines if line.startswith(start)) for start in (
        "audit: 5 of 10 documents", "audit, base model: 5 of 10 documents",
    ))  # fmt: skip
    assert first.endswith("(0 % of the audit)")
    assert second.endswith("(50 % of the audit)")


def test_the_bar_shows_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = _show(force_terminal=True, color_system=None)
    assert "50 % of the audit" in screen
