"""The audit page says what the record says, and reads well where much is missing."""

import re
import shlex
from pathlib import Path
from typing import Any

import evidence_examples as evidence
import pytest
import report_examples as examples
from measure_examples import make_means, make_measures
from page_checks import check_page, words_of

from memguard import records as r
from memguard.report import render_report


def test_all_numbers_of_an_audit_appear() -> None:
    report = examples.make_report()
    words = words_of(check_page(render_report(report)))
    for bucket in report.buckets:
        known = bucket.model.teacher_forced_90
        for rate in (bucket.model.verbatim, bucket.model.near_verbatim, known):
            low, high = rate.ci or (0, 0)
            assert f"{rate.num_matched} of {rate.num_documents}" in words
            if low > 0.01 and high < 0.9995:
                share = f"{100 * (rate.rate or 0):.1f} % ({100 * low:.1f}–{100 * high:.1f} %)"
                assert share in words
        accuracy = bucket.model.mean_token_accuracy
        assert accuracy.value == 1 or f"{100 * accuracy.value:.1f} %" in words
        assert f"{bucket.mean_extraction_strength:.3f}" in words
        assert f"{bucket.model.median_first_divergence:.1f}" in words
        logprob = bucket.model.mean_logprob
        assert f"{logprob.value:.3f}".replace("-0.000", "0.000") in words
        for difference in bucket.minus_control.values():
            assert f"{100 * difference.value:.1f} pp" in words
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
    assert "The first 1,000 of 2,345 findings" in words
    assert findings[-1].id in words
    assert len(page) < 2_000_000


def make_empty_scores() -> r.ModelScores:
    return r.ModelScores(
        verbatim=examples.make_rate(0, 0),
        near_verbatim=examples.make_rate(0, 0),
        teacher_forced_90=examples.make_rate(0, 0),
        mean_token_accuracy=None,
        median_first_divergence=None,
        mean_logprob=None,
    )


def test_a_bare_record_renders() -> None:
    """No control, no base, no training, no membership, no documents, nothing known."""
    full = examples.make_report().model_copy(update={"base_generated": None})
    bucket = full.buckets[1].model_copy(
        update={
            "num_repetitions": None,
            "num_documents": 0,
            "model": make_empty_scores(),
            "base": None,
            "mean_extraction_strength": None,
            "mean_type_token_ratio": None,
            "mean_argmax_type_token_ratio": None,
            "risks": examples.list_risks(make_empty_scores()),
            "base_risks": {},
            "minus_control": {},
        }
    )
    report = full.model_copy(
        update={
            "run": None,
            "training": None,
            "buckets": [bucket],
            "dose_response": False,
            "membership": [],
            "probe_runs": [],
            "findings": [],
            "num_findings": 0,
            "banners": [],
            "environment": {},
            "model": full.model.model_copy(update={"base": None, "base_weights_sha256": None}),
            "data": full.data.model_copy(
                update={"sources": [], "num_clusters": None, "overlap_with_control": None}
            ),
            "method": full.method.model_copy(update={"probes": [], "command": ""}),
            "verdict": examples.make_verdict(
                level="extracted",
                reason="no-control",
                trained=examples.make_counts(0, 0),
                control=examples.make_counts(0, 0),
                base=None,
                test=None,
                bucket="gone",
            ),
        }
    )
    words = words_of(check_page(render_report(report)))
    assert "No chart is shown: memguard did not train this model" in words
    assert "computes no membership scores" in words
    assert "Only these probes ran: none." in words
    assert "No base model was scored" in words
    assert "memguard did not train this model" in words
    check_page(render_report(report.model_copy(update={"buckets": []})))


def test_one_dose_gives_no_chart_but_a_reason() -> None:
    full = examples.make_report()
    report = full.model_copy(update={"buckets": [full.buckets[2]]})
    parser = check_page(render_report(report))
    assert not [a for tag, a in parser.tags if a.get("class") == "chart"]
    assert "needs at least two different numbers of repetitions" in words_of(parser)


def test_limits_follow_the_record() -> None:
    full = examples.make_report()
    sampled = [b.model_copy(update={"num_not_sampled": 60}) for b in full.buckets]
    method = full.method.model_copy(update={"prefix_tokens": 32, "dtype": "bf16"})
    report = full.model_copy(update={"buckets": sampled, "method": method})
    words = words_of(check_page(render_report(report)))
    assert "A random sample of 160 of 400 eligible documents was scored" in words
    assert "the 32 true tokens before the continuation" in words
    assert (
        "Scored in bf16: 1 result depends on a near-tie (a gap of less than 0.001 logits" in words
    )


def make_partly_learned(accuracy: float, half: float) -> r.AuditReport:
    """Return a report where r16 is the worst bucket and nothing of it is extracted."""
    full = examples.make_report()
    learned = examples.make_bucket(16, 0, 0, accuracy)
    verdict = examples.make_green(bucket="r16")
    accuracies = make_means([0.203, accuracy], 0.137, half, 0, 1)
    parts = {
        "buckets": [full.buckets[0], learned],
        "verdict": verdict,
        "measures": make_measures(
            "extraction", {}, {"token_accuracy": ("share", accuracies)}, ["control", "r16"]
        ),
        "membership": evidence.make_membership(),
    }
    return full.model_copy(update={**parts, "findings": [], "num_findings": 0})


def test_tokens_learned_of_documents_that_are_not_extracted_are_called_partly_learned() -> None:
    words = words_of(check_page(render_report(make_partly_learned(0.685, 0.03))))
    assert "Partly learned." in words
    # Model minus base, and that minus the control's gain of 6.6 points.
    told = "r16: +54.8 pp, +48.2 pp more than in the control (+45.2 to +51.2)"
    assert words.count(told) == 2  # a note, and the lead of the table
    assert words.count("partly learned these texts but did not reproduce them") == 2
    assert "No document of these buckets is extracted" in words


def test_a_gain_that_may_be_the_controls_is_not_called_learned() -> None:
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
            "the text is verbatim. 59 documents with a teacher-forced accuracy below 50 % were not "
            "generated; in a random sample of 20 such documents that were, none is near-verbatim.",
        ),
        (
            {"num_checked": 79, "num_matched_below_floor": 2, "num_generated": 103},
            "Text was generated for 103 documents; for 57 others the teacher-forced pass shows "
            "that the text is verbatim.",
        ),
        (
            {"reason_not_generated": "no memory for the cache"},
            "Nothing was generated: no memory for the cache.",
        ),
    ],
    ids=["sample below the floor", "all generated", "none"],
)
def test_how_texts_were_generated_is_told(changes: dict[str, Any], told: str) -> None:
    report = examples.make_report()
    generated = report.generated.model_copy(update=changes)
    words = words_of(check_page(render_report(report.model_copy(update={"generated": generated}))))
    assert told in words
    assert ("were not generated; in a random sample" in words) == (not changes)


def test_without_generated_text_every_part_says_so() -> None:
    report = examples.drop_near_verbatim(evidence.make_full_report())
    words = words_of(check_page(render_report(report)))
    # Each bucket and its base model, in the main table and in that of attacks.
    assert words.count("n/a not generated") == 4 * len(report.buckets)
    assert "Nothing was generated: the key-value cache of one document needs" in words
    assert "near-verbatim –" in words  # the chart's description


def test_a_run_without_study_reads_well() -> None:
    """One bucket 'trained', some documents of it never reached, beside the control."""
    full = examples.make_report()
    bucket = full.buckets[1].model_copy(update={"bucket": "trained", "num_repetitions": None})
    report = full.model_copy(
        update={
            "buckets": [full.buckets[0], bucket],
            "verdict": full.verdict.model_copy(update={"bucket": "trained"}),
        }
    )
    words = words_of(check_page(render_report(report)))
    assert "trained, different numbers of times" in words
    assert "were not all trained the same number of times, so the bucket has no position" in words


def test_an_external_audit_reads_well() -> None:
    """Members only, of a model somebody else trained, without a base model or keyed hashes."""
    full = examples.make_report()
    bucket = full.buckets[3].model_copy(
        update={
            "bucket": "members",
            "num_repetitions": None,
            "base": None,
            "base_risks": {},
            "minus_control": {},
        }
    )
    lost = {"bucket": "members", "num_repetitions": None, "text_hmac": None}
    findings = [f.model_copy(update={**lost, "base_num_correct": None}) for f in full.findings[:2]]
    report = full.model_copy(
        update={
            "run": None,
            "training": None,
            "dose_response": False,
            "buckets": [bucket],
            "membership": [],
            "findings": findings,
            "num_findings": 2,
            "model": full.model.model_copy(update={"base": None, "base_weights_sha256": None}),
            "method": full.method.model_copy(update={"continuation_tokens": 6, "sample_size": 100}),
            "verdict": examples.make_verdict(
                level="extracted",
                reason="no-control",
                control=examples.make_counts(0, 0),
                base=None,
                test=None,
                bucket="members",
            ),
        }
    )
    words = words_of(check_page(render_report(report)))
    assert "in at most 10 % of the tokens (inserted, deleted or replaced)" in words
    assert "All 2 findings, worst first." in words
    assert "at most 100 per bucket" in words
    for step in ("--excerpts", "--nonmembers", "--base"):
        assert step in words
    for missing in ("keyed hash", "− control", "base model below", "private folder"):
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
    quiet = report.model_copy(update={"findings": [], "num_findings": 0})
    words = words_of(check_page(render_report(quiet)))
    assert "so repetitive that it may be a template" not in words
    assert "No document met the criteria for a finding" in words


def test_long_ids_stay_whole_and_break_at_separators() -> None:
    full = examples.make_report()
    place = "s3://bucket/projects/internal/legal/contracts/2025/contract-with-a-long-name.txt"
    finding = full.findings[0].model_copy(update={"id": place})
    page = render_report(full.model_copy(update={"findings": [finding], "num_findings": 1}))
    assert place in words_of(check_page(page))
    assert "legal/<wbr>contracts/" in page
    assert "One finding." in page
