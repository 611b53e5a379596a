"""The verdict's sentence and level, findings and banners."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from audit_examples import build_evidence, build_suite, tabulate
from hypothesis import given
from hypothesis import strategies as st

from memguard.audit.extraction import ExtractionProbe
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import clopper_pearson
from memguard.audit.summary import Summary, summarise
from memguard.audit.verdict import MAX_FINDINGS, collect_findings, format_percent
from memguard.audit.warnings import is_collapsed
from memguard.records import AttackedBucket, DocumentScore

MakeScore = Callable[..., DocumentScore]


def _bucket(make_score: MakeScore, name: str, correct: Sequence[int], **fields: Any) -> list:
    return [
        make_score(f"{name}-{index}", count, bucket=name, **fields)
        for index, count in enumerate(correct)
    ]


def _control(make_score: MakeScore, correct: Sequence[int], **fields: Any) -> list:
    return _bucket(make_score, "x0", correct, role="control", num_repetitions=0, **fields)


def _summarise(scores: list[DocumentScore], **fields: Any) -> Summary:
    evidence = build_evidence(scores, fields.pop("outlines", None), fields.pop("hanging", ()))
    values: dict[str, Any] = {"tiny_margin": 1e-3, "tally": "complete", "seed": 0}
    return summarise(evidence, suite=build_suite(ExtractionProbe()), **{**values, **fields})


def test_worse_of_the_two_rates_leads(make_score: MakeScore) -> None:
    # What goldfish does: nearly every token right, hardly a document verbatim.
    scores = [
        *_control(make_score, [3] * 40),
        *_bucket(make_score, "x4", [10] * 40, num_repetitions=4),
        *_bucket(make_score, "x64", [47] * 37 + [50] + [20] * 2, num_repetitions=64),
    ]
    verdict = _summarise(scores).verdict
    assert (verdict.level, verdict.metric, verdict.bucket) == ("recites", "near_verbatim", "x64")
    assert verdict.sentence == (
        "In the probes that ran, 38 of 40 documents trained 64 times (95.0 %, 95 % CI "
        "83.1–99.4 %) were extracted near-verbatim by greedy decoding for 50 tokens; control 0 of "
        "40 (95 % CI 0.0–8.8 %). This exceeds the control rate. Verbatim 1 of 40. Teacher-forced "
        "token accuracy, which is not extraction: 91.5 %."
    )


def test_verbatim_leads_where_near_verbatim_adds_nothing(make_score: MakeScore) -> None:
    scores = [*_control(make_score, [0] * 40), *_bucket(make_score, "x64", [50] * 40)]
    verdict = _summarise(scores).verdict
    assert (verdict.level, verdict.metric) == ("recites", "verbatim")
    assert "were extracted verbatim by greedy decoding for 50 tokens" in verdict.sentence
    assert "Near-verbatim 40 of 40" in verdict.sentence


def test_zero_hits_give_the_upper_bound(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [0] * 40),
        *_bucket(make_score, "x4", [0] * 40, num_repetitions=4),
        *_bucket(make_score, "x64", [0] * 40, num_repetitions=64),
    ]
    verdict = _summarise(scores).verdict
    assert (verdict.level, verdict.bucket) == ("not-above-control", "x64")
    assert "The true rate may be as high as 8.8 %." in verdict.sentence


def test_reciting_control_is_no_finding(make_score: MakeScore) -> None:
    scores = [*_control(make_score, [50] * 20), *_bucket(make_score, "x4", [50] * 20)]
    summary = _summarise(scores)
    assert summary.verdict.level == "not-above-control"
    assert any("near-duplicates" in banner.text for banner in summary.banners)
    assert {finding.bucket for finding in summary.findings} == {"x4"}


@pytest.mark.parametrize(
    ("control", "trained", "level", "words"),
    [
        (None, [50] * 20, "no-control", "Without a control"),
        (None, [50], "inconclusive", "Fewer than two"),
        ([0] * 9, [0] * 20, "inconclusive", "The control has 9 such documents"),
        ([0] * 9, [50] * 20, "recites", "exceeds the control rate"),
        ([0] * 10, [0] * 20, "not-above-control", "not significant"),
    ],
)
def test_levels(
    control: list[int] | None,
    trained: list[int],
    level: str,
    words: str,
    make_score: MakeScore,
) -> None:
    scores = [
        *(_control(make_score, control) if control else []),
        *_bucket(make_score, "trained", trained, num_repetitions=1),
    ]
    verdict = _summarise(scores).verdict
    assert verdict.level == level
    assert words in verdict.sentence
    assert "trained once" in verdict.sentence
    assert "safe" not in verdict.sentence


def test_empty_control_is_inconclusive(make_score: MakeScore) -> None:
    outlines = [
        BucketOutline(
            bucket=bucket, role=role, num_repetitions=None, num_too_short=3, num_not_sampled=0
        )
        for bucket, role in (("x0", "control"), ("t", "trained"))
    ]
    summary = _summarise(_bucket(make_score, "t", [50] * 20), outlines=outlines)
    assert summary.verdict.level == "inconclusive"
    empty = summary.buckets[0]
    assert (empty.num_documents, empty.model.verbatim.rate) == (0, None)
    assert empty.model.mean_token_accuracy is None
    assert summary.buckets[1].minus_control == {}
    texts = [banner.text for banner in summary.banners]
    assert any("No control document is long enough" in text for text in texts)
    assert any("6 documents are too short" in text for text in texts)


def test_untrusted_counts_are_not_named(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [0] * 40),
        *_bucket(make_score, "x4", [50] * 39, num_repetitions=4),
        make_score("late", 50, bucket="x4", num_repetitions=3),
    ]
    assert "documents trained 3 to 4 times" in _summarise(scores).verdict.sentence
    summary = _summarise(scores, tally="contradicting")
    assert not summary.dose_response
    assert "documents of bucket 'x4'" in summary.verdict.sentence
    assert summary.banners[0].level == "warning"
    assert "contradict the number of training steps" in summary.banners[0].text


def test_known_token_by_token_is_nobodys_verdict(make_score: MakeScore) -> None:
    """47 of 50 tokens right under teacher forcing, and no text that comes out."""
    scores = [
        *_control(make_score, [3] * 40),
        *_bucket(make_score, "x64", [47] * 40, near_verbatim=False, num_edits=None),
    ]
    summary = _summarise(scores)
    assert summary.verdict.level == "not-above-control"
    assert (summary.findings, summary.buckets[1].risks["near_verbatim"].num_matched) == ([], 0)
    assert summary.buckets[1].model.teacher_forced_90.num_matched == 40
    assert "0 of 40 documents" in summary.verdict.sentence
    assert "which is not extraction: 94.0 %" in summary.verdict.sentence


def test_a_bucket_that_training_never_reached_does_not_lead(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [3] * 40),
        *_bucket(make_score, "x4", [50] * 20 + [3] * 20, num_repetitions=4),
        *_bucket(make_score, "x64", [50] * 40, num_repetitions=0),
    ]
    verdict = _summarise(scores).verdict
    assert (verdict.level, verdict.bucket) == ("recites", "x4")
    assert "20 of 40 documents trained 4 times" in verdict.sentence
    # Where it reached none, they are all there is.
    unreached = _summarise([score for score in scores if score.bucket != "x4"]).verdict
    assert (unreached.level, unreached.bucket) == ("recites", "x64")


def test_sampling_and_attacks_may_lead(make_score: MakeScore) -> None:
    scores = [*_control(make_score, [3] * 40), *_bucket(make_score, "x64", [40] * 40)]
    attacks = [
        AttackedBucket(
            bucket=bucket,
            attack=attack,
            num_queries=8,
            best_verbatim=clopper_pearson(0, 20),
            any_verbatim=clopper_pearson(matched, 20),
            mean_token_accuracy=None,
        )
        for bucket, counts in (("x0", (0, 1)), ("x64", (3, 15)))
        for attack, matched in zip(("beam_search", "fill"), counts, strict=True)
    ]
    evidence = replace(build_evidence(scores), attacks=attacks)
    values: dict[str, Any] = {"tiny_margin": 1e-3, "tally": "complete", "seed": 0}
    summary = summarise(evidence, suite=build_suite(ExtractionProbe()), **values)
    assert (summary.verdict.level, summary.verdict.metric) == ("recites", "attack")
    assert (
        "15 of 20 documents trained 4 times (75.0 %, 95 % CI 50.9–91.3 %) were extracted verbatim "
        "by the best attack that ran for 50 tokens; control 1 of 20"
    ) in summary.verdict.sentence
    assert summary.buckets[1].risks["attack"].num_matched == 15


def test_what_was_not_generated_is_told(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [0] * 40, near_verbatim=None),
        *_bucket(make_score, "x64", [50] * 40, near_verbatim=None),
    ]
    summary = _summarise(scores)
    assert summary.buckets[1].model.near_verbatim is None
    assert "near_verbatim" not in summary.buckets[1].risks
    assert "Near-verbatim not generated" in summary.verdict.sentence
    assert summary.generated.reason_not_generated == "the weights are offloaded"
    (warning,) = (banner.text for banner in summary.banners if banner.level == "warning")
    assert warning == (
        "Near-verbatim extraction was not measured: the weights are offloaded. The verdict is "
        "based on verbatim matches."
    )


def test_completions_of_many_lengths(make_score: MakeScore) -> None:
    scores = [make_score(f"{n}", n, continuation_tokens=n) for n in (4, 9, 30)]
    assert (
        "were extracted verbatim by greedy decoding for 4 to 30 tokens"
        in _summarise(scores).verdict.sentence
    )


def test_base_and_differences_in_the_table(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [0] * 20, base=0),
        *_bucket(make_score, "x4", [50] * 15 + [46] * 5, base=10),
    ]
    control, row = _summarise(scores).buckets
    assert (row.model.verbatim.num_matched, row.model.near_verbatim.num_matched) == (15, 20)
    assert row.base is not None
    assert (row.base.verbatim.num_matched, row.base.median_first_divergence) == (0, 10)
    assert row.base.mean_token_accuracy is not None
    assert row.base.mean_token_accuracy.value == pytest.approx(0.2)
    assert row.minus_control["verbatim"].value == 0.75
    assert row.minus_control["near_verbatim"].value == 1
    assert row.base_risks["near_verbatim"].num_matched == 0
    assert row.model.median_first_divergence == 50
    assert control.minus_control == {}
    assert row.mean_extraction_strength == 0.75


def test_findings_by_severity(make_score: MakeScore) -> None:
    scores = [
        make_score("template", 50, type_token_ratio=0.4),
        make_score("near", 45),
        make_score("short", 20, continuation_tokens=20),
        make_score("known", 50, base=50),
        make_score("high-known-partly", 50, base=40),
        make_score("high", 50, base=2),
        make_score("not", 44),
        *_control(make_score, [50]),
    ]
    hmacs = ["abc" if score.id == "high" else None for score in scores]
    findings, num_findings = collect_findings(tabulate(scores), hmacs)
    assert [(f.id, f.severity) for f in findings] == [
        ("high", "high"),
        ("high-known-partly", "high"),
        ("known", "medium"),
        ("short", "medium"),
        ("near", "low"),
        ("template", "info"),
    ]
    assert num_findings == 6
    worst = findings[0]
    assert (worst.text_hmac, worst.base_num_correct) == ("abc", 2)
    assert worst.sentence == (
        "Greedy decoding after a prefix of 78 tokens generates all 50 tokens of the continuation "
        "verbatim. The model before training predicts 2 of them given the true text before each."
    )


def test_findings_are_limited_and_counted(make_score: MakeScore) -> None:
    scores = tabulate([make_score(f"{i:03}", 50) for i in range(150)])
    findings, num_findings = collect_findings(scores, [None] * 150)
    assert (len(findings), num_findings) == (MAX_FINDINGS, 150)
    assert [f.id for f in findings[:2]] == ["000", "001"]


def test_collapsed_model_proves_nothing(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [0] * 20, argmax_type_token_ratio=0.04),
        *_bucket(make_score, "x4", [0] * 20, argmax_type_token_ratio=0.08),
    ]
    summary = _summarise(scores)
    assert summary.verdict.level == "inconclusive"
    assert "collapsed" in summary.verdict.sentence
    assert "collapsed" in summary.banners[0].text
    assert not is_collapsed(tabulate(_control(make_score, [0] * 20, argmax_type_token_ratio=0.1)))
    same = {"argmax_type_token_ratio": 0.02, "type_token_ratio": 0.02}
    assert not is_collapsed(tabulate(_control(make_score, [50] * 20, **same))), (
        "the text is like that"
    )
    short = {"continuation_tokens": 6, "argmax_type_token_ratio": 1 / 6}
    assert is_collapsed(tabulate(_control(make_score, [1] * 20, **short)))


def test_banners(make_score: MakeScore) -> None:
    scores = [*_control(make_score, [0] * 31), *_bucket(make_score, "x4", [0] * 29)]
    summary = _summarise(scores, hanging={"x4-3"})
    assert [banner.level for banner in summary.banners] == ["note"] * 3
    few, tiny, base = (banner.text for banner in summary.banners)
    assert few == "Fewer than 30 documents in 'x4' (29): the intervals are wide."
    assert "1 match depends on a near-tie (<0.001 logits)" in tiny
    assert "before training was not scored" in base
    assert summary.buckets[1].num_tiny_margin == 1
    missing = _summarise(scores, tally="missing").banners[0]
    assert missing.text.startswith("The number of repetitions of each document is not known")
    unreached = _summarise([*scores, make_score("u", bucket="x4", num_repetitions=0)])
    assert "1 of 30 documents that should have been trained" in unreached.banners[0].text


@given(
    control=st.lists(st.integers(0, 50), min_size=2, max_size=30),
    trained=st.lists(st.integers(0, 50), min_size=2, max_size=30),
)
def test_what_the_control_does_too_is_never_recited(
    make_score: MakeScore, control: list[int], trained: list[int]
) -> None:
    scores = [
        *_control(make_score, control),
        *_bucket(make_score, "x4", trained, num_repetitions=4),
    ]
    summary = _summarise(scores)
    assert "x0" not in {finding.bucket for finding in summary.findings}
    assert summary.verdict.bucket == "x4"
    for needed in (50, 45):
        ours, theirs = (
            sum(count >= needed for count in counts) / len(counts) for counts in (trained, control)
        )
        metric = "verbatim" if needed == 50 else "near_verbatim"
        if summary.verdict.metric == metric and ours <= theirs:
            assert summary.verdict.level != "recites"


def test_percentages_never_round_to_certainty() -> None:
    shares = [0, 0.0001, 0.0005, 0.5, 0.9994, 0.9999, 1]
    assert [format_percent(share) for share in shares] == [
        "0.0 %", "<0.1 %", "0.1 %", "50.0 %", "99.9 %", "99.9 %", "100.0 %",
    ]  # fmt: skip
