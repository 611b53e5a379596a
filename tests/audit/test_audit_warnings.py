"""Warnings and notes above the results."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from audit_examples import build_evidence, build_rows, build_suite, tabulate

from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.selection import BucketOutline
from memguard.audit.summary import summarise
from memguard.audit.warnings import collect_banners, is_collapsed
from memguard.records import BLIND, AuditResults, DocumentScore, GeneratedTexts, MembershipScores

MakeScore = Callable[..., DocumentScore]


def _bucket(make_score: MakeScore, name: str, correct: Sequence[int], **fields: Any) -> list:
    return [
        make_score(f"{name}-{index}", count, bucket=name, **fields)
        for index, count in enumerate(correct)
    ]


def _control(make_score: MakeScore, correct: Sequence[int], **fields: Any) -> list:
    return _bucket(make_score, "x0", correct, role="control", num_repetitions=0, **fields)


def _summarise(scores: list[DocumentScore], **fields: Any) -> AuditResults:
    evidence = build_evidence(scores, fields.pop("outlines", None), fields.pop("hanging", ()))
    values: dict[str, Any] = {"tiny_margin": 1e-3, "tally": "complete", "seed": 0}
    return summarise(evidence, suite=build_suite(ExtractionProbe()), **{**values, **fields})


def test_notes(make_score: MakeScore) -> None:
    scores = [*_control(make_score, [0] * 31), *_bucket(make_score, "x4", [0] * 29)]
    summary = _summarise(scores, hanging={"x4-3"})
    assert [banner.level for banner in summary.banners] == ["note"] * 3
    few, tiny, base = (banner.text for banner in summary.banners)
    assert few == "Fewer than 30 documents in 'x4' (29): the intervals are wide."
    assert "1 result depends on a near-tie (<0.001 logits)" in tiny
    assert "before training was not scored" in base
    assert summary.buckets[1].num_tiny_margin == 1
    missing = _summarise(scores, tally="missing").banners[0]
    assert missing.text.startswith("The number of repetitions of each document is not known")
    unreached = _summarise([*scores, make_score("u", bucket="x4", num_repetitions=0)])
    assert "1 of 30 documents that should have been trained" in unreached.banners[0].text


def test_untrusted_counts_are_not_named(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [0] * 40),
        *_bucket(make_score, "x4", [50] * 40, num_repetitions=4),
        *_bucket(make_score, "x8", [0] * 400, num_repetitions=8),
    ]
    assert "40 of 40 documents trained 4 times" in _summarise(scores).verdict.sentence
    summary = _summarise(scores, tally="contradicting")
    assert not summary.dose_response
    assert "40 of 40 documents of 'x4'" in summary.verdict.sentence
    assert summary.banners[0].level == "warning"
    assert "contradict the number of training steps" in summary.banners[0].text


def test_a_control_that_comes_out_is_told(make_score: MakeScore) -> None:
    summary = _summarise([*_control(make_score, [50] * 20), *_bucket(make_score, "x4", [50] * 20)])
    assert (summary.verdict.level, summary.verdict.reason) == ("extracted", "control-too")
    assert any("near-duplicates" in banner.text for banner in summary.banners)


def test_empty_control_is_told(make_score: MakeScore) -> None:
    outlines = [
        BucketOutline(
            bucket=bucket, role=role, num_repetitions=None, num_too_short=3, num_not_sampled=0
        )
        for bucket, role in (("x0", "control"), ("t", "trained"))
    ]
    summary = _summarise(_bucket(make_score, "t", [50] * 20), outlines=outlines)
    assert (summary.verdict.level, summary.verdict.reason) == ("extracted", "no-control")
    texts = [banner.text for banner in summary.banners]
    assert any("No control document is long enough" in text for text in texts)
    assert any("6 documents are too short" in text for text in texts)


def test_what_was_not_generated_is_told(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [0] * 40, near_verbatim=None),
        *_bucket(make_score, "x64", [0] * 40, near_verbatim=None),
    ]
    summary = _summarise(scores)
    assert (summary.verdict.level, summary.verdict.reason) == ("inconclusive", "not-generated")
    assert summary.verdict.scope.endswith("Near-verbatim text was not generated.")
    (warning,) = (banner.text for banner in summary.banners if banner.level == "warning")
    assert warning == (
        "Near-verbatim extraction was not measured: the weights are offloaded. The verdict can "
        "then not say that none was found."
    )


def test_collapsed_model_proves_nothing(make_score: MakeScore) -> None:
    scores = [
        *_control(make_score, [0] * 20, argmax_type_token_ratio=0.04),
        *_bucket(make_score, "x4", [0] * 40, argmax_type_token_ratio=0.08),
    ]
    summary = _summarise(scores)
    assert (summary.verdict.level, summary.verdict.reason) == ("inconclusive", "collapsed")
    assert "collapsed" in summary.verdict.sentence
    assert "collapsed" in summary.banners[0].text
    assert not is_collapsed(tabulate(_control(make_score, [0] * 20, argmax_type_token_ratio=0.1)))
    same = {"argmax_type_token_ratio": 0.02, "type_token_ratio": 0.02}
    assert not is_collapsed(tabulate(_control(make_score, [50] * 20, **same))), (
        "the text is like that"
    )
    short = {"continuation_tokens": 6, "argmax_type_token_ratio": 1 / 6}
    assert is_collapsed(tabulate(_control(make_score, [1] * 20, **short)))


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((72, 26, 0), "72 documents looked unlikely to be extractable; we tested 26, none was."),
        ((72, 72, 0), "72 documents looked unlikely to be extractable; all were tested, none was."),
        ((1, 1, 0), "1 document looked unlikely to be extractable; it was tested and was not."),
        (
            (72, 72, 3),
            "72 documents looked unlikely to be extractable; a sample matched, so all were tested: "
            "3 match.",
        ),
        ((0, 0, 0), None),
    ],
)
def test_the_note_of_what_looked_unlikely(
    counts: tuple[int, int, int], text: str | None, make_score: MakeScore
) -> None:
    below, checked, matched = counts
    scores = [*_control(make_score, [0] * 31), *_bucket(make_score, "x4", [0] * 31, base=0)]
    generated = GeneratedTexts(
        reason_not_generated=None,
        num_verbatim=0,
        num_generated=62,
        floor=0.5,
        num_below_floor=below,
        num_checked=checked,
        num_matched_below_floor=matched,
    )
    banners = collect_banners(
        build_rows(build_evidence(scores)),
        tabulate(scores),
        generated,
        tally="complete",
        tiny_margin=1e-3,
    )
    found = [banner.text for banner in banners if "unlikely" in banner.text]
    assert found == ([] if text is None else [text])


@pytest.mark.parametrize(
    ("num_control", "scores", "text"),
    [
        (4, ["loss"], "it needs 5 of either kind, near-duplicates counted once, and there are 9 "),
        (9, ["loss"], "not run: near-duplicates hold the documents of one kind together. Whether"),
        (9, ["loss", BLIND], None),
        (1, [], None),
    ],
)
def test_texts_that_were_not_compared_are_noted(
    make_score: MakeScore, num_control: int, scores: list[str], text: str | None
) -> None:
    rows = [*_control(make_score, [0] * num_control), *_bucket(make_score, "x4", [0] * 9)]
    evidence = build_evidence(rows)
    banners = collect_banners(
        build_rows(evidence),
        tabulate(rows),
        _summarise(rows).generated,
        tally="complete",
        tiny_margin=1e-3,
        membership=[
            MembershipScores(score=score, num_members=9, num_nonmembers=num_control, auc=None)
            for score in scores
        ],
        documents=[window.document for window in evidence.windows],
    )
    found = [banner.text for banner in banners if "bag-of-words" in banner.text]
    assert len(found) == (text is not None)
    assert all(text in banner for banner in found)
