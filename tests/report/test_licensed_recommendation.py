"""What a recommendation says: exact in a table, and true of drawn settings.

`licensed_recommendations.json`: settings that `draw_settings` drew, the fewest that lead to every
kind of sentence thrice, and what `recommend` says of them. Which setting is chosen agreed with a
second implementation of the rule, since removed. The last two are by hand: ties with the least
risk alone, and a dear one that is less safe than the choice.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_examples import make_badges, make_tables, value_row

from memguard import records as r
from memguard.compare.recommendation import recommend
from memguard.pages import formatting as fmt
from memguard.records.tables import choose_risk

TABLE = json.loads(Path(__file__).with_name("licensed_recommendations.json").read_text())
LEVELS = st.sampled_from(get_args(r.Level))
LIMIT = 1.05
WORST = ("memorized", "extracted", "inconclusive", "none-found")
Setting = dict[str, Any]
"""Name, risks (share and half of its interval, by name), utility, change_ci, levels, told."""


@st.composite
def draw_settings(draw: st.DrawFn) -> list[Setting]:
    """Draw up to five settings; the first is mostly at risk and the others less so."""
    wanted = draw(st.sets(st.sampled_from(get_args(r.RiskName)[1:])))
    names = [name for name in get_args(r.RiskName) if name == "verbatim" or name in wanted]
    num_seeds = draw(st.sampled_from([1, 3]))
    drawn = []
    for number in range(draw(st.integers(1, 5))):
        shares = st.sampled_from([0.0, 0.05, 0.1, 0.5, 1.0] if number else [0.9, 0.5, 0.0])
        halves = st.sampled_from([0.05, 0.2, None]) if number else st.just(0.1)
        names_here = names if draw(st.integers(0, 9)) else []
        utilities = st.sampled_from([3.9, 4.0, 4.1, 4.2, 4.3, 5.0])
        drawn.append(
            {
                "name": f"g{number}" if number else "plain",
                "risks": {name: (draw(shares), draw(halves)) for name in names_here},
                "utility": draw(utilities) if number else 4.0,
                "change_ci": draw(st.sampled_from([None, (-0.01, 0.02)])) if number else None,
                "levels": draw(st.lists(LEVELS, min_size=num_seeds, max_size=num_seeds)),
                "told": draw(st.integers(0, num_seeds)),
            }
        )
    return drawn


def interval(share: float, half: float | None) -> r.Interval:
    ends = None if half is None else (max(0.0, share - half), min(1.0, share + half))
    return r.Interval(value=share, ci=ends)


def list_shares(one: Setting) -> dict[r.RiskName, r.ResultRow]:
    shares = {}
    for name, pair in one["risks"].items():
        probe, metric, parameters = r.RISK_PLACES[name]
        key = {"statistic": "rate", "parameters": parameters, "setting": one["name"]}
        shares[name] = value_row(probe, metric, r.MOST_TRAINED, interval(*pair), **key)
    return shares


def make_point(one: Setting) -> r.FrontPoint:
    by, risk = choose_risk(list_shares(one)) or (None, None)
    worst = next((level for level in WORST if level in one["levels"]), "")
    number, runs = one["levels"].count(worst), len(one["levels"])
    told = "can be told" if one["told"] else "no sign"
    of_runs = [f"{count} of {runs} runs" if runs > 1 else "" for count in (number, one["told"])]
    return r.FrontPoint(
        name=one["name"],
        num_seeds=runs,
        num_documents=40,
        badges=make_badges(r.LEVEL_NAMES[worst], told, *of_runs),
        num_findings=0,
        risk=risk and risk.value,
        risk_low=risk and risk.low,
        risk_high=risk and risk.high,
        risk_by=by,
        utility=one["utility"],
    )


def decide(drawn: Sequence[Setting]) -> r.Recommendation:
    rows = []
    for one in drawn:
        rows += list_shares(one).values()
        if one is not drawn[0]:
            change = r.Interval(value=one["utility"] / 4.0 - 1, ci=one["change_ci"])
            key = {"setting": one["name"], "against": "setting:plain"}
            rows.append(value_row("heldout", "nll_change", "(held out)", change, **key))
    return recommend([make_point(one) for one in drawn], make_tables(rows))


@pytest.mark.parametrize("case", TABLE)
def test_recommendations_of_the_table(case: dict[str, Any]) -> None:
    found = decide(case["settings"])
    assert [found.setting, *map(": ".join, found.list_sentences())] == [
        case["setting"],
        *case["sentences"],
    ]


def write_share(point: r.FrontPoint) -> str:
    """Return a share with its interval, in the numbers of pages."""
    ends = fmt.percent_range(point.risk_ci).replace("\u2013", " to ")
    return f"{fmt.percent(point.risk)} ({ends}".replace(fmt.NBSP, " ")


@pytest.mark.slow
@settings(max_examples=300, derandomize=True, database=None)
@given(draw_settings())
def test_what_is_recommended_is_safer_and_its_numbers_are_its_own(drawn: list[Setting]) -> None:
    found, points = decide(drawn), {one["name"]: make_point(one) for one in drawn}
    first, *others = points.values()
    safer = [
        one for one in others if one.risk_ci and first.risk_ci and one.risk_ci[1] < first.risk_ci[0]
    ]
    allowed = [one for one in safer if one.utility <= LIMIT * first.utility]
    # Of what is neither safer nor good enough, nothing is recommended, and of the rest one is.
    assert (found.setting in {one.name for one in allowed}) if allowed else found.setting is None
    # Every other setting is ruled out, by its own numbers and a reason that holds.
    ruled_out = {one.setting: one.sentence for one in found.ruled_out}
    assert [*ruled_out] == [one.name for one in others if one.name != found.setting]
    for name, sentence in ruled_out.items():
        point = points[name]
        assert point.risk is None or sentence.startswith(f"extraction {write_share(point)}, ")
        assert ("beyond the 5 % limit" in sentence) == (point.utility > LIMIT * first.utility)
        is_unsafe = point.risk is not None and point not in safer
        assert ("not shown to extract less than 'plain'" in sentence) == is_unsafe
        more = re.search(r"extracts more than '(\w+)'", sentence)
        if more is not None:
            assert points[more[1]].risk_ci[1] < point.risk_ci[0]
        assert (f"not shown to extract less than '{found.setting}'" in sentence) == (
            point in allowed and more is None
        )
    if found.setting is None:
        return
    chosen = points[found.setting]
    before = fmt.percent(first.risk).replace(fmt.NBSP, " ")
    start = f"extraction falls from {before} to {write_share(chosen)}, "
    assert found.sentence.startswith(start)
    assert not any(one.risk_ci[1] < chosen.risk_ci[0] for one in allowed)
    # Its own verdict, and that its documents can be told, are never left out.
    text, membership = (
        f"{badge.state}{f' in {badge.detail}' if badge.detail else ''}" for badge in chosen.badges
    )
    assert found.sentence.endswith(f" Its own verdict: {text}; membership: {membership}.")
