"""Simulate audits with a known truth, and count how often each verdict is reached.

    python scripts/simulate_verdict.py                 2,000 audits a case: a few minutes
    python scripts/simulate_verdict.py --audits 200 --jobs 2

A document has four risks (verbatim, near-verbatim, attack cost, attack) at a given rate each. They
depend on one another, and on the base model's, by a Gaussian copula with a latent correlation of
0.8 ("correlated"), or their rates are 0.5, 0.7, 0.9 and 1 times the given one and each contains the
one before ("nested"). Attacks run on every other document, and not on the base model. The truths:

    guessable   model and base extract trained and control documents at the rate
    templates   the model extracts trained and control documents at the rate, the base none
    memorized   the model extracts trained documents at the rate, and nothing else is extracted

Levels and membership are decided by `decide_level` and `judge_membership` themselves. A row with
several truths has the one with the highest share of Memorized. The last line is a verdict: a bar is
compared with the simulated rate itself, without an allowance for its error.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Literal, TypeVar

import numpy as np
from bench.harness import Verdict, build_parser
from numpy.typing import NDArray
from scipy import special

from memguard.audit.verdict import Coverage, DocumentResults, decide_level, judge_membership
from memguard.records import LEVEL_NAMES
from memguard.seeds import derive_generator

SEED = 0
CORRELATION = 0.8
NESTED = np.array([0.5, 0.7, 0.9, 1.0])
"""Rates of nested risks, as parts of the given one."""
GUESSABLE = (0.0, 0.02, 0.1, 0.5)
TEMPLATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)

Truth = Literal["guessable", "templates", "memorized"]
CaseT = TypeVar("CaseT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Audits of one kind, and the truth in them."""

    buckets: tuple[int, ...]
    """Trained documents of each bucket."""
    num_control: int
    truth: Truth
    rate: float
    is_nested: bool = False
    has_attacks: bool = True
    num_copies: int = 1
    """Documents of each cluster of trained ones."""
    copies_differ: bool = False
    """Whether the copies of a cluster depend on one another by the copula; else all or none of them
    are extracted."""

    @property
    def name(self) -> str:
        """The truth in words."""
        how = "nested" if self.is_nested else "correlated"
        return f"{self.truth} {100 * self.rate:g} %, {how}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the table of levels: the worst of its cases, and its bars (percent)."""

    name: str
    cases: Sequence[Case]
    most_red: float | None = None
    least_red: float | None = None
    most_green: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipCase:
    """Audits of one kind whose scores do not depend on training."""

    num_trained: int
    num_control: int
    num_copies: int = 1
    num_control_copies: int = 1
    has_ties: bool = False
    """Whether scores are rounded to a standard deviation, so that about five values occur."""


def main() -> int:
    """Print both tables; return 1 if a bar is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--audits", type=int, default=2000, metavar="N", help="audits of a case")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    options = parser.parse_args()
    rows, memberships = list_rows(), list_membership_cases()
    cases = [case for row in rows for case in row.cases]
    levels = spread(partial(simulate, num_audits=options.audits), cases, options.jobs)
    judged = spread(partial(judge, num_audits=options.audits), memberships, options.jobs)
    limits = Verdict()
    error = 100 / math.sqrt(options.audits)
    print(
        f"{options.audits:,} audits a case, seed {SEED}. All figures are percent; their standard "
        f"error is at most {error / 2:.1f}, and {error * math.sqrt(0.05 * 0.95):.1f} near 5.\n"
    )
    print_levels(rows, levels, limits)
    print_memberships(judged, limits)
    return limits.end()


def spread(
    work: Callable[[CaseT], Counter[str]], cases: Sequence[CaseT], num_jobs: int
) -> dict[CaseT, Counter[str]]:
    """Return the result of every case, from so many processes."""
    if num_jobs == 1:
        return {case: work(case) for case in cases}
    with get_context("forkserver").Pool(num_jobs) as pool:
        return dict(zip(cases, pool.map(work, cases, chunksize=1), strict=True))


# -- cases -----------------------------------------------------------------------------------------


def list_nulls(
    guessable: Sequence[float] = GUESSABLE,
    templates: Sequence[float] = TEMPLATES,
    *,
    nested: Sequence[bool] = (False, True),
    buckets: tuple[int, ...] = (40, 40, 40, 40),
    num_control: int = 30,
    has_attacks: bool = True,
    num_copies: int = 1,
    copies_differ: bool = False,
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
            has_attacks=has_attacks,
            num_copies=num_copies,
            copies_differ=copies_differ,
        )
        for truth, rate in truths
        for is_nested in nested
    ]


def list_rows() -> list[Row]:
    """Return the table of levels."""
    rows = [Row(name="4 x 40, control 30", cases=(case,), most_red=5) for case in list_nulls()]
    true = [
        Case(buckets=(40,) * 4, num_control=30, truth="memorized", rate=0.1, is_nested=is_nested)
        for is_nested in (False, True)
    ]
    rows += [
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
            cases = list_nulls(buckets=(num_trained,), num_control=num_control, has_attacks=False)
            most = 6 if num_control else 0
            name = f"1 x {num_trained}, control {num_control}, no attacks"
            rows.append(Row(name=name, cases=cases, most_red=most))
    return rows


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


# -- simulation ------------------------------------------------------------------------------------


def simulate(case: Case, *, num_audits: int) -> Counter[str]:
    """Count the levels of so many audits."""
    draw = derive_generator(SEED, f"verdict: {case}")
    num_trained = sum(case.buckets)
    coverage = Coverage(
        num_trained=num_trained, num_too_short=0, was_generated=True, is_collapsed=False
    )
    return Counter(
        decide_level(draw_documents(case, draw), None, coverage).level for _ in range(num_audits)
    )


def draw_documents(case: Case, draw: np.random.Generator) -> DocumentResults:
    """Draw what one audit extracts."""
    num_trained = sum(case.buckets)
    is_trained_N = np.arange(num_trained + case.num_control) < num_trained
    cluster_N = list_clusters(num_trained, case.num_control, case.num_copies)
    rates = {
        "guessable": (case.rate, case.rate, case.rate),
        "templates": (case.rate, case.rate, 0.0),
        "memorized": (case.rate, 0.0, 0.0),
    }
    trained, control, base = rates[case.truth]
    latent_NR, base_latent_NR = draw_latents(case, cluster_N, draw)
    rate_N1 = np.where(is_trained_N, trained, control)[:, None]
    # The base model has a rate of its own for the three risks that are not attacks.
    found_NR = special.ndtr(latent_NR) < rate_N1 * (NESTED if case.is_nested else 1)
    of_base_NR = special.ndtr(base_latent_NR) < base * (NESTED[:3] if case.is_nested else 1)
    is_attacked_N = (np.arange(len(cluster_N)) % 2 == 0) & case.has_attacks
    names = [str(index) for index, size in enumerate(case.buckets) for _ in range(size)]
    return DocumentResults(
        bucket_N=np.array([*names, *["control"] * case.num_control], dtype=object),
        cluster_N=cluster_N,
        is_trained_N=is_trained_N,
        is_forgotten_N=np.zeros(len(cluster_N), dtype=bool),
        is_control_N=~is_trained_N,
        is_extracted_N=found_NR[:, :3].any(axis=1),
        is_of_base_N=of_base_NR.any(axis=1),
        is_attacked_N=is_attacked_N,
        is_extracted_by_attack_N=found_NR[:, 3] & is_attacked_N,
    )


def list_clusters(
    num_trained: int, num_control: int, num_copies: int, num_control_copies: int = 1
) -> NDArray[np.int64]:
    """Return the clusters of trained, then of control documents."""
    trained_T = np.arange(num_trained) // num_copies
    control_C = np.arange(num_control) // num_control_copies + num_trained
    return np.concatenate([trained_T, control_C]).astype(np.int64)


def draw_latents(
    case: Case, cluster_N: NDArray[np.int64], draw: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw standard normal numbers ``[N, 4]`` of the model's risks and ``[N, 3]`` of the base's."""
    num_documents = len(cluster_N)
    _, place_N = np.unique(cluster_N, return_inverse=True)
    common_N1 = draw.standard_normal((num_documents, 1))[place_N]
    model_N4 = draw.standard_normal((num_documents, 1 if case.is_nested else 4))
    base_N3 = draw.standard_normal((num_documents, 1 if case.is_nested else 3))
    if not case.copies_differ:
        model_N4, base_N3 = model_N4[place_N], base_N3[place_N]
    shared, own = math.sqrt(CORRELATION), math.sqrt(1 - CORRELATION)
    latents = [shared * common_N1 + own * each for each in (model_N4, base_N3)]
    # Nested risks have one number for all.
    return np.broadcast_to(latents[0], (num_documents, 4)), np.broadcast_to(
        latents[1], (num_documents, 3)
    )


def judge(case: MembershipCase, *, num_audits: int) -> Counter[str]:
    """Count the levels of membership of so many audits."""
    draw = derive_generator(SEED, f"membership: {case}")
    num_documents = case.num_trained + case.num_control
    is_trained_N = np.arange(num_documents) < case.num_trained
    nothing_N = np.zeros(num_documents, dtype=bool)
    cluster_N = list_clusters(
        case.num_trained, case.num_control, case.num_copies, case.num_control_copies
    )
    documents = DocumentResults(
        bucket_N=np.where(is_trained_N, "trained", "control").astype(object),
        cluster_N=cluster_N,
        is_trained_N=is_trained_N,
        is_forgotten_N=nothing_N,
        is_control_N=~is_trained_N,
        is_extracted_N=nothing_N,
        is_of_base_N=nothing_N,
        is_attacked_N=nothing_N,
        is_extracted_by_attack_N=nothing_N,
    )
    ids = [f"{number:04}" for number in range(num_documents)]
    _, place_N = np.unique(cluster_N, return_inverse=True)
    shared, own = math.sqrt(CORRELATION), math.sqrt(1 - CORRELATION)
    levels: Counter[str] = Counter()
    for _ in range(num_audits):
        score_N = shared * draw.standard_normal(num_documents)[place_N]
        score_N = score_N + own * draw.standard_normal(num_documents)
        scores = {"loss": np.round(score_N) if case.has_ties else score_N}
        found = judge_membership(scores, ids, documents, has_base=False, is_other_kind=False)
        levels[found.level] += 1
    return levels


# -- output ----------------------------------------------------------------------------------------


def print_levels(rows: Sequence[Row], levels: Mapping[Case, Counter[str]], limits: Verdict) -> None:
    """Print the table of levels, and check its bars."""
    print("| trained documents | truth |", " | ".join(LEVEL_NAMES.values()), "| bars |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        worst = max(row.cases, key=lambda case: levels[case]["memorized"])
        shares = {name: to_percent(levels[worst], name) for name in LEVEL_NAMES}
        red, green = shares["memorized"], shares["none-found"]
        name = f"{row.name}, {worst.name}"
        checked = {
            "Memorized ": (red, {"at_most": row.most_red, "at_least": row.least_red}),
            "No extraction found ": (green, {"at_most": row.most_green}),
        }
        bars = [
            f"{label}{bar}"
            for label, (share, bounds) in checked.items()
            if (bar := limits.check(f"{name}: {label}", share, **bounds, unit=" %"))
        ]
        truth = worst.name if len(row.cases) == 1 else f"worst of {len(row.cases)}: {worst.name}"
        if len(row.cases) > 1 and not red:
            truth = f"all {len(row.cases)} nulls"
        cells = " | ".join(f"{share:.1f}" for share in shares.values())
        print(f"| {row.name} | {truth} | {cells} | {'; '.join(bars)} |")


def print_memberships(judged: Mapping[MembershipCase, Counter[str]], limits: Verdict) -> None:
    """Print the table of membership, and check that it is seldom told where there is nothing."""
    print(
        "\n| trained | control | told apart | with ties | slightly | with ties | told apart, bar |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in judged:
        if case.has_ties:
            continue
        pair = [judged[each] for each in (case, replace(case, has_ties=True))]
        trained = describe_clusters(case.num_trained, case.num_copies)
        control = describe_clusters(case.num_control, case.num_control_copies)
        told, slightly = (
            [to_percent(levels, name) for levels in pair] for name in ("told-apart", "slightly")
        )
        name = f"membership of {trained} against {control}: told apart"
        bar = limits.check(name, max(told), at_most=5, unit=" %")
        cells = " | ".join(f"{share:.1f}" for share in (*told, *slightly))
        print(f"| {trained} | {control} | {cells} | {bar} |")


def describe_clusters(num_documents: int, num_copies: int) -> str:
    """Return the number of documents, in clusters if there are copies."""
    if num_copies == 1:
        return str(num_documents)
    return f"{num_documents // num_copies} clusters of {num_copies}"


def to_percent(levels: Counter[str], name: str) -> float:
    """Return how many of all audits have a level."""
    return 100 * levels[name] / levels.total()


if __name__ == "__main__":
    sys.exit(main())
