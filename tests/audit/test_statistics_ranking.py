"""AUC and TPR against counting pairs, scikit-learn and hand-computed variances."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_curve

from memguard.audit.statistics import clopper_pearson, compute_auc, compute_tpr_at_fpr, trace_roc

_scores = st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=12)


@given(_scores, _scores)
def test_auc_equals_pair_counting(members: list[float], nonmembers: list[float]) -> None:
    pairs = [(x > y) + 0.5 * (x == y) for x, y in itertools.product(members, nonmembers)]
    interval = compute_auc(members, nonmembers)
    mirrored = compute_auc(nonmembers, members)
    # Sums of halves are exact; only the two divisions round.
    assert interval.value == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert interval.value + mirrored.value == pytest.approx(1, abs=1e-12)
    assert 0 <= interval.ci[0] <= interval.value <= interval.ci[1] <= 1
    assert interval.ci[0] < interval.ci[1], "a zero-width interval claims certainty"
    # The fallback's roots are found to about 1e-12.
    assert interval.ci == pytest.approx((1 - mirrored.ci[1], 1 - mirrored.ci[0]), abs=1e-9)


def test_auc_delong_by_hand() -> None:
    members, nonmembers = [3.0, 5.0, 2.0], [1.0, 4.0]
    # Wins of each member over the nonmembers: 1/2, 1, 1/2; of each nonmember the losses: 1, 1/3.
    variance = np.var([0.5, 1, 0.5], ddof=1) / 3 + np.var([1, 1 / 3], ddof=1) / 2
    auc = 4 / 6
    reach = stats.norm.ppf(0.975) * math.sqrt(variance) / (auc * (1 - auc))
    centre = math.log(auc / (1 - auc))
    expected = tuple(1 / (1 + math.exp(-(centre + sign * reach))) for sign in (-1, 1))
    interval = compute_auc(members, nonmembers)
    assert interval.value == pytest.approx(auc)
    assert interval.ci == pytest.approx(expected)


@pytest.mark.parametrize(("size", "low"), [(2, 0.386), (5, 0.643), (40, 0.950)])
def test_auc_perfect_separation_is_no_certainty(size: int, low: float) -> None:
    above, below = np.arange(size) + 100.0, np.arange(size)
    interval = compute_auc(above, below)
    assert interval.value == 1
    assert interval.ci[1] == 1
    # The lower bound is the AUC at which a perfect result lies 1.96 deviations away.
    assert interval.ci[0] == pytest.approx(low, abs=1e-3)
    theta, mean = interval.ci[0], size
    shape = (1 - theta) / (2 - theta) + theta / (1 + theta)
    deviation = math.sqrt(theta * (1 - theta) / size**2 * (1 + (mean - 1) * shape))
    assert (1 - theta) / deviation == pytest.approx(1.959964, abs=1e-4)


def test_auc_interval_covers() -> None:
    draw, truth = np.random.default_rng(0), stats.norm.cdf(2.5 / math.sqrt(2))
    covered = 0
    for _ in range(400):
        ci = compute_auc(draw.normal(2.5, 1, 30), draw.normal(0, 1, 30)).ci
        covered += ci[0] <= truth <= ci[1]
    # 95 % of 400 is 380 with a standard deviation of 4.4; an asymptotic interval may lack 2 points.
    assert covered >= 360


@given(_scores, _scores, st.sampled_from([0.05, 0.1, 0.2, 0.29, 0.5, 0.9]))
def test_tpr_by_trying_every_threshold(
    members: list[float], nonmembers: list[float], fpr: float
) -> None:
    rate = compute_tpr_at_fpr(members, nonmembers, fpr)
    # Percent as integers: no rounding decides.
    if round(100 * fpr) * len(nonmembers) < 100:
        assert rate is None
        return
    best = max(
        sum(score > threshold for score in members)
        for threshold in (*members, *nonmembers, -math.inf)
        if 100 * sum(score > threshold for score in nonmembers)
        <= round(100 * fpr) * len(nonmembers)
    )
    assert (rate.num_matched, rate.num_documents) == (best, len(members))
    # Never less than what the members alone leave open.
    exact = clopper_pearson(best, len(members))
    # But for rounding of a difference and its root.
    assert rate.ci[0] <= exact.ci[0] + 1e-12
    assert rate.ci[1] >= exact.ci[1] - 1e-12


def test_tpr_is_on_scikit_learns_curve() -> None:
    draw = np.random.default_rng(0)
    members, nonmembers = draw.normal(1, 1, 500), draw.normal(0, 1, 300)
    fprs, tprs, _ = roc_curve(
        [1] * 500 + [0] * 300, np.concatenate([members, nonmembers]), drop_intermediate=False
    )
    for fpr in (0.01, 0.05, 0.1):
        rate = compute_tpr_at_fpr(members, nonmembers, fpr)
        assert rate.rate == tprs[fprs <= fpr + 1e-12].max()


def test_tpr_needs_one_over_fpr_nonmembers() -> None:
    members = np.arange(10.0)
    assert compute_tpr_at_fpr(members, np.arange(99.0), 0.01) is None
    assert compute_tpr_at_fpr(members, np.arange(100.0), 0.01) is not None
    # 0.29 * 100 is 28.999999999999996; the 30th highest of 100 is the threshold.
    rate = compute_tpr_at_fpr(np.arange(100.0), np.arange(100.0), 0.29)
    assert rate.num_matched == 29


def test_tpr_interval_by_scipys_quantiles() -> None:
    draw = np.random.default_rng(0)
    members, nonmembers = draw.normal(1.5, 1, 120), draw.normal(0, 1, 400)
    rate = compute_tpr_at_fpr(members, nonmembers, 0.05)
    # SciPy's interval of a quantile is made of the same order statistics: the lowest and the
    # highest value that an exact test of either side does not reject.
    ranked = np.sort(nonmembers)
    ends = [
        stats.quantile_test(nonmembers, q=0, p=0.95, alternative=side).confidence_interval(0.975)
        for side in ("less", "greater")
    ]
    highest, lowest = ends[0].high, ends[1].low
    assert highest in ranked
    assert lowest in ranked
    share = (members > ranked[-21]).mean()
    exact = clopper_pearson(int((members > ranked[-21]).sum()), 120)
    low = share - math.hypot(share - exact.ci[0], share - (members > highest).mean())
    high = share + math.hypot(exact.ci[1] - share, (members > lowest).mean() - share)
    assert rate.rate == share
    assert rate.ci == pytest.approx((low, high))


def test_tpr_interval_of_few_nonmembers_begins_at_zero() -> None:
    """0.99^n > 2.5 % of samples of n have no score above the threshold of 1 %."""
    members = np.arange(1000.0, 1100.0)
    for num_nonmembers, begins_at_zero in ((100, True), (367, True), (368, False)):
        rate = compute_tpr_at_fpr(members, np.arange(float(num_nonmembers)), 0.01)
        assert rate.rate == 1
        assert (rate.ci[0] == 0) == begins_at_zero


@pytest.mark.parametrize("distance", [0.0, 1.0, 2.5])
def test_tpr_interval_covers(distance: float) -> None:
    """The rate at the threshold of all nonmembers, where the sample's is off."""
    draw, num_draws = np.random.default_rng(3), 400
    truth = stats.norm.sf(stats.norm.isf(0.05) - distance)
    covered = {"ours": 0, "exact": 0}
    for _ in range(num_draws):
        rate = compute_tpr_at_fpr(draw.normal(distance, 1, 200), draw.normal(0, 1, 200), 0.05)
        exact = clopper_pearson(rate.num_matched, 200)
        covered["ours"] += rate.ci[0] <= truth <= rate.ci[1]
        covered["exact"] += exact.ci[0] <= truth <= exact.ci[1]
    # .97 to .98 in 2,000 draws, that of members at a threshold taken for known .70 to .86; 1 set
    # of 1,000 of a method that covers .95 falls below this.
    bar = stats.binom.ppf(0.001, num_draws, 0.95)
    assert covered["ours"] >= bar
    assert covered["exact"] < bar


def test_tpr_of_equal_scores_is_no_detection() -> None:
    rate = compute_tpr_at_fpr(np.ones(20), np.ones(50), 0.1)
    assert (rate.num_matched, rate.num_documents) == (0, 20)


def test_scores_must_not_be_missing() -> None:
    with pytest.raises(AssertionError, match="missing score"):
        compute_auc([1.0, math.nan], [0.0, 1.0])
    with pytest.raises(AssertionError, match="missing score"):
        compute_tpr_at_fpr([1.0, 2.0], [math.nan] * 20, 0.1)


@given(_scores, _scores)
def test_a_curve_is_the_most_members_for_every_number_of_nonmembers(
    members: list[float], nonmembers: list[float]
) -> None:
    num_allowed, num_matched = trace_roc(members, nonmembers)
    assert num_allowed[:11] == tuple(range(len(nonmembers) + 1))[:11]
    assert num_allowed[-1] == len(nonmembers)
    thresholds = [-math.inf, *nonmembers]
    for allowed, matched in zip(num_allowed, num_matched, strict=True):
        passing = [t for t in thresholds if sum(score > t for score in nonmembers) <= allowed]
        assert matched == sum(score > min(passing) for score in members)


@pytest.mark.parametrize("size", [2, 16, 17, 1000, 12_345])
def test_a_curve_has_few_points_with_the_thresholds_of_the_rates(size: int) -> None:
    draw = np.random.default_rng(size)
    members, nonmembers = draw.normal(1, 1, 300), draw.normal(0, 1, size)
    num_allowed, num_matched = trace_roc(members, nonmembers)
    assert num_allowed[0] == 0
    assert num_allowed[-1] == size
    assert list(num_allowed) == sorted(set(num_allowed))
    assert len(num_allowed) <= 5 + 16 * math.ceil(math.log10(size))
    assert num_matched[-1] == 300
    at = dict(zip(num_allowed, num_matched, strict=True))
    for fpr in (0.001, 0.01, 0.1):
        rate = compute_tpr_at_fpr(members, nonmembers, fpr)
        if rate is not None and (allowed := int(fpr * size)) in at:
            assert at[allowed] == rate.num_matched
