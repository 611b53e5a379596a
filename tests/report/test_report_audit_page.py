"""The audit page says what the record says, and reads well where much is missing."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import evidence_examples as evidence
import pytest
import report_examples as examples
from page_checks import check_page, words_of
from result_examples import change_buckets, change_rows, change_tables

from memguard import records as r
from memguard.report.html import render_report


def test_all_numbers_of_an_audit_appear() -> None:
    report = examples.make_report()
    words = words_of(check_page(render_report(report)))
    for row in report.tables.results:
        if row.probe != "extraction" or row.value is None:
            continue
        if row.statistic == "rate":
            low, high = row.ci
            assert f"{row.num_matched} of {row.num_documents}" in words
            if low > 0.01 and high < 0.9995 and row.metric != "tiny_margin":
                share = f"{100 * row.value:.1f} % ({100 * low:.1f}–{100 * high:.1f} %)"
                assert share in words
            if row.minus_control is not None and row.metric != "teacher_forced_90":
                assert f"{100 * row.minus_control:.1f} pp" in words
        elif row.metric == "token_accuracy":
            assert row.value == 1 or f"{100 * row.value:.1f} %" in words or row.against
        elif row.against is None and row.model == "trained":
            digits = 1 if row.metric == "first_divergence" else 3
            assert f"{row.value:.{digits}f}".replace("-0.000", "0.000") in words
    for number in ("0.713", "0.655", "0.934", "0.957", "1,053,440", "853,440", "4.372", "5.012"):
        assert number in words
    for finding in report.findings:
        assert finding.id in words
        assert (finding.text_hmac or "")[:12] in words
    for text in (report.method.command, report.verdict.sentence, report.banners[0].text):
        assert text in words
    for name, value in report.environment.items():
        assert name in words
        assert value in words
    assert report.model.weights_sha256 in words
    assert "12.8 % below the base model's 5.012" in words
    assert "trained 64 times" in words


def test_a_thousand_findings_render() -> None:
    findings = [examples.make_finding(number) for number in range(1000)]
    report = examples.make_report().model_copy(update={"findings": findings, "num_findings": 2345})
    page = render_report(report)
    words = words_of(check_page(page))
    assert "The worst 1,000 are listed; 'findings.csv' has all." in words
    assert findings[-1].id in words
    assert len(page) < 2_000_000


def make_foreign(*doses: examples.Dose, **changes: Any) -> r.AuditReport:
    """Return the audit of a model that somebody else trained, without control and base model."""
    full = examples.make_report(doses=doses)
    report = change_rows(
        full,
        lambda row: (
            None if row.model == "base" or row.against or row.probe == "membership" else row
        ),
    )
    report = change_buckets(report, bucket="members", num_repetitions=None)
    report = change_rows(report, lambda row: replace(row, bucket="members"))
    values = {
        "run": None,
        "training": None,
        "dose_response": False,
        "model": full.model.model_copy(update={"base": None, "base_weights_sha256": None}),
        "verdict": examples.make_verdict(
            level="extracted",
            reason="no-control",
            control=examples.make_counts(0, 0),
            base=None,
            test=None,
            bucket="members",
        ),
    }
    return report.model_copy(update={**values, **changes})


def test_a_bare_record_renders() -> None:
    """No control, no base, no training, no membership, no documents, nothing known."""
    full = examples.make_report()
    report = make_foreign(
        (4, 0, 0, 0.394),
        probe_runs=[],
        findings=[],
        num_findings=0,
        banners=[],
        environment={},
        data=full.data.model_copy(
            update={"sources": [], "num_clusters": None, "overlap_with_control": None}
        ),
        method=full.method.model_copy(update={"probes": [], "command": ""}),
    )

    def empty(row: r.ResultRow) -> r.ResultRow:
        row = replace(row, num_documents=0, value=None, low=None, high=None, interval="")
        return replace(row, num_matched=None, missing_because=r.NO_DOCUMENTS)

    report = change_buckets(change_rows(report, empty), num_documents=0)
    words = words_of(check_page(render_report(report)))
    assert "No chart is shown: memguard did not train this model" in words
    assert "computes no membership scores" in words
    assert "Only these probes ran: none." in words
    assert "No base model was scored" in words
    assert "memguard did not train this model" in words
    check_page(render_report(report.model_copy(update={"tables": r.Tables()})))


def test_one_dose_gives_no_chart_but_a_reason() -> None:
    parser = check_page(render_report(examples.make_report(doses=[examples.PLAIN[2]])))
    assert not [a for tag, a in parser.tags if a.get("class") == "chart"]
    assert "needs at least two different numbers of repetitions" in words_of(parser)


def test_limits_follow_the_record() -> None:
    full = examples.make_report()
    method = full.method.model_copy(update={"prefix_tokens": 32, "dtype": "bf16"})
    report = change_buckets(full, num_not_sampled=60).model_copy(update={"method": method})
    words = words_of(check_page(render_report(report)))
    assert "A random sample of 160 of 400 eligible documents was scored" in words
    assert "the 32 true tokens before the continuation" in words
    assert (
        "Scored in bf16: 1 result depends on a near-tie (a gap of less than 0.001 logits" in words
    )


def make_partly_learned(accuracy: float, half: float) -> r.AuditReport:
    """Return a report where r16 is the worst bucket and nothing of it is extracted."""
    full = examples.make_report(doses=[(0, 0, 0, 0.203), (16, 0, 0, accuracy)])

    def widen(row: r.ResultRow) -> r.ResultRow | None:
        if row.probe == "membership":
            return None
        if row.metric != "token_accuracy" or row.against is None or row.minus_control is None:
            return row
        ends = {"minus_control_low": -half, "minus_control_high": half}
        return replace(row, **{name: row.minus_control + end for name, end in ends.items()})

    report = change_rows(full, widen, evidence.list_membership())
    verdict = examples.make_green(bucket="r16")
    return report.model_copy(
        update={"verdict": verdict, "findings": [], "num_findings": 0, "num_by_method": 0}
    )


def test_tokens_learned_of_documents_that_are_not_extracted_are_called_partly_learned() -> None:
    words = words_of(check_page(render_report(make_partly_learned(0.685, 0.03))))
    assert "Partly learned." in words
    # Model minus base, and that minus the control's gain of 6.6 points.
    told = "r16: +54.8 pp, +48.2 pp more than in the control (+45.2 to +51.2)"
    assert words.count(told) == 2  # a note, and the lead of the table
    assert words.count("partly learned these texts but did not reproduce them") == 2
    assert "No document of these buckets is extracted" in words
    # 4.7 points more than in the control, give or take 5.
    words = words_of(check_page(render_report(make_partly_learned(0.25, 0.05)))).lower()
    assert "partly learned" not in words
    assert "training raised" not in words


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {},
            "Text was generated for 44 documents; for 57 others the teacher-forced pass shows that "
            "the text is verbatim. 79 documents looked unlikely to be extractable (teacher-forced "
            "accuracy below 50 %); text was generated for 20 of them, a random sample, and none is "
            "near-verbatim.",
        ),
        (
            {"num_checked": 79, "num_matched_below_floor": 2, "num_generated": 103},
            "Text was generated for 103 documents; for 57 others the teacher-forced pass shows "
            "that the text is verbatim. 79 documents looked unlikely to be extractable "
            "(teacher-forced accuracy below 50 %); text was generated for all of them.",
        ),
        ({"reason": "no memory for the cache"}, "Nothing was generated: no memory for the cache."),
    ],
    ids=["sample below the floor", "all generated", "none"],
)
def test_how_texts_were_generated_is_told(changes: dict[str, Any], told: str) -> None:
    details = examples.make_generated(**changes)
    report = change_tables(examples.make_report(), details=details)
    words = words_of(check_page(render_report(report)))
    assert told in words
    assert ("of them, a random sample" in words) == (not changes)
    # The note above the results has the same counts; 59, not generated, would be a third one.
    assert "59 documents" not in words


def test_without_generated_text_every_part_says_so() -> None:
    report = examples.drop_near_verbatim(evidence.make_full_report())
    words = words_of(check_page(render_report(report)))
    # Each bucket and its base model, in the main table and in that of attacks.
    assert words.count("n/a not generated") == 4 * len(report.tables.buckets)
    assert "Nothing was generated: the key-value cache of one document needs" in words
    assert "near-verbatim –" in words  # the chart's description


def test_a_run_without_study_reads_well() -> None:
    """One bucket 'trained', some documents of it never reached, beside the control."""
    full = examples.make_report(doses=examples.PLAIN[:2])
    control, trained = full.tables.buckets
    trained = replace(trained, bucket="trained", num_repetitions=None)
    report = change_tables(full, buckets=[control, trained])
    report = change_rows(
        report, lambda row: replace(row, bucket="trained") if row.bucket == "r4" else row
    ).model_copy(update={"verdict": full.verdict.model_copy(update={"bucket": "trained"})})
    words = words_of(check_page(render_report(report)))
    assert "trained, different numbers of times" in words
    assert "were not all trained the same number of times, so the bucket has no position" in words


def test_an_external_audit_reads_well() -> None:
    """Members only, of a model somebody else trained, without a base model or keyed hashes."""
    full = examples.make_report()
    lost = {"bucket": "members", "num_repetitions": None, "text_hmac": None}
    findings = [f.model_copy(update={**lost, "base_num_correct": None}) for f in full.findings[:2]]
    report = make_foreign(
        (64, 40, 40, 1.0),
        findings=findings,
        num_findings=2,
        num_by_method=4,
        method=full.method.model_copy(update={"continuation_tokens": 6, "sample_size": 100}),
    )
    report = change_rows(
        report,
        lambda row: replace(
            row, minus_control=None, minus_control_low=None, minus_control_high=None
        ),
    )
    words = words_of(check_page(render_report(report)))
    assert "in at most 10 % of the tokens (inserted, deleted or replaced)" in words
    assert "2 documents were extracted (4 findings by method)." in words
    assert "at most 100 per bucket" in words
    for step in ("audit.excerpts=true", "--nonmembers", "--base"):
        assert step in words
    for missing in ("keyed hash", "− control", "base model below", "identity key"):
        assert missing not in words


@pytest.mark.parametrize("run", ["none", "a b", "$(x)", "-x"])
def test_the_run_is_named_in_the_title_and_its_path_in_commands(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = tmp_path / "my runs" / run / "audit"
    audit.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    report = examples.make_report().model_copy(update={"run": run})
    words = words_of(check_page(render_report(report, audit)))
    assert words.count(f"Run '{run}'") == 2, "title and heading"
    command = re.search(r"memguard compare (.+?) --fix", words)
    (path,) = shlex.split(command[1])
    assert Path(path).resolve() == audit.parent


def test_a_page_that_is_not_stored_prints_no_command() -> None:
    words = words_of(check_page(render_report(examples.make_report())))
    assert "Fine-tune again with goldfish loss" in words
    assert "--fix" not in words


def test_severities_are_explained_where_there_are_findings() -> None:
    report = examples.make_report()
    assert "so repetitive that it may be a template" in words_of(check_page(render_report(report)))
    quiet = report.model_copy(update={"findings": [], "num_findings": 0, "num_by_method": 0})
    words = words_of(check_page(render_report(quiet)))
    assert "so repetitive that it may be a template" not in words
    assert "No document was extracted." in words


def test_long_ids_stay_whole_and_break_at_separators() -> None:
    full = examples.make_report()
    place = "s3://bucket/projects/internal/legal/contracts/2025/contract-with-a-long-name.txt"
    finding = full.findings[0].model_copy(update={"id": place})
    changes = {"findings": [finding], "num_findings": 1, "num_by_method": 1}
    page = render_report(full.model_copy(update=changes))
    assert place in words_of(check_page(page))
    assert "legal/<wbr>contracts/" in page
    assert "1 document was extracted." in page


@pytest.mark.parametrize(
    ("answers", "prefix", "attacker", "facts"),
    [
        ("none", None, "everything before its last 50 tokens", "last 50 tokens"),
        ("some", None, "everything before its last 50 tokens or last answer", "Continuation last"),
        ("all", None, "everything before its last answer", "Continuation last answer"),
        ("none", 20, "the 20 true tokens before the continuation.", "Prefix 20 tokens"),
        ("some", 20, "the 20 true tokens before the continuation, or everything", "20 tokens of a"),
        ("all", 20, "everything before its last answer", "Prefix everything before the"),
    ],
)
def test_an_answer_is_not_said_to_be_as_long_as_the_end_of_a_text(
    answers: str, prefix: int | None, attacker: str, facts: str
) -> None:
    full = examples.make_report()
    changes = {"answers": answers, "prefix_tokens": prefix}
    report = full.model_copy(update={"method": full.method.model_copy(update=changes)})
    words = words_of(check_page(render_report(report)))
    assert f"each document is prompted with {attacker}" in words
    assert facts in words
    assert ("last 50 tokens" in words) == (answers != "all")
