"""Resampled means against SciPy, naive loops and a truth that is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from memguard.audit.statistics import (
    Sample,
    bootstrap,
    compute_bootstrap_difference,
    compute_bootstrap_mean,
)


def test_mean_is_scipys() -> None:
    values = np.random.default_rng(0).exponential(size=50)
    interval = compute_bootstrap_mean(Sample(values=values), generator=np.random.default_rng(1))
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(2)
    )
    assert interval is not None
    assert interval.value == pytest.approx(values.mean())
    low, high = expected.confidence_interval
    # A 2.5 % quantile of 2,000 resamples is off by about 0.06 standard errors (0.14): four of them.
    assert interval.ci == pytest.approx((low, high), abs=0.035)


def test_difference_is_scipys() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.normal(1, 1, 40), draw.normal(0, 2, 70)
    interval = compute_bootstrap_difference(
        Sample(values=first), Sample(values=second), generator=np.random.default_rng(1)
    )
    expected = stats.bootstrap(
        (first, second),
        lambda x, y, axis: x.mean(axis=axis) - y.mean(axis=axis),
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(2),
    )
    assert interval is not None
    assert interval.value == pytest.approx(first.mean() - second.mean())
    low, high = expected.confidence_interval
    # As above; the standard error is 0.29.
    assert interval.ci == pytest.approx((low, high), abs=0.07)


def test_clusters_in_strata_against_a_plain_loop() -> None:
    draw = np.random.default_rng(0)
    clusters = np.repeat(np.arange(24), draw.integers(1, 5, size=24))
    strata = np.array(["low", "high"])[clusters % 2]
    values = draw.normal(size=24)[clusters] + 5.0 * (strata == "high")
    interval = compute_bootstrap_mean(
        Sample(values=values, strata=strata, clusters=clusters), generator=np.random.default_rng(1)
    )
    means = []
    for _ in range(4000):
        mean = 0.0
        for stratum in ("low", "high"):
            names = np.unique(clusters[strata == stratum])
            drawn = draw.choice(names, len(names))
            documents = np.concatenate([values[clusters == name] for name in drawn])
            mean += (strata == stratum).mean() * documents.mean()
        means.append(mean)
    assert interval is not None
    assert interval.value == pytest.approx(values.mean())
    # Quantiles of 2,000 and 4,000 resamples differ by about 0.08 standard errors: four of them.
    assert interval.ci == pytest.approx(
        np.quantile(means, (0.025, 0.975)), abs=0.32 * np.std(means)
    )


def test_interval_covers_where_clusters_are_told() -> None:
    """95 % with clusters; far fewer where copies pass for documents of their own."""
    draw = np.random.default_rng(0)
    covered = {"clusters": 0, "documents": 0}
    for _ in range(400):
        clusters = np.repeat(np.arange(40), draw.integers(1, 6, size=40))
        values = draw.normal(size=40)[clusters] + 0.5 * draw.normal(size=len(clusters))
        for name, given_clusters in (("clusters", clusters), ("documents", None)):
            interval = compute_bootstrap_mean(
                Sample(values=values, clusters=given_clusters), generator=draw, num_resamples=500
            )
            assert interval is not None
            assert interval.ci is not None
            covered[name] += interval.ci[0] <= 0 <= interval.ci[1]
    # The percentile method covers 92 to 93 % with 40 clusters: 370 of 400, standard deviation 5.
    assert 350 <= covered["clusters"] <= 395
    assert covered["documents"] < 320


def test_strata_take_their_differences_out() -> None:
    """What differs between buckets, whose sizes are fixed, is no uncertainty."""
    draw = np.random.default_rng(0)
    strata = np.repeat([0, 1], 50)
    values = draw.normal(size=100) + 10 * strata
    stratified, pooled = (
        compute_bootstrap_mean(Sample(values=values, strata=s), generator=np.random.default_rng(1))
        for s in (strata, None)
    )
    assert stratified is not None
    assert pooled is not None
    assert stratified.ci is not None
    assert pooled.ci is not None
    assert stratified.value == pytest.approx(pooled.value)
    # Standard errors 0.1 and 0.51.
    assert pooled.ci[1] - pooled.ci[0] > 4 * (stratified.ci[1] - stratified.ci[0])


def test_strata_that_share_a_cluster_are_one() -> None:
    draw = np.random.default_rng(0)
    values = draw.normal(size=40)
    strata = np.repeat(["a", "b"], 20)
    clusters = np.arange(40)
    clusters[20] = 0  # The first document of b is a copy of the first of a.
    shared, one = (
        compute_bootstrap_mean(
            Sample(values=values, strata=s, clusters=clusters), generator=np.random.default_rng(1)
        )
        for s in (strata, None)
    )
    assert shared == one


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 4)), max_size=12))
@settings(max_examples=60)
def test_no_interval_without_two_clusters_in_every_stratum(
    documents: list[tuple[int, int, int]],
) -> None:
    values = [value for value, _, _ in documents]
    strata = [stratum for _, stratum, _ in documents]
    # A cluster lies in one stratum.
    clusters = [10 * stratum + cluster for _, stratum, cluster in documents]
    interval = compute_bootstrap_mean(
        Sample(values=values, strata=strata, clusters=clusters),
        generator=np.random.default_rng(0),
        num_resamples=50,
    )
    if not documents:
        assert interval is None
        return
    assert interval is not None
    assert interval.value == pytest.approx(np.mean(values), abs=1e-12)
    if min(len({c for c in clusters if c // 10 == s}) for s in strata) < 2:
        assert interval.ci is None
    if interval.ci is not None:
        assert interval.ci[0] < interval.ci[1]
        assert min(values) <= interval.ci[0] + 1e-12
        assert interval.ci[1] <= max(values) + 1e-12


def test_what_cannot_be_known_has_no_interval() -> None:
    def mean_of(**fields: object):
        return compute_bootstrap_mean(Sample(**fields), generator=np.random.default_rng(0))

    assert mean_of(values=[]) is None
    for fields in (
        {"values": [1.0]},
        {"values": [0.0, 1.0], "clusters": [7, 7]},
        {"values": [0.1] * 30},
        {"values": [0.1] * 10 + [0.3] * 10, "strata": [0] * 10 + [1] * 10},
        {"values": [0.0, 1.0, 2.0], "strata": ["a", "a", "b"]},
    ):
        interval = mean_of(**fields)
        assert interval is not None
        assert interval.value == pytest.approx(np.mean(fields["values"]))
        assert interval.ci is None
    some, lone = Sample(values=[0.0, 1.0]), Sample(values=[3.0])
    draw = np.random.default_rng(0)
    assert compute_bootstrap_difference(some, Sample(values=[]), generator=draw) is None
    difference = compute_bootstrap_difference(lone, some, generator=draw)
    assert difference is not None
    assert (difference.value, difference.ci) == (2.5, None)


def test_same_generator_same_interval_whatever_fits_into_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(0).normal(size=100)
    sample = Sample(values=values, clusters=np.arange(100) // 2, strata=np.arange(100) // 50)

    def interval():
        return compute_bootstrap_mean(sample, generator=np.random.default_rng(1))

    first = interval()
    assert first == interval()
    for draws in (1, 60, 2**24):
        monkeypatch.setattr(bootstrap, "_CHUNK_DRAWS", draws)
        assert first == interval()


def test_lists_of_other_lengths_are_refused() -> None:
    draw = np.random.default_rng(0)
    with pytest.raises(AssertionError, match="one stratum and one cluster"):
        compute_bootstrap_mean(Sample(values=[1.0, 2.0], clusters=[0]), generator=draw)
    with pytest.raises(AssertionError, match="missing value"):
        compute_bootstrap_mean(Sample(values=[1.0, np.nan]), generator=draw)


def test_many_clusters_are_drawn_from_the_limit_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    clusters = draw.integers(0, 3000, 9000)
    values = draw.exponential(size=9000) + draw.normal(size=3000)[clusters]
    sample = Sample(values=values, clusters=clusters)
    resampled = compute_bootstrap_mean(sample, generator=np.random.default_rng(1))
    monkeypatch.setattr(bootstrap, "_MANY_CLUSTERS", 100)
    limit = compute_bootstrap_mean(sample, generator=np.random.default_rng(1))
    assert resampled is not None
    assert limit is not None
    assert resampled.ci is not None
    assert limit.ci is not None
    assert limit.value == resampled.value
    # 2,000 resamples place a bound within about 4 % of the interval's width.
    width = resampled.ci[1] - resampled.ci[0]
    np.testing.assert_allclose(limit.ci, resampled.ci, atol=0.1 * width)
