"""An audit says of each stage what is counted, and how much of it is done."""

import io

import pytest
import rich.console

from memguard.runtime import Console, console
from memguard.workflows.auditing.resources import show_progress


def test_lines_say_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_FIRST_LINE_S", 0)
    monkeypatch.setattr(console, "_LINE_EVERY_S", 0)
    said = io.StringIO()
    with show_progress(Console(rich.console.Console(file=said, width=80))) as show:
        show("model", 5, 10, "documents")
        show("model", 10, 10, "documents")
        show("base model: near-verbatim", 3, 7, "documents")
        show("hellaswag, base model", 4, 200, "items")
    lines = said.getvalue().splitlines()
    assert lines[0].startswith("audit: 5 of 10 documents")
    assert any(line.startswith("audit, base model: near-verbatim: 3 of 7 doc") for line in lines)
    assert any(line.startswith("audit, hellaswag, base model: 4 of 200 items") for line in lines)
    assert "%" not in said.getvalue()
