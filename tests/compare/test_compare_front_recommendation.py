"""One rule chooses a setting, or says plainly why it chooses none."""

from collections.abc import Sequence

import pytest
from result_examples import make_tables, value_row

from memguard import records as r
from memguard.compare import recommendation

Point = tuple[r.FrontPoint, list[r.ResultRow]]


def recommend(points: Sequence[Point]) -> r.Recommendation:
    tables = make_tables(row for _, rows in points for row in rows)
    return recommendation.recommend([point for point, _ in points], tables)


def make_point(
    name: str,
    risk: tuple[float, float, float] | None,
    utility: float,
    by: str = "near_verbatim",
    change_ci: tuple[float, float] | None = None,
    levels: dict[str, int] | None = None,
    num_told_apart: int = 0,
    num_seeds: int = 1,
    none_by: Sequence[r.RiskName] = (),
) -> Point:
    """Return a point of ``(low, risk, high)`` with its rows; the first one's utility is 4.

    ``none_by`` are methods that extracted no document.
    """
    point = r.FrontPoint.model_validate(
        {
            "name": name,
            "num_seeds": num_seeds,
            "levels": levels or {"none-found": num_seeds},
            "num_told_apart": num_told_apart,
            "num_documents": 40,
            "risk": risk and risk[1],
            "risk_ci": risk and (risk[0], risk[2]),
            "risk_by": by if risk else None,
            "utility": utility,
        }
    )
    rows = [
        value_row("extraction", metric, r.MOST_TRAINED, 0.0, statistic="rate", setting=name)
        for metric in none_by
    ]
    if name != "plain":
        change = r.Interval(value=utility / 4.0 - 1, ci=change_ci)
        against = {"setting": name, "against": "setting:plain"}
        rows.append(value_row("heldout", "nll_change", "(held out)", change, **against))
    return point, rows


PLAIN = make_point("plain", (0.9, 1.0, 1.0), 4.0)


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([], None),
        ([("a", (0.1, 0.2, 0.3), 4.1)], "a"),
        # At most 5 % above the first; one that is better is welcome.
        ([("a", (0.1, 0.2, 0.3), 4.2)], "a"),
        ([("a", (0.1, 0.2, 0.3), 4.21)], None),
        ([("a", (0.1, 0.2, 0.3), 3.5)], "a"),
        # Less risk, but not beyond the intervals.
        ([("a", (0.5, 0.8, 0.9), 4.0)], None),
        ([("a", (0.5, 0.8, 0.89), 4.0)], "a"),
        # The least risk of those whose intervals are apart.
        ([("a", (0.4, 0.5, 0.6), 4.0), ("b", (0.1, 0.2, 0.3), 4.1)], "b"),
        # Overlapping: the better utility.
        ([("a", (0.2, 0.4, 0.6), 4.0), ("b", (0.1, 0.2, 0.3), 4.1)], "a"),
        # Overlap is asked of the least risk alone, not from one to the next.
        (
            [("a", (0.4, 0.6, 0.8), 4.0), ("b", (0.2, 0.4, 0.5), 4.1), ("c", (0.0, 0.1, 0.3), 4.2)],
            "b",
        ),
        # The least risk is too dear: the next one.
        ([("a", (0.4, 0.5, 0.6), 4.0), ("b", (0.1, 0.2, 0.3), 4.5)], "a"),
        # Equal in utility: less risk; equal in both: the first.
        ([("a", (0.1, 0.3, 0.4), 4.0), ("b", (0.1, 0.2, 0.4), 4.0)], "b"),
        ([("a", (0.1, 0.2, 0.4), 4.0), ("b", (0.1, 0.2, 0.4), 4.0)], "a"),
    ],
)
def test_the_rule(
    others: list[tuple[str, tuple[float, float, float], float]], chosen: str | None
) -> None:
    found = recommend([PLAIN, *(make_point(*other) for other in others)])
    assert found.setting == chosen
    assert found.sentence.startswith(
        f"'{chosen}' is recommended: " if chosen else "No setting is recommended: "
    )
    assert "at most 5 % above that of 'plain'" in found.rule
    assert "sampling within the limit (10^6 queries for 50 tokens" in found.rule


def test_the_sentence_gives_the_numbers_and_the_runner_up() -> None:
    found = recommend(
        [
            PLAIN,
            make_point("k4", (0.057, 0.15, 0.298), 4.0, by="attack_cost"),
            make_point("k2", (0.0, 0.0, 0.088), 4.2, change_ci=(0.031, 0.069)),
        ]
    )
    assert found.sentence == (
        "'k4' is recommended: 15.0 % (95 % CI 5.7 to 29.8 %) of the documents trained most often "
        "are extracted within the limit, against 100.0 % (95 % CI 90.0 to 100.0 %) with "
        "'plain', at a held-out NLL of 4.000 (+0.0 %). 'k2' has 0.0 % (95 % CI 0.0 to 8.8 %), no "
        "less beyond the intervals, at a held-out NLL of 4.200 (+5.0 %, 95 % CI +3.1 to "
        "+6.9 %)."
    )


def test_no_risk_is_none_of_any_kind() -> None:
    none = make_point("k2", (0.0, 0.0, 0.088), 4.1, none_by=["verbatim", "near_verbatim"])
    dearer = make_point("k3", (0.0, 0.0, 0.088), 4.2)
    found = recommend([PLAIN, dearer, none])
    # Of two without risk the better one is both: nothing is said of the other.
    assert found.sentence.startswith(
        "'k2' is recommended: 0.0 % (95 % CI 0.0 to 8.8 %) of the documents trained most often "
        "are extracted verbatim or near-verbatim, against"
    )
    assert "k3" not in found.sentence


@pytest.mark.parametrize(
    ("levels", "num_seeds", "clause"),
    [
        ({"none-found": 1}, 1, ""),
        ({"none-found": 1, "inconclusive": 2}, 3, ""),
        ({"memorized": 1}, 1, ", although its own verdict is 'Memorized'"),
        ({"extracted": 1}, 1, ", although its own verdict is 'Extracted'"),
        # The worst level is the one that is told.
        (
            {"extracted": 1, "memorized": 2},
            3,
            ", although the verdict of 2 of its 3 runs is 'Memorized'",
        ),
        (
            {"none-found": 2, "extracted": 1},
            3,
            ", although the verdict of 1 of its 3 runs is 'Extracted'",
        ),
    ],
)
def test_a_setting_whose_own_verdict_is_bad_is_recommended_with_that(
    levels: dict[str, int], num_seeds: int, clause: str
) -> None:
    # What the reports of the others say is not told here.
    first = make_point("plain", (0.9, 1.0, 1.0), 4.0, levels={"memorized": 1})
    other = make_point("b", (0.4, 0.5, 0.6), 4.0, levels={"memorized": 1}, num_told_apart=1)
    chosen = make_point("a", (0.1, 0.2, 0.3), 4.0, levels=levels, num_seeds=num_seeds)
    sentence = recommend([first, other, chosen]).sentence
    assert sentence.startswith(f"'a' is recommended{clause}: 20.0 % (95 % CI 10.0 to 30.0 %) of")
    assert sentence.count("although") == bool(clause)
    assert "can be told" not in sentence


@pytest.mark.parametrize(
    ("num_told_apart", "num_seeds", "told"),
    [
        (1, 1, " Whether a document was trained with 'a' can be told."),
        (2, 3, " Whether a document was trained with 'a' can be told in 2 of its runs."),
    ],
)
def test_a_setting_whose_training_can_be_told_is_recommended_with_that(
    num_told_apart: int, num_seeds: int, told: str
) -> None:
    chosen = make_point(
        "a", (0.1, 0.2, 0.3), 4.0, num_told_apart=num_told_apart, num_seeds=num_seeds
    )
    assert recommend([PLAIN, chosen]).sentence.endswith(told)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ([], ""),
        # Safer and within the limit: it would be the one recommended.
        ([("b", (0.0, 0.0, 0.088), 4.1)], None),
        (
            [("b", (0.0, 0.0, 0.088), 4.3)],
            " 'b' has a lower risk, 0.0 % (95 % CI 0.0 to 8.8 %), and is ruled out by its "
            "held-out NLL of 4.300 (+7.5 %), more than 5 % above that of the first setting.",
        ),
        # Of several the safest, of equals the one of lower loss.
        (
            [
                ("b", (0.0, 0.1, 0.2), 4.3),
                ("c", (0.0, 0.05, 0.1), 4.6),
                ("d", (0.0, 0.05, 0.1), 4.5),
            ],
            " 'd' has a lower risk, 5.0 % (95 % CI 0.0 to 10.0 %), and is ruled out by its "
            "held-out NLL of 4.500 (+12.5 %), more than 5 % above that of the first setting.",
        ),
        # Not safer than the one recommended, or not than the first beyond the intervals.
        ([("b", (0.1, 0.2, 0.3), 4.3)], ""),
        ([("b", (0.0, 0.1, 0.95), 4.3)], ""),
    ],
)
def test_a_safer_setting_that_the_limit_to_the_loss_rules_out_is_named(
    others: list[tuple[str, tuple[float, float, float], float]], told: str | None
) -> None:
    points = [make_point(*other) for other in others]
    found = recommend([PLAIN, make_point("a", (0.1, 0.2, 0.3), 4.0), *points])
    if told is None:
        assert found.setting == "b"
        assert "ruled out" not in found.sentence
    else:
        assert found.setting == "a"
        assert found.sentence.endswith(f"at a held-out NLL of 4.000 (+0.0 %).{told}")


def test_the_best_attack_is_spoken_of() -> None:
    found = recommend([PLAIN, make_point("k4", (0.057, 0.15, 0.298), 4.0, by="attack")])
    assert "of the documents trained most often are extracted by the best attack, " in (
        found.sentence
    )
    assert "verbatim by the best attack" in found.rule


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ([PLAIN], "only 'plain' was compared."),
        (
            [make_point("plain", None, 4.0), make_point("a", (0, 0, 0.1), 4.0)],
            "nothing that 'plain' was trained on was audited.",
        ),
        (
            [make_point("plain", (0, 0, 0.088), 4.0), make_point("a", (0, 0, 0.088), 4.0)],
            "'plain' shows no risk that another could lower (0.0 % (95 % CI 0.0 to 8.8 %)).",
        ),
        (
            [PLAIN, make_point("a", (0, 0, 0.1), 5.0), make_point("b", (0, 0.1, 0.2), 4.4)],
            "every setting with a risk below 'plain' beyond the intervals has a held-out NLL more "
            "than 5 % above it; the lowest is that of 'b', 4.400 (+10.0 %).",
        ),
        (
            [PLAIN, make_point("a", (0.6, 0.9, 1.0), 4.0)],
            "no other setting has a risk below 'plain' beyond the intervals (100.0 % (95 % CI 90.0 "
            "to 100.0 %) of its documents).",
        ),
    ],
)
def test_why_nothing_is_recommended(points: list[Point], why: str) -> None:
    found = recommend(points)
    assert (found.setting, found.sentence) == (None, f"No setting is recommended: {why}")
