"""Tasks of others that fail in every way: the audit is whole, and no text gets out."""

import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_examples import run_cli, save_tiny_model, write_texts
from utility_tasks import TaskKind, write_task

from memguard import api
from memguard.audit.benchmarks.tasks import open_tasks
from memguard.config.utility import UtilityTask
from memguard.errors import ConfigError
from memguard.records import AuditReport

pytestmark = pytest.mark.slow

SECRET = "Ilse Aichinger, 12 Lindenweg"
FAULTS = {
    "value": f"int({SECRET!r})",
    "key": f"{{}}[{SECRET!r}]",
    "text": f"raise_(RuntimeError({SECRET!r}))",
    "cause": f"raise_from({SECRET!r})",
    "exit": "sys.exit(0)",
    "exit-text": f"sys.exit({SECRET!r})",
    "interrupt": "raise_(KeyboardInterrupt())",
    "memory": "raise_(MemoryError())",
    "nothing": "None",
    "nan": "{'acc': float('nan')}",
    "infinite": "{'acc': float('inf')}",
    "large": "{'acc': 10**400}",
    "words": f"{{'acc': {SECRET!r}}}",
    "list": "[]",
    "surrogate": "'\\udc80'",
    "number": "7",
}
PLACES = ("process_results", "doc_to_text", "doc_to_target", "doc_to_choice", "process_docs")
CHANGES = (
    "metric_list: []",
    "metric_list: [{metric: acc, aggregation: unknown}]",
    "metric_list: [{metric: unknown}]",
    "num_fewshot: 100",
    "repeats: 0",
    "generation_kwargs: {until: 5, max_gen_toks: 5}",
    "generation_kwargs: {until: ['e'], max_gen_toks: -1}",
    "doc_to_text: '{{nothing.at.all}}'",
    "doc_to_target: '{{no}}'",
    "filter_list: [{name: f, filter: [{function: nothing}]}]",
)
KINDS: tuple[TaskKind, ...] = ("choice", "rolling", "generation")
CODE = """
import sys

def raise_(error):
    raise error

def raise_from(text):
    try:
        int(text)
    except ValueError as error:
        raise RuntimeError(text) from error
"""


def write_broken(folder: Path) -> list[Path]:
    """Write the broken tasks, and a module with their functions beside them."""
    code, paths = [CODE], []
    for (kind, place), (name, fault) in itertools.product(
        [(kind, place) for kind in KINDS for place in PLACES], FAULTS.items()
    ):
        if kind != "choice" and place == "doc_to_choice":
            continue
        task = f"{kind}_{place}_{name}".replace("-", "_")
        code.append(f"def {task}(*_):\n    return {fault}\n")
        path = write_task(folder, kind, name=task)
        lines = [line for line in path.read_text().splitlines() if not line.startswith(place)]
        path.write_text("\n".join([*lines, f"{place}: !function broken.{task}", ""]))
        paths.append(path)
    for number, (kind, change) in enumerate(itertools.product(KINDS, CHANGES)):
        path = write_task(folder, kind, name=f"changed_{number}")
        name = change.partition(":")[0]
        lines = path.read_text().splitlines()
        begin = next((i for i, line in enumerate(lines) if line.startswith(name)), len(lines))
        end = begin + 1
        while end < len(lines) and lines[end].startswith(" "):
            end += 1
        path.write_text("\n".join([*lines[:begin], *lines[end:], change, ""]))
        paths.append(path)
    (folder / "broken.py").write_text("\n".join(code))
    return paths


@pytest.fixture
def _no_interrupt() -> Iterator[None]:
    """As in the command line, where a Ctrl-C is another exception than that of the fault."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_no_interrupt")
def test_broken_tasks_end_no_audit_and_show_no_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_tiny_model(tmp_path / "model")
    write_texts(tmp_path / "documents.jsonl", 40)
    good = write_task(tmp_path, "choice")
    paths, opened, messages = write_broken(tmp_path), [], []
    for path in paths:
        try:
            open_tasks([UtilityTask(task=str(path))], allow_download=False)
        except ConfigError as error:
            messages.append(str(error))
        else:
            opened.append(path)
    assert SECRET not in "".join(messages)
    assert len(paths) >= 160
    assert len(opened) >= 60

    def audit(out: str, tasks: list[Path]) -> AuditReport:
        return api.audit(
            model=tmp_path / "model",
            members=tmp_path / "documents.jsonl",
            out=tmp_path / out,
            utility=[str(task) for task in tasks],
            continuation_tokens=8,
            cache=False,
        ).report

    alone, among = audit("alone", [good]), audit("among", [*opened, good])
    assert SECRET not in "".join(capfd.readouterr())
    own = "task=choice"
    rows = [
        [row for row in report.tables.results if row.probe != "utility" or row.parameters == own]
        for report in (alone, among)
    ]
    assert rows[0] == rows[1]
    assert alone.verdict == among.verdict
    for path in (tmp_path / "among").rglob("*"):
        if path.is_file() and "private" not in path.parts:
            assert SECRET.encode() not in path.read_bytes(), path
    # What ran nevertheless has its rows; what did not is named.
    ran = {json.dumps(row.parameters) for row in among.tables.results if row.probe == "utility"}
    named = " ".join(banner.text for banner in among.banners)
    for path in opened:
        is_named = f"The task {path.stem} did not run" in named
        assert is_named or any(path.stem in parameters for parameters in ran), path.stem


def test_a_task_that_cannot_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    write_texts(tmp_path / "documents.jsonl", 40)
    path = write_task(tmp_path, "choice")
    path.write_text(path.read_text().replace("test_split: test", "test_split: tests"))
    outcome = run_cli(
        *("audit", "--model", tmp_path / "model", "--members", tmp_path / "documents.jsonl"),
        *("--out", tmp_path / "out", f"audit.utility={json.dumps([{'task': str(path)}])}"),
    )
    assert outcome.code == 2
    assert not (tmp_path / "out" / "report.json").exists()
