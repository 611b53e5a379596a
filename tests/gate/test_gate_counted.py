"""The number of findings, with and without a triage, and epsilon: spent and shown."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from evidence_examples import describe_canaries, make_full_report
from gate_audits import hash_text, open_records, write_audit
from report_examples import make_report
from result_examples import change_tables

from memguard.errors import ConfigError
from memguard.gate.gaps import Audited, load_audited
from memguard.gate.judge import judge_audit
from memguard.gate.policy import load_policy, read_policy
from memguard.records.gate import Judgement

ANSWERS = {
    "extraction": lambda bucket, number: float(bucket.bucket == "r64" and number < 3),
    "sampling": lambda bucket, number: float(bucket.bucket == "r64" and number < 2),
    # Not asked is no answer, and the control is no finding.
    "attacks": lambda bucket, number: 1.0 if bucket.bucket == "control" else float("nan"),
}
FIRST, SECOND = (hash_text(f"r64 {number}") for number in (0, 1))


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    folder = tmp_path_factory.mktemp("findings") / "audit"
    return load_audited(write_audit(folder, make_full_report(goldfish=False), ANSWERS))


def judge(audited: Audited, **rule: Any) -> Judgement:
    (judgement,) = judge_audit(audited, read_policy({"gate": [rule]})).judgements
    return judgement


def accept(folder: Path, limit: int, *entries: str) -> None:
    lines = ["accepted:", *entries]
    (folder / "triage.yaml").write_text("\n".join(lines) + "\n")
    (folder / "policy.yaml").write_text(
        f"gate: [{{metric: findings, at_most: {limit}}}]\ntriage: triage.yaml\n"
    )


def write_entry(document: str, until: str = "null") -> str:
    return f"  - {{document: '{document}', by: A. Writer, reason: public, until: {until}}}"


def test_findings_are_documents_that_were_trained_and_a_probe_extracts(audited: Audited) -> None:
    assert audited.gaps == ()
    # Two of the three are extracted by two probes, and are accepted or open as one document.
    for limit, outcome in ((2, "fail"), (3, "pass")):
        judgement = judge(audited, metric="findings", at_most=limit)
        assert (judgement.outcome, judgement.value) == (outcome, 3)
    one = judge(audited, metric="findings", probe="sampling", at_most=1)
    assert (one.outcome, one.value, one.name) == ("fail", 2, "findings by sampling at most 1")
    # Nothing was looked for in labels and in what is too short.
    buckets = [replace(row, num_labels=2) for row in audited.report.tables.buckets]
    tables = audited.report.tables.model_copy(update={"buckets": tuple(buckets)})
    more = replace(audited, report=audited.report.model_copy(update={"tables": tables}))
    num_labels = 2 * sum(row.role in ("trained", "forget") for row in buckets)
    sentence = judge(more, metric="findings", at_most=3).sentence
    assert f"{num_labels} trained documents could not be audited" in sentence


def test_accepted_findings_stay_counted_and_expired_ones_are_open_again(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1764547200")  # 2025-12-01
    accept(
        *(tmp_path, 1),
        write_entry(FIRST),
        write_entry(SECOND, "2025-12-01"),
        write_entry("f" * 64),
    )
    result = judge_audit(audited, load_policy(tmp_path / "policy.yaml"))
    (judgement,) = result.judgements
    assert (judgement.outcome, judgement.value) == ("pass", 1)
    assert "3 documents came out (51 findings by method; 2 accepted): 1 open" in judgement.sentence
    assert "3 documents can be extracted (2 accepted), listed in findings.csv" in result.decision
    assert result.num_findings == 3
    assert [entry.state for entry in result.accepted] == ["accepted", "accepted", "not-found"]
    assert result.triage == (tmp_path / "triage.yaml").read_text()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1764633600")  # 2025-12-02
    later = judge_audit(audited, load_policy(tmp_path / "policy.yaml"))
    assert (later.judgements[0].outcome, later.judgements[0].value) == ("fail", 2)
    assert "1 accepted until a day that has passed" in later.judgements[0].sentence


def test_the_decision_names_what_fails_if_every_document_is_accepted(
    audited: Audited, tmp_path: Path
) -> None:
    accept(tmp_path, 0, *(write_entry(hash_text(f"r64 {number}")) for number in range(3)))
    rule = {"metric": "verbatim", "probe": "extraction", "on": "r64", "at_most": 0.1}
    policy = {"gate": [rule], "triage": str(tmp_path / "triage.yaml")}
    assert judge_audit(audited, read_policy(policy)).decision == (
        "Do not release: 'extraction verbatim on documents trained 64 times at most 10 %' is not "
        "kept. 3 documents can be extracted (3 accepted), listed in findings.csv."
    )
    # A limit on something else is named, and the open documents beside it.
    other = judge_audit(audited, read_policy({"gate": [{"metric": "epsilon", "at_most": 0.1}]}))
    assert "Do not release: 'epsilon at most 0.1' is not kept. 3 documents can" in other.decision


def test_a_triage_never_changes_a_rate(audited: Audited, tmp_path: Path) -> None:
    accept(tmp_path, 3, write_entry(FIRST))
    rule = {"metric": "near_verbatim", "probe": "extraction", "at_most": 0.1}
    plain = judge_audit(audited, read_policy({"gate": [rule]}))
    triaged = judge_audit(
        audited, read_policy({"gate": [rule], "triage": str(tmp_path / "triage.yaml")})
    )
    assert triaged.judgements == plain.judgements
    assert len(triaged.accepted) == 1


def test_a_triage_beside_the_audit_is_refused(audited: Audited) -> None:
    inside = audited.folder / "triage.yaml"
    inside.write_text("accepted: []\n")
    policy = {"verdict": ["none-found"], "triage": str(inside)}
    with pytest.raises(ConfigError, match="must not be inside the folder of an audit"):
        judge_audit(audited, read_policy(policy))
    inside.unlink()


def test_documents_without_a_hash_count_and_cannot_be_accepted(audited: Audited) -> None:
    assert audited.documents is not None
    table = audited.documents.file.read()
    place = table.column_names.index("text_hmac")
    table = table.set_column(place, "text_hmac", pyarrow.nulls(len(table), pyarrow.string()))
    audited = replace(audited, documents=open_records(table))
    judgement = judge(audited, metric="findings", at_most=2)
    assert (judgement.outcome, judgement.value) == ("fail", 3)
    assert "3 without a keyed hash, which cannot be accepted" in judgement.sentence


def test_findings_that_were_not_looked_for_are_not_none(audited: Audited, tmp_path: Path) -> None:
    assert judge(audited, metric="findings", probe="memory", at_most=9).outcome == (
        "cannot-be-judged"
    )
    assert audited.documents is not None
    table = audited.documents.file.read().drop_columns("attacks.extracted")
    audited = replace(audited, documents=open_records(table))
    judgement = judge(audited, metric="findings", at_most=9)
    assert judgement.outcome == "cannot-be-judged"
    assert "no answers of the probe attacks" in judgement.sentence


# -- epsilon --------------------------------------------------------------------------------------


def make_epsilon(spent: float | None, shown: float | None, *, ran: bool = True) -> Audited:
    report = make_full_report(goldfish=False) if ran else make_report()
    assert report.training is not None
    training = report.training.model_copy(update={"epsilon": spent, "delta": 1e-5})
    details = [row for row in report.tables.details if row.probe != "canaries"]
    if shown is not None:
        details.append(describe_canaries(shown))
    report = change_tables(report, details=details)
    report = report.model_copy(update={"training": training})
    return Audited(folder=Path(), report=report, report_sha256="0" * 64, documents=None, gaps=())


@pytest.mark.parametrize(
    ("spent", "shown", "outcome"),
    [
        (3.0, 1.5, "pass"),
        (9.0, 1.5, "fail"),
        (3.0, 8.5, "fail"),
        (None, 8.5, "fail"),
        (None, 1.5, "inconclusive"),
        (None, 0.0, "inconclusive"),
        # The canaries ran, and their bound was taken out.
        (3.0, None, "cannot-be-judged"),
        (None, None, "cannot-be-judged"),
    ],
)
def test_epsilon_is_what_was_spent_unless_the_canaries_show_more(
    spent: float | None, shown: float | None, outcome: str
) -> None:
    judgement = judge(make_epsilon(spent, shown), metric="epsilon", at_most=8)
    assert judgement.outcome == outcome
    assert (judgement.low, judgement.high) == (shown, spent)
    assert judgement.num_documents_needed is None


def test_without_canaries_only_the_spent_epsilon_is_known() -> None:
    judgement = judge(make_epsilon(3.0, None, ran=False), metric="epsilon", at_most=8)
    assert judgement.outcome == "pass"
    assert "no lower bound was measured with canaries" in judgement.sentence.replace("No", "no")
    judgement = judge(make_epsilon(None, None, ran=False), metric="epsilon", at_most=8)
    assert judgement.outcome == "cannot-be-judged"
