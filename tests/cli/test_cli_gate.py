"""`memguard gate`: its exit codes, its screen, and that it needs neither torch nor permission."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundle_examples import write_audited_run
from cli_examples import run_cli
from damage import flip_byte
from gate_audits import make_rates, write_audit
from gate_checks import check_rates
from other_user import needs_root, open_copy, run_as_nobody
from ranks import RankPool

from memguard.records.audit_files import load_audit_report
from memguard.records.gate import GATE_FILES, load_gate

RULE = "gate:\n  - {{metric: {}, on: {}, at_most: {}}}\n"
POLICIES = {
    "pass": RULE.format("near_verbatim", "r4", 0.1),
    "fail": RULE.format("near_verbatim", "trained", 0.1),
    "inconclusive": RULE.format("near_verbatim", "r4", 0.01),
    "cannot-be-judged": RULE.format("personal_data", "trained", 0.1),
    "wrong": RULE.format("near_verbatim", "r4", 0.1).replace("at_most", "at_mots"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of which r64 is extracted and r4 is not; do not write here."""
    folder = tmp_path_factory.mktemp("gated")
    run = write_audited_run(folder / "run")
    report = load_audit_report(run / "audit")
    rates = make_rates({"control": (0, 40), "r4": (0, 40), "r64": (40, 40)}, report)
    write_audit(run / "audit", rates, has_card=True)
    for name in ("findings.csv", "records.parquet"):
        (run / "audit" / name).chmod(0o600)
    for name, text in POLICIES.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


@pytest.mark.parametrize(
    ("policy", "code"), [("pass", 0), ("fail", 10), ("inconclusive", 11), ("cannot-be-judged", 12)]
)
def test_the_exit_code_says_the_outcome(place: Path, policy: str, code: int) -> None:
    outcome = run_cli("gate", place / "run", "--policy", place / f"{policy}.yaml")
    assert (outcome.code, outcome.err) == (code, "")
    lines = outcome.out.splitlines()
    folder = str(place / "run" / "gate")
    # A path is not wrapped, everything else fits a log.
    assert all(len(line) <= 80 for line in lines if line != folder)
    assert lines[-1] == folder
    words = policy.replace("-", " ")
    assert f"Gate: {words} (exit code {code})" in outcome.out
    assert "Verdict of the audit: Inconclusive. 2 of 4 documents" in " ".join(lines)
    assert load_gate(place / "run" / "gate").exit_code == code


def test_each_judgement_is_one_line_and_what_does_not_pass_is_explained(place: Path) -> None:
    outcome = run_cli("gate", place / "run", "--policy", place / "fail.yaml")
    decision, table, explained = outcome.out.split("\n\n")[:3]
    assert decision == "Do not release: 40 documents can be extracted, listed in findings.csv."
    assert [line.split()[0] for line in table.splitlines()] == ["outcome", "fail", "pass"]
    assert "near_verbatim on r64 ≤ 10 %" in table
    assert "40 of 40" in table
    assert explained.startswith("near_verbatim on r64 at most 10 %: 40 of 40 documents: 100 %")
    undecided = run_cli("gate", place / "run", "--policy", place / "inconclusive.yaml").out
    assert "368 documents would decide at this rate" in " ".join(undecided.split())
    assert undecided.split("\n\n")[1].splitlines()[1].split()[-1] == "368"


def test_a_pass_under_a_verdict_that_alarms_is_loud(place: Path) -> None:
    outcome = run_cli("gate", place / "run", "--policy", place / "pass.yaml")
    assert "WARNING: The gate passes, but the verdict of the audit is" in outcome.out


def test_json_is_the_record(place: Path) -> None:
    outcome = run_cli("gate", place / "run", "--policy", place / "fail.yaml", "--json")
    assert outcome.code == 10
    given = json.loads(outcome.out)
    written = json.loads((place / "run" / "gate" / "gate.json").read_text())
    written.pop("sha256")
    assert given == written
    assert given["judgements"][0]["num_documents_needed"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "--policy", "wrong.yaml"], 2, "wrong.yaml:2:37 'gate[0].at_mots' is not a"),
        (["run", "--policy", "nowhere.yaml"], 2, "nowhere.yaml cannot be read"),
        (["run"], 2, "--policy is missing: 'memguard gate run --init"),
        (["nowhere", "--policy", "pass.yaml"], 2, "'nowhere' is neither the folder of a run"),
        (["run", "--init", "--json"], 2, "--init takes no"),
        (["run/model", "--policy", "pass.yaml"], 2, "neither the folder of a run"),
    ],
)
def test_a_mistake_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(place)
    outcome = run_cli("gate", *arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert said in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (place / "run" / "gate").exists()


def test_a_damaged_audit_is_refused(place: Path) -> None:
    flip_byte(place / "run" / "audit" / "results.parquet")
    outcome = run_cli("gate", place / "run", "--policy", place / "pass.yaml")
    assert (outcome.code, outcome.out) == (3, "")
    assert "is damaged and is not judged: results.parquet" in outcome.err
    flip_byte(place / "run" / "audit" / "results.parquet")
    flip_byte(place / "run" / "model" / "model.safetensors")
    asked = run_cli("gate", place / "run", "--policy", place / "pass.yaml", "--weights")
    assert asked.code == 3


def test_init_writes_a_policy_that_judges(place: Path) -> None:
    shown = run_cli("gate", place / "run", "--init")
    path = place / "policy.yaml"
    assert run_cli("gate", place / "run", "--init", "--policy", path).out == f"wrote {path}\n"
    assert shown.out == path.read_text()
    assert shown.out.count("- {") == 2
    assert run_cli("gate", place / "run", "--init", "--all").out.count("- {") > 3
    assert run_cli("gate", place / "run", "--all").code == 2
    assert run_cli("gate", place / "run", "--policy", path).code == 10
    assert run_cli("gate", place / "run", "--init", "--policy", path).code == 2
    inside = run_cli(
        "gate", place / "run", "--init", "--policy", place / "run" / "model" / "p.yaml"
    )
    assert inside.code == 2
    assert "must not be in model/ of a run" in inside.err


def test_it_needs_no_torch(place: Path, bare: Any) -> None:
    outcome = bare("gate", place / "run", "--policy", place / "fail.yaml")
    assert (outcome.returncode, outcome.stderr) == (10, "")
    assert {path.name for path in (place / "run" / "gate").iterdir()} == {*GATE_FILES}
    assert bare("gate", place / "run", "--init").returncode == 0


# -- the quickstart -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_gate_on_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_cli("compare", "quickstart")
    assert outcome.code == 0, outcome.err
    policy = tmp_path / "policy.yaml"
    for metric, on, limit, code in (
        ("near_verbatim", "trained", "at_most: 0.1", 10),
        ("personal_data", "trained", "at_most: 0.1", 12),
        ("near_verbatim", "controls", "at_most: 0.1", 12),
    ):
        policy.write_text(f"gate: [{{metric: {metric}, on: {on}, {limit}}}]\n")
        gated = run_cli("gate", "runs/quickstart/plain", "--policy", policy)
        assert gated.code == code, gated.err
    for config in sorted((tmp_path / "runs" / "quickstart").glob("*/config.yaml")):
        if (config.parent / "audit").is_dir():
            check_rates(config.parent)


# -- another user ---------------------------------------------------------------------------------


@pytest.fixture
def opened(made: Path) -> Iterator[Path]:
    with open_copy(made) as folder:
        yield folder


@needs_root
def test_another_user_judges_what_all_may_read(opened: Path, ranks: RankPool) -> None:
    findings = opened / "findings.yaml"
    findings.write_text("gate:\n  - {metric: findings, at_most: 0}\n")
    own, elsewhere, counted = run_as_nobody(
        ranks,
        opened,
        ["gate", "run", "--policy", "fail.yaml"],
        ["gate", "run", "--policy", "fail.yaml", "--out", "out/gate"],
        ["gate", "run", "--policy", "findings.yaml", "--out", "out/counted"],
    )
    assert own.code == 2
    assert own.err.count("\n") == 1
    assert "run/gate' cannot be written (Permission denied): choose another" in own.err
    assert elsewhere.code == 10
    result = load_gate(opened / "out" / "gate")
    assert (result.exit_code, result.num_findings) == (10, None)
    assert counted.code == 12
    assert "only another user may read the records" in " ".join(counted.out.split())
