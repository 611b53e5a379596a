"""Audits that were edited are refused; sealed again without rows, none that failed passes."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from evidence_examples import make_full_report
from gate_audits import reseal, write_audit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_examples import make_report
from result_examples import change_tables

from memguard import records as r
from memguard.errors import ConfigError, RecordError
from memguard.gate.gaps import Audited, find_audit_folder, list_gaps, load_audited
from memguard.gate.judge import judge_audit
from memguard.gate.policy import read_policy
from memguard.records import ResultRow, save_record
from memguard.records.audit import WatchedStep
from memguard.records.audit_files import REPORT, RESULTS, SCORES, save_audit_files
from memguard.records.results import save_results

pytestmark = pytest.mark.slow

FULL = make_full_report(goldfish=False)
RULES: Sequence[dict[str, Any]] = (
    {"metric": "risk", "at_most": 0.1},
    {"metric": "risk", "above_control": 0.1},
    {"metric": "near_verbatim", "at_most": 0.1},
    {"metric": "near_verbatim", "probe": "extraction", "at_most": 0.99},
    {"metric": "verbatim", "probe": "extraction", "at_most": 0.1},
    {"metric": "verbatim", "probe": "extraction", "on": "(trained)", "at_most": 0.05},
    {"metric": "verbatim", "probe": "extraction", "above_control": 0.1},
    {"metric": "verbatim", "probe": "extraction", "above_base": 0.1},
    {"metric": "verbatim", "on": "control", "at_most": 0.01},
    {"metric": "verbatim", "on": "control", "at_most": 0.1},
    {"metric": "auc", "on": "(members)", "at_most": 0.6},
    {"metric": "any_answer", "on": "r64", "at_most": 0.1},
    {"metric": "within_queries", "on": "r64", "at_most": 0.1},
    {"metric": "first_divergence", "at_most": 1},
    {"metric": "exposure_bits", "on": "(secrets)", "at_most": 1},
    {"metric": "epsilon", "at_most": 1},
    {"metric": "learned", "at_most": 0.1},
)


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small sealed audit; do not write here."""
    return write_audit(tmp_path_factory.mktemp("audits") / "audit", make_report())


@pytest.fixture
def copied(audit: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(audit, tmp_path / "audit"))


# -- edits ----------------------------------------------------------------------------------------


@pytest.mark.quick
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_edit_of_a_sealed_audit_is_refused(copied: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(copied.iterdir())))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content.rstrip()) - 1))  # The last line may lose its end.
    kind = data.draw(st.sampled_from(["flip", "cut", "add", "delete"]))
    try:
        if kind == "delete":
            path.unlink()
        elif kind == "cut":
            path.write_bytes(content[:at])
        elif kind == "add":
            path.write_bytes(content + b"{")
        else:
            # The lowest bit turns no space of JSON into another space.
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(RecordError) as caught:
            load_audited(copied)
        assert caught.value.exit_code == 3
    finally:
        path.write_bytes(content)


def test_a_report_and_results_of_two_audits_are_refused(copied: Path) -> None:
    report = make_report()
    rows = report.tables.results
    for changed in (
        rows[:-1],
        (*rows[:-1], replace(rows[-1], value=0.5)),
        (replace(rows[0], missing_because="x"), *rows[1:]),
    ):
        save_results(changed, copied / RESULTS)
        save_audit_files(copied, has_card=False)
        with pytest.raises(RecordError, match="have different rows: they are not of one audit"):
            load_audited(copied)
    (copied / RESULTS).write_bytes(b"no table")
    save_audit_files(copied, has_card=False)
    with pytest.raises(RecordError, match="cannot be read as a table of results"):
        load_audited(copied)


def test_a_folder_without_an_audit_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither the folder of a run"):
        find_audit_folder(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(RecordError, match="was not audited: 'memguard audit"):
        find_audit_folder(tmp_path)
    (tmp_path / "report.json").touch()
    with pytest.raises(RecordError, match=r"audit\.json is missing"):
        load_audited(find_audit_folder(tmp_path))


# -- removals -------------------------------------------------------------------------------------


def judge(report: r.AuditReport, rule: dict[str, Any], folder: Path) -> int:
    """Judge a report as an audit that was sealed with it, and no records of its documents."""
    gaps = tuple(list_gaps(report, None))
    audited = Audited(
        folder=folder, report=report, report_sha256="0" * 64, documents=None, gaps=gaps
    )
    return judge_audit(audited, read_policy({"gate": [rule]})).exit_code


@cache
def judge_whole(number: int) -> int:
    return judge(FULL, RULES[number], Path())


def check_never_passes(report: r.AuditReport) -> None:
    for number, rule in enumerate(RULES):
        if judge_whole(number) != 0:
            assert judge(report, rule, Path()) != 0, rule


def test_the_rules_give_every_code() -> None:
    assert {judge_whole(number) for number in range(len(RULES))} == {0, 10, 11, 12}


def keep_rows(report: r.AuditReport, keep: Callable[[ResultRow], bool]) -> r.AuditReport:
    tables = report.tables.model_copy(
        update={"results": tuple(row for row in report.tables.results if keep(row))}
    )
    # A copy keeps what was computed from the rows before.
    return report.model_copy(update={"tables": r.Tables(**dict(tables))})


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("control", lambda row: row.bucket != "control"),
        ("base", lambda row: row.model != "base"),
        ("differences from the base", lambda row: row.against is None),
        ("base, both", lambda row: row.model != "base" and row.against is None),
        ("trained most", lambda row: row.bucket != "r64"),
        ("every trained bucket", lambda row: not row.bucket.startswith("r")),
        ("groups", lambda row: not row.bucket.startswith("(")),
        ("attacks", lambda row: row.probe != "attacks"),
        ("extraction", lambda row: row.probe != "extraction"),
        ("near-verbatim", lambda row: row.metric != "near_verbatim"),
        ("parameters", lambda row: not row.parameters),
        ("without parameters", lambda row: bool(row.parameters)),
        ("means", lambda row: row.statistic != "mean"),
        ("medians", lambda row: row.statistic != "median"),
        ("rates", lambda row: row.statistic != "rate"),
        ("known", lambda row: not row.is_known),
        ("all", lambda row: False),
    ],
)
def test_rows_that_are_removed_never_turn_a_code_into_0(
    name: str, keep: Callable[[ResultRow], bool]
) -> None:
    check_never_passes(keep_rows(FULL, keep))


@settings(max_examples=12)
@given(data=st.data())
def test_any_rows_that_are_removed_never_turn_a_code_into_0(data: st.DataObject) -> None:
    rows = FULL.tables.results
    field = data.draw(st.sampled_from(["probe", "metric", "bucket", "parameters", "model"]))
    values = sorted({str(getattr(row, field)) for row in rows})
    removed = data.draw(st.sets(st.sampled_from(values), min_size=1))
    share = data.draw(st.sampled_from([1, 2, 3]))
    count = iter(range(10**6))

    def keep(row: ResultRow) -> bool:
        return str(getattr(row, field)) not in removed or next(count) % share != 0

    check_never_passes(keep_rows(FULL, keep))


@pytest.mark.parametrize(
    "column", [field.name for field in fields(ResultRow) if field.default is not MISSING]
)
def test_a_column_that_is_removed_never_turns_a_code_into_0(column: str) -> None:
    default = next(field.default for field in fields(ResultRow) if field.name == column)
    rows = tuple(replace(row, **{column: default}) for row in FULL.tables.results)
    tables = r.Tables(**{**dict(FULL.tables), "results": rows})
    check_never_passes(FULL.model_copy(update={"tables": tables}))


@pytest.mark.parametrize("name", [run.name for run in FULL.probe_runs])
@pytest.mark.parametrize("with_rows", [False, True], ids=["alone", "with its rows"])
def test_a_probe_run_that_is_removed_never_turns_a_code_into_0(name: str, with_rows: bool) -> None:
    runs = [run for run in FULL.probe_runs if run.name != name]
    report = FULL.model_copy(update={"probe_runs": runs})
    if with_rows:
        report = keep_rows(report, lambda row: row.probe != name)
        tables = report.tables
        kept = {
            "metrics": tuple(m for m in tables.metrics if m.probe != name),
            "details": tuple(d for d in tables.details if d.probe != name),
        }
        report = report.model_copy(update={"tables": r.Tables(**{**dict(tables), **kept})})
    check_never_passes(report)


@pytest.mark.quick
@pytest.mark.parametrize("has_tasks", [False, True])
@pytest.mark.parametrize("has_run", [False, True])
def test_the_run_of_tasks_belongs_to_the_tasks_of_the_settings(
    has_tasks: bool, has_run: bool
) -> None:
    tasks = [{"task": "cloze", "headline": "acc"}] if has_tasks else []
    runs = [*FULL.probe_runs]
    if has_run:
        run = {"name": "utility", "counted": "items", "num_documents": 30, "reason_not_run": None}
        runs.append(runs[0].model_copy(update=run))
    method = FULL.method.model_copy(update={"utility": tasks})
    report = FULL.model_copy(update={"method": method, "probe_runs": runs})
    assert any("the probe utility" in gap for gap in list_gaps(report, None)) == (
        has_tasks != has_run
    )


def test_rows_with_one_key_cannot_be_told_apart() -> None:
    rows = FULL.tables.results
    row = next(one for one in rows if (one.metric, one.bucket) == ("verbatim", "control"))
    tables = r.Tables(**{**dict(FULL.tables), "results": (*rows, replace(row, step=None))})
    twice = FULL.model_copy(update={"tables": tables})
    rule = {"metric": "verbatim", "on": "control", "at_most": 0.1}
    assert judge(FULL, rule, Path()) == 0
    assert judge(twice, rule, Path()) == 12
    assert any("1 key twice" in gap for gap in list_gaps(twice, None))


@pytest.mark.parametrize(
    ("name", "limit", "is_lost"),
    [
        ("above_control", 0.99, lambda row: row.bucket == "control" and row.model == "trained"),
        ("above_base", 0.99, lambda row: row.model == "base"),
    ],
)
def test_a_difference_needs_the_row_that_it_is_from(
    name: str, limit: float, is_lost: Callable[[ResultRow], bool]
) -> None:
    rule = {"metric": "near_verbatim", "probe": "extraction", "on": "r4", name: limit}
    assert judge(FULL, rule, Path()) == 0
    lost = keep_rows(FULL, lambda row: not (row.metric == "near_verbatim" and is_lost(row)))
    assert judge(lost, rule, Path()) == 12


def test_a_step_that_becomes_a_plain_row_is_no_pass() -> None:
    training = FULL.training
    assert training is not None
    step = WatchedStep(step=7, audit_s=1.0, trained=[])
    row = next(row for row in FULL.tables.results if row.metric == "verbatim")
    learned = [
        replace(row, metric="learned", bucket=bucket, step=7, num_matched=0, value=0.0, low=0.0,
                high=0.0880973)
        for bucket in ("r4", "r16", "r64")
    ]  # fmt: skip
    report = change_tables(FULL, results=[*FULL.tables.results, *learned]).model_copy(
        update={"training": training.model_copy(update={"watched": [step]})}
    )
    rule = {"metric": "learned", "at_most": 0.1}
    assert judge(report, rule, Path()) == 12
    rows = tuple(replace(row, step=None) for row in report.tables.results)
    tables = r.Tables(**{**dict(report.tables), "results": rows})
    assert judge(report.model_copy(update={"tables": tables}), rule, Path()) == 12


# -- the records of the documents -----------------------------------------------------------------


def judge_folder(folder: Path, **rule: Any) -> tuple[int, str]:
    result = judge_audit(load_audited(folder), read_policy({"gate": [rule]}))
    return result.exit_code, " ".join(judgement.sentence for judgement in result.judgements)


def test_a_whole_audit_has_no_gap(audit: Path) -> None:
    assert load_audited(audit).gaps == ()
    assert judge_folder(audit, metric="verbatim", on="control", at_most=0.1)[0] == 0


@pytest.mark.quick
def test_a_trained_bucket_that_only_the_records_have_is_a_gap(copied: Path) -> None:
    assert judge_folder(copied, metric="near_verbatim", on="trained", at_most=0.1)[0] == 10

    def remove(report: r.AuditReport) -> r.AuditReport:
        kept = keep_rows(report, lambda row: row.bucket not in ("r16", "r64", "r4"))
        buckets = [b for b in report.tables.buckets if b.bucket not in ("r16", "r64")]
        return change_tables(kept, buckets=buckets)

    reseal(copied, remove)
    code, said = judge_folder(copied, metric="verbatim", on="control", at_most=0.1)
    assert code == 12
    assert "the records have the trained bucket r16, and the report has not" in said


def test_fewer_documents_than_the_records_have_are_a_gap(copied: Path) -> None:
    def shrink(report: r.AuditReport) -> r.AuditReport:
        buckets = [replace(bucket, num_documents=39) for bucket in report.tables.buckets]
        return change_tables(report, buckets=buckets)

    reseal(copied, shrink)
    code, said = judge_folder(copied, metric="verbatim", on="control", at_most=0.1)
    assert (code, "the records have 40 documents of r4, the report 39" in said) == (12, True)


def test_answers_of_a_probe_that_did_not_run_are_a_gap(tmp_path: Path) -> None:
    answers = {name: lambda bucket, number: 0.0 for name in ("extraction", "attacks")}
    folder = write_audit(tmp_path / "audit", make_report(), answers)
    code, said = judge_folder(folder, metric="verbatim", on="control", at_most=0.1)
    assert (code, "answers of the probe attacks, which did not run" in said) == (12, True)


def test_records_that_cannot_be_read_are_no_damage(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def refuse(self: Path, *arguments: Any, **named: Any) -> Any:
        if self.name == SCORES:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", refuse)
    assert load_audited(copied).documents is None
    assert judge_folder(copied, metric="verbatim", on="control", at_most=0.1)[0] == 0
    code, said = judge_folder(copied, metric="findings", at_most=0)
    assert (code, "only another user may read the records" in said) == (12, True)


def test_a_report_that_cannot_be_read_is_refused(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_record(make_report(), copied / REPORT)
    opened = Path.open

    def refuse(self: Path, *arguments: Any, **named: Any) -> Any:
        if self.name == REPORT:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RecordError, match="no permission"):
        load_audited(copied)
