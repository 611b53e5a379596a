"""Risk over seeds is the worst of what was asked, and the front holds what nothing beats."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compare_examples import CORRECT, KNOWN, TOKENS, write_run
from hypothesis import given
from hypothesis import strategies as st
from result_examples import make_badges
from scipy import stats

from memguard.audit.statistics import compute_mean
from memguard.compare import compare_runs
from memguard.compare.front import mark_dominated
from memguard.compare.utility import Axis
from memguard.pages.doses import build_doses
from memguard.records import FrontPoint
from memguard.records.audit_files import load_audit_report
from memguard.records.comparison import find_change, list_shares
from memguard.records.tables import choose_risk
from memguard.report.comparison_front import describe_unshared


def front_of(*runs: Any) -> dict[str, Any]:
    """Return the points of the settings, each with its rows."""
    comparison = compare_runs(runs, name="sweep", command="")
    tables = comparison.tables
    return {
        point.name: SimpleNamespace(
            **dict(point),
            risk_ci=point.risk_ci,
            shares=list_shares(tables, point.name),
            loss=tables.find("heldout", "nll", "(held out)", setting=point.name),
            change=find_change(tables, point.name),
        )
        for point in comparison.front
    }


def exact_ends(num_matched: int, num_documents: int) -> tuple[float, float]:
    ends = stats.binomtest(num_matched, num_documents).proportion_ci(method="exact")
    return ends.low, ends.high


def write_seeds(folder: Path, *by_seed: dict[str, Any], **same: Any) -> list[Any]:
    """Write a run of a setting for each seed."""
    return [
        write_run(folder / f"{same.get('name', '')}{seed}", seed=seed, **same, **own)
        for seed, own in enumerate(by_seed)
    ]


def right(num_verbatim: int, num_documents: int = 40) -> dict[int, list[int]]:
    return {16: [TOKENS] * num_verbatim + [0] * (num_documents - num_verbatim)}


def make_point(name: str, risk: float | None, utility: float, half: float = 0.0) -> FrontPoint:
    """Return a point whose risk is known to ``half``."""
    return FrontPoint(
        name=name,
        num_seeds=1,
        badges=make_badges(),
        num_findings=0,
        num_documents=10,
        risk=risk,
        risk_low=risk - half if half and risk is not None else None,
        risk_high=risk + half if half and risk is not None else None,
        risk_by=None,
        utility=utility,
    )


def test_one_seed_has_the_exact_interval_and_none_of_utility(tmp_path: Path) -> None:
    point = front_of(write_run(tmp_path / "a", correct=right(6)))["plain"]
    exact = exact_ends(6, 40)
    assert (point.num_seeds, point.num_documents, point.risk) == (1, 40, 0.15)
    # Both solve the same equation, ours in closed form by the beta distribution.
    assert point.risk_ci == pytest.approx(exact, rel=1e-9)
    assert (point.utility, point.loss.value, point.loss.ci) == (2.0, 2.0, None)


def test_other_documents_with_each_seed_are_put_together(tmp_path: Path) -> None:
    found, nlls = (6, 8, 7), (2.0, 2.1, 2.4)
    seeds = [
        {"ids": f"d{seed}", "correct": right(number), "nll": nll}
        for seed, (number, nll) in enumerate(zip(found, nlls, strict=True))
    ]
    point = front_of(*write_seeds(tmp_path, *seeds))["plain"]
    assert (point.num_seeds, point.num_documents, point.risk) == (3, 120, pytest.approx(21 / 120))
    exact = exact_ends(21, 120)
    rates = [num / 40 for num in found]
    seeds = stats.t.interval(0.95, 2, loc=21 / 120, scale=stats.sem(rates))
    assert seeds[0] > exact[0], "seeds that agree do not widen the documents' interval"
    assert point.risk_ci == pytest.approx(exact, rel=1e-9)
    losses = stats.t.interval(0.95, 2, loc=6.5 / 3, scale=stats.sem(nlls))
    assert point.utility == pytest.approx(6.5 / 3)
    assert point.loss.ci == pytest.approx(losses, rel=1e-9)


def test_utility_is_held_against_the_first_seed_by_seed(tmp_path: Path) -> None:
    plain, other = (2.0, 3.1, 4.4), (2.1, 3.3, 4.5)
    runs = [
        write_run(tmp_path / f"{name}{seed}", name=name, seed=seed, nll=nlls[seed])
        for name, nlls in (("plain", plain), ("other", other))
        for seed in range(3)
    ]
    points = front_of(*runs)
    assert points["plain"].change is None
    change = points["other"].change
    assert change.value == pytest.approx(sum(other) / sum(plain) - 1)
    paired = stats.ttest_rel(other, plain).confidence_interval(0.95)
    mean = sum(plain) / 3
    # Both solve the same equation; only the order of the sums differs.
    assert change.ci == pytest.approx((paired.low / mean, paired.high / mean), rel=1e-9)
    # Other documents with each seed: the losses themselves say next to nothing.
    assert points["other"].loss.low < points["plain"].utility


def test_a_seed_that_one_setting_lacks_counts_for_none(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{name}{seed}", name=name, seed=seed, nll=2.0 + seed)
        for name, seed in (("plain", 0), ("plain", 1), ("plain", 2), ("other", 2))
    ]
    points = front_of(*runs)
    assert {point.num_seeds for point in points.values()} == {1}
    assert {point.utility for point in points.values()} == {4.0}
    assert points["other"].change.value == 0


def test_seeds_that_disagree_widen_the_interval(tmp_path: Path) -> None:
    seeds = [{"ids": f"d{seed}", "correct": right(n)} for seed, n in enumerate((2, 20, 38))]
    point = front_of(*write_seeds(tmp_path, *seeds))["plain"]
    assert (point.risk, point.risk_ci) == (0.5, (0, 1))
    point = seeded(tmp_path / "at", [{"fill": (0, 10)}, {"fill": (5, 10)}, {"fill": (10, 10)}])
    assert (point.risk, point.risk_ci) == (0.5, (0, 1))


def test_a_document_of_several_seeds_is_one_piece_of_evidence(tmp_path: Path) -> None:
    point = front_of(*write_seeds(tmp_path, *[{"correct": right(20)}] * 4))["plain"]
    assert point.num_documents == 160
    low, high = point.risk_ci
    # That of 40 documents, by the normal distribution; of 160 it would be 0.155 wide. With t(39),
    # and taken back from the logit, it is at most 4 % from that.
    assert high - low == pytest.approx(2 * 1.96 * (0.25 / 40) ** 0.5, rel=0.05)
    none = write_seeds(tmp_path, *[{"correct": right(0)}] * 4, name="none")
    exact = exact_ends(0, 40)
    assert front_of(*none)["none"].risk_ci == pytest.approx((0, exact[1]))


def test_near_duplicates_are_less_evidence_of_a_risk(tmp_path: Path) -> None:
    copies = {"correct": {4: [TOKENS] * 8 + [0] * 12}, "clusters": [n // 4 for n in range(20)]}
    runs = write_seeds(tmp_path, copies, copies)
    exact = exact_ends(2, 5)
    # Two of five texts, of four copies each.
    assert front_of(runs[0])["plain"].risk_ci == pytest.approx(exact)
    # Both seeds have the same documents: a jackknife over five texts.
    share = compute_mean([1, 1, 0, 0, 0], (0, 1))
    assert front_of(*runs)["plain"].risk_ci == pytest.approx(share.ci)


def test_the_worst_rate_decides(tmp_path: Path) -> None:
    near = {0: CORRECT[0], 16: [TOKENS, TOKENS - 1, TOKENS - 1, 0, 0]}
    free = {0: [None] * 5, 16: [0.0, None, None, None, 6.5]}
    dear = {0: [None] * 5, 16: [0.0, 6.0, 5.0, 3.0, None]}
    points = front_of(
        write_run(tmp_path / "a", name="near", correct=near, costs=free),
        write_run(tmp_path / "b", name="drawn", correct=near, costs=dear),
        write_run(tmp_path / "c", name="alike", correct={**near, 16: [TOKENS] * 5}, costs=dear),
    )
    assert (points["near"].risk, points["near"].risk_by) == (0.6, "near_verbatim")
    # 10^6 queries are within the bound, 10^6.5 are not.
    assert (points["drawn"].risk, points["drawn"].risk_by) == (0.8, "attack_cost")
    assert (points["alike"].risk, points["alike"].risk_by) == (1.0, "verbatim")


def test_attack_cost_counts_where_every_run_was_asked(tmp_path: Path) -> None:
    points = front_of(
        write_run(tmp_path / "a", name="asked", correct=right(1, 4), costs={16: [0.0] * 4}),
        write_run(tmp_path / "b", name="not asked", correct=right(1, 4)),
    )
    assert {point.risk_by for point in points.values()} == {"verbatim"}
    assert {point.risk for point in points.values()} == {0.25}


def seeded(
    tmp_path: Path, attacked: Sequence[dict[str, tuple[int, int]]], *, shared: bool = False
) -> Any:
    """Return the point of a setting none of whose 40 documents a seed is extracted greedily."""
    seeds = [
        {"ids": "d" if shared else f"d{number}", "attacks": {16: tried}}
        for number, tried in enumerate(attacked)
    ]
    return front_of(*write_seeds(tmp_path, *seeds, correct=right(0)))["plain"]


def test_the_best_attack_counts_over_all_seeds(tmp_path: Path) -> None:
    # Beam search is best with the first seed, fill over all of them.
    tried: list[dict[str, tuple[int, int]]] = [
        {"beam_search": (5, 10), "fill": (4, 10)},
        {"beam_search": (2, 10), "fill": (5, 10)},
        {"beam_search": (3, 10), "fill": (5, 10)},
    ]
    point = seeded(tmp_path, tried)
    assert (point.risk, point.risk_by) == (pytest.approx(14 / 30), "attack")
    assert set(point.shares) == {"verbatim", "near_verbatim", "attack"}
    exact = exact_ends(14, 30)
    seeds = stats.t.interval(0.95, 2, loc=14 / 30, scale=stats.sem([0.4, 0.5, 0.5]))
    assert seeds[0] > exact[0], "seeds that agree do not widen the documents' interval"
    assert point.risk_ci == pytest.approx(exact, rel=1e-9)


def test_documents_that_several_seeds_attack_are_one_piece_of_evidence(tmp_path: Path) -> None:
    tried = {"fill": (5, 10)}
    apart = seeded(tmp_path / "apart", [tried] * 4)
    alike = seeded(tmp_path / "alike", [tried] * 4, shared=True)
    assert (apart.risk, alike.risk) == (0.5, 0.5)
    # 40 documents attacked, or 10 of them four times.
    for point, matched, documents in ((apart, 20, 40), (alike, 5, 10)):
        exact = exact_ends(matched, documents)
        assert point.risk_ci == pytest.approx(exact, rel=1e-9)


def test_near_duplicates_that_are_attacked_are_less_evidence(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "a",
        correct={4: [0] * 20},
        clusters=[n // 4 for n in range(20)],
        attacks={4: {"fill": (4, 8)}},
    )
    point = front_of(run)["plain"]
    # One of two texts, of four copies each.
    exact = exact_ends(1, 2)
    assert (point.risk, point.risk_by) == (0.5, "attack")
    assert point.shares["attack"].ci == pytest.approx(exact, rel=1e-9)


def test_attacks_count_where_every_run_was_attacked(tmp_path: Path) -> None:
    tried = {16: {"beam_search": (9, 10)}}
    runs = [
        write_run(tmp_path / f"{name}{seed}", name=name, seed=seed, correct=right(4), attacks=done)
        for name, seed, done in (
            ("plain", 0, tried),
            ("plain", 1, tried),
            ("other", 0, tried),
            ("other", 1, None),
        )
    ]
    points = front_of(*runs)
    for point in points.values():
        assert (point.risk, point.risk_by) == (0.1, "verbatim")
        assert "attack" not in point.shares
    (said,) = describe_unshared(compare_runs(runs, name="sweep", command=""))
    assert said == "Left out of the risk, as not every run measured it: best attack."
    attacked = front_of(*runs[:3])
    assert {point.risk for point in attacked.values()} == {0.9}


def test_none_extracted_is_known_no_better_than_from_the_fewest_documents(tmp_path: Path) -> None:
    point = seeded(tmp_path, [{"beam_search": (0, 5)}])
    exact = exact_ends(0, 5)
    # Of 40 documents none is verbatim, and that would be below 8.8 %; five were attacked.
    assert (point.risk, point.risk_by) == (0.0, "attack")
    assert point.risk_ci == pytest.approx((0.0, exact[1]))
    assert point.shares["verbatim"].ci == pytest.approx((0.0, 0.0881), abs=1e-4)
    alone = seeded(tmp_path / "alone", [{"beam_search": (0, 1)}])
    assert alone.risk_ci == (0.0, 1.0)


def test_the_interval_ends_at_the_highest_end_of_all(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "a", correct=right(2), attacks={16: {"fill": (0, 5)}}, generated=False
    )
    point = front_of(run)["plain"]
    assert (point.risk, point.risk_by) == (0.05, "verbatim")
    # Two of 40 are extracted; of five attacked none is, which says less.
    ends = (exact_ends(2, 40)[0], exact_ends(0, 5)[1])
    assert point.risk_ci == pytest.approx(ends, rel=1e-9)
    # The report of the run has the same risk.
    report = load_audit_report(run.folder / "audit")
    name, risk = report.tables.find_risk("x16")
    assert (name, risk.value, *risk.ci) == (point.risk_by, point.risk, *point.risk_ci)
    said = build_doses(report).lead[0].replace("\xa0", " ")
    assert said.startswith("Risk of the documents trained most often: 2 of 40, 5.0 % (0.61–")
    assert said.endswith("52.2 %, verbatim).")
    shares = point.shares
    assert choose_risk({}) is None
    assert choose_risk({"attack": shares["attack"]}) == ("attack", shares["attack"])


def test_near_verbatim_counts_where_every_run_generated(tmp_path: Path) -> None:
    near = {16: [TOKENS, TOKENS - 1, TOKENS - 1, 0]}
    runs = [
        write_run(tmp_path / "a", name="generated", correct=near),
        write_run(tmp_path / "b", name="not", correct=near, generated=False),
    ]
    assert front_of(runs[0])["generated"].risk_by == "near_verbatim"
    for point in front_of(*runs).values():
        assert (point.risk, point.risk_by, set(point.shares)) == (0.25, "verbatim", {"verbatim"})


def test_what_is_known_token_by_token_is_no_risk(tmp_path: Path) -> None:
    point = front_of(write_run(tmp_path / "a", correct={16: [KNOWN] * 4}))["plain"]
    assert point.risk == 0
    assert set(point.shares) == {"verbatim", "near_verbatim"}


def test_badges_are_the_worst_of_the_runs(tmp_path: Path) -> None:
    verdicts = [
        ("memorized", "told-apart"),
        ("none-found", "told-apart"),
        ("memorized", "slightly"),
        ("inconclusive", "not-seen"),
    ]
    seeds = [
        {
            "changes": {
                "verdict.level": level,
                "verdict.membership.level": told,
                "verdict.membership.auc": {"value": 0.7, "ci": None},
                "verdict.membership.lack": None,
                "num_findings": number,
            }
        }
        for number, (level, told) in enumerate(verdicts)
    ]
    runs = write_seeds(tmp_path, *seeds)
    point = front_of(*runs)["plain"]
    assert [(badge.title, badge.state, badge.detail) for badge in point.badges] == [
        ("Text", "Memorized", "2 of 4 runs"),
        ("Membership", "can be told", "2 of 4 runs"),
    ]
    assert (point.num_seeds, point.num_findings) == (4, 6)
    # What was not judged with one seed is not hidden by one that gave no sign.
    text, membership = front_of(runs[3])["plain"].badges
    assert (text.state, text.colour) == ("Inconclusive", "grey")
    assert (membership.state, membership.colour) == ("no sign", "green")


def test_a_setting_that_trains_less_often_is_judged_on_its_own_highest_dose(tmp_path: Path) -> None:
    correct = {**CORRECT, 16: [TOKENS, 0, 0, 0, 0]}
    points = front_of(
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", name="fewer", correct=correct, repetitions={"x16": 8}),
    )
    assert points["plain"].risk == 0.8
    assert points["fewer"].risk == 0.2


def find_front(points: Sequence[FrontPoint]) -> set[str]:
    """Return what nothing beats: in order of utility, each that lowers the least risk so far."""
    front: set[str] = set()
    least = float("inf")
    for utility in sorted({point.utility for point in points}):
        level = [point for point in points if point.utility == utility and point.risk is not None]
        risk = min((point.risk for point in level if point.risk is not None), default=least)
        if risk < least:
            least = risk
            front |= {point.name for point in level if point.risk == risk}
    return front


@given(st.lists(st.tuples(st.none() | st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_the_front_is_what_nothing_beats(values: list[tuple[int | None, int]]) -> None:
    points = mark_dominated(
        [make_point(f"p{n}", risk, float(utility)) for n, (risk, utility) in enumerate(values)],
        Axis(values={f"p{n}": {0: float(utility)} for n, (_, utility) in enumerate(values)}),
    )
    front = find_front(points)
    for point in points:
        assert point.is_dominated == bool(point.dominated_by)
        assert point.name not in point.dominated_by
        if point.risk is None:
            assert not point.is_dominated
        else:
            assert point.is_dominated == (point.name not in front)
        # Whoever is beaten is beaten by somebody on the front.
        assert not point.is_dominated or front & set(point.dominated_by)
        # Of one seed nothing says how far the losses may be off; equal ones need not be known.
        losses = {other.name: other.utility for other in points}
        assert all(losses[name] == point.utility for name in point.dominated_beyond_ci_by)
        assert not point.dominated_beyond_ci_by


@pytest.mark.parametrize(
    ("one", "other", "half", "spread", "beyond"),
    [
        # With three seeds the interval of a difference reaches 4.303 / sqrt(3) spreads.
        ((0.2, 2.0), (0.5, 2.5), 0.1, 0.2, True),
        ((0.2, 2.0), (0.5, 2.5), 0.2, 0.2, False),  # the intervals of risk overlap
        ((0.2, 2.0), (0.5, 2.5), 0.1, 0.21, False),  # that of utility holds 0
        ((0.2, 2.0), (0.2, 2.5), 0.1, 0.2, True),  # equal in one, apart in the other
        ((0.2, 2.0), (0.5, 2.0), 0.1, 0.2, True),
        ((0.2, 2.0), (0.5, 2.5), 0.0, 0.2, False),  # no intervals
        ((0.2, 2.0), (0.5, 2.5), 0.1, 0.0, False),  # all seeds alike: nothing is known
    ],
)
def test_beyond_the_intervals(
    one: tuple[float, float], other: tuple[float, float], half: float, spread: float, beyond: bool
) -> None:
    # What a seed does to both, however much, is no part of their difference.
    better, worse = mark_dominated(
        [make_point("a", *one, half), make_point("b", *other, half)],
        Axis(
            values={
                name: {seed: utility + shift for seed, shift in enumerate((1 + more, 0, -1 - more))}
                for name, (_, utility), more in (("a", one, 0), ("b", other, spread))
            }
        ),
    )
    assert not better.is_dominated
    assert worse.dominated_by == ["a"]
    assert worse.dominated_beyond_ci_by == (["a"] if beyond else [])
