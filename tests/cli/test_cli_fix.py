"""`memguard compare RUN --fix`: a verdict becomes another run, and the two are compared."""

import json
from pathlib import Path

import pytest
from cli_examples import read_json, run_cli, write_run, write_texts

from memguard.config import load_run_config


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fix")
    (folder / "model").symlink_to(tiny_folder / "model")
    write_texts(folder / "documents.jsonl", 60)
    settings = write_run(folder, mitigations=[{"name": "goldfish", "k": 5}], train={"epochs": 2})
    trained = run_cli("train", settings)
    assert trained.code == 0, trained.err
    return folder / "runs" / "run"


def say(run: Path, **changes: str) -> None:
    """Let the run's report say something else."""
    path = run / "audit" / "report.json"
    report = read_json(path)
    report["verdict"]["level"] = changes.get("level", report["verdict"]["level"])
    report["status"] = changes.get("status", "complete")
    path.write_text(json.dumps(report))


def test_nothing_to_fix_is_said_and_nothing_trained(run: Path) -> None:
    say(run, level="not-above-control")
    done = run_cli("compare", run, "--fix", "--json")
    assert (done.code, json.loads(done.out)) == (0, None)
    assert "nothing to fix: documents come back no more often than in the control" in done.err
    say(run, level="no-control")
    assert "the report cannot tell" in run_cli("compare", run, "--fix").err
    assert not run.with_name("run-fix").exists()


def test_a_run_that_recites_is_trained_again_and_compared(run: Path) -> None:
    say(run, level="recites")
    done = run_cli("compare", run, "--fix", "--json")
    assert done.code == 0, done.err
    assert "changed: goldfish k: 5 -> 4 (" in done.err
    before, after = (load_run_config(run.with_name(n) / "config.yaml") for n in ("run", "run-fix"))
    assert [one.k for one in after.mitigations if one.name == "goldfish"] == [4]
    assert after.model_copy(update={"name": "run", "mitigations": before.mitigations}) == before
    assert load_run_config(run.with_name("run-fix.yaml")) == after
    comparison = json.loads(done.out)
    assert comparison == read_json(run.with_name("comparison") / "comparison.json")
    assert [setting["name"] for setting in comparison["settings"]] == ["run", "run-fix"]
    assert [point["name"] for point in comparison["front"]] == ["run", "run-fix"]
    assert comparison["recommendation"]["sentence"] in done.err
    # A second time nothing is trained.
    say(run, level="recites")
    again = run_cli("compare", run, "--fix")
    assert again.code == 0
    assert "was trained before" in again.err


def test_what_has_no_finished_audit(run: Path) -> None:
    say(run, status="partial")
    partial = run_cli("compare", run, "--fix")
    assert (partial.code, partial.err.count("\n")) == (3, 1)
    assert "is partial; audit it again: memguard audit " in partial.err
    say(run)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("quickstart", "--fix"), "--fix belongs to a finished RUN"),
        (("{run}", "{run}", "--fix"), "--fix takes one RUN; got 2"),
    ],
)
def test_what_is_refused(run: Path, arguments: tuple[str, ...], reason: str) -> None:
    done = run_cli("compare", *(one.format(run=run) for one in arguments))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert reason in done.err
