"""Warnings and notes above the results."""

import pytest
from audit_examples import build_suite
from made_examples import build_columns, make, make_bucket, make_control, summarise_made
from record_examples import make_outline
from result_examples import auc_row

from memguard.audit.probe import Summary
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.warnings import is_base_nearly_equal, is_collapsed
from memguard.records import BLIND, AuditResults


def _list_texts(results: AuditResults, part: str = "") -> list[str]:
    return [banner.text for banner in results.banners if part in banner.text]


def test_notes() -> None:
    made = [
        *make_control([0] * 31),
        *make_bucket("x4", [0] * 28),
        make("h", bucket="x4", hangs=True),
    ]
    summary = summarise_made(made)
    assert [banner.level for banner in summary.banners] == ["note"] * 3
    few, tiny, base = _list_texts(summary)
    assert few == "Fewer than 30 documents in 'x4' (29): the intervals are wide."
    assert "1 result depends on a near-tie (<0.001 logits)" in tiny
    assert "before training was not scored" in base
    assert summary.tables.find("extraction", "tiny_margin", "x4").num_matched == 1
    missing = summarise_made(made, tally="missing").banners[0]
    assert missing.text.startswith("The number of repetitions of each document is not known")
    unreached = summarise_made([*made, make("u", bucket="x4", num_repetitions=0)])
    assert "1 of 30 documents that should have been trained" in unreached.banners[0].text


def test_untrusted_counts_are_not_named() -> None:
    made = [
        *make_control([0] * 40),
        *make_bucket("x4", [50] * 40, num_repetitions=4),
        *make_bucket("x8", [0] * 400, num_repetitions=8),
    ]
    assert "40 of 40 documents trained 4 times" in summarise_made(made).verdict.sentence
    summary = summarise_made(made, tally="contradicting")
    assert not summary.dose_response
    assert "40 of 40 documents of 'x4'" in summary.verdict.sentence
    assert summary.banners[0].level == "warning"
    assert "contradict the number of training steps" in summary.banners[0].text


def test_a_control_that_is_extracted_or_empty_is_stated() -> None:
    trained = make_bucket("t", [50] * 20)
    extracted = summarise_made([*make_control([50] * 20), *trained])
    assert (extracted.verdict.level, extracted.verdict.reason) == ("extracted", "control-too")
    assert _list_texts(extracted, "near-duplicates")
    buckets = [make_outline("x0", "control", num_too_short=3), make_outline("t", num_too_short=3)]
    empty = summarise_made(trained, buckets)
    assert (empty.verdict.level, empty.verdict.reason) == ("extracted", "no-control")
    assert _list_texts(empty, "No control document is long enough")
    assert _list_texts(empty, "6 documents are too short")


def test_text_that_was_not_generated_is_stated() -> None:
    summary = summarise_made([*make_control([0] * 40), *make_bucket("x64", [0] * 40)], generated="")
    assert (summary.verdict.level, summary.verdict.reason) == ("inconclusive", "not-generated")
    assert summary.verdict.scope.endswith("Near-verbatim text was not generated.")
    (warning,) = (banner.text for banner in summary.banners if banner.level == "warning")
    assert warning == (
        "Near-verbatim extraction was not measured: the weights are offloaded. The verdict can "
        "then not say that none was found."
    )


def test_a_collapsed_model_proves_nothing() -> None:
    summary = summarise_made(
        [
            *make_control([0] * 20, argmax_ratio=0.04),
            *make_bucket("x4", [0] * 40, argmax_ratio=0.08),
        ]
    )
    assert (summary.verdict.level, summary.verdict.reason) == ("inconclusive", "collapsed")
    assert "collapsed" in summary.verdict.sentence
    assert "collapsed" in summary.banners[0].text


def test_a_base_that_gives_nearly_the_same_losses_is_none() -> None:
    made = [*make_control([0] * 30, base=0), *make_bucket("x4", [50] * 40, base=50)]
    other = summarise_made(made, base_loss=1.0011)
    assert (other.verdict.level, other.verdict.reason) == ("extracted", "base-too")
    assert not _list_texts(other, "not used as a base")
    same = summarise_made(made, base_loss=1.0003)
    assert (same.verdict.level, same.verdict.base) == ("memorized", None)
    assert "losses (median difference 0.0003 nats a token)" in same.banners[0].text
    assert same.banners[0].level == "warning"
    assert not is_base_nearly_equal(build_columns(make_bucket("x4", [50] * 3)))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"argmax_ratio": 0.1}, False),
        # The text is like that.
        ({"argmax_ratio": 0.02, "ratio": 0.02}, False),
        ({"size": 6, "argmax_ratio": 1 / 6}, True),
    ],
)
def test_what_counts_as_collapsed(fields: dict[str, float], expected: bool) -> None:
    assert is_collapsed(build_columns(make_control([1] * 20, **fields))) is expected


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
def test_the_note_of_what_looked_unlikely(counts: tuple[int, int, int], text: str | None) -> None:
    names = ("num_below_floor", "num_checked", "num_matched_below_floor")
    made = make_bucket("x4", [0] * 31)
    summary = summarise_made(made, counts=dict(zip(names, counts, strict=True)))
    assert _list_texts(summary, "unlikely") == ([] if text is None else [text])


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
    num_control: int, scores: list[str], text: str | None
) -> None:
    made = [*make_control([0] * num_control), *make_bucket("x4", [0] * 9)]
    suite = build_suite(ExtractionProbe(), MembershipProbe())
    rows = [auc_row(score, None, 9) for score in scores]
    others = {"membership": Summary(num_items=9, rows=rows)}
    summary = summarise_made(made, suite=suite, others=others)
    found = _list_texts(summary, "bag-of-words")
    assert len(found) == (text is not None)
    assert all(text in banner for banner in found)
