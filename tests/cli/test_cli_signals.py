"""Ctrl-C and SIGTERM in prepare, export and audit: one line, and nothing half under its name."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_examples import run_cli, write_run

from memguard.data import corpus
from memguard.hf import export
from memguard.runtime import children
from memguard.runtime.children import SignalReceived, raise_on_signals
from memguard.workflows.auditing import audit

pytestmark = pytest.mark.slow

GO_ON = "memguard: interrupted; run the same command again to resume"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def then(function: Any, number: signal.Signals) -> Any:
    """Return the function, during which the signal comes."""

    def act(*arguments: Any, **how: Any) -> Any:
        result = function(*arguments, **how)
        signal.raise_signal(number)
        return result

    return act


STAGES: dict[str, tuple[Any, str, Callable[[Path], list[Path]]]] = {
    "prepare": (corpus, "save_manifest", lambda run: [run / "prepared"]),
    "export": (export, "write_surroundings", lambda run: [run / "model"]),
    "audit": (audit, "save_scores", lambda run: [run / "audit" / "report.json"]),
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("prepare", signal.SIGTERM),
        ("prepare", signal.SIGINT),
        ("export", signal.SIGTERM),
        ("audit", signal.SIGINT),
        pytest.param("export", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("audit", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_signal_leaves_a_line_and_nothing_half_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, number: signal.Signals
) -> None:
    module, name, list_unwritten = STAGES[stage]
    steps = 8 if stage == "audit" else 1
    run, path = folder / "runs" / "run", write_run(folder, train={"max_steps": steps})
    with monkeypatch.context() as patch:
        patch.setattr(module, name, then(getattr(module, name), number))
        outcome = run_cli("train", path)
    assert outcome.code == CODES[number], outcome.err
    assert outcome.err.splitlines()[-1] == GO_ON
    assert "Traceback" not in outcome.err
    assert not [each for each in list_unwritten(run) if each.exists()]
    assert list(run.rglob(".*.*")) == [], "files under their first name"


def test_libraries_that_catch_every_error_do_not_hold_a_signal_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memguard.hf import checkpoint

    read = checkpoint.transformers.AutoConfig.from_pretrained
    monkeypatch.setattr(
        checkpoint.transformers.AutoConfig, "from_pretrained", then(read, signal.SIGTERM)
    )
    outcome = run_cli("prepare", write_run(folder))
    assert (outcome.code, outcome.err.splitlines()[-1]) == (143, GO_ON)

    def convert(*arguments: Any, **how: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise ValueError("as pydantic does while it builds a class") from error

    monkeypatch.setattr(checkpoint.transformers.AutoConfig, "from_pretrained", convert)
    outcome = run_cli("prepare", write_run(folder))
    assert (outcome.code, outcome.err.splitlines()[-1]) == (143, GO_ON)


@pytest.fixture
def _handlers_restored() -> Any:
    before = {number: signal.getsignal(number) for number in CODES}
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers_restored")
def test_a_second_signal_is_taken_for_the_same_one_within_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raise_on_signals()
    with pytest.raises(SignalReceived) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.number == signal.SIGTERM
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ended: list[int] = []
    monkeypatch.setattr(children, "SAME_SIGNAL_S", 0.0)
    monkeypatch.setattr(children.signal, "raise_signal", ended.append)
    handler: Any = signal.getsignal(signal.SIGTERM)
    handler(signal.SIGTERM, None)
    assert ended == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class _Finalized:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("_handlers_restored")
def test_a_signal_that_a_finalizer_discards_comes_again() -> None:
    def finalize() -> None:
        _Finalized()
        time.sleep(10)

    raise_on_signals()
    with pytest.raises(SignalReceived):
        finalize()


@pytest.mark.usefixtures("_handlers_restored")
def test_ranks_and_ignored_signals_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_on_signals()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setenv("LOCAL_RANK", "0")
    raise_on_signals()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_process_is_ended_without_a_traceback_in_its_first_imports() -> None:
    # The first import from the package, as `python -m memguard` and the console script do it.
    program = (
        "import builtins, os, signal\n"
        "from memguard.cli import main\n"
        "load = builtins.__import__\n"
        "def stop(name, *rest):\n"
        "    if name == 'rich.console': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = stop\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_a_process_that_imports_torch_is_ended_with_a_line(folder: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "memguard", "prepare", str(write_run(folder))],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr.readline() == "prepare: loading torch and transformers\n"
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGTERM)
    rest = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), rest.splitlines()) == (143, [GO_ON])
    assert not list((folder / "runs").glob("run/prepared"))
