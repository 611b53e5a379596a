"""The audit page says what the record says, and reads well where much is missing."""

import report_examples as examples
from page_checks import check_page, words_of

from memguard import records as r
from memguard.report import render_report


def test_all_numbers_of_an_audit_appear() -> None:
    report = examples.make_report()
    words = words_of(check_page(render_report(report)))
    for bucket in report.buckets:
        for rate in (bucket.model.verbatim, bucket.model.near_verbatim):
            low, high = rate.ci or (0, 0)
            assert f"{rate.num_matched} of {rate.num_documents}" in words
            if low > 0.01 and high < 0.9995:
                share = f"{100 * (rate.rate or 0):.1f} % ({100 * low:.1f}–{100 * high:.1f} %)"
                assert share in words
        accuracy = bucket.model.mean_token_accuracy
        assert accuracy is not None
        assert accuracy.value == 1 or f"{100 * accuracy.value:.1f} %" in words
        assert f"{bucket.mean_extraction_strength:.3f}" in words
        assert f"{bucket.model.median_first_divergence:.1f}" in words
        logprob = bucket.model.mean_logprob
        assert logprob is not None
        assert f"{logprob.value:.3f}".replace("-0.000", "0.000") in words
        difference = bucket.near_verbatim_minus_control
        assert difference is None or f"{100 * difference.value:.1f} pp" in words
    for number in ("0.713", "0.655", "0.934", "0.957", "1,053,440", "853,440", "4.372", "5.012"):
        assert number in words
    for finding in report.findings:
        assert finding.id in words
        assert f"{finding.logprob:.3f}" in words
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
        mean_token_accuracy=None,
        median_first_divergence=None,
        mean_logprob=None,
    )


def test_a_bare_record_renders() -> None:
    """No control, no base, no training, no membership, no documents, nothing known."""
    full = examples.make_report()
    bucket = full.buckets[1].model_copy(
        update={
            "num_repetitions": None,
            "num_documents": 0,
            "model": make_empty_scores(),
            "base": None,
            "mean_extraction_strength": None,
            "mean_type_token_ratio": None,
            "mean_argmax_type_token_ratio": None,
            "verbatim_minus_control": None,
            "near_verbatim_minus_control": None,
        }
    )
    report = full.model_copy(
        update={
            "status": "partial",
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
            "verdict": full.verdict.model_copy(update={"level": "no-control", "bucket": "gone"}),
        }
    )
    words = words_of(check_page(render_report(report)))
    assert "No chart is shown: memguard did not train this model" in words
    assert "computes no membership scores" in words
    assert "Only these probes ran: none." in words
    assert "No base model was scored" in words
    assert "memguard did not train this model" in words
    assert "This audit ended before all documents were scored" in words
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
    assert "A random sample was scored: 160 of 400 documents" in words
    assert "the 32 true tokens before the continuation" in words
    assert "Scored in bf16: 1 result hangs on a gap of less than 0.001 logits" in words


def make_partly_learned(accuracy: float, half: float) -> r.AuditReport:
    """Return a report where r16 is the worst bucket and recites nothing."""
    full = examples.make_report()
    learned = examples.make_bucket(16, 0, 0, accuracy)
    scores = learned.model.model_copy(
        update={"mean_token_accuracy": examples.make_interval(accuracy, half)}
    )
    verdict = full.verdict.model_copy(
        update={"level": "not-above-control", "bucket": "r16", "sentence": "0 of 40."}
    )
    buckets = [full.buckets[0], learned.model_copy(update={"model": scores})]
    return full.model_copy(
        update={"buckets": buckets, "verdict": verdict, "findings": [], "num_findings": 0}
    )


def test_zero_documents_with_many_tokens_right_are_called_partly_learned() -> None:
    words = words_of(check_page(render_report(make_partly_learned(0.685, 0.03))))
    assert "Partly learned." in words
    told = "In r16 no document is given back near-verbatim, yet 68.5 % of the tokens are right"
    assert words.count(told) == 2  # the notice above the verdict, and the lead of the table
    assert "against 20.3 % in the control" in words


def test_an_accuracy_that_may_be_the_controls_is_not_called_learned() -> None:
    # 0.203 +- 0.03 against 0.25 +- 0.03: the intervals overlap.
    assert "partly learned" not in words_of(
        check_page(render_report(make_partly_learned(0.25, 0.03)))
    )


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
    assert "trained, not equally often" in words
    assert "were not all trained equally often, so the bucket has no place on the axis" in words
    assert "Near-verbatim, trained" in words


def test_an_external_audit_reads_well() -> None:
    """Members only, of a model somebody else trained, without a base model or keyed hashes."""
    full = examples.make_report()
    bucket = full.buckets[3].model_copy(
        update={
            "bucket": "members",
            "num_repetitions": None,
            "base": None,
            "verbatim_minus_control": None,
            "near_verbatim_minus_control": None,
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
            "verdict": full.verdict.model_copy(update={"level": "no-control", "bucket": "members"}),
        }
    )
    words = words_of(check_page(render_report(report)))
    assert "which with so few is all of them" in words
    assert "All 2 findings, worst first." in words
    assert "at most 100 of a bucket" in words
    for step in ("--excerpts", "--nonmembers", "--base"):
        assert step in words
    for missing in ("keyed hash", "− control", "base model's below", "private folder"):
        assert missing not in words


def test_severities_are_explained_where_there_are_findings() -> None:
    report = examples.make_report()
    assert "so much that it may be a template" in words_of(check_page(render_report(report)))
    quiet = report.model_copy(update={"findings": [], "num_findings": 0})
    words = words_of(check_page(render_report(quiet)))
    assert "so much that it may be a template" not in words
    assert "No document met the rule for a finding" in words


def test_long_ids_stay_whole_and_break_at_separators() -> None:
    full = examples.make_report()
    place = "s3://bucket/projects/internal/legal/contracts/2025/contract-with-a-long-name.txt"
    finding = full.findings[0].model_copy(update={"id": place})
    page = render_report(full.model_copy(update={"findings": [finding], "num_findings": 1}))
    assert place in words_of(check_page(page))
    assert "legal/<wbr>contracts/" in page
    assert "One finding." in page
