"""The audits that `simulate_verdict.py` simulates: their truths, and the bars of its tables.

Functions list the table of levels, that of membership, and the price of the test of other windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from memguard.audit.verdict import ControlKind
from memguard.records.verdict import OtherMethod

OTHERS: tuple[OtherMethod, ...] = ("attacked", "generated", "windows")
GUESSABLE = (0.0, 0.02, 0.1, 0.5)
TEMPLATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
SIZES = (((40,) * 4, 30), ((40,), 30), ((40,), 12), ((135,), 14), ((20,), 14), ((20,), 5))
"""Trained and control documents of the tables of other methods."""
WINDOW_LEVELS = (0.005, 0.0075, 0.01)

Truth = Literal["guessable", "templates", "memorized", "truncated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Audits of one kind, and the truth in them."""

    buckets: tuple[int, ...]
    """Trained documents of each bucket."""
    num_control: int
    truth: Truth
    rate: float
    is_nested: bool = False
    others: tuple[OtherMethod, ...] = ("attacked",)
    window_rate: float = 1.0
    """Rate of other windows, as a part of the given one."""
    window_level: float | None = None
    """Level of the test of other windows, if not the rule's."""
    control: ControlKind = "drawn"
    num_letters: int = 0
    """Documents at the start of the first bucket that are not own text."""
    num_control_letters: int = 0
    letters_rate: float = 1.0
    num_unaudited: int = 0
    num_copies: int = 1
    """Documents of each cluster of trained ones."""
    copies_differ: bool = False
    """Whether the copies of a cluster depend on one another by the copula; else all or none of them
    are extracted."""

    @property
    def name(self) -> str:
        """The truth in words."""
        how = "nested" if self.is_nested else "correlated"
        letters = f", letters {100 * self.letters_rate:g} %" if self.num_letters else ""
        return f"{self.truth} {100 * self.rate:.3g} %, {how}{letters}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the table of levels: the worst of its cases, and its bars (percent)."""

    name: str
    cases: Sequence[Case]
    most_red: float | None = None
    least_red: float | None = None
    most_green: float | None = None
    least_green: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipCase:
    """Audits of one kind whose scores do not depend on training."""

    num_trained: int
    num_control: int
    num_copies: int = 1
    num_control_copies: int = 1
    has_ties: bool = False
    """Whether scores are rounded to a standard deviation, so that about five values occur."""


def list_nulls(
    guessable: Sequence[float] = GUESSABLE,
    templates: Sequence[float] = TEMPLATES,
    *,
    nested: Sequence[bool] = (False, True),
    buckets: tuple[int, ...] = (40, 40, 40, 40),
    num_control: int = 30,
    **fields: Any,
) -> list[Case]:
    """Return audits in which nothing is memorized."""
    truths: list[tuple[Truth, float]] = [("guessable", rate) for rate in guessable]
    truths += [("templates", rate) for rate in templates]
    return [
        Case(
            buckets=buckets,
            num_control=num_control,
            truth=truth,
            rate=rate,
            is_nested=is_nested,
            **fields,
        )
        for truth, rate in truths
        for is_nested in nested
    ]


def list_rows() -> list[Row]:
    """Return the table of levels."""
    true = [
        Case(buckets=(40,) * 4, num_control=30, truth="memorized", rate=0.1, is_nested=is_nested)
        for is_nested in (False, True)
    ]
    rows = [
        Row(name="4 x 40, control 30", cases=list_nulls(), most_red=5),
        Row(name="4 x 40, control 30", cases=true[:1], least_red=90, most_green=0),
        Row(name="4 x 40, control 30", cases=true[1:]),
        Row(
            name="4 x 40 in 10 clusters of 16, control 30",
            cases=list_nulls(num_copies=16),
            most_red=5,
        ),
        Row(
            name="the same, each copy extracted by itself",
            cases=list_nulls(num_copies=16, copies_differ=True),
        ),
    ]
    for num_trained in (5, 10, 20, 135):
        for num_control in (0, 5, 14, 30):
            # Without a control no test can be significant.
            rates = () if num_control else ((0.0,), (0.5,))
            sizes = {"buckets": (num_trained,), "num_control": num_control, "others": ()}
            cases = list_nulls(*rates, **sizes)
            most = limit_red(num_trained, num_control) if num_control else 0
            name = f"1 x {num_trained}, control {num_control}, no attacks"
            rows.append(Row(name=name, cases=cases, most_red=most))
    return [*rows, *list_other_rows(), *list_given_rows(), *list_short_rows()]


def list_other_rows() -> list[Row]:
    """Return rows with attacks, generation and other windows."""
    rows = []
    for buckets, control in SIZES:
        name = f"{describe_buckets(buckets)}, control {control}, all methods"
        sizes = {"buckets": buckets, "num_control": control, "others": OTHERS}
        nulls = list_nulls((0.1, 0.5), (0.05, 0.1, 0.3, 0.5), **sizes)
        rows.append(Row(name=name, cases=nulls, most_red=limit_red(sum(buckets), control)))
        for rate, least in ((1.0, 99), (0.3, None)):
            case = Case(truth="truncated", rate=rate, **sizes)
            rows.append(Row(name=name, cases=(case,), least_red=least, most_green=0))
    return rows


def list_given_rows() -> list[Row]:
    """Return rows of given controls: mixed corpora, few texts, another kind."""
    rows = []
    for num, letters, control, control_letters in (
        (60, 20, 30, 0),
        (100, 10, 30, 0),
        (60, 15, 14, 0),
        (60, 40, 30, 5),
        (30, 15, 30, 15),
    ):
        name = f"{letters} letters + {num - letters}, given control {control_letters} + "
        cases = [
            case
            for rate in (0.5, 1.0)
            for case in list_nulls(
                (0.1,),
                (0.05, 0.1, 0.3),
                buckets=(num,),
                num_control=control,
                others=("windows",),
                control="given",
                num_letters=letters,
                num_control_letters=control_letters,
                letters_rate=rate,
            )
        ]
        name = f"{name}{control - control_letters}"
        rows.append(Row(name=name, cases=cases, most_red=limit_red(num, control)))
    for kind, controls in (("given", (1, 4, 5, 30)), ("other-kind", (8, 30))):
        for control in controls:
            sizes = {"num_control": control, "control": kind, "others": ("windows",)}
            name = f"control {control}, {kind}, with a base"
            letters = Case(buckets=(60,), truth="memorized", rate=0, num_letters=60, **sizes)
            rows.append(Row(name=f"60 letters, {name}", cases=(letters,), most_red=0))
            own = Case(buckets=(41,), truth="memorized", rate=0.75, **sizes)
            least = 95 if control >= 5 else None
            rows.append(Row(name=f"1 x 41, {name}", cases=(own,), least_red=least))
    return rows


def list_short_rows() -> list[Row]:
    """Return rows of short answers, and of documents that are not audited.

    Of unseen answers of two tokens .031 are within the limit, and of four .002; of PINs of four
    tokens that were trained 30 times, 17 of 30.
    """
    name = "30 short answers, control 30"
    nulls = list_nulls((), (0.031, 0.002), buckets=(30,), others=())
    pins = Case(buckets=(30,), num_control=30, truth="memorized", rate=17 / 30, others=())
    rows = [
        Row(name=name, cases=nulls, most_red=5),
        Row(name=name, cases=(pins,), least_red=95, most_green=0),
        Row(
            name="60 labels, not audited, control 30",
            cases=list_nulls((0.5,), (), buckets=(), others=(), num_unaudited=60),
            most_red=0,
            most_green=0,
        ),
    ]
    for audited, unaudited, least in ((30, 3, 100), (36, 4, 100), (36, 30, None)):
        name = f"{audited} audited, {unaudited} not"
        sizes = {"buckets": (audited,), "num_control": 0, "others": ()}
        quiet = list_nulls((0,), (), nested=(True,), num_unaudited=unaudited, **sizes)
        most = None if least else 0
        rows.append(Row(name=name, cases=quiet, least_green=least, most_green=most))
        if least:
            # All unaudited documents and so many others that 20 % are: of nested risks, .9.
            rate = (0.2 * (audited + unaudited) - unaudited) / audited / 0.9
            true = Case(
                truth="memorized", rate=rate, is_nested=True, num_unaudited=unaudited, **sizes
            )
            rows.append(Row(name=f"{name}, 20 % true", cases=(true,), most_green=2.5))
    return rows


def list_powers() -> dict[tuple[str, str], list[Case]]:
    """Return the table of the price of other windows: cases by audit and truth.

    Without a test of them, then for every level; last the same where other windows show nothing.
    """
    table = {}
    for buckets, control in SIZES:
        for truth, rate, is_nested in (
            ("memorized", 0.1, False),
            ("memorized", 0.3, True),
            ("truncated", 0.3, False),
        ):
            case = Case(
                buckets=buckets,
                num_control=control,
                truth=truth,
                rate=rate,
                is_nested=is_nested,
                others=("windows",),
            )
            cells = [replace(case, others=())]
            for window_rate in (1.0, 0.0):
                of_rate = replace(case, window_rate=window_rate)
                cells += [replace(of_rate, window_level=level) for level in WINDOW_LEVELS]
            name = f"{describe_buckets(buckets)}, control {control}"
            table[name, case.name] = cells
    return table


def limit_red(num_trained: int, num_control: int) -> float:
    """Return how often nulls may be Memorized (percent)."""
    return 5 if min(num_trained, num_control) >= 20 else 6


def describe_buckets(buckets: Sequence[int]) -> str:
    """Return the number of buckets of one size."""
    return f"{len(buckets)} x {buckets[0]}"


def list_membership_cases() -> list[MembershipCase]:
    """Return the table of membership."""
    sizes = [(trained, control, 1, 1) for trained in (2, 5, 10, 160) for control in (10, 14, 30)]
    sizes += [(160, 30, 16, 1), (160, 30, 16, 6), (160, 30, 1, 6)]
    return [
        MembershipCase(
            num_trained=trained,
            num_control=control,
            num_copies=copies,
            num_control_copies=control_copies,
            has_ties=has_ties,
        )
        for trained, control, copies, control_copies in sizes
        for has_ties in (False, True)
    ]
