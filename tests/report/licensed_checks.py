"""A table of sentences and the numbers that license them, held against what was written."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from scipy import stats

CaseT = TypeVar("CaseT")
Said = re.Match[str]

PERCENT = r"(?:<0\.1|\d+\.\d) %"
"""As verdicts and recommendations write a share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence(Generic[CaseT]):
    """One sentence that may be written."""

    name: str
    pattern: str
    """Matches all of it."""
    count: Callable[[CaseT], int]
    """How often the numbers ask for it: 0 forbids it."""
    holds: Callable[[CaseT, Said], bool] = lambda _case, _said: True
    """Whether the numbers that it gives are right."""


def check_sentences(
    written: Iterable[str], table: Sequence[Sentence[CaseT]], case: CaseT
) -> Counter[str]:
    """Check that each sentence is one of the table and licensed, and that none is left out.

    Args:
        written: every sentence that was written of the case.
        table: all that may be.
        case: the numbers.

    Returns:
        How often each was written, by name.
    """
    said: Counter[str] = Counter()
    for text in written:
        found = [(one, match) for one in table if (match := re.fullmatch(one.pattern, text))]
        assert len(found) == 1, f"{[one.name for one, _ in found]} license: {text}"
        [(sentence, match)] = found
        assert sentence.holds(case, match), f"{sentence.name}: the numbers do not say: {text}"
        said[sentence.name] += 1
    for sentence in table:
        wanted = sentence.count(case)
        assert said[sentence.name] == wanted, f"{sentence.name}: {wanted} wanted, got {said}"
    return said


def is_share(text: str | None, share: float | None) -> bool:
    """Tell whether a percentage is that of the share; 0.0 and 100.0 stand for nothing else."""
    if text is None or share is None:
        return text is None and share is None
    number = text.removesuffix(" %")
    if number == "<0.1":
        return 0 < share < 0.001
    if number in ("0.0", "100.0"):
        # Sums of fractions miss 1 by rounding.
        return abs(share - float(number) / 100) < 1e-12
    # Half of the last digit, and what stands for a share next to 1.
    return abs(float(number) - 100 * share) <= 0.0501 or (number == "99.9" and 0.999 < share < 1)


def subtract(one: tuple[int, int], other: tuple[int, int]) -> tuple[float, float] | None:
    """Return Newcombe's 95 % interval (1998, method 10) of a difference of shares.

    From scipy's Wilson intervals (l, u) of shares p: p1 - p2 - sqrt((p1 - l1)^2 + (u2 - p2)^2) to
    p1 - p2 + sqrt((u1 - p1)^2 + (p2 - l2)^2).

    Args:
        one: matched, documents.
        other: the same of what is subtracted.
    """
    if min(one[1], other[1]) < 2:
        return None
    (p1, low1, high1), (p2, low2, high2) = (
        (matched / documents, wilson.low, wilson.high)
        for matched, documents in (one, other)
        for wilson in [stats.binomtest(matched, documents).proportion_ci(method="wilson")]
    )
    below = ((p1 - low1) ** 2 + (high2 - p2) ** 2) ** 0.5
    above = ((high1 - p1) ** 2 + (p2 - low2) ** 2) ** 0.5
    return p1 - p2 - below, p1 - p2 + above
