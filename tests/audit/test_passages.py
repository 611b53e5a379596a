"""What is fed to a model, and which of its answers belong to which token."""

import numpy as np
import pytest

from memguard.audit.passages import Passage


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
