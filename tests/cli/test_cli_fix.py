"""`memguard compare RUN --fix`: a verdict becomes another run, and the two are compared."""

import json
from pathlib import Path

import pytest
from cli_examples import read_json, run_cli, write_run, write_texts
from damage import flip_byte

from memguard.config import load_run_config
from memguard.records import Comparison
from memguard.records.audit_files import save_audit_files
from memguard.records.comparison import load_comparison
from memguard.records.run_files import add_hash_line

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fix")
    (folder / "model").symlink_to(tiny_folder / "model")
    write_texts(folder / "documents.jsonl", 60)
    settings = write_run(folder, mitigations=[{"name": "goldfish", "k": 5}], train={"epochs": 2})
    trained = run_cli("train", settings)
    assert trained.code == 0, trained.err
    return folder / "runs" / "run"


def say(run: Path, *, level: str, reason: str | None) -> None:
    """Let the run's report reach another verdict."""
    path = run / "audit" / "report.json"
    report = read_json(path)
    report["verdict"] |= {"level": level, "reason": reason}
    path.write_text(json.dumps(report))
    save_audit_files(path.parent, has_card=True)


def test_nothing_to_fix_is_said_and_nothing_trained(run: Path) -> None:
    say(run, level="none-found", reason=None)
    done = run_cli("compare", run, "--fix", "--json")
    assert (done.code, json.loads(done.out)) == (0, None)
    assert "verdict: None found. " in done.err
    assert "nothing to fix: no training document was extracted\n" in done.err
    for level, reason, why in (
        ("extracted", "base-too", "the base model produces the same documents"),
        ("extracted", "control-too", "unseen documents are extracted too"),
        ("inconclusive", "too-few", "the audit shows no more"),
    ):
        say(run, level=level, reason=reason)
        assert why in run_cli("compare", run, "--fix").err
    assert not run.with_name("run-fix").exists()


def test_a_run_that_recites_is_trained_again_and_compared(run: Path) -> None:
    say(run, level="memorized", reason="control")
    done = run_cli("compare", run, "--fix", "--json")
    assert done.code == 0, done.err
    assert "changed: goldfish k: 5 -> 4 (" in done.err
    before, after = (load_run_config(run.with_name(n) / "config.yaml") for n in ("run", "run-fix"))
    assert [one.k for one in after.mitigations if one.name == "goldfish"] == [4]
    assert after.model_copy(update={"name": "run", "mitigations": before.mitigations}) == before
    assert load_run_config(run.with_name("run-fix.yaml")) == after
    comparison = json.loads(done.out)
    path = run.with_name("comparison") / "comparison.json"
    assert Comparison.model_validate(comparison) == load_comparison(path)
    assert [each["setting"] for each in comparison["runs"]] == ["run", "run-fix"]
    assert [point["name"] for point in comparison["front"]] == ["run", "run-fix"]
    assert comparison["recommendation"]["sentence"] in done.err
    # A second time nothing is trained.
    say(run, level="memorized", reason="control")
    again = run_cli("compare", run, "--fix")
    assert again.code == 0
    assert "was trained before" in again.err


def test_an_audit_of_another_kind_is_told_before_anything_is_trained(run: Path) -> None:
    path = run / "audit" / "report.json"
    before = path.read_text()
    say(run, level="memorized", reason="control")
    report = read_json(path)
    report["method"]["sample_size"] = 3
    path.write_text(json.dumps(report))
    save_audit_files(path.parent, has_card=True)
    refused = run_cli("compare", run, "--fix")
    assert (refused.code, refused.err.count("\n")) == (3, 2)
    assert "does not match its config.yaml; audit it again" in refused.err
    path.write_text(before)
    save_audit_files(path.parent, has_card=True)


@pytest.mark.quick
def test_what_ended_a_run_early_is_told_before_anything_is_trained(run: Path) -> None:
    say(run, level="memorized", reason="control")
    path = run / "config.yaml"
    before = path.read_text()
    settings = before[: before.rindex("# sha256")]
    settings = settings.replace("budget: null", "budget: {action: stop}")
    settings = settings.replace("audit_every_steps: null", "audit_every_steps: 2")
    path.write_text(add_hash_line(settings))
    refused = run_cli("compare", run, "--fix")
    path.write_text(before)
    # Two lines; the verdict and the findings.
    assert (refused.code, refused.err.count("\n")) == (2, 4)
    assert "may have been ended early by 'budget.action: stop'" in refused.err


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("audit/report.json", "Run 'memguard audit' again"),
        ("manifest.jsonl", "'memguard train"),
        ("model/model.safetensors", "'memguard train"),
    ],
)
def test_what_is_damaged_is_not_fixed(run: Path, name: str, way_out: str) -> None:
    path = run / name
    before = path.read_bytes()
    flip_byte(path)
    refused = run_cli("compare", run, "--fix")
    path.write_bytes(before)
    assert (refused.code, refused.err.count("\n")) == (3, 2)
    assert f"'{path}' " in refused.err
    assert way_out in refused.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("quickstart", "--fix"), "--fix needs a finished RUN"),
        (("{run}", "{run}", "--fix"), "--fix takes one RUN; got 2"),
        (("{run}", "--nproc", "2"), "--nproc needs --fix"),
    ],
)
def test_what_is_refused(run: Path, arguments: tuple[str, ...], reason: str) -> None:
    done = run_cli("compare", *(one.format(run=run) for one in arguments))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert reason in done.err
