"""The recommendation: one rule, a sentence on the setting, and one on each setting ruled out.

Utility is the held-out loss or the benchmark task that the comparison names. A task must tell
something: if every setting is at chance, equal values do not show that utility is kept, and no
setting is recommended on them; nor is one that is at chance where another is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memguard.compare.front import is_below
from memguard.pages import formatting as fmt
from memguard.records import (
    RISK_NAMES,
    WITHIN_LIMIT,
    Badge,
    FrontPoint,
    Recommendation,
    Tables,
    Utility,
)
from memguard.records.comparison import HELDOUT, RuledOut, find_change

_PLAIN = str.maketrans({fmt.NBSP: " ", fmt.MINUS: "-", "\u2013": " to "})
"""Characters of pages that not every terminal has."""
TOLERANCE = 0.05
"""Largest accepted loss of utility from the first setting (share of the first one's value)."""

_RULE = (
    "Of the settings whose {utility} is {limit} "
    "'{first}' and whose risk interval lies wholly below that of '{first}': the one of least risk; "
    "among ties (overlapping intervals) the one of {best} {utility}. Risk is the highest of the "
    "rates measured in every run: verbatim and near-verbatim by greedy decoding, "
    f"verbatim by sampling {WITHIN_LIMIT}, verbatim by the best attack; of the documents trained "
    "most often. Its interval ends at the highest upper end of these rates."
)


def recommend(
    front: Sequence[FrontPoint], tables: Tables, utility: Utility = HELDOUT
) -> Recommendation:
    """Recommend a setting, or give the reason why none is recommended."""
    first, *others = front
    words = _Words(tables, utility)
    safer = [point for point in others if is_below(point.risk_ci, first.risk_ci)]
    within = [point for point in safer if _is_kept(point, first, utility)]
    sentence, reasons = _describe_why_not(front, safer, words), {}
    chosen = None
    if within:
        least = min(within, key=lambda point: (point.risk or 0.0, utility.worsening(point.utility)))
        similar = [point for point in within if not is_below(least.risk_ci, point.risk_ci)]
        chosen = min(
            similar, key=lambda point: (utility.worsening(point.utility), point.risk or 0.0)
        )
        sentence = _describe_choice(chosen, first, words)
        for point in within:
            reasons[point.name] = f"; extracts more than '{least.name}'"
        for point in similar:
            reasons[point.name] = f"; not shown to extract less than '{chosen.name}'"
    return Recommendation(
        setting=None if chosen is None else chosen.name,
        sentence=sentence,
        ruled_out=[
            RuledOut(
                setting=point.name,
                sentence=words.describe(point)
                + reasons.get(point.name, _describe_failure(point, first, utility))
                + ".",
            )
            for point in others
            if point is not chosen
        ],
        rule=words.write_rule(first.name),
    )


def _is_kept(point: FrontPoint, first: FrontPoint, utility: Utility) -> bool:
    """Return whether a setting keeps the first one's utility."""
    return not point.is_at_chance and not _is_beyond(point, first, utility)


def _is_beyond(point: FrontPoint, first: FrontPoint, utility: Utility) -> bool:
    """Return whether the utility is worse than the first one's by more than the tolerance."""
    if not utility.is_task:
        return point.utility > (1 + TOLERANCE) * first.utility
    worse = utility.worsening(point.utility - first.utility)
    return worse > TOLERANCE * abs(first.utility)


def _describe_failure(point: FrontPoint, first: FrontPoint, utility: Utility) -> str:
    """Return which conditions of the rule a setting does not meet, as the end of a sentence."""
    ending = ""
    if _is_beyond(point, first, utility):
        ending = f", beyond the {100 * TOLERANCE:g} % limit"
    if point.is_at_chance:
        ending += "; not shown to differ from a random choice"
    if point.risk is not None and not is_below(point.risk_ci, first.risk_ci):
        ending += f"; not shown to extract less than '{first.name}'"
    return ending


@dataclass(frozen=True, slots=True)
class _Words:
    """Words for the numbers of a setting."""

    tables: Tables
    utility: Utility

    def write_rule(self, first: str) -> str:
        """Return the rule."""
        side = "below" if self.utility.higher_is_better else "above"
        of_what = " (of its value)" if self.utility.is_task else ""
        limit = f"at most {100 * TOLERANCE:g} %{of_what} {side} that of"
        if self.utility.is_task and (self.utility.chance is not None or self.utility.is_share):
            limit = f"shown to differ from a random choice and {limit}"
        best = "highest" if self.utility.higher_is_better else "lowest"
        return _RULE.format(first=first, utility=self.utility.spoken, limit=limit, best=best)

    def describe(self, point: FrontPoint) -> str:
        """Return extraction and utility of a setting."""
        if point.risk is None:
            return f"no document that it trained was audited, {self.value(point)}"
        return f"extraction {self.share(point)}, {self.value(point)}"

    def share(self, point: FrontPoint) -> str:
        """Return the risk, its interval and its method."""
        assert point.risk is not None, "called only for points with documents"
        how = "" if point.risk_by is None else f", {RISK_NAMES[point.risk_by]}"
        text = f"{fmt.percent(point.risk)} ({fmt.percent_range(point.risk_ci)}{how})"
        return text.translate(_PLAIN)

    def value(self, point: FrontPoint) -> str:
        """Return the change of the utility from the first setting, with its interval."""
        change, spoken = find_change(self.tables, point.name, self.utility), self.utility.spoken
        if change is None or change.value is None:
            return f"{spoken} {self.number(point.utility)}"
        if not self.utility.is_task:
            interval = fmt.change_range(change)
            text = f"{spoken} {fmt.change(change.value)}{f' ({interval})' if interval else ''}"
            return text.translate(_PLAIN)
        moved = (fmt.points if self.utility.is_share else fmt.difference)(change)
        interval = f", {moved.interval}" if change.ci is not None else ""
        text = f"{spoken} {self.number(point.utility)} ({moved.value}{interval})"
        return text.translate(_PLAIN)

    def number(self, value: float) -> str:
        """Return a value of the utility."""
        shown = fmt.percent(value) if self.utility.is_share else fmt.number(value)
        return shown.translate(_PLAIN)


def _describe_choice(chosen: FrontPoint, first: FrontPoint, words: _Words) -> str:
    """Return the figures of the recommended setting, a caveat, and its own verdict."""
    before = fmt.percent(first.risk).translate(_PLAIN)
    figures = f"extraction falls from {before} to {words.share(chosen)}, {words.value(chosen)}."
    text, membership = chosen.badges
    states = (
        f"{text.state}{_count_runs(text)}",
        f"membership: {membership.state}{_count_runs(membership)}",
    )
    caveat = _describe_not_excluded(chosen, first, words)
    return f"{figures}{caveat} Its own verdict: {'; '.join(states)}."


def _count_runs(badge: Badge) -> str:
    return f" in {badge.detail}" if badge.detail.endswith(" runs") else ""


def _describe_not_excluded(chosen: FrontPoint, first: FrontPoint, words: _Words) -> str:
    """Return a caveat if the items of a task do not exclude a loss beyond the tolerance."""
    utility = words.utility
    if not utility.is_task:
        return ""
    change = find_change(words.tables, chosen.name, utility)
    ci = None if change is None else change.ci
    limit = TOLERANCE * abs(first.utility)
    if ci is not None and max(map(utility.worsening, ci)) <= limit:
        return ""
    return (
        f" The {utility.num_items or 0:,} items of the task do not exclude a loss beyond the "
        f"{100 * TOLERANCE:g} % limit."
    )


def _describe_why_not(
    front: Sequence[FrontPoint], safer: Sequence[FrontPoint], words: _Words
) -> str:
    first, *others = front
    utility = words.utility
    if not others:
        return f"only '{first.name}' was compared."
    if first.risk is None:
        return f"nothing that '{first.name}' was trained on was audited."
    if not first.risk:
        return f"'{first.name}' extracts nothing that another could lower, {words.share(first)}."
    if safer and all(point.is_at_chance for point in front):
        chance = 0.0 if utility.chance is None else utility.chance
        return (
            f"task '{utility.name}' cannot tell whether utility is kept: the {utility.metric} of "
            f"every setting, on {utility.num_items or 0:,} items, does not differ from a random "
            f"choice ({words.number(chance)}) beyond its interval. Take more items, an easier "
            "task, or the held-out loss."
        )
    if safer:
        limit = f"{100 * TOLERANCE:g} % limit"
        article = "an" if utility.spoken[:1].lower() in "aeiou" else "a"
        at_chance = ""
        if any(point.is_at_chance for point in safer):
            at_chance = " or not shown to differ from a random choice"
        return (
            f"every setting that extracts less than '{first.name}' beyond the intervals has "
            f"{article} {utility.spoken} beyond the {limit}{at_chance}."
        )
    return f"no setting is shown to extract less than '{first.name}', {words.share(first)}."
