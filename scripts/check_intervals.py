"""Measure how often the intervals of rates, means and differences cover a known truth.

    python scripts/check_intervals.py                    2,000 samples of a mean: two minutes
    python scripts/check_intervals.py --samples 20000

Coverage of rates and paired rates is exact: the sum of the probabilities of all counts whose
interval contains the truth, on a grid of true rates from 0 to 1, the nearest to either end at .1/n
of n documents. In a cluster of near-duplicates all match or none does ("alike"), each matches by
itself ("independent"), or half of the clusters are of either kind ("half").

Means are of shares of 50 tokens, simulated. The rates of texts are beta distributed with a given
a + b: at .5 most are near 0 or 1, at 2 they are spread evenly about a mean of .5. Near-duplicates
have one rate. "Change" is from a base model with shares of 0, on the same documents, "difference"
that of other documents.

Every interval has to contain its estimate and stay within its range. The last line is a verdict: a
bar is compared with the coverage itself, without an allowance for the error of a simulation. Rows
without a bar show where intervals are known to cover less often.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from bench.harness import Verdict, build_parser
from numpy.typing import NDArray
from scipy import signal, special

from memguard.audit.statistics import (
    clopper_pearson,
    compute_difference,
    compute_exact_interval,
    compute_mean,
    compute_mean_difference,
    compute_paired_difference,
    compute_paired_interval,
    compute_rate,
)
from memguard.records import Interval, Rate, Texts
from memguard.seeds import derive_generator

SEED = 0
NUM_TOKENS = 50
SIZES = (12, 25, 40, 100)
ALIKE = {"alike": 1.0, "half": 0.5, "independent": 0.0}
"""Share of clusters in which all documents match or none does; in the others each by itself."""
MEANS = (0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 1.0)
BARRED = 0.1
"""Means from which there are bars."""
FEWEST = 25
"""Documents from which means have bars; below, the page says "few documents"."""
_SLACK = 1e-9
"""Allowance for rounding where a truth is at the end of an interval."""

Ends = tuple[float, float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How documents are near-duplicates of one another."""

    name: str
    sizes: tuple[int, ...]
    """Documents of each cluster."""
    has_bar: bool = True

    @property
    def cluster_D(self) -> NDArray[np.int64]:
        """The cluster of each document."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @property
    def num_effective(self) -> float:
        """Effective number of documents, as `compute_rate` counts them."""
        texts = compute_rate(np.zeros(sum(self.sizes)), self.cluster_D).texts
        return float(sum(self.sizes)) if texts is None else texts.num_effective


def list_layouts(count: int) -> list[Layout]:
    """Return layouts of so many documents, without copies first."""
    fours = count // 8
    large = count // 3
    return [
        Layout(name="no copies", sizes=(1,) * count),
        Layout(name="pairs", sizes=(2,) * (count // 2) + (1,) * (count % 2)),
        Layout(name="fours", sizes=(4,) * (count // 4) + (1,) * (count % 4)),
        Layout(name="half in fours", sizes=(4,) * fours + (1,) * (count - 4 * fours)),
        Layout(name="a third of one text", sizes=(large, *(1,) * (count - large)), has_bar=False),
    ]


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts intervals that leave their range, or do not contain their estimate."""

    limits: Verdict = field(default_factory=Verdict)
    num_wrong: int = 0

    def look(self, estimate: float, ends: Ends, low: float, high: float) -> Ends:
        """Count an interval, and return it."""
        if ends is not None and not low <= ends[0] <= estimate <= ends[1] <= high:
            self.num_wrong += 1
        return ends

    def bar(self, name: str, least: float, mean: float, bars: tuple[float, float]) -> str:
        """Check the lowest coverage and the mean against their bars."""
        words = self.limits.check(f"{name}, lowest", least, at_least=bars[0], unit="")
        return f"{words}; {self.limits.check(f'{name}, mean', mean, at_least=bars[1], unit='')}"


def main() -> int:
    """Print the tables; return 1 if a bar is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--samples", type=int, default=2000, metavar="N", help="samples of a mean")
    options = parser.parse_args()
    tally = Tally()
    print_rates(tally)
    print_differences(tally)
    print_paired(tally)
    print_means(tally, options.samples)
    print_mean_differences(tally, options.samples)
    name = "intervals that leave their range or miss their estimate"
    bar = tally.limits.check(name, tally.num_wrong, at_most=0, unit="")
    print(f"\n{name}: {tally.num_wrong}, {bar}")
    return tally.limits.end()


# -- exact sums ------------------------------------------------------------------------------------


def list_truths(count: int, num_steps: int) -> NDArray[np.float64]:
    """Return rates from 0 to 1: even steps, and some close to either end."""
    near = np.array([0, 0.1, 0.2, 0.4, 1, 2]) / count
    return np.unique(np.concatenate([near, 1 - near, np.linspace(0, 1, num_steps + 1)]))


def count_matches(sizes: Sequence[int], rate: float, alike: float) -> NDArray[np.float64]:
    """Return the probability of each number of matching documents, ``[sum(sizes) + 1]``."""
    total = np.ones(1)
    by_size = {size: _count_in_cluster(size, (rate, 0.0), alike)[:, 0] for size in set(sizes)}
    for size in sizes:
        total = np.convolve(total, by_size[size])
    return total


def count_pairs(
    sizes: Sequence[int], rates: tuple[float, float], alike: float
) -> NDArray[np.float64]:
    """Return probabilities of the numbers that match only under the first and only the second.

    Args:
        sizes: documents of each cluster.
        rates: probability of a document to match only under the first, and only the second.
        alike: share of clusters in which all documents match or none does.
    """
    if not alike:
        sizes = (sum(sizes),)
    total = np.ones((1, 1))
    by_size = {size: _count_in_cluster(size, rates, alike) for size in set(sizes)}
    for size in sizes:
        total = signal.convolve2d(total, by_size[size])
    return total


def _count_in_cluster(size: int, rates: tuple[float, float], alike: float) -> NDArray[np.float64]:
    first, second = rates
    neither = max(0.0, 1 - first - second)
    b, c = np.meshgrid(np.arange(size + 1), np.arange(size + 1), indexing="ij")
    rest = np.maximum(size - b - c, 0)
    log_ways = special.gammaln(size + 1) - sum(special.gammaln(k + 1) for k in (b, c, rest))
    log_p = special.xlogy(b, first) + special.xlogy(c, second) + special.xlogy(rest, neither)
    independent = np.where(b + c <= size, np.exp(log_ways + log_p), 0.0)
    together = np.zeros((size + 1, size + 1))
    together[0, 0] += neither
    together[size, 0] += first
    together[0, size] += second
    return alike * together + (1 - alike) * independent


def is_in(truth: float, ends: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether intervals ``[..., 2]`` contain a truth."""
    return (ends[..., 0] <= truth + _SLACK) & (truth <= ends[..., 1] + _SLACK)


def describe(covered: Sequence[float]) -> str:
    """Return the lowest coverage and the mean."""
    return f"{min(covered):.3f} ({np.mean(covered):.3f})"


def make_rate(matched: int, layout: Layout) -> Rate:
    """Return the rate of so many matching documents."""
    texts = Texts(num_texts=len(layout.sizes), num_matched=0, num_effective=layout.num_effective)
    return clopper_pearson(matched, sum(layout.sizes), texts)


def print_rates(tally: Tally) -> None:
    """Print the table of rates: Clopper and Pearson's interval at the effective number."""
    print("Rates, lowest coverage (mean), exact\n")
    print("| documents | copies | effective |", " | ".join(ALIKE), "| bar |")
    print("|---|---|---|---|---|---|---|")
    for count in SIZES:
        for layout in list_layouts(count):
            ends = np.full((count + 1, 2), math.nan)
            for matched in range(count + 1):
                found = compute_exact_interval(matched, count, layout.num_effective)
                ends[matched] = tally.look(matched / count, found, 0, 1)
            covered = {
                how: [
                    float(count_matches(layout.sizes, rate, alike)[is_in(rate, ends)].sum())
                    for rate in list_truths(count, 100)
                ]
                for how, alike in ALIKE.items()
            }
            name = f"rates, {count} documents, {layout.name}"
            least = min(map(min, covered.values()))
            bar = ""
            if layout.has_bar:
                bar = tally.limits.check(name, least, at_least=0.93, unit="")
            cells = " | ".join(map(describe, covered.values()))
            print(f"| {count} | {layout.name} | {layout.num_effective:.1f} | {cells} | {bar} |")


def print_differences(tally: Tally) -> None:
    """Print the table of differences of rates of other documents: Newcombe's interval."""
    print("\nRates minus those of a control without copies, lowest coverage (mean), exact\n")
    print("| documents | control | copies, alike | coverage | bar |")
    print("|---|---|---|---|---|")
    for count, num_control in ((12, 12), (40, 25)):
        control = Layout(name="control", sizes=(1,) * num_control)
        for layout in list_layouts(count):
            ends = np.full((count + 1, num_control + 1, 2), math.nan)
            for matched in range(count + 1):
                first = make_rate(matched, layout)
                for other in range(num_control + 1):
                    found = compute_difference(first, make_rate(other, control))
                    assert found is not None, "both have documents"
                    ends[matched, other] = tally.look(found.value, found.ci, -1, 1)
            covered = []
            for rate in list_truths(count, 20):
                p_M = count_matches(layout.sizes, rate, 1.0)
                for floor in list_truths(num_control, 20):
                    p_C = count_matches((num_control,), floor, 0.0)
                    inside = is_in(rate - floor, ends)
                    covered.append(float((np.outer(p_M, p_C) * inside).sum()))
            bar = ""
            if layout.has_bar:
                name = f"differences, {count} documents, {layout.name}"
                bar = tally.bar(name, min(covered), float(np.mean(covered)), (0.85, 0.95))
            print(f"| {count} | {num_control} | {layout.name} | {describe(covered)} | {bar} |")


def print_paired(tally: Tally) -> None:
    """Print the table of rates of the same documents: Tango's interval, joined with the exact."""
    print("\nRates of the same documents under two settings, lowest coverage (mean), exact\n")
    print("| documents | copies |", " | ".join(ALIKE), "| bar |")
    print("|---|---|---|---|---|---|")
    for count in SIZES:
        # Convolutions over pairs of counts take long for 100 documents in clusters.
        for layout in list_layouts(count)[: 1 if count == SIZES[-1] else None]:
            ends = np.full((count + 1, count + 1, 2), math.nan)
            for first in range(count + 1):
                for second in range(count + 1 - first):
                    found = compute_paired_interval(first, second, count, layout.num_effective)
                    ends[first, second] = tally.look((first - second) / count, found, -1, 1)
            has_copies = max(layout.sizes) > 1
            truths = list_truths(count, 10 if has_copies else 20)
            covered = {
                how: [
                    float(
                        count_pairs(layout.sizes, pair, alike)[is_in(pair[0] - pair[1], ends)].sum()
                    )
                    for pair in _list_pairs(truths)
                ]
                for how, alike in ALIKE.items()
                if has_copies or not alike
            }
            bar = ""
            if layout.has_bar:
                name = f"paired rates, {count} documents, {layout.name}"
                mean = min(float(np.mean(each)) for each in covered.values())
                bar = tally.bar(name, min(map(min, covered.values())), mean, (0.93, 0.95))
            cells = " | ".join(describe(covered[how]) if how in covered else "" for how in ALIKE)
            print(f"| {count} | {layout.name} | {cells} | {bar} |")


def _list_pairs(truths: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    """Yield the rates of differing in either direction; the second is not the larger."""
    for first in truths.tolist():
        for second in truths.tolist():
            if second <= first and first + second <= 1 + _SLACK:
                yield first, second


# -- simulated means -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Documents whose shares of right tokens are drawn."""

    layout: Layout
    spread: float
    """a + b of the beta distribution of the rates of texts."""

    def draw(self, mean: float, num_samples: int, purpose: str) -> NDArray[np.float64]:
        """Return ``[num_samples, num_documents]`` shares with a given mean."""
        draw = derive_generator(SEED, f"{purpose}: {self} {mean}")
        size = (num_samples, len(self.layout.sizes))
        rates = np.full(size, mean)
        if 0 < mean < 1:
            rates = draw.beta(self.spread * mean, self.spread * (1 - mean), size=size)
        return draw.binomial(NUM_TOKENS, rates[:, self.layout.cluster_D]) / NUM_TOKENS

    def __str__(self) -> str:
        """Return words for its name."""
        copies = "" if max(self.layout.sizes) == 1 else f", {self.layout.name}"
        return f"{sum(self.layout.sizes)} documents{copies}, a + b = {self.spread:g}"


def list_sources() -> Iterator[Source]:
    """Yield documents without copies and half in clusters of four, of either spread."""
    for count in SIZES:
        alone, _, _, fours, _ = list_layouts(count)
        yield Source(layout=alone, spread=0.5)
        yield Source(layout=alone, spread=2.0)
        yield Source(layout=fours, spread=2.0)


def _estimate_mean(share_D: NDArray[np.float64], cluster_D: NDArray[np.int64]) -> Interval | None:
    return compute_mean(share_D, (0, 1), cluster_D)


def _estimate_change(share_D: NDArray[np.float64], cluster_D: NDArray[np.int64]) -> Interval | None:
    nothing_D = np.zeros(len(share_D))
    return compute_paired_difference(share_D, nothing_D, bounds=(0, 1), clusters=cluster_D)


_ESTIMATES = {"mean": (_estimate_mean, 0.0), "change": (_estimate_change, -1.0)}
"""What is estimated, and its lowest value."""


def print_means(tally: Tally, num_samples: int) -> None:
    """Print the table of means between bounds, and of changes from a base model."""
    print(f"\nMeans of shares, coverage, {num_samples:,} samples each, seed {SEED}\n")
    print("| documents | of |", " | ".join(f"{mean:g}" for mean in MEANS), "| bar, from .1 |")
    print("|---|---|" + "---|" * (len(MEANS) + 1))
    for source in list_sources():
        cluster_D = source.layout.cluster_D
        for name, (estimate, low) in _ESTIMATES.items():
            covered = [
                _cover(
                    (
                        estimate(share_D, cluster_D)
                        for share_D in source.draw(mean, num_samples, "")
                    ),
                    mean,
                    tally,
                    low,
                )
                for mean in MEANS
            ]
            barred = [c for mean, c in zip(MEANS, covered, strict=True) if mean >= BARRED]
            bar = ""
            if sum(source.layout.sizes) >= FEWEST and max(source.layout.sizes) == 1:
                where = f"{name} of {source}"
                bar = tally.bar(where, min(barred), float(np.mean(barred)), (0.86, 0.93))
            cells = " | ".join(f"{share:.3f}" for share in covered)
            print(f"| {source} | {name} | {cells} | {bar} |")


_APART = ((0.1, 0.1), (0.3, 0.1), (0.5, 0.5), (0.9, 0.1), (0.95, 0.9), (1.0, 0.1), (1.0, 0.0))


def print_mean_differences(tally: Tally, num_samples: int) -> None:
    """Print the table of differences of means of other documents."""
    print(f"\nMeans minus those of a control, coverage, {num_samples:,} samples each\n")
    heads = " | ".join(f"{mean:g} − {floor:g}" for mean, floor in _APART)
    print(f"| documents | control | {heads} | bar |")
    print("|---|---|" + "---|" * (len(_APART) + 1))
    for count, num_control in ((12, 12), (25, 25), (40, 25), (100, 40)):
        for spread in (0.5, 2.0):
            source = Source(layout=list_layouts(count)[0], spread=spread)
            control = Source(layout=list_layouts(num_control)[0], spread=spread)
            covered = [
                _cover(
                    (
                        compute_mean_difference(share_D, other_C, bounds=(0, 1))
                        for share_D, other_C in zip(
                            source.draw(mean, num_samples, "difference"),
                            control.draw(floor, num_samples, "control"),
                            strict=True,
                        )
                    ),
                    mean - floor,
                    tally,
                    -1.0,
                )
                for mean, floor in _APART
            ]
            bar = ""
            if count >= FEWEST:
                where = f"difference of {source}, control {num_control}"
                bar = tally.bar(where, min(covered), float(np.mean(covered)), (0.86, 0.93))
            cells = " | ".join(f"{share:.3f}" for share in covered)
            print(f"| {source} | {num_control} | {cells} | {bar} |")


def _cover(intervals: Iterable[Interval | None], truth: float, tally: Tally, low: float) -> float:
    """Return the share of intervals between ``low`` and 1 that contain a truth."""
    inside = []
    for found in intervals:
        assert found is not None, "there are documents"
        ends = tally.look(found.value, found.ci, low, 1)
        # No interval is none that covers.
        inside.append(ends is not None and bool(is_in(truth, np.array(ends))))
    return float(np.mean(inside))


if __name__ == "__main__":
    sys.exit(main())
