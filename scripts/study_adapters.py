"""The study of adapters: what each way of fine-tuning memorizes at the same held-out loss.

    1  rates      every setting at every learning rate of its grid, one seed that step 3 lacks
    2  matching   target = the worst of the settings' lowest held-out losses
                  rates  = the lowest and the highest that reach the target, interpolated
    3  runs       every setting at these rates, three seeds
    4  correction rates whose mean loss is off the target are corrected and run again, up to twice

The loss falls and then rises with the learning rate, so one loss has two rates: at the low one the
model is trained little, at the high one it overfits.

All runs train the same documents as often as planned, in the same number of steps; a run that
stopped where it reaches the target would have trained them less often than others. Losses are
compared as changes from the model before training, because seeds have different held-out documents.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors import safe_open
from scipy.interpolate import PchipInterpolator
from study_common import (
    QUICK_PRETRAIN,
    ROOT,
    STUDIES,
    count_documents,
    count_matched,
    mean,
    run_compare,
    show_queries,
)

from memguard.config import apply_overrides, load_yaml
from memguard.records import ComparedRun, Comparison, Tables, write_parameters
from memguard.report.seed_means import (
    Setting,
    get_base,
    is_measured,
    list_costs,
    list_doses,
    list_settings,
    list_values,
)

RATES = {
    "full": (5e-5, 1.5e-4, 5e-4, 1.5e-3, 4e-3, 1e-2),
    "lora": (5e-4, 1.2e-3, 3e-3, 7e-3, 1.5e-2, 3e-2),
    "head": (5e-4, 1.2e-3, 3e-3, 8e-3, 2e-2, 5e-2),
}
"""Learning rates by the first part of a setting's name."""
RATES_SEED = 100
HIGH = "_high"
"""End of the name of a setting at the higher one of its rates."""
SAME_RATE = 1.25
"""Two rates are one if their ratio is lower."""
NUM_CORRECTIONS = 2
TOLERANCE = 0.03
"""Largest difference of a matched held-out loss from the target (nats a token)."""
QUICK_SETTINGS = ("full", "lora-r4", "head")
QUICK_OVERRIDES = (
    *QUICK_PRETRAIN,
    "run.data.train=['docstrings:networkx']",
    "run.data.study={num_repetitions: [0, 2], documents_per_bucket: 6}",
    "run.data.heldout_documents=10",
    "seeds=[0]",
)

Curve = Sequence[tuple[float, float]]
"""Learning rates, ascending, each with its change of the held-out loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The learning rates of a setting."""

    rate: float
    """The lowest rate that reaches the target."""
    high_rate: float | None
    """The highest rate that reaches the target; None if it is the same."""
    best_rate: float
    """Of the grid, the rate with the lowest held-out loss."""
    best_change: float
    """Its change of the held-out loss (nats a token)."""


def run(output_dir: Path, *, jobs: int, quick: bool, overrides: Sequence[str]) -> str:
    """Run all steps and return the tables.

    Args:
        output_dir: folder of the two sweeps.
        jobs: runs trained at a time.
        quick: three settings, one rate, one seed and a tiny model.
        overrides: key=value for the study's YAML.
    """
    added = QUICK_OVERRIDES if quick else ()
    document = apply_overrides(load_yaml(STUDIES / "adapters.yaml"), [*added, *overrides])
    values = {**document.values, "output_dir": str(output_dir)}
    if quick:
        chosen = [item for item in values["settings"] if item["name"] in QUICK_SETTINGS]
        values |= {"name": "adapters-quick", "settings": chosen}
    name = values["name"]
    searching = build_rates(values, num_rates=1 if quick else None)
    searched = run_sweep(output_dir, searching, jobs=jobs)
    curves = read_curves(searched)
    target, choices = choose_rates(curves)
    base = output_dir / searching["name"] / "base" / "model"
    rates = list_rates(choices)
    compared = run_sweep(output_dir, build_matched(values, rates, base), jobs=jobs)
    measured: dict[str, dict[float, float]] = {}
    for attempt in range(1, 1 if quick else NUM_CORRECTIONS + 1):
        corrected = correct_rates(curves, rates, measure(compared, rates, measured), target)
        if not corrected:
            break
        sweep = build_matched({**values, "name": f"{name}-corrected{attempt}"}, corrected, base)
        compared = replace_runs(compared, run_sweep(output_dir, sweep, jobs=jobs))
        rates |= corrected
    return "\n\n".join(
        [
            write_matching(compared, choices, rates, target, output_dir),
            write_doses(compared),
            write_rates(searched),
        ]
    )


def run_sweep(output_dir: Path, values: Mapping[str, Any], *, jobs: int) -> Comparison:
    """Write a sweep's YAML into its folder and run it; the runs' names then have its folder."""
    folder = output_dir / values["name"]
    path = folder / "sweep.yaml"
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    (ROOT / path).write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
    comparison = run_compare(path, folder, jobs=jobs, overrides=())
    runs = [
        run.model_copy(update={"run": str(Path(values["name"]) / run.run)})
        for run in comparison.runs
    ]
    return comparison.model_copy(update={"runs": runs})


def build_rates(values: Mapping[str, Any], *, num_rates: int | None = None) -> dict[str, Any]:
    """Return the sweep of step 1.

    Args:
        values: the study's YAML.
        num_rates: number of rates of each setting, the highest ones; None takes all.
    """
    settings = []
    for setting in values["settings"]:
        rates = RATES[setting["name"].partition("-")[0]]
        for rate in rates[-(num_rates or len(rates)) :]:
            changes = {**setting.get("overrides", {}), "optim.lr": rate}
            name = f"{setting['name']}_{rate:g}"
            settings.append({**setting, "name": name, "overrides": changes})
    name = f"{values['name']}-rates"
    return {**values, "name": name, "settings": settings, "seeds": [RATES_SEED]}


def list_rates(choices: Mapping[str, Choice]) -> dict[str, float]:
    """Return the rates of step 3 by label: the setting's name, with `HIGH` for the higher one."""
    rates = {}
    for name, choice in choices.items():
        rates[name] = choice.rate
        if choice.high_rate is not None:
            rates[f"{name}{HIGH}"] = choice.high_rate
    return rates


def build_matched(
    values: Mapping[str, Any], rates: Mapping[str, float], base: Path
) -> dict[str, Any]:
    """Return a sweep at these rates by label, which starts from the model of step 1."""
    by_name = {setting["name"]: setting for setting in values["settings"]}
    settings = []
    for label, rate in rates.items():
        setting = by_name[label.removesuffix(HIGH)]
        changes = {**setting.get("overrides", {}), "optim.lr": rate}
        settings.append({**setting, "name": label, "overrides": changes})
    kept = {key: value for key, value in values.items() if key != "pretrain"}
    run = {**values["run"], "model": {**values["run"].get("model", {}), "path": str(base)}}
    return {**kept, "run": run, "settings": settings}


def measure(
    compared: Comparison, rates: Mapping[str, float], measured: dict[str, dict[float, float]]
) -> dict[str, dict[float, float]]:
    """Add the mean change of each label's runs to those of its setting, by rate."""
    for setting in list_settings(compared):
        by_rate = measured.setdefault(setting.name.removesuffix(HIGH), {})
        by_rate[rates[setting.name]] = mean([find_change(run, compared) for run in setting.runs])
    return measured


def correct_rates(
    curves: Mapping[str, Curve],
    rates: Mapping[str, float],
    measured: Mapping[str, Mapping[float, float]],
    target: float,
) -> dict[str, float]:
    """Return new rates by label where the mean change of the seeds is off the target.

    Args:
        curves: of step 1, which has another seed than the means.
        rates: by label, as trained.
        measured: mean changes by setting and rate.
        target: the change of the held-out loss to reach.
    """
    corrected = {}
    for label, rate in rates.items():
        name = label.removesuffix(HIGH)
        if abs(measured[name][rate] - target) <= TOLERANCE:
            continue
        low, high = find_rates(shift_curve(curves[name], measured[name]), target)
        wanted = high if label.endswith(HIGH) else low
        if wanted is not None and wanted not in measured[name]:
            corrected[label] = wanted
    return corrected


def shift_curve(curve: Curve, measured: Mapping[float, float]) -> Curve:
    """Return a curve through the means, elsewhere with the shape of the other seed's.

    Each point is shifted as far as the nearest mean is from the curve. Below the lowest rate the
    change is proportional to the rate, as that of a short step is.
    """
    powers_N = np.log([rate for rate, _ in curve])
    changes_N = [change for _, change in curve]
    shifts = {
        rate: mean_change - float(np.interp(np.log(rate), powers_N, changes_N))
        for rate, mean_change in measured.items()
    }
    points = dict(measured)
    for rate, change in curve:
        nearest = min(shifts, key=lambda other: abs(math.log(other / rate)))
        points.setdefault(rate, change + shifts[nearest])
    lowest = min(points)
    for part in (4, 16, 64):
        points[lowest / part] = points[lowest] / part
    return sorted(points.items())


def replace_runs(compared: Comparison, again: Comparison) -> Comparison:
    """Return a comparison with the runs of some labels replaced, in the same order."""
    later = {setting.name: setting.runs for setting in list_settings(again)}
    runs = [
        run for setting in list_settings(compared) for run in later.get(setting.name, setting.runs)
    ]
    kept = [row for row in compared.tables.results if row.setting not in later]
    tables = Tables(results=(*kept, *again.tables.results), metrics=compared.tables.metrics)
    return compared.model_copy(update={"runs": runs, "tables": tables})


def find_change(run: ComparedRun, compared: Comparison) -> float:
    """Return the change of the held-out loss by a run's training (nats a token)."""
    rows = [compared.find_loss(run, model) for model in ("trained", "base")]
    after, before = list_values(filter(None, rows))
    return after - before


def read_curves(searched: Comparison) -> dict[str, Curve]:
    """Return the curve of each setting of step 1."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for run in searched.runs:
        name, _, rate = run.setting.rpartition("_")
        curves.setdefault(name, []).append((float(rate), find_change(run, searched)))
    return {name: sorted(curve) for name, curve in curves.items()}


def choose_rates(curves: Mapping[str, Curve]) -> tuple[float, dict[str, Choice]]:
    """Return the target, which every setting reaches, and each setting's learning rates."""
    target = max(min(change for _, change in curve) for curve in curves.values())
    choices = {}
    for name, curve in curves.items():
        best_rate, best_change = min(curve, key=lambda point: point[1])
        rate, high_rate = find_rates(curve, target)
        choices[name] = Choice(
            rate=rate, high_rate=high_rate, best_rate=best_rate, best_change=best_change
        )
    return target, choices


def find_rates(curve: Curve, target: float) -> tuple[float, float | None]:
    """Return the lowest and the highest rate at which the change of the loss is ``target``.

    Between the rates of the grid the change is interpolated in log(rate), monotonically. The lowest
    rate of the grid is returned where its change is already below the target. There is no second
    rate where the curve does not rise above the target again, or soon after the lowest rate.
    """
    if len(curve) == 1:
        return curve[0][0], None
    powers_N = np.log([rate for rate, _ in curve])
    changes_N = [change for _, change in curve]
    fine_M = np.unique(np.concatenate([powers_N, np.linspace(powers_N[0], powers_N[-1], 2000)]))
    curve_M = PchipInterpolator(powers_N, changes_N)(fine_M)
    reached = np.exp(fine_M[curve_M <= target + 1e-9])
    low, high = (float(f"{rate:.3g}") for rate in (reached[0], reached[-1]))
    has_two = changes_N[-1] > target and high > SAME_RATE * low
    return low, high if has_two else None


# Tables


def write_matching(
    compared: Comparison,
    choices: Mapping[str, Choice],
    rates: Mapping[str, float],
    target: float,
    folder: Path,
) -> str:
    """Format one row per setting: how its loss was matched, and what its training costs."""
    rows = [
        "| setting | trained parameters | learning rate | change of held-out NLL | from the target "
        "| lowest at any rate | training time | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for setting in list_settings(compared):
        name, runs = setting.name, setting.runs
        choice = choices[name.removesuffix(HIGH)]
        changes = [find_change(run, compared) for run in runs]
        beside = mean(changes) - target
        is_matched = abs(beside) <= TOLERANCE
        peaks = [read_peak(folder / run.run) for run in runs]
        cells = (
            name,
            f"{count_trained(folder / runs[0].run):,}",
            f"{rates[name]:g}",
            f"{mean(changes):+.3f} {show_range(changes, '+.3f')}",
            f"{beside:+.3f}" + ("" if is_matched else " **not matched**"),
            f"{choice.best_change:+.3f} at {choice.best_rate:g}",
            f"{mean([run.cost.train_s for run in runs]):.0f} s",
            f"{mean(peaks) / 2**20:.0f} MiB",
        )
        rows.append(f"| {' | '.join(cells)} |")
    losses = [compared.find_loss(run, "base") for run in compared.runs]
    before = mean(list_values(filter(None, losses)))
    seeds = sorted({run.seed for run in compared.runs})
    return "\n".join(
        [
            f"Target: {target:+.3f} nats a token from the model before training (held-out NLL "
            f"{before:.3f}). Means over seeds {', '.join(map(str, seeds))}, in brackets the lowest "
            f"and highest seed; matched is within {TOLERANCE} of the target. The lowest change at "
            f"any rate is of seed {RATES_SEED}. Peak memory is the resident memory of the whole "
            "process, libraries and documents included.",
            "",
            *rows,
        ]
    )


def write_doses(compared: Comparison) -> str:
    """Format one row per setting: membership, and extraction by number of repetitions."""
    doses = [dose for dose in list_doses(compared) if dose]
    settings = list_settings(compared)
    rows = [
        f"| setting | membership AUC | {' | '.join(f'{dose} times' for dose in doses)} |",
        "|---|---|" + "---|" * len(doses),
    ]
    base = [show_cells(get_base(compared), dose) for dose in doses]
    rows.append(f"| before training | | {' | '.join(base)} |")
    for setting in settings:
        shown = [show_cells(setting, dose) for dose in doses]
        rows.append(f"| {setting.name} | {show_auc(setting)} | {' | '.join(shown)} |")
    num = settings[0].find("extraction", "verbatim", doses[0])[0].num_documents
    return "\n".join(
        [
            f"By number of repetitions: verbatim / near-verbatim of all documents ({num} a seed), "
            "mean teacher-forced accuracy of the last 50 tokens, median attack cost (queries, mean "
            "of the seeds' logarithms). Membership is the AUC of the loss, trained documents of "
            "all repetitions against the control, in brackets the lowest and highest seed. 'Before "
            "training' is of the first seed.",
            "",
            *rows,
        ]
    )


def write_rates(searched: Comparison) -> str:
    """Format the runs of step 1: one row per setting, one column per rank of the rate."""
    dose = list_doses(searched)[-1]
    by_name: dict[str, list[str]] = {}
    for setting in list_settings(searched):
        name, _, rate = setting.name.rpartition("_")
        change = find_change(setting.runs[0], searched)
        cell = f"{rate}: {change:+.3f}; {show_cells(setting, dose)}"
        by_name.setdefault(name, []).append(cell)
    num_rates = len(next(iter(by_name.values())))
    head = " | ".join(["setting", *(f"rate {n}" for n in range(1, num_rates + 1))])
    rows = [f"| {head} |", "|---|" + "---|" * num_rates]
    for name, cells in by_name.items():
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(
        [
            f"All rates, seed {RATES_SEED}: learning rate, change of the held-out NLL, then as "
            f"above for documents trained {dose} times.",
            "",
            *rows,
        ]
    )


def show_cells(setting: Setting, dose: int) -> str:
    """Format one setting's documents of one number of repetitions, over its seeds."""
    verbatim, near, accuracy = (
        setting.find("extraction", metric, dose)
        for metric in ("verbatim", "near_verbatim", "token_accuracy")
    )
    num = count_documents(verbatim)
    is_generated = all(map(is_measured, near))
    matched = f"{100 * count_matched(near) / num:.0f}" if is_generated else "-"
    return (
        f"{100 * count_matched(verbatim) / num:.0f} / {matched} %, "
        f"{100 * mean(list_values(accuracy)):.0f} %, {show_queries(list_costs(setting, dose))}"
    )


def show_auc(setting: Setting) -> str:
    """Format the AUC of the loss as a membership score, over a setting's seeds."""
    parameters = write_parameters({"score": "loss"})
    rows = setting.tables.select("membership", "auc", setting=setting.name, parameters=parameters)
    values = list_values(rows)
    return f"{mean(values):.2f} {show_range(values, '.2f')}" if values else "not measured"


def show_range(values: Sequence[float], form: str) -> str:
    """Format the lowest and the highest value."""
    return f"[{min(values):{form}}, {max(values):{form}}]"


def read_peak(folder: Path) -> int:
    """Return the peak memory of a run's training (bytes)."""
    lines = (ROOT / folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines if '"event":"step"' in line]
    return max(step["peak_memory_bytes"] for step in steps)


def count_trained(folder: Path) -> int:
    """Return the number of parameters that a run has trained."""
    config = yaml.safe_load((ROOT / folder / "config.yaml").read_text(encoding="utf-8"))
    adapter = ROOT / folder / "adapter" / "adapter_model.safetensors"
    path = adapter if adapter.exists() else ROOT / folder / "model" / "model.safetensors"
    chosen = config["train"]["trainable_modules"]
    with safe_open(path, framework="np") as file:
        return sum(
            math.prod(file.get_slice(name).get_shape())
            # The file has no iterator.
            for name in file.keys()  # noqa: SIM118
            if chosen is None or any(f".{module}." in f".{name}" for module in chosen)
        )
