"""The recommendation: one rule, and the sentence that reports its result.

Utility is the held-out loss or the benchmark task that the comparison names. A task must tell
something: if every setting is at chance, equal values do not show that utility is kept, and no
setting is recommended on them; nor is one that is at chance where another is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memguard.compare.front import is_below
from memguard.records import (
    LEVEL_NAMES,
    RISK_NAMES,
    WITHIN_LIMIT,
    FrontPoint,
    Level,
    Recommendation,
    Tables,
    Utility,
)
from memguard.records.comparison import HELDOUT, find_change, find_own_ci, list_shares
from memguard.records.texts import format_percent

TOLERANCE = 0.05
"""Largest accepted loss of utility from the first setting (share of the first one's value)."""

_RULE = (
    "Of the settings whose {utility} is {limit} "
    "'{first}' and whose risk interval lies wholly below that of '{first}': the one of least risk; "
    "among ties (overlapping intervals) the one of {best} {utility}. Risk is the "
    "worst of the rates measured in every run: verbatim and near-verbatim by greedy decoding, "
    f"verbatim by sampling {WITHIN_LIMIT}, verbatim by the best attack; of the documents trained "
    "most often."
)


def recommend(
    front: Sequence[FrontPoint], tables: Tables, utility: Utility = HELDOUT
) -> Recommendation:
    """Recommend a setting, or give the reason why none is recommended."""
    first, *others = front
    words = _Words(tables, utility)
    safer = [point for point in others if is_below(point.risk_ci, first.risk_ci)]
    within = [point for point in safer if _is_kept(point, first, utility)]
    rule = words.write_rule(first.name)
    if not within:
        why = _describe_why_not(front, safer, words)
        return Recommendation(setting=None, sentence=f"No setting is recommended: {why}", rule=rule)
    least = min(within, key=lambda point: (point.risk or 0.0, utility.worsening(point.utility)))
    similar = [point for point in within if not is_below(least.risk_ci, point.risk_ci)]
    chosen = min(similar, key=lambda point: (utility.worsening(point.utility), point.risk or 0.0))
    sentence = _describe_choice(chosen, least, first, words)
    sentence += _describe_not_excluded(chosen, first, words)
    sentence += _describe_costly(chosen, first, safer, within, words)
    sentence += _describe_told_apart(chosen)
    return Recommendation(setting=chosen.name, sentence=sentence, rule=rule)


def _is_kept(point: FrontPoint, first: FrontPoint, utility: Utility) -> bool:
    """Return whether a setting keeps the first one's utility."""
    return not point.is_at_chance and not _is_beyond(point, first, utility)


def _is_beyond(point: FrontPoint, first: FrontPoint, utility: Utility) -> bool:
    """Return whether the utility is worse than the first one's by more than the tolerance."""
    if not utility.is_task:
        return point.utility > (1 + TOLERANCE) * first.utility
    worse = utility.worsening(point.utility - first.utility)
    return worse > TOLERANCE * abs(first.utility)


@dataclass(frozen=True, slots=True)
class _Words:
    """Words for the numbers of a setting."""

    tables: Tables
    utility: Utility

    def write_rule(self, first: str) -> str:
        """Return the rule."""
        limit = f"{self.limit} of"
        if self.utility.is_task and (self.utility.chance is not None or self.utility.is_share):
            limit = f"shown to differ from a random choice and {limit}"
        best = "highest" if self.utility.higher_is_better else "lowest"
        return _RULE.format(first=first, utility=self.utility.spoken, limit=limit, best=best)

    @property
    def limit(self) -> str:
        """What is accepted, before the first one's name."""
        allowed = f"at most {100 * TOLERANCE:g} %"
        if not self.utility.is_task:
            return f"{allowed} above that"
        side = "below" if self.utility.higher_is_better else "above"
        return f"{allowed} (of its value) {side} that"

    @property
    def beyond(self) -> str:
        """What is not accepted, before "it" or the first one's name."""
        side = "below" if self.utility.higher_is_better else "above"
        of_value = " (of its value)" if self.utility.is_task else ""
        return f"more than {100 * TOLERANCE:g} %{of_value} {side}"

    def risk(self, point: FrontPoint) -> str:
        """Return the share at risk and the methods that extract it."""
        assert point.risk_by is not None, "a point with an interval has a risk"
        # A risk of 0 means that no measured method extracted a document, so all are listed.
        methods = [point.risk_by]
        if not point.risk:
            methods = list(list_shares(self.tables, point.name)) or methods
        by = RISK_NAMES["attack"]
        names = [RISK_NAMES[method] for method in methods]
        *others, last = (f"by the {name}" if name == by else name for name in names)
        how = f"{', '.join(others)} or {last}" if others else last
        return f"{self.share(point)} of the documents trained most often are extracted {how}"

    def share(self, point: FrontPoint) -> str:
        """Return the share at risk and its interval."""
        assert point.risk is not None, "called only for points with documents"
        own = find_own_ci(point, self.tables)
        if point.risk_ci is None or own is None:
            return format_percent(point.risk)
        low, high = (100 * end for end in own)
        others = ""
        if point.risk_ci[1] > high / 100:
            others = f"; by all methods up to {format_percent(point.risk_ci[1])}"
        return f"{format_percent(point.risk)} (95 % CI {low:.1f} to {high:.1f} %{others})"

    def value(self, point: FrontPoint) -> str:
        """Return the utility and its change from the first setting."""
        change = find_change(self.tables, point.name, self.utility)
        shown = self.number(point.utility)
        if change is None or change.value is None:
            return shown
        # Changes of a loss are relative; those of a task have the unit of its values.
        if self.utility.is_task and not self.utility.is_share:
            factor, form, unit = 1.0, "+.3f", ""
        else:
            factor, form, unit = 100.0, "+.1f", " points" if self.utility.is_task else " %"
        moved = f"{factor * change.value:{form}}{unit}"
        if change.ci is not None:
            low, high = (f"{factor * end:{form}}" for end in change.ci)
            moved += f", 95 % CI {low} to {high}{unit}"
        return f"{shown} ({moved})"

    def number(self, value: float) -> str:
        """Return a value of the utility."""
        return format_percent(value) if self.utility.is_share else f"{value:.3f}"


def _describe_choice(
    chosen: FrontPoint, least: FrontPoint, first: FrontPoint, words: _Words
) -> str:
    utility = words.utility.spoken
    sentence = (
        f"'{chosen.name}' is recommended{_describe_level(chosen)}: {words.risk(chosen)}, "
        f"against {words.share(first)} with '{first.name}', at {_article(utility)} {utility} of "
        f"{words.value(chosen)}."
    )
    if least.name != chosen.name:
        sentence += (
            f" '{least.name}' has {words.share(least)}, no less beyond the intervals, at "
            f"{_article(utility)} {utility} of {words.value(least)}."
        )
    return sentence


def _article(noun: str) -> str:
    return "an" if noun[:1].lower() in "aeiou" else "a"


def _describe_level(chosen: FrontPoint) -> str:
    """Return a caveat if documents were extracted by the verdict of one of the setting's runs."""
    worst: tuple[Level, ...] = ("memorized", "extracted")
    level = next((level for level in worst if chosen.levels.get(level)), None)
    if level is None:
        return ""
    if chosen.num_seeds == 1:
        return f", although its own verdict is '{LEVEL_NAMES[level]}'"
    return (
        f", although the verdict of {chosen.levels[level]} of its {chosen.num_seeds} runs is "
        f"'{LEVEL_NAMES[level]}'"
    )


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
        f" The {utility.num_items or 0:,} items of the task do not exclude that it is "
        f"{words.beyond} that of '{first.name}'."
    )


def _describe_told_apart(chosen: FrontPoint) -> str:
    if not chosen.num_told_apart:
        return ""
    runs = "" if chosen.num_seeds == 1 else f" in {chosen.num_told_apart} of its runs"
    return f" Whether a document was trained with '{chosen.name}' can be told{runs}."


def _describe_costly(
    chosen: FrontPoint,
    first: FrontPoint,
    safer: Sequence[FrontPoint],
    within: Sequence[FrontPoint],
    words: _Words,
) -> str:
    """Return a sentence on the setting of lowest risk if its utility rules it out, else ""."""
    utility = words.utility
    costly = [
        point
        for point in safer
        if point not in within and (point.risk or 0.0) < (chosen.risk or 0.0)
    ]
    if not costly:
        return ""
    best = min(costly, key=lambda point: (point.risk or 0.0, utility.worsening(point.utility)))
    why = f"{words.beyond} that of the first setting"
    if not _is_beyond(best, first, utility):
        why = "not shown to differ from a random choice"
    return (
        f" '{best.name}' has a lower risk, {words.share(best)}, and is ruled out by its "
        f"{utility.spoken} of {words.value(best)}, {why}."
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
        return f"'{first.name}' shows no risk that another could lower ({words.share(first)})."
    if safer and all(point.is_at_chance for point in front):
        chance = 0.0 if utility.chance is None else utility.chance
        return (
            f"task '{utility.name}' cannot tell whether utility is kept: the {utility.metric} of "
            f"every setting, on {utility.num_items or 0:,} items, does not differ from a random "
            f"choice ({words.number(chance)}) beyond its interval. Take more items, an easier "
            "task, or the held-out loss."
        )
    if safer:
        cheapest = min(safer, key=lambda point: utility.worsening(point.utility))
        extreme = "highest" if utility.higher_is_better else "lowest"
        at_chance = (
            " or not shown to differ from a random choice"
            if any(point.is_at_chance for point in safer)
            else ""
        )
        return (
            f"every setting with a risk below '{first.name}' beyond the intervals has "
            f"{_article(utility.spoken)} {utility.spoken} {words.beyond} it{at_chance}; the "
            f"{extreme} is that of '{cheapest.name}', {words.value(cheapest)}."
        )
    return (
        f"no other setting has a risk below '{first.name}' beyond the intervals "
        f"({words.share(first)} of its documents)."
    )
