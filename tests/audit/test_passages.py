"""What is fed to a model, and which of its answers belong to which token."""

import numpy as np
import pytest
from audit_examples import Scripted, say_by_context
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard.audit.passages import Passage, ScoreSelection
from memguard.config.settings import SamplingScheme


@pytest.mark.parametrize(("first_label", "first_choice"), [(0, 3), (3, 2), (2, 6), (6, 6), (-1, 2)])
def test_labels_come_before_choices(first_label: int, first_choice: int) -> None:
    with pytest.raises(AssertionError, match="labels come before choices"):
        Passage(
            input_ids=np.arange(5, dtype=np.int32),
            first_label=first_label,
            first_choice=first_choice,
        )


def test_counts() -> None:
    ids = np.arange(9, dtype=np.int32)
    passage = Passage(input_ids=ids, first_label=2, first_choice=5)
    assert passage.num_labels == 7


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_cut_tokens_are_those_of_their_places(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 30))
    first_label = data.draw(st.integers(1, size - 1))
    first_choice = data.draw(st.integers(first_label, size - 1))
    start = data.draw(st.integers(first_choice, size - 1))
    end = data.draw(st.integers(start + 1, size))
    ids = np.arange(size, dtype=np.int32)
    passage = Passage(input_ids=ids, first_label=first_label, first_choice=first_choice)
    requested = ScoreSelection(
        needs=frozenset({"entropy"}), schemes=(SamplingScheme(), SamplingScheme(top_k=2))
    )
    (whole,) = Scripted(say_by_context).score([passage], requested)
    part = whole.cut(start - first_choice, end - first_choice)
    said = [say_by_context(ids[: place + 1]) for place in range(start, end)]
    assert part.logprob.tolist() == [each.logprob for each in said]
    assert part.correct.tolist() == [each.right for each in said]
    assert part.margin.tolist() == [each.margin for each in said]
    assert part.argmax.tolist() == [
        ids[place] + (not each.right) for place, each in zip(range(start, end), said, strict=True)
    ]
    assert part.sampled.T.tolist() == [list(each.sampled[:2]) for each in said]
    # What has no choices is left out: its numbers begin elsewhere.
    assert part.entropy is None
