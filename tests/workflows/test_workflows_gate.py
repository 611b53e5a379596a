"""What a gate writes, where, and what `memguard verify` says of it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from bundle_examples import write_audited_run
from damage import flip_byte
from gate_audits import make_rates, reseal, write_audit
from junitparser import JUnitXml
from result_examples import change_rows

from memguard.errors import ConfigError, RecordError
from memguard.gate.policy import load_policy
from memguard.records import AuditReport
from memguard.records.audit_files import load_audit_report
from memguard.records.gate import GATE_FILES, GateResult, load_gate
from memguard.records.sealed import find_damage
from memguard.workflows.common.folder import check_outside_runs, locked
from memguard.workflows.gate import draft_policy, gate_folder, judge_folder
from memguard.workflows.results import AuditResult
from memguard.workflows.verify import Part, verify

POLICY = "gate:\n  - {metric: near_verbatim, on: trained, at_most: 0.1}\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run that passes POLICY, and the policy; do not write here."""
    folder = tmp_path_factory.mktemp("gated")
    run = write_audited_run(folder / "run")
    report = load_audit_report(run / "audit")
    rates = make_rates({"control": (0, 40), "r4": (0, 40)}, report)
    write_audit(run / "audit", rates, has_card=True)
    (folder / "policy.yaml").write_text(POLICY)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


def judge(place: Path, **options: Any) -> tuple[Path, GateResult]:
    return gate_folder(place / "run", place / "policy.yaml", **options)


def find_part(folder: Path) -> Part | None:
    parts = verify(folder, lambda name, size: None).parts
    return next((part for part in parts if part.name == "gate"), None)


def list_whole(folder: Path) -> list[str]:
    """Return every path of a folder but the lock."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return sorted(path for path in paths if path != ".lock")


def test_the_result_is_written_beside_the_audit(place: Path) -> None:
    before = list_whole(place / "run")
    own_page = (place / "run" / "audit" / "report.html").read_bytes()
    folder, result = judge(place)
    assert folder == place / "run" / "gate"
    assert {path.name for path in folder.iterdir()} == {*GATE_FILES}
    assert list_whole(place / "run") == sorted(
        [*before, "gate", *(f"gate/{name}" for name in GATE_FILES)]
    )
    assert load_gate(folder) == result
    assert result.exit_code == 0
    assert result.policy == POLICY
    # The hashes are those of the files, and none is missing.
    assert {*result.files} == {*GATE_FILES} - {"gate.json"}
    assert find_damage(folder, result.files) == []
    assert JUnitXml.fromfile(str(folder / "junit.xml")).tests == len(result.judgements)
    assert "Pass" in (folder / "summary.md").read_text()
    page = (folder / "report.html").read_text()
    assert "Gate: pass" in page
    assert 'class="links"' not in page
    assert (place / "run" / "audit" / "report.html").read_bytes() == own_page


def test_it_replaces_an_earlier_gate_whole(place: Path) -> None:
    judge(place)
    (place / "policy.yaml").write_text(POLICY.replace("0.1", "0.01"))
    folder, result = judge(place)
    assert result.exit_code == 11
    assert load_gate(folder).exit_code == 11
    assert sorted(path.name for path in (place / "run").iterdir() if path.name[0] == ".") == [
        ".lock"
    ]


def test_nothing_is_written_over_files_that_are_not_the_gates(place: Path) -> None:
    out = place / "out"
    out.mkdir()
    (out / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"such as 'notes\.txt', and would be replaced whole"):
        judge(place, out=out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match="'--out' must not be in model/ of a run"):
        judge(place, out=place / "run" / "model" / "gate")
    (place / "file").touch()
    with pytest.raises(ConfigError, match="choose another folder with --out"):
        judge(place, out=place / "file")


def test_out_is_another_folder(place: Path) -> None:
    folder, result = judge(place, out=place / "there" / "gate")
    assert folder == place / "there" / "gate"
    assert load_gate(folder) == result
    assert 'href="../' not in (folder / "report.html").read_text()
    assert not (place / "run" / "gate").exists()
    # The run's own, by name.
    assert judge(place, out=place / "run" / "gate")[0] == place / "run" / "gate"


def test_a_run_that_another_process_uses_is_not_written_to(place: Path) -> None:
    with locked(place / "run"), pytest.raises(ConfigError, match="another process is using"):
        judge(place)
    assert not (place / "run" / "gate").exists()


def test_a_folder_that_cannot_be_written_to_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_folder = Path.mkdir

    def refuse(self: Path, *arguments: Any, **named: Any) -> None:
        if self.name.startswith(".memguard-tmp-gate"):
            raise OSError(30, "Read-only file system", str(self))
        made_folder(self, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"gate' cannot be written \(Read-only.*with --out"):
        judge(place)


def test_an_audit_folder_has_its_own_gate(place: Path) -> None:
    inside, _ = gate_folder(place / "run" / "audit", place / "policy.yaml")
    assert inside.resolve() == (place / "run" / "gate").resolve()
    report = load_audit_report(place / "run" / "audit")
    alone = write_audit(place / "alone", report)
    folder, _ = gate_folder(alone, place / "policy.yaml")
    assert folder == alone / "gate"
    assert [part.state for part in verify(alone, lambda name, size: None).parts] == [
        "intact",
        "intact",
    ]


# -- verify ---------------------------------------------------------------------------------------


def test_verify_compares_the_files_of_a_gate(place: Path) -> None:
    assert find_part(place / "run") is None
    judge(place)
    part = find_part(place / "run")
    assert part is not None
    assert (part.state, part.damages) == ("intact", ())
    for name in GATE_FILES:
        path = place / "run" / "gate" / name
        content = path.read_bytes()
        for spoil in (flip_byte, Path.unlink):
            spoil(path)
            part = find_part(place / "run")
            assert part is not None
            assert [damage.file for damage in part.damages] == [f"gate/{name}"]
            assert part.repair is not None
            assert "memguard gate" in part.repair
            path.write_bytes(content)
    (place / "run" / "gate" / "more.txt").touch()
    part = find_part(place / "run")
    assert part is not None
    assert [str(damage) for damage in part.damages] == [
        "gate/more.txt was not written by 'memguard gate'"
    ]


def test_verify_says_that_a_gate_is_older_than_the_audit(place: Path) -> None:
    judge(place)

    def change(report: AuditReport) -> AuditReport:
        return report.model_copy(update={"created": "2026-01-01T00:00:00Z"})

    reseal(place / "run" / "audit", change, has_card=True)
    part = find_part(place / "run")
    assert part is not None
    assert (part.state, part.damages) == ("intact", ())
    assert "older than this audit: 'memguard gate " in part.note
    judge(place)
    part = find_part(place / "run")
    assert part is not None
    assert "older" not in part.note
    assert verify(place / "run", lambda name, size: None).is_intact
    (place / "run" / "audit" / "audit.json").unlink()
    part = find_part(place / "run")
    assert part is not None
    assert "judged an audit that is no longer there" in str(part.damages[0])


def test_other_commands_do_not_write_into_a_gate(place: Path) -> None:
    with pytest.raises(ConfigError, match="must not be in gate/ of a run"):
        check_outside_runs(place / "run" / "gate" / "audit", "out")


def test_a_killed_gate_leaves_nothing_after_the_next_command(place: Path) -> None:
    left = place / "run" / ".memguard-tmp-gate.0123abcd"
    left.mkdir()
    (left / "junit.xml").touch()
    judge(place)
    assert not left.exists()


# -- damage ---------------------------------------------------------------------------------------


def test_a_damaged_audit_is_refused_and_the_weights_only_where_asked(place: Path) -> None:
    flip_byte(place / "run" / "model" / "model.safetensors")
    assert judge(place)[1].exit_code == 0
    with pytest.raises(RecordError, match=r"model: model/model.safetensors is not what was"):
        judge(place, weights=True)
    shutil.rmtree(place / "run" / "gate")
    flip_byte(place / "run" / "audit" / "records.parquet")
    with pytest.raises(RecordError, match=r"is damaged and is not judged: records\.parquet"):
        judge(place)
    assert not (place / "run" / "gate").exists()


def test_undamaged_weights_are_checked_and_an_old_gate_is_no_obstacle(place: Path) -> None:
    judge(place)
    flip_byte(place / "run" / "gate" / "summary.md")
    read: list[str] = []
    judge(place, weights=True, on_read=lambda name, size: read.append(name))
    assert "model" in read
    report = load_audit_report(place / "run" / "audit")
    other = report.model_copy(
        update={"model": report.model.model_copy(update={"weights_sha256": "0" * 64})}
    )
    reseal(place / "run" / "audit", lambda report: other, has_card=True)
    assert judge(place)[1].exit_code == 0
    with pytest.raises(RecordError, match="is of other weights than those of the run"):
        judge(place, weights=True)
    alone = write_audit(place / "alone", report)
    with pytest.raises(ConfigError, match="an audit without one"):
        gate_folder(alone, place / "policy.yaml", weights=True)


# -- Python and --init ----------------------------------------------------------------------------


def test_python_judges_a_result(place: Path) -> None:
    audit = place / "run" / "audit"
    result = AuditResult(folder=audit, report=load_audit_report(audit))
    before = list_whole(place)
    outcome = result.gate(place / "policy.yaml")
    assert (outcome.exit_code, outcome.policy, outcome.files) == (0, POLICY, {})
    rule = {"metric": "near_verbatim", "on": "r4", "at_most": 0.01}
    given = result.gate({"gate": [rule], "release": "api"})
    assert (given.exit_code, given.release) == (11, "api")
    assert given.judgements[0].num_documents_needed == 368
    assert list_whole(place) == before
    for wrong in (None, "", 3, ["policy.yaml"]):
        with pytest.raises(ConfigError, match="'policy' should "):
            result.gate(wrong)  # type: ignore[arg-type]
    written = result.gate(str(place / "policy.yaml"), out=place / "out")
    assert load_gate(place / "out") == written
    assert judge_folder(audit, place / "policy.yaml").judgements == written.judgements


def test_a_policy_is_drafted_from_the_audit(place: Path) -> None:
    path = place / "drafted.yaml"
    text = draft_policy(place / "run", path)
    assert path.read_text() == text == draft_policy(place / "run", None)
    assert load_policy(path).policy.gate[0].metric == "risk"
    with pytest.raises(ConfigError, match="exists already"):
        draft_policy(place / "run", path)
    reseal(
        place / "run" / "audit",
        lambda report: change_rows(report, lambda row: None if row.bucket == "r4" else row),
        has_card=True,
    )
    # What is lacking is judged, not refused.
    assert judge(place)[1].exit_code == 12
