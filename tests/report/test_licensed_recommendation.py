"""Every sentence of a recommendation is licensed by the points it chooses from."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from licensed_checks import Said, Sentence, check_sentences
from result_examples import make_tables, value_row

from memguard import records as r
from memguard.compare.front import mark_dominated
from memguard.compare.recommendation import recommend
from memguard.compare.utility import make_loss_axis
from memguard.records import FrontPoint, Interval, Level, RiskName

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Point:
    """What `build_front` returns of a setting."""

    point: FrontPoint
    risks: Mapping[RiskName, Interval]
    change: Interval | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.point, name)

    def list_rows(self) -> list[r.ResultRow]:
        rows = []
        for risk, share in self.risks.items():
            probe, metric, parameters = r.RISK_PLACES[risk]
            key = {"statistic": "rate", "parameters": parameters, "setting": self.name}
            rows.append(value_row(probe, metric, r.MOST_TRAINED, share, **key))
        against = {"setting": self.name, "against": "setting:plain"}
        if self.change is None:
            return rows
        return [*rows, value_row("heldout", "nll_change", "(held out)", self.change, **against)]


Points = Sequence[Point]
LEVELS = st.sampled_from(get_args(Level))
WORDS = {"memorized": "Memorized", "extracted": "Extracted"}
"""Levels that a recommendation names, the worst first."""
LIMIT = 1.05
WAYS = {
    "verbatim": "verbatim",
    "near-verbatim": "near_verbatim",
    "within 1,000,000 queries": "attack_cost",
    "by the best attack": "attack",
}
NAME = r"'(?P<{0}>[^']+)'"
SHARE = r"(?P<{0}share>[\d.]+) %(?: \(95 % CI (?P<{0}low>[\d.]+) to (?P<{0}high>[\d.]+) %\))?"
LOSS = (
    r"(?P<{0}nll>[\d.]+)(?: \((?P<{0}change>[+-][\d.]+) %"
    r"(?:, 95 % CI (?P<{0}from>[+-][\d.]+) to (?P<{0}to>[+-][\d.]+) %)?\))?"
)


@st.composite
def draw_points(draw: st.DrawFn) -> list[Point]:
    """Draw what `build_front` returns of up to five settings; the first is what others beat."""
    requested = draw(st.sets(st.sampled_from(get_args(RiskName)[1:])))
    names = [name for name in get_args(RiskName) if name == "verbatim" or name in requested]
    num_seeds = draw(st.sampled_from([1, 3]))
    first_nll = 4.0
    points, others = [], []
    for number in range(draw(st.integers(1, 5))):
        # The first is mostly at risk, the others mostly less so.
        shares = st.sampled_from([0.9, 0.5, 0.0] if not number else [0.0, 0.05, 0.1, 0.5, 1.0])
        risks = {}
        if draw(st.integers(0, 9)):
            for name in names:
                value = draw(shares)
                half = draw(st.sampled_from([0.05, 0.2, None]) if number else st.just(0.1))
                ends = None if half is None else (max(0.0, value - half), min(1.0, value + half))
                risks[name] = Interval(value=value, ci=ends)
        worst = max(risks, key=lambda name: risks[name].value, default=None)
        nll = first_nll if not number else draw(st.sampled_from([3.9, 4.0, 4.1, 4.2, 4.3, 5.0]))
        changes = st.sampled_from([None, (-0.01, 0.02)])
        points.append(
            FrontPoint(
                name="plain" if not number else f"g{number}",
                num_seeds=num_seeds,
                num_documents=40,
                levels=Counter(draw(st.lists(LEVELS, min_size=num_seeds, max_size=num_seeds))),
                num_told_apart=draw(st.integers(0, num_seeds)),
                risk=None if worst is None else risks[worst].value,
                risk_ci=None if worst is None else risks[worst].ci,
                risk_by=worst,
                utility=nll,
            )
        )
        change = Interval(value=nll / first_nll - 1, ci=draw(changes)) if number else None
        others.append((risks, change))
    losses = {point.name: {0: point.utility} for point in points}
    marked = mark_dominated(points, make_loss_axis(losses))
    return [Point(point, *other) for point, other in zip(marked, others, strict=True)]


# -- What the rule says, once more.


def safer(points: Points) -> list[Point]:
    """Return what is less at risk than the first beyond the intervals."""
    first, *others = points
    return [
        one for one in others if one.risk_ci and first.risk_ci and one.risk_ci[1] < first.risk_ci[0]
    ]


def within(points: Points) -> list[Point]:
    """Return those of them that do not cost too much."""
    return [one for one in safer(points) if one.utility <= LIMIT * points[0].utility]


def least(points: Points) -> Point:
    return sorted(within(points), key=lambda one: (one.risk, one.utility))[0]


def chosen(points: Points) -> Point:
    ends = least(points).risk_ci
    assert ends is not None, "safer beyond the intervals"
    alike = [one for one in within(points) if one.risk_ci and one.risk_ci[0] <= ends[1]]
    return sorted(alike, key=lambda one: (one.utility, one.risk))[0]


def costly(points: Points) -> list[Point]:
    """Return what is safer than the one recommended and costs too much, the safest first."""
    if not within(points):
        return []
    limit = chosen(points).risk
    out = [
        one
        for one in safer(points)
        if one.utility > LIMIT * points[0].utility and one.risk is not None and one.risk < limit
    ]
    return sorted(out, key=lambda one: (one.risk, one.utility))


# -- Whether the numbers in a sentence are right.


def is_risk(said: Said, prefix: str, point: Point) -> bool:
    told = [said[f"{prefix}{name}"] for name in ("share", "low", "high")]
    wanted = [point.risk, *(point.risk_ci or (None, None))]
    return all(
        text is None if value is None else text is not None and is_near(text, 100 * value, 0.05)
        for text, value in zip(told, wanted, strict=True)
    )


def is_loss(said: Said, prefix: str, point: Point) -> bool:
    change = point.change
    ends = change.ci if change else None
    told = [said[f"{prefix}{name}"] for name in ("change", "from", "to")]
    wanted = [change and change.value, *(ends or (None, None))]
    return is_near(said[f"{prefix}nll"], point.utility, 0.0005) and all(
        text is None if value is None else text is not None and is_near(text, 100 * value, 0.05)
        for text, value in zip(told, wanted, strict=True)
    )


def is_near(text: str, value: float, half: float) -> bool:
    """Tell whether a number is written rightly: half of its last digit, and rounding of that."""
    return abs(float(text) - value) <= half + 1e-9


def is_choice(points: Points, said: Said) -> bool:
    point = chosen(points)
    ways = re.split(r", | or ", said["ways"])
    wanted = [point.risk_by] if point.risk else list(point.risks)
    seeds = (said["runs"], said["seeds"])
    level = next((level for level in WORDS if point.levels.get(level)), None)
    counted = (str(point.levels.get(level or "")), str(point.num_seeds))
    return (
        said["name"] == point.name
        and [WAYS[way] for way in ways] == wanted
        and is_risk(said, "", point)
        and said["first"] == points[0].name
        and is_risk(said, "f", points[0])
        and is_loss(said, "", point)
        # A setting whose own verdict is red or amber is never recommended without that.
        and said["level"] == (None if level is None else WORDS[level])
        and seeds == (counted if level is not None and point.num_seeds > 1 else (None, None))
    )


def is_nothing(points: Points) -> bool:
    return len(points) > 1 and points[0].risk is None


def is_riskless(points: Points) -> bool:
    return len(points) > 1 and points[0].risk == 0


def is_at_risk(points: Points) -> bool:
    return len(points) > 1 and bool(points[0].risk)


NONE = "No setting is recommended: "
WAY = "|".join(WAYS)
TABLE: tuple[Sentence[Points], ...] = (
    Sentence(
        name="only one",
        pattern=rf"{NONE}only {NAME.format('first')} was compared\.",
        count=lambda p: int(len(p) == 1),
        holds=lambda p, said: said["first"] == p[0].name,
    ),
    Sentence(
        name="nothing audited",
        pattern=rf"{NONE}nothing that {NAME.format('first')} was trained on was audited\.",
        count=lambda p: int(is_nothing(p)),
        holds=lambda p, said: said["first"] == p[0].name,
    ),
    Sentence(
        name="no risk",
        pattern=rf"{NONE}{NAME.format('first')} shows no risk that another could lower "
        rf"\({SHARE.format('')}\)\.",
        count=lambda p: int(is_riskless(p)),
        holds=lambda p, said: said["first"] == p[0].name and is_risk(said, "", p[0]),
    ),
    Sentence(
        name="all too costly",
        pattern=rf"{NONE}every setting with a risk below {NAME.format('first')} beyond the "
        r"intervals has a held-out NLL more than 5 % above it; the lowest is that of "
        rf"{NAME.format('name')}, {LOSS.format('')}\.",
        count=lambda p: int(bool(safer(p)) and not within(p)),
        holds=lambda p, said: (
            said["first"] == p[0].name
            and said["name"] == min(safer(p), key=lambda one: one.utility).name
            and is_loss(said, "", min(safer(p), key=lambda one: one.utility))
        ),
    ),
    Sentence(
        name="none safer",
        pattern=rf"{NONE}no other setting has a risk below {NAME.format('first')} beyond the "
        r"intervals "
        rf"\({SHARE.format('')} of its documents\)\.",
        count=lambda p: int(is_at_risk(p) and not safer(p)),
        holds=lambda p, said: said["first"] == p[0].name and is_risk(said, "", p[0]),
    ),
    Sentence(
        name="choice",
        pattern=rf"{NAME.format('name')} is recommended(?:, although (?:its own verdict|the "
        r"verdict of (?P<runs>\d+) of its (?P<seeds>\d+) runs) is '(?P<level>Memorized|Extracted)'"
        rf")?: {SHARE.format('')} of the documents trained most often are extracted "
        rf"(?P<ways>(?:{WAY})(?:(?:, | or )(?:{WAY}))*), against {SHARE.format('f')} with "
        rf"{NAME.format('first')}, at a held-out NLL of {LOSS.format('')}\.",
        count=lambda p: int(bool(within(p))),
        holds=is_choice,
    ),
    Sentence(
        name="least risk",
        pattern=rf"{NAME.format('name')} has {SHARE.format('')}, no less beyond the intervals, at "
        rf"a held-out NLL of {LOSS.format('')}\.",
        count=lambda p: int(bool(within(p)) and least(p).name != chosen(p).name),
        holds=lambda p, said: (
            said["name"] == least(p).name
            and is_risk(said, "", least(p))
            and is_loss(said, "", least(p))
        ),
    ),
    Sentence(
        name="safer and ruled out",
        pattern=rf"{NAME.format('name')} has a lower risk, {SHARE.format('')}, and is ruled out by "
        rf"its held-out NLL of {LOSS.format('')}, more than 5 % above that of the first setting\.",
        count=lambda p: int(bool(costly(p))),
        holds=lambda p, said: (
            said["name"] == costly(p)[0].name
            and is_risk(said, "", costly(p)[0])
            and is_loss(said, "", costly(p)[0])
        ),
    ),
    Sentence(
        name="training can be told",
        pattern=rf"Whether a document was trained with {NAME.format('name')} can be told"
        r"(?: in (?P<runs>\d+) of its runs)?\.",
        count=lambda p: int(bool(within(p)) and chosen(p).num_told_apart > 0),
        holds=lambda p, said: (
            said["name"] == chosen(p).name
            and said["runs"] == (str(chosen(p).num_told_apart) if chosen(p).num_seeds > 1 else None)
        ),
    ),
)


def test_every_sentence_of_a_recommendation_is_licensed_and_each_is_said() -> None:
    total: Counter[str] = Counter()

    # The same points each time: that every sentence is met must not be a matter of luck.
    @settings(max_examples=700, derandomize=True, database=None)
    @given(draw_points())
    def check(points: list[Point]) -> None:
        tables = make_tables(row for point in points for row in point.list_rows())
        found = recommend([point.point for point in points], tables)
        said = check_sentences(re.split(r"(?<=\.) (?='|Whether)", found.sentence), TABLE, points)
        assert found.setting == (chosen(points).name if within(points) else None)
        assert "at most 5 % above that of 'plain'" in found.rule
        if within(points):
            levels = chosen(points).levels
            assert ("although" in found.sentence) == any(levels.get(level) for level in WORDS)
            said["although"] += "although" in found.sentence
        total.update(said)

    check()
    wanted = {one.name for one in TABLE} | {"although"}
    assert wanted - total.keys() == set(), "sentences that no points led to"
