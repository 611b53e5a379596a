"""Words of the gate: numbers, intervals, sentences. Plain spaces, as other programs read them."""

from dataclasses import dataclass

from memguard.gate.deciding import MOST_DOCUMENTS
from memguard.pages.judgements import OUTCOME_NAMES, count_outcomes
from memguard.records.gate import GateResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """How the values of a judgement are written."""

    is_share: bool
    is_difference: bool = False

    def write(self, value: float, beside: float | None = None) -> str:
        """Return a value, with enough digits to tell it from another one.

        Args:
            value: the value.
            beside: a value that must not be written the same, unless it is the same.
        """
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


def count_documents(num_matched: int | None, num_documents: int) -> str:
    """Return ``2 of 40 documents``, or ``40 documents`` of another statistic than a rate."""
    noun = "document" if num_documents == 1 else "documents"
    of = "" if num_matched is None else f"{num_matched:,} of "
    return f"{of}{num_documents:,} {noun}"


def say_undecided(needed: int | None, *, is_rate: bool, is_on_limit: bool) -> str:
    """Return the clause about the number of documents that would decide.

    Args:
        needed: the number; None if none was found.
        is_rate: whether it was computed from counts; else it is an approximation.
        is_on_limit: whether the value is the limit.
    """
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
