"""A budget's limit is a share."""

import pytest
from pydantic import ValidationError

from memguard.config import BudgetConfig


@pytest.mark.parametrize("limit", [0.0, 0.1, 1.0])
def test_a_limit_is_a_share(limit: float) -> None:
    assert BudgetConfig(limit=limit).limit == limit


@pytest.mark.parametrize(
    ("limit", "message"),
    [(-0.01, "greater than or equal to 0"), (1.01, "less than or equal to 1"), (10, "equal to 1")],
)
def test_a_limit_that_is_no_share_is_refused(limit: float, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BudgetConfig(limit=limit)
