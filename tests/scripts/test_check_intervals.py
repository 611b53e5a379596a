"""scripts/check_intervals.py with 12 documents and few samples: sums, tables, and a missed bar."""

import sys

import numpy as np
import pytest
from scipy import stats
from script_calls import load_script

pytestmark = pytest.mark.slow

script = load_script("check_intervals")


def test_sums_over_clusters_are_distributions() -> None:
    for how in script.ALIKE.values():
        total = script.count_pairs((3, 2, 1), (0.5, 0.2), how)
        assert total.sum() == pytest.approx(1)
        count_B = np.arange(7)
        # Copies change the variance, not the mean.
        assert total.sum(1) @ count_B == pytest.approx(6 * 0.5)
        assert total.sum(0) @ count_B == pytest.approx(6 * 0.2)
        matched = script.count_matches((3, 2, 1), 0.5, how)
        assert matched == pytest.approx(total.sum(1))
    assert matched == pytest.approx(stats.binom.pmf(count_B, 6, 0.5))
    alike = script.count_matches((3, 2, 1), 0.5, 1.0)
    assert alike @ (count_B - 3) ** 2 == pytest.approx(0.25 * (3**2 + 2**2 + 1))


def test_tables_of_twelve_documents(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "SIZES", (12,))
    monkeypatch.setattr(script, "MEANS", (0.3, 1.0))
    tally = script.Tally()
    script.print_rates(tally)
    script.print_means(tally, 20)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 12")]
    assert len(rows) == 5 + 6
    # Clopper and Pearson's of 12 documents, and of 6 with pairs of copies.
    assert rows[0].startswith("| 12 | no copies | 12.0 | 0.955 (")
    assert rows[1].startswith("| 12 | pairs | 6.0 | 0.966 (")
    assert tally.num_wrong == 0
    assert tally.limits.end() == 0


def test_a_missed_bar_and_an_interval_out_of_its_range_end_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "SIZES", (12,))
    monkeypatch.setattr(sys, "argv", ["check_intervals.py"])
    for name in ("differences", "paired", "means", "mean_differences"):
        monkeypatch.setattr(script, f"print_{name}", lambda *_: None)
    monkeypatch.setattr(script, "compute_exact_interval", lambda k, n, number: (k / n, 1.1))
    assert script.main() == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAIL: rates, 12 documents, no copies: ")
    assert "intervals that leave their range or miss their estimate: 65, not <= 0" in last
