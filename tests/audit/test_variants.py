"""The comparison of variants, against formulas, on made-up scores."""

import numpy as np
import pytest
from record_examples import make_document

from memguard.audit.cache import ScoreMatrix
from memguard.audit.document_scores import DocumentScores
from memguard.audit.extraction import Window
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import compute_mean, compute_paired_rates
from memguard.audit.variants import HeldoutPiece, HeldoutTexts, VariantResults, compare_variants
from memguard.records import VariantName

NUM = 12


def make_windows() -> list[Window]:
    return [
        Window(
            # Pairs of near-duplicates.
            document=make_document(
                np.arange(20), name=f"d{number}", num_repetitions=4, cluster=number // 2
            ),
            start=0,
            prefix_tokens=10,
            continuation_tokens=10,
        )
        for number in range(NUM)
    ]


def make_results(
    name: VariantName, verbatim: list[int], nll: list[float], cost: float, *, generated: bool = True
) -> VariantResults:
    columns = {
        "bucket": np.array(["trained"] * NUM, dtype=object),
        "verbatim": np.array(verbatim, dtype=np.float64),
        "near_verbatim": np.array(verbatim, dtype=np.float64),
        "attack_log10_queries": np.full(NUM, cost),
        "base_attack_log10_queries": np.full(NUM, np.nan),
        "logprob": -np.arange(NUM, dtype=np.float64),
        "continuation_tokens": np.full(NUM, 10.0),
    }
    tokens = [4.0, 2.0, 6.0]
    return VariantResults(
        name=name,
        description=name,
        scores=DocumentScores(columns=columns),
        reason_not_generated=None if generated else "there was an obstacle",
        heldout=ScoreMatrix(
            names=("nll", "num_tokens"), rows=np.column_stack([nll, tokens]).astype(np.float64)
        ),
    )


def make_heldout() -> HeldoutTexts:
    """Two documents, the second of which has two pieces."""
    return HeldoutTexts(
        bucket="heldout",
        pieces=[
            HeldoutPiece(
                document=document,
                input_ids=np.arange(size + 1, dtype=np.int32),
                supervised=np.ones(size + 1, dtype=bool),
            )
            for document, size in ((7, 4), (9, 2), (9, 6))
        ],
    )


OUTLINES = [
    BucketOutline(
        bucket="trained", role="trained", num_repetitions=4, num_too_short=0, num_not_sampled=0
    )
]


def test_differences_are_paired_by_document_over_clusters() -> None:
    before = [1] * 8 + [0] * 4
    after = [1] * 3 + [0] * 9
    first = make_results("merged", before, [8.0, 4.0, 12.0], 5.0)
    second = make_results("nf4", after, [12.0, 6.0, 30.0], 7.0)
    compared = compare_variants([first, second], make_windows(), OUTLINES, make_heldout())
    one, other = compared.variants
    assert (compared.heldout_num_documents, compared.heldout_num_tokens) == (2, 12)
    # 24 and 48 nats over 12 tokens; the pieces of a document are one unit of the interval.
    assert (one.heldout_nll, other.heldout_nll) == (pytest.approx(2), pytest.approx(4))
    assert one.heldout_difference is None
    expected = compute_mean(np.array([12.0 - 8, 36.0 - 16]) * 2 / 12)
    assert expected.value == pytest.approx(2)
    assert other.heldout_difference.value == pytest.approx(expected.value)
    assert other.heldout_difference.ci == pytest.approx(expected.ci)
    (bucket,), (changed,) = one.buckets, other.buckets
    assert bucket.risks["verbatim"].num_matched == 8
    assert bucket.risks["attack_cost"].num_matched == NUM, "10^5 queries are within 10^6"
    assert changed.risks["attack_cost"].num_matched == 0
    assert not bucket.differences
    difference = compute_paired_rates(after, before, clusters=np.arange(NUM) // 2)
    assert changed.differences["verbatim"] == difference
    assert changed.differences["verbatim"].value == pytest.approx(-5 / 12)
    assert changed.differences["attack_cost"].value == -1


def test_what_a_variant_lacks_has_no_difference() -> None:
    some = [1] * 4 + [0] * 8
    first = make_results("adapter", some, [1.0, 1.0, 1.0], np.nan)
    second = make_results("int8", some, [1.0, 1.0, 1.0], np.nan, generated=False)
    compared = compare_variants([first, second], make_windows(), OUTLINES, make_heldout())
    other = compared.variants[1]
    assert other.reason_not_generated == "there was an obstacle"
    assert other.buckets[0].risks.keys() == other.buckets[0].differences.keys() == {"verbatim"}
    assert other.buckets[0].attack_cost is None
    # No document differs, of twelve in pairs of copies: 0 of 6, in either direction.
    assert other.buckets[0].differences["verbatim"].value == 0
    low, high = other.buckets[0].differences["verbatim"].ci
    assert -low == pytest.approx(high)
    assert high == pytest.approx(1 - 0.025 ** (1 / 6))
