"""Which setting to take: one rule, and the sentence it leads to."""

from collections.abc import Sequence

from memguard.compare.pareto import is_below
from memguard.records import NUM_RISK_QUERIES, FrontPoint, Recommendation, RiskName

TOLERANCE = 0.05
"""What less risk may cost: held-out NLL above that of the first setting (share)."""

_RULE = (
    f"Of the settings whose held-out NLL is at most {100 * TOLERANCE:g} % above that of "
    "'{first}' and whose risk interval lies wholly below that of '{first}': the one of least risk; "
    "of those whose interval overlaps its interval, the one of lowest held-out NLL. Risk is the "
    "worst of the rates measured in every run: verbatim and near-verbatim by greedy decoding, "
    f"verbatim within {NUM_RISK_QUERIES:,} queries, verbatim by the best attack; of the documents "
    "trained most often."
)
_SPOKEN: dict[RiskName, str] = {
    "verbatim": "verbatim",
    "near_verbatim": "near-verbatim",
    "attack_cost": f"within {NUM_RISK_QUERIES:,} queries",
    "attack": "by the best attack",
}


def recommend(front: Sequence[FrontPoint]) -> Recommendation:
    """Choose a setting, or say why none is chosen.

    Args:
        front: at least one point; the first is what the others must beat.
    """
    first, *others = front
    safer = [point for point in others if is_below(point.risk_ci, first.risk_ci)]
    within = [point for point in safer if point.utility <= (1 + TOLERANCE) * first.utility]
    rule = _RULE.format(first=first.name)
    if not within:
        why = _tell_why_not(others, safer, first)
        return Recommendation(setting=None, sentence=f"No setting is recommended: {why}", rule=rule)
    least = min(within, key=lambda point: (point.risk or 0.0, point.utility))
    alike = [point for point in within if not is_below(least.risk_ci, point.risk_ci)]
    chosen = min(alike, key=lambda point: (point.utility, point.risk or 0.0))
    sentence = _tell_choice(chosen, least, first) + _tell_costly(chosen, safer, within)
    return Recommendation(setting=chosen.name, sentence=sentence, rule=rule)


def _tell_choice(chosen: FrontPoint, least: FrontPoint, first: FrontPoint) -> str:
    sentence = (
        f"'{chosen.name}' is recommended{_tell_detected(chosen)}: {_tell_risk(chosen)}, against "
        f"{_tell_share(first)} with '{first.name}', at a held-out NLL of {_tell_utility(chosen)}."
    )
    if least.name != chosen.name:
        sentence += (
            f" '{least.name}' has {_tell_share(least)}, no less beyond the intervals, at a "
            f"held-out NLL of {_tell_utility(least)}."
        )
    return sentence


def _tell_detected(chosen: FrontPoint) -> str:
    """Return a clause where the setting's own report says that memorization is detected."""
    if not chosen.num_runs_detected:
        return ""
    if chosen.num_seeds == 1:
        return ", although its own report says that memorization is detected"
    return (
        f", although the reports of {chosen.num_runs_detected} of its {chosen.num_seeds} runs say "
        "that memorization is detected"
    )


def _tell_costly(
    chosen: FrontPoint, safer: Sequence[FrontPoint], within: Sequence[FrontPoint]
) -> str:
    """Name the setting of least risk that the limit to the loss rules out, if its risk is lower."""
    costly = [
        point
        for point in safer
        if point not in within and (point.risk or 0.0) < (chosen.risk or 0.0)
    ]
    if not costly:
        return ""
    best = min(costly, key=lambda point: (point.risk or 0.0, point.utility))
    return (
        f" '{best.name}' has a lower risk, {_tell_share(best)}, and is ruled out by its held-out "
        f"NLL of {_tell_utility(best)}, more than {100 * TOLERANCE:g} % above that of the first "
        "setting."
    )


def _tell_why_not(
    others: Sequence[FrontPoint], safer: Sequence[FrontPoint], first: FrontPoint
) -> str:
    if not others:
        return f"only '{first.name}' was compared."
    if first.risk is None:
        return f"nothing that '{first.name}' was trained on was audited."
    if not first.risk:
        return f"'{first.name}' shows no risk that another could lower ({_tell_share(first)})."
    if safer:
        cheapest = min(safer, key=lambda point: point.utility)
        return (
            f"whatever has less risk than '{first.name}' beyond the intervals has a held-out NLL "
            f"more than {100 * TOLERANCE:g} % above its own; the lowest is that of "
            f"'{cheapest.name}', {_tell_utility(cheapest)}."
        )
    return (
        f"no other has less risk than '{first.name}' beyond the intervals ({_tell_share(first)} "
        "of its documents)."
    )


def _tell_risk(point: FrontPoint) -> str:
    assert point.risk_by is not None, "a point with an interval has a risk"
    # None at all: in none of the ways that were asked about.
    ways = [point.risk_by] if point.risk else list(point.risks) or [point.risk_by]
    *others, last = (_SPOKEN[way] for way in ways)
    told = f"{', '.join(others)} or {last}" if others else last
    return f"{_tell_share(point)} of the documents trained most often are extracted {told}"


def _tell_share(point: FrontPoint) -> str:
    assert point.risk is not None, "asked only where there are documents"
    if point.risk_ci is None:
        return f"{100 * point.risk:.1f} %"
    low, high = (100 * end for end in point.risk_ci)
    return f"{100 * point.risk:.1f} % (95 % CI {low:.1f} to {high:.1f} %)"


def _tell_utility(point: FrontPoint) -> str:
    change = point.utility_change
    if change is None:
        return f"{point.utility:.3f}"
    told = f"{100 * change.value:+.1f} %"
    if change.ci is not None:
        told += f", 95 % CI {100 * change.ci[0]:+.1f} to {100 * change.ci[1]:+.1f} %"
    return f"{point.utility:.3f} ({told})"
