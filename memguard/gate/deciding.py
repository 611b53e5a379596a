"""Judges an interval by a limit, finds the fewest documents that would decide, and says so.

    upper end <= limit   pass            lower end > limit   fail            else inconclusive

for a limit that a value may reach at most; `at_least` mirrors it. The interval is the one of the
results table: two-sided, 95 %, not corrected for the number of judgements.

The fewest documents, for a rate of k in n below its limit: the smallest m >= n for which

    Clopper-Pearson's upper end of ceil(k m / n) in m  <=  limit

Matches are rounded against the decision: up below the limit, down above it, where the lower end has
to exceed the limit. A rate equal to the limit is decided by no number. With copies, the interval is
that of the effective number, which grows in proportion.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

from memguard.audit.statistics import compute_exact_interval
from memguard.audit.statistics.rates import TAIL
from memguard.pages.judgements import OUTCOME_NAMES, count_outcomes
from memguard.records import ResultRow
from memguard.records.gate import GateResult, Outcome

MOST_DOCUMENTS: Final = 1_000_000
"""No larger number of documents is looked for."""
_HALVINGS = 100


def judge_interval(low: float, high: float, limit: float, *, at_least: bool = False) -> Outcome:
    """Return whether an interval is within a limit, beyond it, or across it."""
    if at_least:
        low, high, limit = -high, -low, -limit
    if high <= limit:
        return "pass"
    return "fail" if low > limit else "inconclusive"


def find_effective(row: ResultRow) -> float:
    """Return the effective number of documents of a rate, at which its interval was computed.

    The table does not store it; the end of the interval is strictly monotone in it.
    """
    if row.num_clusters is None or row.ci is None or row.num_matched is None:
        return float(row.num_documents)
    matched, documents = row.num_matched, row.num_documents
    is_all = matched == documents
    low, high = 1.0, float(documents)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        ends = compute_exact_interval(matched, documents, middle)
        # More documents: a narrower interval.
        is_wider = ends is None or (ends[0] < row.ci[0] if is_all else ends[1] > row.ci[1])
        low, high = (middle, high) if is_wider else (low, middle)
    return (low + high) / 2


def find_documents_for_rate(
    matched: int,
    documents: int,
    limit: float,
    *,
    effective: float | None = None,
    at_least: bool = False,
) -> int | None:
    """Return the fewest documents that would decide at this rate; None if no number would.

    ``effective`` is the effective number of today's documents; None: all of them.
    """
    rate = matched / documents
    share = 1.0 if effective is None else effective / documents
    if rate == limit:
        return None
    # A rate that must stay below its limit passes on it, one that must stay above it exceeds it.
    if rate < limit:
        return _find_fewest(matched, documents, limit, share, may_touch=not at_least)
    # The lower end of k in n is 1 minus the upper end of n - k in n.
    return _find_fewest(documents - matched, documents, 1 - limit, share, may_touch=at_least)


def find_documents_by_width(value: float, reach: float, documents: int, limit: float) -> int | None:
    """Return about how many documents would decide on another estimate than a rate.

    Its interval is taken to narrow with the square root of the number of documents; ``reach`` is
    the distance from the estimate to its end on the limit's side.
    """
    if value == limit or not documents:
        return None
    needed = documents * (reach / abs(limit - value)) ** 2
    return None if needed > MOST_DOCUMENTS else max(documents, math.ceil(needed))


def _find_fewest(
    matched: int, documents: int, limit: float, share: float, *, may_touch: bool
) -> int | None:
    """Return the smallest number of documents whose upper end is within a limit above the rate."""

    def decide(counted_M: NDArray[Any], number_M: NDArray[Any]) -> NDArray[np.bool_]:
        # Clopper and Pearson's upper end at the effective number, as `statistics.rates` has it.
        missed_M = (number_M - counted_M) * share
        high_M = special.betaincinv(counted_M * share + 1, missed_M, 1 - TAIL)
        high_M[(number_M * share <= 1) | (missed_M <= 0)] = 1.0
        return np.asarray(high_M <= limit if may_touch else high_M < limit)

    start = documents
    while start <= MOST_DOCUMENTS:
        number_M = np.arange(start, start + start // 8 + 8)
        last = number_M[-1:]
        # Without rounding the end falls with the number: if the last does not decide, none does.
        if decide(matched * last / documents, last).any():
            found = number_M[decide(-(-matched * number_M // documents), number_M)]
            if len(found):
                return int(found[0])
        start = int(last[0]) + 1
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """How the values of a judgement are written."""

    is_share: bool
    is_difference: bool = False

    def write(self, value: float, beside: float | None = None) -> str:
        """Return a value, with enough digits to tell it from the one beside it."""
        shown = self._write(value, None)
        if beside is not None and value != beside and shown == self._write(beside, None):
            return self._write(value, 9)
        return shown

    def _write(self, value: float, digits: int | None) -> str:
        if not self.is_share:
            text = f"{value:.{digits or 4}g}"
            return f"+{text}" if self.is_difference and value > 0 else text
        number = f"{100 * value:.{digits or 3}g}"
        sign = "+" if self.is_difference and value > 0 else ""
        return f"{sign}{number} {'percentage points' if self.is_difference else '%'}"

    def write_interval(self, low: float, high: float, limit: float) -> str:
        """Return the ends of an interval: ``0.6 % to 16.9 %``."""
        ends = [self.write(end, limit) for end in (low, high)]
        if self.is_share and self.is_difference:
            ends[0] = ends[0].removesuffix(" percentage points")
        return " to ".join(ends)


def say_undecided(needed: int | None, *, is_rate: bool, is_on_limit: bool) -> str:
    """Return the clause about the number of documents that would decide; None: none was found."""
    if is_on_limit:
        return "no number of documents decides at a value that is the limit"
    if needed is None:
        return f"not even {MOST_DOCUMENTS:,} documents would decide at this value"
    if is_rate:
        return f"{needed:,} documents would decide at this rate"
    return f"about {needed:,} documents would decide at this value"


def end_sentence(reason: str) -> str:
    """Return a reason as a sentence."""
    return f"{reason[:1].upper()}{reason[1:]}{'' if reason.endswith(('.', '?')) else '.'}"


def describe_gate(result: GateResult) -> str:
    """Return the gate's sentence: the outcome, its exit code, and how many judgements gave it."""
    outcome = OUTCOME_NAMES[result.outcome].lower()
    return f"Gate: {outcome} (exit code {result.exit_code}); {count_outcomes(result)}."
