"""The largest by groups equal those by sorting whole rows, with ties, odd widths and NaN."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from memguard.model.truncation import find_first, find_largest, find_peaks, raise_peaks


@st.composite
def _logits(draw: st.DrawFn) -> Tensor:
    """Few different values, so that they tie; widths around whole rows of groups, and large."""
    width = draw(st.integers(1, 70) | st.sampled_from([512, 1000, 2049]))
    seed = draw(st.integers(0, 999))
    num_values = draw(st.sampled_from([2, 5, 1_000_000]))
    values = np.random.default_rng(seed).integers(0, num_values, (4, width))
    return torch.from_numpy(values.astype(np.float32))


@given(logits_CV=_logits())
def test_first_of_the_largest(logits_CV: Tensor) -> None:
    # numpy's argmax takes the first of several.
    expected = logits_CV.numpy().argmax(1).tolist()
    assert find_first(logits_CV, find_peaks(logits_CV)).tolist() == expected


@given(logits_CV=_logits(), share=st.floats(0, 1), rows=st.lists(st.integers(0, 3), max_size=4))
def test_largest_of_some_rows(logits_CV: Tensor, share: float, rows: list[int]) -> None:
    num = max(1, int(share * min(40, logits_CV.shape[1])))
    expected = logits_CV.sort(1, descending=True).values[:, :num]
    found = find_largest(logits_CV, num).sort(1, descending=True).values
    assert torch.equal(found, expected)
    rows_N = torch.tensor(rows, dtype=torch.int64)
    some = find_largest(logits_CV, num, find_peaks(logits_CV), rows_N)
    assert torch.equal(some.sort(1, descending=True).values, expected[rows_N])


@given(logits_CV=_logits(), place=st.floats(0, 1, exclude_max=True))
def test_peaks_are_told_of_one_more(logits_CV: Tensor, place: float) -> None:
    places_C1 = torch.full((4, 1), int(place * logits_CV.shape[1]))
    without_CV = logits_CV.scatter(1, places_C1, -torch.inf)
    peaks_CG = find_peaks(without_CV)
    raise_peaks(peaks_CG, logits_CV.shape[1], places_C1, logits_CV.gather(1, places_C1))
    assert torch.equal(peaks_CG, find_peaks(logits_CV))


@pytest.mark.parametrize("width", [5, 33, 64])
def test_what_is_no_number_is_the_largest(width: int) -> None:
    logits_CV = torch.zeros(2, width)
    logits_CV[1, width - 2] = torch.nan
    assert find_first(logits_CV, find_peaks(logits_CV)).tolist() == [0, width - 2]
