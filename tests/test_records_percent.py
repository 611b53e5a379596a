"""Percentages in sentences."""

import pytest

from memguard.records.texts import format_percent


@pytest.mark.parametrize(
    ("decimals", "texts"),
    [
        (0, ["0 %", "<1 %", "<1 %", "50 %", "99 %", "99 %", "100 %"]),
        (1, ["0.0 %", "<0.1 %", "0.1 %", "50.0 %", "99.9 %", "99.9 %", "100.0 %"]),
        (2, ["0.00 %", "0.01 %", "0.05 %", "50.00 %", "99.94 %", "99.99 %", "100.00 %"]),
    ],
)
def test_percentages_never_round_to_certainty(decimals: int, texts: list[str]) -> None:
    shares = [0, 0.0001, 0.0005, 0.5, 0.9994, 0.9999, 1]
    assert [format_percent(share, decimals) for share in shares] == texts
