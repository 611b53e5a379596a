"""What a recommendation says: exact in a table, and true of drawn settings.

`licensed_recommendations.json`: settings that `draw_settings` drew, the fewest that lead to every
kind of sentence thrice, and what `recommend` wrote of them at the commit that added the file, which
agreed with a second implementation of the rule, since removed. The last two are by hand: ties
with the least risk alone, and a dear one that is less safe than the choice.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_examples import make_tables, value_row

from memguard import records as r
from memguard.compare.recommendation import recommend
from memguard.records.texts import format_percent

TABLE = json.loads(Path(__file__).with_name("licensed_recommendations.json").read_text())
LEVELS = st.sampled_from(get_args(r.Level))
LIMIT = 1.05
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


def make_point(one: Setting) -> r.FrontPoint:
    risks = {name: interval(*pair) for name, pair in one["risks"].items()}
    worst = max(risks, key=lambda name: risks[name].value, default=None)
    return r.FrontPoint(
        name=one["name"],
        num_seeds=len(one["levels"]),
        num_documents=40,
        levels={level: one["levels"].count(level) for level in one["levels"]},
        num_told_apart=one["told"],
        risk=None if worst is None else risks[worst].value,
        risk_ci=None if worst is None else risks[worst].ci,
        risk_by=worst,
        utility=one["utility"],
    )


def decide(drawn: Sequence[Setting]) -> r.Recommendation:
    rows = []
    for one in drawn:
        for risk, pair in one["risks"].items():
            probe, metric, parameters = r.RISK_PLACES[risk]
            key = {"statistic": "rate", "parameters": parameters, "setting": one["name"]}
            rows.append(value_row(probe, metric, r.MOST_TRAINED, interval(*pair), **key))
        if one is not drawn[0]:
            change = r.Interval(value=one["utility"] / 4.0 - 1, ci=one["change_ci"])
            key = {"setting": one["name"], "against": "setting:plain"}
            rows.append(value_row("heldout", "nll_change", "(held out)", change, **key))
    return recommend([make_point(one) for one in drawn], make_tables(rows))


@pytest.mark.parametrize("case", TABLE)
def test_recommendations_of_the_table(case: dict[str, Any]) -> None:
    found = decide(case["settings"])
    assert (found.setting, found.sentence) == (case["setting"], case["sentence"])


def write_share(point: r.FrontPoint) -> str:
    share = format_percent(point.risk or 0.0)
    if point.risk_ci is None:
        return share
    low, high = (100 * end for end in point.risk_ci)
    return f"{share} (95 % CI {low:.1f} to {high:.1f} %)"


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
    assert found.sentence.startswith("No setting is recommended: ") == (not allowed)
    # A share or a loss that follows a name is that setting's.
    shares = re.findall(
        r"'(\w+)' (?:has|has a lower risk,|shows no risk[^(]*\()\s?([\d.]+ %)", found.sentence
    )
    shares += [
        (n, s) for s, n in re.findall(r"([\d.]+ %)(?: \([^)]*\))? with '(\w+)'", found.sentence)
    ]
    assert all(share == format_percent(points[name].risk or 0.0) for name, share in shares)
    spans = re.findall(r"[\d.]+ % \(95 % CI [\d.]+ to [\d.]+ %\)", found.sentence)
    assert set(spans) <= {write_share(point) for point in points.values() if point.risk is not None}
    losses = re.findall(r"(?:NLL of|'\w+',) (\d\.\d{3})", found.sentence)
    assert set(losses) <= {f"{point.utility:.3f}" for point in points.values()}
    if found.setting is None:
        return
    chosen = points[found.setting]
    assert write_share(chosen) in found.sentence.split("against")[0]
    assert f"against {write_share(first)} with 'plain'" in found.sentence
    assert not any(one.risk_ci[1] < chosen.risk_ci[0] for one in allowed)
    # One that is ruled out is named where it would have been safer, and nowhere else.
    ruled_out = re.search(r"'(\w+)' has a lower risk", found.sentence)
    costly = [one.name for one in safer if one not in allowed and one.risk < chosen.risk]
    assert ruled_out[1] in costly if ruled_out else not costly
    # Its own verdict, and that its documents can be told, are never left out.
    names = {"memorized": "Memorized", "extracted": "Extracted"}
    worst = next((names[level] for level in names if chosen.levels.get(level)), None)
    assert re.findall(r"although .* is '(\w+)'", found.sentence) == ([worst] if worst else [])
    assert ("can be told" in found.sentence) == (chosen.num_told_apart > 0)
