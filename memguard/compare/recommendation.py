"""The recommendation: one rule, and the sentence that reports its result."""

from collections.abc import Sequence
from dataclasses import dataclass

from memguard.compare.front import is_below
from memguard.records import (
    LEVEL_NAMES,
    NUM_RISK_QUERIES,
    RISK_NAMES,
    FrontPoint,
    Level,
    Recommendation,
    Tables,
)
from memguard.records.comparison import find_change, find_own_ci, list_shares

TOLERANCE = 0.05
"""Largest accepted increase of held-out NLL over the first setting (share)."""

_RULE = (
    f"Of the settings whose held-out NLL is at most {100 * TOLERANCE:g} % above that of "
    "'{first}' and whose risk interval lies wholly below that of '{first}': the one of least risk; "
    "among ties (overlapping intervals) the one of lowest held-out NLL. Risk is the "
    "worst of the rates measured in every run: verbatim and near-verbatim by greedy decoding, "
    f"verbatim within {NUM_RISK_QUERIES:,} queries, verbatim by the best attack; of the documents "
    "trained most often."
)


def recommend(front: Sequence[FrontPoint], tables: Tables) -> Recommendation:
    """Recommend a setting, or give the reason why none is recommended.

    Args:
        front: at least one point; the others are compared with the first.
        tables: shares and losses of the settings over their seeds.
    """
    first, *others = front
    words = _Words(tables)
    safer = [point for point in others if is_below(point.risk_ci, first.risk_ci)]
    within = [point for point in safer if point.utility <= (1 + TOLERANCE) * first.utility]
    rule = _RULE.format(first=first.name)
    if not within:
        why = _describe_why_not(others, safer, first, words)
        return Recommendation(setting=None, sentence=f"No setting is recommended: {why}", rule=rule)
    least = min(within, key=lambda point: (point.risk or 0.0, point.utility))
    similar = [point for point in within if not is_below(least.risk_ci, point.risk_ci)]
    chosen = min(similar, key=lambda point: (point.utility, point.risk or 0.0))
    sentence = _describe_choice(chosen, least, first, words)
    sentence += _describe_costly(chosen, safer, within, words) + _describe_told_apart(chosen)
    return Recommendation(setting=chosen.name, sentence=sentence, rule=rule)


@dataclass(frozen=True, slots=True)
class _Words:
    """Words for the numbers of a setting."""

    tables: Tables

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
            return f"{100 * point.risk:.1f} %"
        low, high = (100 * end for end in own)
        others = ""
        if point.risk_ci[1] > high / 100:
            others = f"; by all methods up to {100 * point.risk_ci[1]:.1f} %"
        return f"{100 * point.risk:.1f} % (95 % CI {low:.1f} to {high:.1f} %{others})"

    def loss(self, point: FrontPoint) -> str:
        """Return the held-out loss and its change from the first setting."""
        change = find_change(self.tables, point.name)
        if change is None or change.value is None:
            return f"{point.utility:.3f}"
        relative = f"{100 * change.value:+.1f} %"
        if change.ci is not None:
            relative += f", 95 % CI {100 * change.ci[0]:+.1f} to {100 * change.ci[1]:+.1f} %"
        return f"{point.utility:.3f} ({relative})"


def _describe_choice(
    chosen: FrontPoint, least: FrontPoint, first: FrontPoint, words: _Words
) -> str:
    sentence = (
        f"'{chosen.name}' is recommended{_describe_level(chosen)}: {words.risk(chosen)}, "
        f"against {words.share(first)} with '{first.name}', at a held-out NLL of "
        f"{words.loss(chosen)}."
    )
    if least.name != chosen.name:
        sentence += (
            f" '{least.name}' has {words.share(least)}, no less beyond the intervals, at a "
            f"held-out NLL of {words.loss(least)}."
        )
    return sentence


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


def _describe_told_apart(chosen: FrontPoint) -> str:
    if not chosen.num_told_apart:
        return ""
    runs = "" if chosen.num_seeds == 1 else f" in {chosen.num_told_apart} of its runs"
    return f" Whether a document was trained with '{chosen.name}' can be told{runs}."


def _describe_costly(
    chosen: FrontPoint,
    safer: Sequence[FrontPoint],
    within: Sequence[FrontPoint],
    words: _Words,
) -> str:
    """Return a sentence on the setting of lowest risk if the NLL limit rules it out, else ""."""
    costly = [
        point
        for point in safer
        if point not in within and (point.risk or 0.0) < (chosen.risk or 0.0)
    ]
    if not costly:
        return ""
    best = min(costly, key=lambda point: (point.risk or 0.0, point.utility))
    return (
        f" '{best.name}' has a lower risk, {words.share(best)}, and is ruled out by its "
        f"held-out NLL of {words.loss(best)}, more than {100 * TOLERANCE:g} % above that of "
        "the first setting."
    )


def _describe_why_not(
    others: Sequence[FrontPoint],
    safer: Sequence[FrontPoint],
    first: FrontPoint,
    words: _Words,
) -> str:
    if not others:
        return f"only '{first.name}' was compared."
    if first.risk is None:
        return f"nothing that '{first.name}' was trained on was audited."
    if not first.risk:
        return f"'{first.name}' shows no risk that another could lower ({words.share(first)})."
    if safer:
        cheapest = min(safer, key=lambda point: point.utility)
        return (
            f"every setting with a risk below '{first.name}' beyond the intervals has a held-out "
            f"NLL more than {100 * TOLERANCE:g} % above it; the lowest is that of "
            f"'{cheapest.name}', {words.loss(cheapest)}."
        )
    return (
        f"no other setting has a risk below '{first.name}' beyond the intervals "
        f"({words.share(first)} of its documents)."
    )
