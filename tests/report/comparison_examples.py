"""Comparisons as `memguard compare` makes them of runs, made up: for tests of their page."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import evidence_examples as evidence
import report_examples as examples
from report_examples import GOLDFISH, PLAIN, Dose
from result_examples import make_interval, make_metric, make_rate, make_tables, rate_row, value_row

from memguard import records as r
from memguard.compare.front import mark_dominated, merge_badges
from memguard.compare.recommendation import recommend
from memguard.compare.utility import Axis
from memguard.records.tables import choose_risk

HALF: tuple[Dose, ...] = ((0, 0, 0, 0.181), (4, 0, 0, 0.262), (16, 0, 0, 0.443), (64, 0, 0, 0.621))
SHOWN = ("verbatim", "near_verbatim", "teacher_forced_90", "token_accuracy")
Part = tuple[r.ComparedRun, list[r.ResultRow]]
"""A run and its rows."""


def make_run(name: str, k: int | None, nll: float, doses: Sequence[Dose], seed: int = 0) -> Part:
    """Return a run with goldfish of this k and its rows, those of the base model among them."""
    buckets = {examples.name_bucket(dose): dose for dose, *_ in doses}
    most = max((near for *_, near, _ in doses), default=0)
    run = r.ComparedRun(
        setting=name,
        seed=seed,
        run=f"{name}-seed{seed}",
        doses=buckets,
        verdict=examples.make_verdict() if most > 8 else examples.make_green(),
        mitigations=[{"name": "goldfish", "k": k, "context_width": 13, "mode": "hash"}]
        if k
        else [],
        overrides={},
        cost=r.Cost(
            train_s=52.4 + (k or 0),
            num_steps=420,
            num_supervised_tokens=round(853_440 * (1 - 1 / k)) if k else 853_440,
            dropped_fraction=1 / k - 0.0017 if k else 0.0,
        ),
    )
    rows = [
        row
        for dose in doses
        for row in examples.list_scores(*dose)
        if row.metric in SHOWN and row.against is None
    ]
    rows += [
        value_row("heldout", "nll", "heldout", loss, 64, interval="", model=model)
        for model, loss in (("trained", nll), ("base", 5.012))
    ]
    return run, [replace(row, setting=name, seed=seed) for row in rows]


def attack(part: Part) -> Part:
    """Return the run with what a full suite measures."""
    run, rows = part
    harder = {"plain": 0.0, "goldfish-k4": 3.2, "goldfish-k2": 9.7}[run.setting] + run.seed / 10
    found = evidence.list_membership()
    for bucket, dose in run.doses.items():
        found += evidence.list_costs(bucket, 40 / dose + harder if dose else None)
        found += evidence.list_costs(bucket, None, model="base")
        for name in evidence.FOUND:
            found += evidence.list_attacked(bucket, name)
        best = max(any_of.get(bucket, (0, 0))[1] for any_of in evidence.FOUND.values())
        found.append(rate_row("attacks", "best_any_answer", bucket, best))
    return run, rows + [replace(row, setting=run.setting, seed=run.seed) for row in found]


def assemble(parts: Sequence[Part]) -> r.Comparison:
    """Return the comparison of runs, with rough intervals over seeds."""
    runs = [run for run, _ in parts]
    rows = [row for _, rows in parts for row in rows]
    tables = make_tables(rows)
    differences, tests = pair_runs(runs, tables)
    names = list(dict.fromkeys(run.setting for run in runs))
    losses = {
        name: {run.seed: find_loss(run, tables) for run in runs if run.setting == name}
        for name in names
    }
    points, over_seeds = [], []
    for name in names:
        point, found = make_point([run for run in runs if run.setting == name], tables)
        utility = math.fsum(losses[name].values()) / len(losses[name])
        points.append(point.model_copy(update={"utility": utility}))
        over_seeds += found
        if name != names[0] and len(losses[name]) > 1:
            change = make_interval(utility / points[0].utility - 1, 0.006, -1)
            against = {"setting": name, "against": f"setting:{names[0]}"}
            over_seeds.append(
                value_row("heldout", "nll_change", "(held out)", change, 0, interval="t", **against)
            )
    front = mark_dominated(points, Axis(values=losses))
    notes = [
        make_metric("attacks", "any_answer", f"answers=16, attack={name}", note=note)
        for name, note in evidence.NOTES.items()
    ]
    tables = make_tables([*rows, *differences, *over_seeds], tests=tests, metrics=notes)
    return r.Comparison(
        name="quickstart",
        tool_version="0.1.0",
        command="memguard compare configs/quickstart.yaml",
        documents_sha256="9d77c02b6e18" + "5f" * 26,
        continuation_tokens=50,
        runs=runs,
        heldout_num_tokens=8192,
        front=front,
        recommendation=recommend(front, tables),
        environment={"python": "3.11.2", "torch": "2.13.0", "device": "cpu, 2 threads"},
        tables=tables,
    )


def find_loss(run: r.ComparedRun, tables: r.Tables) -> float:
    row = tables.find("heldout", "nll", "heldout", setting=run.setting, seed=run.seed)
    assert row is not None, "every run has a loss"
    return row.value or 0.0


def find(run: r.ComparedRun, tables: r.Tables, metric: str, bucket: str) -> r.ResultRow | None:
    return tables.find("extraction", metric, bucket, setting=run.setting, seed=run.seed)


def make_point(
    runs: Sequence[r.ComparedRun], tables: r.Tables
) -> tuple[r.FrontPoint, list[r.ResultRow]]:
    """Return the point of a setting without its utility, and its shares."""
    number = 0
    shares: dict[r.RiskName, r.ResultRow] = {}
    for name, (probe, metric, parameters) in r.RISK_PLACES.items():
        found = [
            tables.find(
                *(probe, metric, list(run.doses)[-1]),
                parameters=parameters,
                setting=run.setting,
                seed=run.seed,
            )
            for run in runs
            if run.doses
        ]
        known = [row for row in found if row is not None and row.num_matched is not None]
        number = number or sum(row.num_documents for row in known)
        if known and len(known) == len(runs):
            documents = sum(row.num_documents for row in known)
            rate = make_rate(sum(row.num_matched or 0 for row in known), documents)
            row = replace(known[0], bucket=r.MOST_TRAINED, seed=None)
            shares[name] = r.fill_row(row, rate, "pooled")
    by, risk = choose_risk(shares) or (None, None)
    point = r.FrontPoint.model_validate(
        {
            "name": runs[0].setting,
            "num_seeds": len(runs),
            "num_documents": number,
            "badges": merge_badges([run.verdict for run in runs]),
            "num_findings": round(number * ((risk and risk.value) or 0)),
            "risk": risk and risk.value,
            "risk_low": risk and risk.low,
            "risk_high": risk and risk.high,
            "risk_by": by,
            "utility": 0.0,
        }
    )
    return point, [*shares.values()]


def pair_runs(
    runs: Sequence[r.ComparedRun], tables: r.Tables
) -> tuple[list[r.ResultRow], list[r.TestRow]]:
    """Return differences from the first setting in trained buckets, and rough tests."""
    rows, tests = [], []
    for run in runs:
        first = next(one for one in runs if one.seed == run.seed)
        for bucket, dose in run.doses.items():
            if first is run or not dose or bucket not in first.doses:
                continue
            key: dict[str, Any] = {
                "setting": run.setting,
                "seed": run.seed,
                "against": f"setting:{first.setting}",
            }
            group = f"(trained {dose} times)"
            mine, other = (find(one, tables, "token_accuracy", bucket) for one in (run, first))
            lost = ((other and other.value) or 0.0) - ((mine and mine.value) or 0.0)
            interval = make_interval(-lost, 0.021, -1, 1)
            rows.append(value_row("extraction", "token_accuracy", group, interval, **key))
            for metric in ("verbatim", "near_verbatim"):
                mine, other = (find(one, tables, metric, bucket) for one in (run, first))
                if mine is None or other is None or not (mine.is_known and other.is_known):
                    continue
                fewer = (other.num_matched or 0) - (mine.num_matched or 0)
                p_value = min(1.0, 2 * 0.5**fewer)
                tests.append(
                    r.TestRow(
                        **key,
                        probe="extraction",
                        metric=metric,
                        bucket=group,
                        test="mcnemar",
                        num_documents=40,
                        num_only_here=0,
                        num_only_against=fewer,
                        p_value=p_value,
                        p_holm=min(1.0, 12 * p_value),
                    )
                )
    return rows, tests


def list_parts(num_seeds: int = 1) -> list[Part]:
    """Return the runs of three settings."""
    return [
        part
        for seed in range(num_seeds)
        for part in (
            make_run("plain", None, 4.372 + seed / 100, PLAIN, seed),
            make_run("goldfish-k4", 4, 4.581 + seed / 90, GOLDFISH, seed),
            make_run("goldfish-k2", 2, 4.853 + seed / 80, HALF, seed),
        )
    ]


def make_comparison(num_seeds: int = 1) -> r.Comparison:
    return assemble(list_parts(num_seeds))


def make_full_comparison(num_seeds: int = 1) -> r.Comparison:
    """Return a comparison whose runs were attacked."""
    return assemble([attack(part) for part in list_parts(num_seeds)])


def make_sweep(num_settings: int = 12, num_seeds: int = 3) -> r.Comparison:
    """Return a sweep as large as they come: every goldfish, some of them beaten by others."""
    parts = []
    for number in range(num_settings):
        near = max(0, 40 - 9 * number) if number % 4 else min(40, 44 - 3 * number)
        nll = 4.372 + 0.031 * number + (0.11 if number % 3 == 2 else 0.0)
        name = "plain" if number == 0 else f"goldfish-k{34 - number}-h13-lr{number % 3}"
        for seed in range(num_seeds):
            found = max(0, near - seed)
            accuracy = 0.35 + 0.65 * found / 40
            doses = [(0, 0, 0, 0.19), (4, 0, 0, 0.3), (16, found // 3, found // 2, 0.5)]
            doses.append((64, 2 * found // 3 if number else found, found, accuracy))
            parts.append(make_run(name, 34 - number, nll + seed / 70, doses, seed))
    return assemble(parts)


def change_rows(
    comparison: r.Comparison,
    change: Callable[[r.ResultRow], r.ResultRow | None] = lambda row: row,
    add: Iterable[r.ResultRow] = (),
) -> r.Comparison:
    """Return the comparison with rows changed, without those that became None, and with others."""
    old = comparison.tables
    rows = [row for one in old.results if (row := change(one)) is not None]
    tables = make_tables([*rows, *add], old.buckets, old.tests, old.details, old.metrics)
    return comparison.model_copy(update={"tables": tables})


def drop_near(part: Part) -> Part:
    """Return the run without generated text."""
    run, rows = part
    key = {"num_matched": None, "value": None, "low": None, "high": None}
    return run, [
        replace(row, **key, missing_because="the cache does not fit")
        if row.metric == "near_verbatim"
        else row
        for row in rows
    ]
