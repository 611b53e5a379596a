"""Metrics that `evaluate.load` finds in `eval/metrics`."""

from pathlib import Path

import pytest

METRICS = Path(__file__).parents[2] / "eval" / "metrics"


@pytest.fixture(scope="module")
def metric(tmp_path_factory: pytest.TempPathFactory):
    evaluate = pytest.importorskip("evaluate")
    cache = str(tmp_path_factory.mktemp("evaluate"))
    return evaluate.load(str(METRICS / "verbatim_match"), cache_dir=cache)


def test_verbatim_match_counts_by_hand(metric) -> None:
    truth = list(range(10))
    one_wrong = [99, *truth[1:]]
    two_wrong = [*truth[:8], 98, 99]
    result = metric.compute(
        predictions=[truth, one_wrong, two_wrong, truth], references=[truth] * 4
    )
    assert result["verbatim_match"] == 0.5
    assert result["near_verbatim"] == 0.75
    # Exact binomial interval for 2 of 4, from scipy.stats.binomtest(2, 4).proportion_ci().
    assert result["verbatim_match_ci"] == pytest.approx((0.067586, 0.932414), abs=1e-6)
    assert result["mean_token_accuracy"] == pytest.approx((1 + 0.9 + 0.8 + 1) / 4)
    assert result["mean_first_divergence"] == (10 + 0 + 8 + 10) / 4


def test_lengths_that_differ_are_refused(metric) -> None:
    with pytest.raises(ValueError, match="prediction 0 has 2 tokens, its reference 3"):
        metric.compute(predictions=[[1, 2]], references=[[1, 2, 3]])
