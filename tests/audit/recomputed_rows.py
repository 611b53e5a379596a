"""The numbers of each row of results, computed from the columns of an audit's files.

find_values          a row -> the values of all documents, under one model
recompute            a row -> its number, interval, difference from the control and counts
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plain_statistics as plain
from numpy.typing import NDArray
from recompute_examples import GRID_SIZE, SIZE, Audited

from memguard.records import ResultRow

GRID = {
    f"continuation_tokens={GRID_SIZE}, offset=0, prefix_tokens={prefix}": f"grid.{number}"
    for number, prefix in enumerate((4, 6))
}
DECODINGS = {"decoding=greedy": "greedy", "decoding=T=1, top-p 0.9": "nucleus"}
WITHOUT_INTERVAL = ("type_token_ratio", "argmax_type_token_ratio", "tiny_margin", "never")
LENGTHS, UNBOUNDED = {"first_divergence", "longest_run", "longest_copied_run"}, {"logprob"}


@dataclass(frozen=True, kw_only=True)
class Group:
    """The documents of a row: values, near-duplicate clusters, and how many have no value."""

    values: list[float]
    clusters: list[Any]
    num_missing: int = 0


def select(audited: Audited, values: NDArray[np.float64], where: NDArray[np.bool_]) -> Group:
    """Return the selected documents that have a value."""
    known = where & ~np.isnan(values)
    return Group(
        values=values[known].tolist(),
        clusters=audited.records["cluster"][known].tolist(),
        num_missing=int((where & np.isnan(values)).sum()),
    )


def find_values(audited: Audited, row: ResultRow, model: str) -> NDArray[np.float64]:
    """Return the values of all documents for a metric, from the columns of one model."""
    start = "" if model == "trained" else f"{model}."
    probe, metric = row.probe, row.metric
    if probe == "generation":
        return audited.read(f"{start}generation.{DECODINGS[row.parameters]}.{metric}")
    if probe == "attacks":
        attack = row.parameters.partition("attack=")[2]
        name = {"first_answer": "best", "any_answer": "any", "token_accuracy": "right"}[metric]
        values = audited.read(f"attacks.{attack}.{name}")
        return values / audited.read("continuation_tokens") if name == "right" else values
    if probe == "sampling":
        cost = audited.read(f"{start}sampling.log10_queries")
        # No number of queries is enough: null in the file.
        cost[np.isnan(cost)] = math.inf
        floor = audited.read(f"{start}sampling.log10_floor")
        if metric == "log10_floor":
            return floor
        if metric == "beyond_queries":
            queries = int(row.parameters.removeprefix("queries="))
            return (floor > math.log10(queries)).astype(float)
        if metric == "beyond_limit":
            tokens = audited.read("continuation_tokens")
            return (floor > np.where(tokens < 50, 0.12 * tokens, 6)).astype(float)
        if metric == "never":
            return np.isinf(cost).astype(float)
        if metric == "within_queries":
            queries = int(row.parameters.removeprefix("queries="))
            return (cost <= math.log10(queries)).astype(float)
        if metric == "within_limit":
            tokens = audited.read("continuation_tokens")
            return (cost <= np.where(tokens < 50, 0.12 * tokens, 6)).astype(float)
        return cost
    place = f"{start}extraction" if probe == "extraction" else f"{start}{GRID[row.parameters]}"
    size = audited.read("continuation_tokens") if probe == "extraction" else GRID_SIZE
    correct = audited.read(f"{place}.num_correct")
    derived = {
        "token_accuracy": lambda: correct / size,
        "logprob": lambda: audited.read(f"{place}.logprob") / size,
        "type_token_ratio": lambda: audited.read("type_token_ratio"),
    }
    if metric in derived:
        return derived[metric]()
    if probe == "grid" and metric in ("verbatim", "teacher_forced_90"):
        least = size if metric == "verbatim" else math.ceil(0.9 * size)
        return np.where(np.isnan(correct), np.nan, correct >= least)
    return audited.read(f"{place}.{metric}")


def find_bounds(row: ResultRow) -> tuple[float, float]:
    """Return the smallest and largest value of a document."""
    if row.metric in UNBOUNDED:
        return -math.inf, 0.0
    size = GRID_SIZE if row.probe == "grid" else SIZE
    return 0.0, float(size) if row.metric in LENGTHS else 1.0


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a row must contain; None: no value."""

    estimate: plain.Estimate | None
    minus_control: plain.Estimate | None = None
    group: Group | None = None
    counts: Mapping[str, int | None] | None = None


def recompute(audited: Audited, row: ResultRow) -> Numbers:
    """Compute a row again."""
    if row.probe == "membership":
        return recompute_membership(audited, row)
    if row.probe == "canaries":
        return recompute_canaries(audited, row)
    if row.metric == "best_any_answer":
        return recompute_best_attack(audited, row)
    if "copies_at_most" in row.parameters:
        most = int(row.parameters.removeprefix("copies_at_most="))
        is_trained = audited.records["role"] == "trained"
        copies = np.array(audited.records["num_copies"], dtype=float)
        group = select(audited, audited.read("extraction.verbatim"), is_trained & (copies <= most))
        return Numbers(estimate=(float(np.mean(group.values)), None, None), group=group)
    values = find_values(audited, row, row.model)
    here = audited.records["bucket"] == row.bucket
    control = audited.records["role"] == "control"
    if row.model == "base" or row.against == "base":
        ours, base = (find_values(audited, row, model) for model in ("trained", "base"))
        # The base model is compared on the documents that both have.
        values, base = (np.where(np.isnan(ours + base), np.nan, n) for n in (values, base))
    group, beside = select(audited, values, here), select(audited, values, control)
    if row.against == "base":
        return _recompute_change(audited, row, values, base, here, control)
    return _recompute_level(row, group, None if here[control].all() else beside)


def _recompute_level(row: ResultRow, group: Group, beside: Group | None) -> Numbers:
    """Compute a rate, a mean or a quantile, and its difference from the control."""
    if row.statistic in ("q10", "median", "q90"):
        return Numbers(estimate=_find_quantile(row, group.values), group=group)
    if row.metric in WITHOUT_INTERVAL and row.probe != "generation":
        return Numbers(estimate=(float(np.mean(group.values)), None, None), group=group)
    if not group.values or (row.metric in UNBOUNDED and len(set(group.clusters)) < 2):
        return Numbers(estimate=None, group=group)
    minus, bounds = None, find_bounds(row)
    # Only of the model, and of what is compared with the control.
    is_compared = row.model == "trained" and row.probe != "attacks"
    is_compared = is_compared and row.metric not in ("within_queries", "beyond_queries")
    if row.statistic == "rate":
        estimate = plain.estimate_rate(group.values, group.clusters)
        if beside is not None and is_compared:
            others = (beside.values, beside.clusters)
            minus = plain.subtract_rates(group.values, group.clusters, *others)
    else:
        estimate = plain.estimate_mean(group.values, group.clusters, bounds)
        if beside is not None and is_compared:
            others = (beside.values, beside.clusters)
            minus = plain.subtract_means(group.values, group.clusters, *others, bounds)
    return Numbers(estimate=estimate, minus_control=minus, group=group)


def _find_quantile(row: ResultRow, values: list[float]) -> plain.Estimate | None:
    if row.metric == "first_divergence":
        return float(np.median(values)), None, None
    share = {"q10": 0.1, "median": 0.5, "q90": 0.9}[row.statistic]
    if len(values) < 10:
        return None
    # The smallest cost that at least this share of the documents does not exceed.
    cost = next(c for c in sorted(values) if np.mean(np.array(values) <= c) >= share - 1e-12)
    # A cost is rounded up, a bound from below is rounded down.
    whole = math.floor if row.metric == "log10_floor" else math.ceil
    return (float(whole(cost)), None, None) if math.isfinite(cost) else None


def _recompute_change(
    audited: Audited,
    row: ResultRow,
    values: NDArray[np.float64],
    base: NDArray[np.float64],
    here: NDArray[np.bool_],
    control: NDArray[np.bool_],
) -> Numbers:
    """Compute a difference from the base model, and its excess over the control's."""
    low, high = find_bounds(row)
    is_rate = np.isin(values[here & ~np.isnan(values)], (0, 1)).all() and row.metric not in (
        *LENGTHS,
        *UNBOUNDED,
        *("token_accuracy", "extraction_strength", "rouge_l", "edit_distance", "type_token_ratio"),
    )
    span = 1.0 if is_rate else high - low
    change = select(audited, values - base, here)
    if not change.values or (row.metric in UNBOUNDED and len(set(change.clusters)) < 2):
        return Numbers(estimate=None, group=change)

    def estimate(where: NDArray[np.bool_]) -> plain.Estimate:
        ours, theirs = select(audited, values, where), select(audited, base, where)
        if is_rate:
            return plain.estimate_paired_rates(ours.values, theirs.values, ours.clusters)
        differences = select(audited, values - base, where)
        return plain.estimate_mean(differences.values, differences.clusters, (-span, span))

    excess = None
    if not here[control].all():
        if math.isfinite(span):
            excess = plain.subtract(estimate(here), estimate(control), 2 * span)
        else:
            beside = select(audited, values - base, control)
            of_control = (beside.values, beside.clusters)
            excess = plain.subtract_means(
                change.values, change.clusters, *of_control, (-math.inf, math.inf)
            )
    return Numbers(estimate=estimate(here), minus_control=excess, group=change)


def recompute_best_attack(audited: Audited, row: ResultRow) -> Numbers:
    """Compute the rate of the attack that extracts most documents of a bucket."""

    def find_best(where: NDArray[np.bool_]) -> Group:
        attacks = ("beam_search", "sampling", "fill")
        groups = [select(audited, audited.read(f"attacks.{n}.any"), where) for n in attacks]
        return max(groups, key=lambda group: sum(group.values))

    here = audited.records["bucket"] == row.bucket
    control = audited.records["role"] == "control"
    group, beside = replace(find_best(here), num_missing=0), find_best(control)
    minus = plain.subtract_rates(group.values, group.clusters, beside.values, beside.clusters)
    return Numbers(
        estimate=plain.estimate_rate(group.values, group.clusters),
        minus_control=None if here[control].all() else minus,
        group=group,
    )


def select_scores(audited: Audited, score: str) -> tuple[list[float], list[float], int]:
    """Return the scores of trained and of control documents, and how many have none."""
    score_N, role_N = audited.read(f"membership.{score}"), audited.records["role"]
    is_member_N = (role_N == "trained") & (audited.records["num_repetitions"] != 0)
    known_N = ~np.isnan(score_N)
    members, control = (score_N[n & known_N].tolist() for n in (is_member_N, role_N == "control"))
    return members, control, int(((is_member_N | (role_N == "control")) & ~known_N).sum())


def recompute_membership(audited: Audited, row: ResultRow) -> Numbers:
    """Compute an AUC or a true-positive rate from the scores in the records."""
    settings = dict(pair.split("=") for pair in row.parameters.split(", "))
    members, control, num_missing = select_scores(audited, settings["score"])
    counts: dict[str, int | None] = {
        "num_documents": len(members),
        "num_other": len(control),
        "num_missing": num_missing,
    }
    if row.metric == "auc":
        return Numbers(estimate=plain.estimate_auc(members, control), counts=counts)
    tpr = plain.estimate_tpr(members, control, settings["fpr"])
    if tpr is not None:
        counts["num_matched"] = round(tpr[0] * len(members))
    return Numbers(estimate=tpr, counts=counts)


def recompute_canaries(audited: Audited, row: ResultRow) -> Numbers:
    """Compute a row from canaries.parquet."""
    canaries = audited.canaries
    here = canaries["was_trained"] == (row.bucket == "(secrets)")
    if row.metric == "verbatim":
        matched = canaries["verbatim"][here].astype(float).tolist()
        return Numbers(estimate=plain.estimate_rate(matched, range(len(matched))))
    if row.metric == "exposure_bits":
        bits = [value for value in canaries[row.metric][here] if value is not None]
        if not bits:
            return Numbers(estimate=None)
        compute = {"median": np.median, "max": np.max}[row.statistic]
        return Numbers(estimate=(float(compute(bits)), None, None))
    with_loss, tokens = (canaries[n][here] for n in ("num_loss_tokens", "num_secret_tokens"))
    share = (
        sum(with_loss) / sum(tokens) if row.metric == "loss_coverage" else np.mean(with_loss == 0)
    )
    return Numbers(estimate=(float(share), None, None))
