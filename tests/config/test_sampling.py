"""Ways to draw the next token: their names and their limits."""

import pytest
from pydantic import ValidationError

from memguard.config.settings import SamplingScheme


@pytest.mark.parametrize(
    ("scheme", "label"),
    [
        (SamplingScheme(), "T=1"),
        (SamplingScheme(top_k=40), "T=1, top-k 40"),
        (SamplingScheme(temperature=0.7, top_p=0.95), "T=0.7, top-p 0.95"),
        (SamplingScheme(temperature=2, top_k=5, top_p=1), "T=2, top-k 5, top-p 1"),
    ],
)
def test_labels(scheme: SamplingScheme, label: str) -> None:
    assert scheme.label == label


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p"])
def test_nothing_is_drawn_from_nothing(field: str) -> None:
    with pytest.raises(ValidationError):
        SamplingScheme.model_validate({field: 0})
