"""Windows and verdicts against plain loops."""

from decimal import ROUND_CEILING, Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from record_examples import make_document

from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.requests import Inputs
from memguard.audit.windows import (
    compute_extraction_strength,
    compute_first_divergence,
    compute_type_token_ratio,
    count_needed_90,
    find_greedy_margin,
    find_min_margin,
    is_near_tie,
)

_flags = st.lists(st.booleans(), min_size=1, max_size=60)


@given(flags=_flags)
def test_what_flags_say_equals_naive_loops(flags: list[bool]) -> None:
    size, correct = len(flags), np.array(flags)
    divergence = size
    for index, right in reversed(list(enumerate(flags))):
        if not right:
            divergence = index
    start = next(k for k in range(size + 1) if all(flags[k:]))
    needed = (Decimal("0.9") * size).to_integral_value(ROUND_CEILING)
    assert compute_first_divergence(correct) == divergence
    assert compute_extraction_strength(correct) == pytest.approx(1 - start / size, abs=1e-12)
    assert count_needed_90(size) == needed


def test_extraction_strength_golden() -> None:
    # references: no match 0 (some print 1/L), all 1, last 5 right .25, first 10 right 0
    tail, head = np.arange(20) >= 15, np.arange(20) < 10
    assert compute_extraction_strength(np.zeros(20, dtype=bool)) == 0
    assert compute_extraction_strength(np.ones(20, dtype=bool)) == 1
    assert compute_extraction_strength(tail) == 0.25
    assert compute_extraction_strength(head) == 0
    assert compute_first_divergence(head) == 10
    assert compute_type_token_ratio([1, 1, 2, 2]) == 0.5


def test_the_ratio_of_a_long_answer_is_that_of_its_segments() -> None:
    """A vocabulary of 100 tokens: whole, 400 of them would look like a template, and 50 do not."""
    ids = np.random.default_rng(0).integers(0, 100, 400)
    segments = [len(set(ids[start : start + 50].tolist())) / 50 for start in range(0, 400, 50)]
    assert compute_type_token_ratio(ids) == pytest.approx(np.mean(segments))
    assert len(set(ids.tolist())) / 400 < 0.3 < 0.7 < compute_type_token_ratio(ids)
    # The last segment ends with the answer.
    assert compute_type_token_ratio(np.array([[1] * 60, [*range(60)]])).tolist() == [0.02, 1.0]
    assert compute_type_token_ratio([1] * 50 + [2, 3]) == pytest.approx((1 + 3) / 2 / 50)


def test_thresholds_are_exact() -> None:
    assert (count_needed_90(50), count_needed_90(51), count_needed_90(1)) == (45, 46, 1)
    assert count_needed_90(np.array([10, 11])).tolist() == [9, 10]
    # 0.1 * 30 is 3.0000000000000004 and 0.29 * 100 is 28.999999999999996 in floating point.
    cases = [(0.1, 30, 3), (0.1, 59, 5), (0.29, 100, 29), (0.0, 50, 0)]
    for share, size, allowed in cases:
        inputs = Inputs(windows=(), max_edit_share=share, seed=0, tiny_margin=0.0)
        assert inputs.num_edits_allowed(size) == allowed


@given(
    length=st.integers(0, 40),
    size=st.integers(1, 20),
    prefix=st.none() | st.integers(1, 20),
    minimum=st.integers(1, 10),
)
def test_text_window(length: int, size: int, prefix: int | None, minimum: int) -> None:
    document = make_document(np.arange(length))
    probe = ExtractionProbe(
        continuation_tokens=size, prefix_tokens=prefix, min_prefix_tokens=minimum
    )
    window = probe.window(document)
    available = length - size
    if available < max(minimum, prefix or 0):
        assert window is None
        return
    assert window.prefix_tokens == (available if prefix is None else prefix)
    assert window.continuation_tokens == size
    ids = list(range(length))
    assert window.input_ids.tolist() == ids[available - window.prefix_tokens :]
    assert window.start == available - window.prefix_tokens
    assert window.continuation_ids.tolist() == ids[-size:]
    passage = window.passage()
    assert passage.input_ids.tolist() == window.input_ids.tolist()
    assert passage.first_label == passage.first_choice == window.prefix_tokens


def test_conversation_window_is_the_last_supervised_span() -> None:
    supervised = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0], dtype=bool)
    document = make_document(np.arange(11), supervised=supervised, format="messages")
    # The lengths set for texts do not cut a completion, nor what stands before it.
    window = ExtractionProbe(continuation_tokens=2, prefix_tokens=2).window(document)
    assert window.continuation_ids.tolist() == [7, 8, 9]
    assert (window.start, window.input_ids.tolist()) == (0, list(range(10)))

    assert ExtractionProbe(min_prefix_tokens=8).window(document) is None
    nothing = make_document(
        np.arange(11), supervised=np.zeros(11, dtype=bool), format="prompt_completion"
    )
    assert ExtractionProbe().window(nothing) is None


@pytest.mark.parametrize(
    ("margins", "hangs"),
    [
        ([1, 1, 1, 1], False),
        ([1, 1, 1, 1e-4], True),  # verbatim, by little
        ([1, 1, 1, -1e-4], True),  # not verbatim, by little
        ([1, -1, 1, 1e-4], False),  # verbatim in neither way
        ([1, 1, 0, 1], True),  # a tie
        # At the margin is not below it: bf16 logits step by .125, so that this is common.
        ([1, 1, 1, 1e-3], False),
        ([1, 1, 1, -1e-3], False),
    ],
)
def test_verdict_is_a_near_tie(margins: list[float], hangs: bool) -> None:
    assert bool(is_near_tie(np.array(margins), 1e-3)) is hangs


def test_greedy_margin_is_of_tokens_before_the_first_divergence() -> None:
    margins = np.array([[3.0, 0.25, -0.5, 0.1], [-1.0, 2.0, 3.0, 4.0], [0.5, 0.75, 1.0, 0.5]])
    smallest = find_greedy_margin(margins, margins > 0)
    assert smallest[[0, 2]].tolist() == [0.25, 0.5]
    assert np.isnan(smallest[1])


def test_min_margin_is_of_right_tokens() -> None:
    margins = np.array([[3.0, -0.25, 0.5], [-1.0, -2.0, -3.0]])
    smallest = find_min_margin(margins, margins > 0)
    assert smallest[0] == 0.5
    assert np.isnan(smallest[1])


def test_numbers_of_many_are_those_of_each() -> None:
    correct = np.random.default_rng(0).random((50, 7)) < 0.7
    for compute in (compute_first_divergence, compute_extraction_strength):
        assert compute(correct).tolist() == [compute(row) for row in correct]


def test_adapt_checks() -> None:
    probe = ExtractionProbe(max_edit_share=0.2).adapt(continuation_tokens=16)
    assert (probe.continuation_tokens, probe.prefix_tokens) == (16, None)
    assert probe.max_edit_share == 0.2
    with pytest.raises(ValidationError):
        probe.adapt(continuation_tokens=0)
