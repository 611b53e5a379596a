"""Simulate audits with a known truth, and count how often each verdict is reached.

    python scripts/simulate_verdict.py                 2,000 audits a case: a few minutes
    python scripts/simulate_verdict.py --audits 200 --jobs 2

A document has three risks (verbatim, near-verbatim, attack cost) at a given rate each, and others
by attacks (on every other document), generation and other windows where these run. They depend on
one another, and on the base model's, by a Gaussian copula with a latent correlation of 0.8
("correlated"), or their rates are 0.5, 0.7, 0.9, 1, 1 and 1 times the given one and each contains
the ones before ("nested"). Attacks do not run on the base model. The truths:

    guessable   model and base extract trained and control documents at the rate
    templates   the model extracts trained and control documents at the rate, the base none
    memorized   the model extracts trained documents at the rate, and nothing else is extracted
    truncated   the model extracts trained documents at the rate in other windows, and nothing else

Documents that are not own text (form letters) are extracted at a rate of their own ("letters 100
%") whether trained or not, and by the base never; no other window or generation of them counts.

Levels and membership are decided by `decide_level` and `judge_membership` themselves. A row with
several truths has the one with the highest share of Memorized. The last table has the price of the
test of other windows. The last line is a verdict: a bar is compared with the simulated rate itself,
without an allowance for its error.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from typing import TypeVar
from unittest.mock import patch

import numpy as np
from bench.harness import Verdict, build_parser
from numpy.typing import NDArray
from scipy import special
from verdict_cases import (
    OTHERS,
    WINDOW_LEVELS,
    Case,
    MembershipCase,
    Row,
    list_membership_cases,
    list_powers,
    list_rows,
)

from memguard.audit import verdict
from memguard.audit.verdict import (
    Coverage,
    DocumentResults,
    MethodResults,
    decide_level,
    judge_membership,
)
from memguard.records import LEVEL_NAMES
from memguard.seeds import derive_generator

SEED = 0
CORRELATION = 0.8
NESTED = np.array([0.5, 0.7, 0.9, 1.0, 1.0, 1.0])
"""Rates of nested risks, those of `OTHERS` last, as parts of the given one."""
CaseT = TypeVar("CaseT")

P_VALUES = cache(verdict.compute_p_above_control)
"""The same counts come again and again."""
RULE_LEVEL = verdict._WINDOW_LEVEL


def main() -> int:
    """Print both tables; return 1 if a bar is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--audits", type=int, default=2000, metavar="N", help="audits of a case")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    options = parser.parse_args()
    rows, memberships, powers = list_rows(), list_membership_cases(), list_powers()
    cases = [case for row in rows for case in row.cases]
    cases += [case for cells in powers.values() for case in cells]
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
    print_powers(powers, levels)
    return limits.end()


def spread(
    work: Callable[[CaseT], Counter[str]], cases: Sequence[CaseT], num_jobs: int
) -> dict[CaseT, Counter[str]]:
    """Return the result of every case, from so many processes."""
    if num_jobs == 1:
        return {case: work(case) for case in cases}
    with get_context("forkserver").Pool(num_jobs) as pool:
        return dict(zip(cases, pool.map(work, cases, chunksize=1), strict=True))


# -- simulation ------------------------------------------------------------------------------------


def simulate(case: Case, *, num_audits: int) -> Counter[str]:
    """Count the levels of so many audits."""
    draw = derive_generator(SEED, f"verdict: {case}")
    coverage = Coverage(
        num_trained=sum(case.buckets) + case.num_unaudited,
        num_unaudited=case.num_unaudited,
        has_base=True,
        control=case.control,
    )
    level = RULE_LEVEL if case.window_level is None else case.window_level
    with patch.multiple(verdict, _WINDOW_LEVEL=level, compute_p_above_control=P_VALUES):
        return Counter(
            decide_level(draw_documents(case, draw), None, coverage).level
            for _ in range(num_audits)
        )


def draw_documents(case: Case, draw: np.random.Generator) -> DocumentResults:
    """Draw what one audit extracts."""
    num_trained = sum(case.buckets)
    number_N = np.arange(num_trained + case.num_control)
    is_trained_N = number_N < num_trained
    is_own_N = np.where(
        is_trained_N,
        number_N >= case.num_letters,
        number_N - num_trained >= case.num_control_letters,
    )
    cluster_N = list_clusters(num_trained, case.num_control, case.num_copies)
    in_both = case.truth in ("guessable", "templates")
    rate_N = np.where(is_trained_N, case.rate, case.rate * in_both)
    rate_N1 = np.where(is_own_N, rate_N, case.letters_rate)[:, None]
    base_N1 = np.where(is_own_N, case.rate * (case.truth == "guessable"), 0.0)[:, None]
    part_R = NESTED.copy() if case.is_nested else np.ones(len(NESTED))
    part_R[-1] *= case.window_rate
    if case.truth == "truncated":
        part_R[:-1] = 0
    latent_NR, base_latent_NR = draw_latents(case, cluster_N, draw)
    found_NR = special.ndtr(latent_NR) < rate_N1 * part_R
    # The base model has rates of its own.
    of_base_NR = special.ndtr(base_latent_NR) < base_N1 * part_R
    others = {}
    for risk, name in enumerate(OTHERS, start=3):
        if name in case.others:
            is_attack = name == "attacked"
            tried_N = (number_N % 2 == 0) | (not is_attack)
            of_base_N = of_base_NR[:, :3].any(axis=1) if is_attack else of_base_NR[:, risk]
            found_N = found_NR[:, risk] & tried_N & (is_own_N | is_attack)
            others[name] = MethodResults(
                is_tried_N=tried_N, is_extracted_N=found_N, is_new_N=found_N & ~of_base_N
            )
    # The base is subtracted from greedy text, and from sampling.
    greedy_N, of_base_N = found_NR[:, :2].any(axis=1), of_base_NR[:, :2].any(axis=1)
    names = [str(index) for index, size in enumerate(case.buckets) for _ in range(size)]
    return DocumentResults(
        bucket_N=np.array([*names, *["control"] * case.num_control], dtype=object),
        cluster_N=cluster_N,
        is_trained_N=is_trained_N,
        is_forgotten_N=np.zeros(len(cluster_N), dtype=bool),
        is_control_N=~is_trained_N,
        is_own_N=is_own_N,
        is_extracted_N=greedy_N | found_NR[:, 2],
        is_new_N=(greedy_N & ~of_base_N) | (found_NR[:, 2] & ~of_base_NR[:, 2]),
        is_of_base_N=of_base_N | of_base_NR[:, 2],
        others=others,
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
    """Draw standard normal numbers ``[N, R]`` of the model's risks, and of the base's."""
    num_documents, num_risks = len(cluster_N), len(NESTED)
    _, place_N = np.unique(cluster_N, return_inverse=True)
    common_N1 = draw.standard_normal((num_documents, 1))[place_N]
    # Nested risks have one number for all.
    shape = (2, num_documents, 1 if case.is_nested else num_risks)
    model_NR, base_NR = draw.standard_normal(shape)
    if not case.copies_differ:
        model_NR, base_NR = model_NR[place_N], base_NR[place_N]
    shared, own = math.sqrt(CORRELATION), math.sqrt(1 - CORRELATION)
    model_NR, base_NR = (
        np.broadcast_to(shared * common_N1 + own * each, (num_documents, num_risks))
        for each in (model_NR, base_NR)
    )
    return model_NR, base_NR


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
        is_own_N=~nothing_N,
        is_extracted_N=nothing_N,
        is_new_N=nothing_N,
        is_of_base_N=nothing_N,
    )
    ids = [f"{number:04}" for number in range(num_documents)]
    _, place_N = np.unique(cluster_N, return_inverse=True)
    shared, own = math.sqrt(CORRELATION), math.sqrt(1 - CORRELATION)
    levels: Counter[str] = Counter()
    for _ in range(num_audits):
        score_N = shared * draw.standard_normal(num_documents)[place_N]
        score_N = score_N + own * draw.standard_normal(num_documents)
        scores = {"loss_minus_base": np.round(score_N) if case.has_ties else score_N}
        found = judge_membership(scores, ids, documents, has_base=True, is_other_kind=False)
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
            "None found ": (
                green,
                {"at_most": row.most_green, "at_least": row.least_green},
            ),
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


def print_powers(
    powers: Mapping[tuple[str, str], Sequence[Case]], levels: Mapping[Case, Counter[str]]
) -> None:
    """Print how often each audit is Memorized without and with a test of other windows."""
    heads = [f"level {100 * level:g} %" for level in WINDOW_LEVELS]
    print("\nMemorized without the test of other windows, and with it; in brackets where other")
    print("windows of memorized documents show nothing, so that the test only costs power.\n")
    print(f"| trained documents | truth | without | {' | '.join(heads)} |")
    print(f"|---|---|---{'|---' * len(heads)}|")
    for (name, truth), cases in powers.items():
        reds = [to_percent(levels[case], "memorized") for case in cases]
        num = len(WINDOW_LEVELS)
        pairs = zip(reds[1 : 1 + num], reds[1 + num :], strict=True)
        cells = [f"{reds[0]:.1f}", *(f"{shown:.1f} ({hidden:.1f})" for shown, hidden in pairs)]
        print(f"| {name} | {truth} | {' | '.join(cells)} |")


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
