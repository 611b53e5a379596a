"""The study of adapters' part on optimizers: full fine-tuning with each, not matched in loss.

Every optimizer has one learning rate of its own and trains the base model, the documents and the
steps of the study of adapters. Their held-out losses differ, so the rates of extraction rank
nothing: a setting that has learned less also recites less.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study_adapters import QUICK_OVERRIDES, find_change, run_sweep, show_cells, show_range
from study_common import STUDIES, mean

from memguard.config import apply_overrides, load_yaml
from memguard.config.optimizers import OPTIMIZERS
from memguard.records import Comparison
from memguard.report.seed_means import get_base, list_doses, list_settings

RATES = {"adamw": 1.5e-3, "adamw_8bit": 1.5e-3, "adalomo": 3e-2, "lomo": 1.0, "mezo": 1e-4}
"""One learning rate for each optimizer."""


def run(output_dir: Path, *, jobs: int, quick: bool, overrides: Sequence[str]) -> str:
    """Train the base model, then all optimizers and seeds, and return the table.

    Args:
        output_dir: folder of the sweep.
        jobs: runs trained at a time.
        quick: one seed and a tiny model.
        overrides: key=value for the study's YAML.
    """
    added = QUICK_OVERRIDES if quick else ()
    document = apply_overrides(load_yaml(STUDIES / "adapters.yaml"), [*added, *overrides])
    name = f"{document.values['name']}-optimizers{'-quick' if quick else ''}"
    values = {**document.values, "output_dir": str(output_dir), "name": name}
    compared = run_sweep(output_dir, {**values, "settings": build_settings()}, jobs=jobs)
    return write_optimizers(compared)


def build_settings() -> list[dict[str, Any]]:
    """Return one setting for each optimizer."""
    settings: list[dict[str, Any]] = []
    for name, rate in RATES.items():
        changes: dict[str, Any] = {"optim.name": name, "optim.lr": rate}
        if OPTIMIZERS[name].why_no_clipping:
            changes["optim.max_grad_norm"] = None
        settings.append({"name": name, "overrides": changes})
    return settings


def write_optimizers(compared: Comparison) -> str:
    """Format one row per optimizer: its rate, its change of the loss, extraction by repetitions."""
    doses = [dose for dose in list_doses(compared) if dose]
    rows = [
        f"| optimizer | learning rate | change of held-out NLL | "
        f"{' | '.join(f'{dose} times' for dose in doses)} |",
        "|---|---|---|" + "---|" * len(doses),
    ]
    base = [show_cells(get_base(compared), dose) for dose in doses]
    rows.append(f"| before training | | | {' | '.join(base)} |")
    for setting in list_settings(compared):
        changes = [find_change(run, compared) for run in setting.runs]
        change = f"{mean(changes):+.3f} {show_range(changes, '+.3f')}"
        shown = [show_cells(setting, dose) for dose in doses]
        cells = (setting.name, f"{RATES[setting.name]:g}", change, *shown)
        rows.append(f"| {' | '.join(cells)} |")
    seeds = sorted({run.seed for run in compared.runs})
    num = list_settings(compared)[0].find("extraction", "verbatim", doses[0])[0].num_documents
    return "\n".join(
        [
            "Optimizers, **not matched in loss**: full fine-tuning, one learning rate each. Change "
            f"of the held-out NLL, mean over seeds {', '.join(map(str, seeds))}, in brackets the "
            "lowest and highest seed; then by number of repetitions verbatim / near-verbatim of "
            f"all documents ({num} a seed), mean teacher-forced accuracy of the last 50 tokens, "
            "median attack cost. 'Before training' is of the first seed.",
            "",
            *rows,
        ]
    )
