"""Audited run folders with benchmark tasks, made up from the scores of their items."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from compare_examples import write_run
from task_examples import make_metric, make_task

from memguard import records as r
from memguard.audit.benchmarks.rows import tabulate_utility
from memguard.compare import FinishedRun
from memguard.records.audit_files import save_audit_files
from memguard.records.results import save_results
from memguard.records.utility import (
    ITEM_SCORES,
    TaskResult,
    UtilityModel,
    list_item_scores,
    save_item_scores,
)


def write_answered_run(
    folder: Path, results: Sequence[TaskResult], *, name: str = "plain", seed: int = 0, **run: Any
) -> FinishedRun:
    """Write a run folder whose audit answered tasks; ``run`` as in `write_run`."""
    finished = write_run(folder, name=name, seed=seed, **run)
    audit = folder / "audit"
    report = r.load_record(r.AuditReport, audit / "report.json")
    tables = r.merge_tables([report.tables, tabulate_utility(results, seed=seed)])
    r.save_record(report.model_copy(update={"tables": tables}), audit / "report.json")
    save_results(tables.results, audit / "results.parquet")
    save_item_scores(list_item_scores(results), audit / ITEM_SCORES)
    save_audit_files(audit, has_card=False)
    return finished


def write_quiz(
    folder: Path,
    answers: Mapping[str, Sequence[float]],
    *,
    chance: float = 0.25,
    correct: Mapping[str, Any] | None = None,
) -> list[FinishedRun]:
    """Write a run of each setting that answered one task, and what each has extracted."""
    return [
        write_answered_run(
            folder / name,
            [make_task("quiz", "trained", make_metric("acc", list(flags)), chance=chance)],
            name=name,
            **({"correct": {0: [1, 1], 16: correct[name]}} if correct else {}),
        )
        for name, flags in answers.items()
    ]


RIGHT: Mapping[str, str] = {
    "plain": "1111111111111111111111110000000000001111",
    "k4": "1111111111111011111111110100000000001101",
    "k2": "1111011011001011010111010000000000000101",
}
"""Items of a multiple-choice task that each setting answers rightly."""
BASE = "1010101010101010101010101010101000000000"


def make_answers(setting: str, *, shift: float = 0.0) -> list[TaskResult]:
    """Return three tasks of a setting and of the base model: a rate, a perplexity and a mean."""
    results = []
    models: tuple[tuple[UtilityModel, str], ...] = (("trained", RIGHT[setting]), ("base", BASE))
    for model, right in models:
        flags = [float(flag) for flag in right]
        numbers = np.arange(len(flags))
        level = {"plain": 0.0, "k4": 0.3, "k2": 1.1}[setting] if model == "trained" else 2.0
        logprobs = -20.0 - level - 3 * np.sin(numbers) - shift * np.cos(3 * numbers) * level
        shares = 0.5 + 0.3 * np.sin(numbers) - 0.05 * level * (1 + np.cos(5 * numbers))
        results += [
            make_task("quiz", model, make_metric("acc", flags), chance=0.25),
            make_task(
                "texts",
                model,
                make_metric(
                    "word_perplexity",
                    list(logprobs),
                    aggregation="weighted_perplexity",
                    weights=list(5.0 + numbers % 3),
                    higher=False,
                ),
            ),
            make_task("overlap", model, make_metric("f1", list(shares))),
        ]
    return results


RISKY = {0: [1, 1], 16: [50] * 36 + [5] * 4}
SAFE = {"k4": {0: [1, 1], 16: [50] * 4 + [5] * 36}, "k2": {0: [1, 1], 16: [5] * 40}}


def write_three(folder: Path, *, seed: int = 0, **changes: Any) -> list[FinishedRun]:
    """Write three settings: a risky one, and two that are safer and answer ever worse.

    ``changes`` are further arguments of `write_answered_run`.
    """
    return [
        write_answered_run(
            folder / f"{name}{seed}",
            make_answers(name, shift=1.0),
            name=name,
            seed=seed,
            correct=SAFE.get(name, RISKY),
            nll=nll,
            **changes,
        )
        for name, nll in (("plain", 2.0), ("k4", 2.05), ("k2", 2.5))
    ]
