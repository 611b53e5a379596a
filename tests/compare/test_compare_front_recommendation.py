"""One rule chooses a setting, or says plainly why it chooses none."""

from collections.abc import Sequence

import pytest
from result_examples import make_badges, make_tables, value_row

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
    badges: tuple[r.Badge, r.Badge] | None = None,
    num_seeds: int = 1,
) -> Point:
    """Return a point of ``(low, risk, high)`` with its rows; the first one's utility is 4."""
    point = r.FrontPoint.model_validate(
        {
            "name": name,
            "num_seeds": num_seeds,
            "badges": badges or make_badges(),
            "num_findings": 0,
            "num_documents": 40,
            "risk": risk and risk[1],
            "risk_low": risk and risk[0],
            "risk_high": risk and risk[2],
            "risk_by": by if risk else None,
            "utility": utility,
        }
    )
    rows = []
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
    assert found.describe().startswith(f"{chosen or 'No setting'} is recommended: ")
    assert [other.setting for other in found.ruled_out] == [
        name for name, *_ in others if name != chosen
    ]
    assert "at most 5 % above that of 'plain'" in found.rule
    assert "sampling within the limit (10^6 queries from 50 tokens on" in found.rule


def test_the_sentences_give_the_numbers_and_the_reasons() -> None:
    risk = (0.9, 1.0, 1.0)
    found = recommend(
        [
            make_point("plain", risk, 4.0),
            make_point("k4", (0.0013, 0.05, 0.249), 4.14, by="attack", badges=EXTRACTED),
            make_point("k2", (0.0, 0.0, 0.168), 4.324, by="attack", change_ci=(0.051, 0.1112)),
            make_point("k3", (0.0, 0.0, 0.168), 4.2, by="verbatim"),
            make_point("k8", (0.3, 0.5, 0.7), 4.04),
            make_point("k16", (0.7, 0.9, 0.99), 4.3),
            make_point("k32", None, 4.0),
        ]
    )
    assert found.list_sentences() == [
        (
            "k4 is recommended",
            "extraction falls from 100 % to 5.0 % (0.13 to 24.9 %, best attack), held-out loss "
            "+3.5 %. Its own verdict: Extracted; membership: can be told.",
        ),
        (
            "k2",
            "extraction 0 % (0 to 16.8 %, best attack), held-out loss +8.1 % (+5.1 to +11.1 %), "
            "beyond the 5 % limit.",
        ),
        (
            "k3",
            "extraction 0 % (0 to 16.8 %, verbatim), held-out loss +5.0 %; not shown to extract "
            "less than 'k4'.",
        ),
        (
            "k8",
            "extraction 50.0 % (30.0 to 70.0 %, near-verbatim), held-out loss +1.0 %; extracts "
            "more than 'k3'.",
        ),
        (
            "k16",
            "extraction 90.0 % (70.0 to 99.0 %, near-verbatim), held-out loss +7.5 %, beyond the "
            "5 % limit; not shown to extract less than 'plain'.",
        ),
        ("k32", "no document that it trained was audited, held-out loss 0.0 %."),
    ]


EXTRACTED = make_badges("Extracted", "can be told")


def test_the_verdict_of_several_runs_says_of_how_many() -> None:
    badges = make_badges("Extracted", "can be told", "1 of 3 runs", "3 of 3 runs")
    chosen = make_point("a", (0.1, 0.2, 0.3), 4.0, badges=badges, num_seeds=3)
    assert recommend([PLAIN, chosen]).sentence.endswith(
        " Its own verdict: Extracted in 1 of 3 runs; membership: can be told in 3 of 3 runs."
    )


def test_many_settings_are_counted() -> None:
    others = [make_point(f"a{number}", (0.1, 0.2, 0.3), 4.0 + number / 100) for number in range(12)]
    sentences = recommend([PLAIN, *others]).list_sentences()
    assert [head for head, _ in sentences] == [
        "a0 is recommended",
        *(f"a{number}" for number in range(1, 8)),
        "4 more settings are ruled out",
    ]


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
            "'plain' extracts nothing that another could lower, 0 % (0 to 8.8 %, near-verbatim).",
        ),
        (
            [PLAIN, make_point("a", (0, 0, 0.1), 5.0), make_point("b", (0, 0.1, 0.2), 4.4)],
            "every setting that extracts less than 'plain' beyond the intervals has a held-out "
            "loss beyond the 5 % limit.",
        ),
        (
            [PLAIN, make_point("a", (0.6, 0.9, 1.0), 4.0)],
            "no setting is shown to extract less than 'plain', 100 % (90.0 to 100 %, "
            "near-verbatim).",
        ),
    ],
)
def test_why_nothing_is_recommended(points: list[Point], why: str) -> None:
    found = recommend(points)
    assert (found.setting, found.describe()) == (None, f"No setting is recommended: {why}")
