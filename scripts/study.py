"""Run a study of eval/studies and write its tables into its page.

    python scripts/study.py NAME [--jobs 2]     NAME: adapters, catastrophic, goldfish_k, ...

A study is a sweep, eval/studies/NAME.yaml, or several: catastrophic has one for each size of the
model, adapters one that chooses learning rates (`study_adapters`); utility writes benchmark tasks
first (`study_utility`). `adapters --part optimizers` runs only a part of its own, whose table has
marks of its own (`study_optimizers`). Finished runs are not repeated.
The tables are written between the marks of eval/studies/NAME.md; the text around them is written by
hand and describes the results at the time of writing.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import study_adapters
import study_audit_dtype
import study_optimizers
import study_utility
from study_common import (
    STUDIES,
    count_matched,
    mean,
    replace_tables,
    run_compare,
    show_change,
    show_dose,
    show_queries,
    show_share,
)

from memguard.records import Comparison
from memguard.records.comparison import find_change, list_shares
from memguard.report.seed_means import (
    Setting,
    get_base,
    list_costs,
    list_doses,
    list_settings,
    list_values,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One size of a model, and its learning rates."""

    hidden: int
    layers: int
    intermediate: int

    def list_overrides(self, name: str) -> list[str]:
        """Return the overrides of a sweep of this size; learning rates decrease with the width."""
        model = "pretrain.model.scratch.config"
        return [
            f"name={name}-{self.hidden}",
            f"{model}.hidden_size={self.hidden}",
            f"{model}.num_hidden_layers={self.layers}",
            f"{model}.intermediate_size={self.intermediate}",
            f"pretrain.optim.lr={4e-3 * 128 / self.hidden:.6f}",
            f"run.optim.lr={8e-3 * 128 / self.hidden:.6f}",
        ]


SIZES = (
    Size(hidden=64, layers=3, intermediate=176),
    Size(hidden=128, layers=4, intermediate=352),
    Size(hidden=192, layers=6, intermediate=528),
    Size(hidden=320, layers=6, intermediate=880),
)

OWN_STEPS = {
    "adapters": study_adapters.run,
    "audit_dtype": study_audit_dtype.run,
    "utility": study_utility.run,
}
"""Studies that are more than a sweep; they have a quick form."""
PARTS = {"optimizers": study_optimizers.run}
"""Parts of the study of adapters that its own steps do not run."""


def main() -> None:
    """Run the study given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study", choices=sorted(path.stem for path in STUDIES.glob("*.yaml")))
    parser.add_argument("--jobs", type=int, default=1, help="runs trained at a time")
    parser.add_argument("--output-dir", default="runs/studies", help="where the runs go")
    parser.add_argument("--another-seed", type=int, help="also recommend with this seed added")
    parser.add_argument("override", nargs="*", help="key=value for the sweep")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="adapters, audit_dtype, utility: a small sample; prints its tables only",
    )
    parser.add_argument("--part", choices=sorted(PARTS), help="adapters: only this part")
    options = parser.parse_intermixed_args()
    if options.part and options.study != "adapters":
        parser.error(f"--part is for adapters only; got {options.study}")
    if options.another_seed is not None and options.study in (*OWN_STEPS, "catastrophic"):
        parser.error(f"--another-seed needs a recommendation, which {options.study} does not have")
    if options.quick and options.study not in OWN_STEPS:
        parser.error(f"--quick is for {' and '.join(OWN_STEPS)} only")
    started = time.perf_counter()
    page = STUDIES / f"{options.study}.md"
    tables = run_study(options)
    print(tables)
    if options.quick:
        return
    replace_tables(page, tables, part=options.part)
    minutes = (time.perf_counter() - started) / 60
    print(f"{page}: {minutes:.1f} minutes, finished runs not counted")


def run_study(options: argparse.Namespace) -> str:
    """Run all sweeps of a study and return its tables."""
    if options.study in OWN_STEPS:
        steps = PARTS[options.part] if options.part else OWN_STEPS[options.study]
        return steps(
            Path(options.output_dir),
            jobs=options.jobs,
            quick=options.quick,
            overrides=options.override,
        )
    sizes = SIZES if options.study == "catastrophic" else (None,)
    comparisons = [run_sweep(options, size) for size in sizes]
    write = write_sizes if options.study == "catastrophic" else write_settings
    tables = write(comparisons)
    if options.another_seed is not None:
        tables += "\n\n" + write_another_seed(options, comparisons[0])
    return tables


def run_sweep(
    options: argparse.Namespace, size: Size | None, seeds: Sequence[int] = ()
) -> Comparison:
    """Train and compare one sweep; ``seeds``, if given, replace its own."""
    overrides = [f"output_dir={options.output_dir}", *options.override]
    if seeds:
        overrides.append(f"seeds={list(seeds)}")
    if size is not None:
        overrides += size.list_overrides(options.study)
    name = options.study if size is None else f"{options.study}-{size.hidden}"
    return run_compare(
        Path("eval/studies") / f"{options.study}.yaml",
        Path(options.output_dir) / name,
        jobs=options.jobs,
        overrides=overrides,
    )


def write_settings(comparisons: Sequence[Comparison]) -> str:
    """Format one row per setting over its seeds, then the recommendation."""
    (comparison,) = comparisons
    dose, settings = max(list_doses(comparison)), list_settings(comparison)
    rows = [
        "| setting | held-out NLL | change | verbatim | near-verbatim | within 10^6 queries "
        "| teacher-forced: 90 % right | teacher-forced accuracy | median attack cost "
        "| labels trained | training time | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting, point in zip(settings, comparison.front, strict=True):
        costs = [run.cost for run in setting.runs]
        shares = list_shares(comparison.tables, setting.name)
        known, accuracy = (
            list_values(setting.find("extraction", metric, dose))
            for metric in ("teacher_forced_90", "token_accuracy")
        )
        rows.append(
            " | ".join(
                (
                    f"| {point.name}",
                    f"{point.utility:.3f}",
                    show_change(find_change(comparison.tables, point.name)),
                    show_share(shares.get("verbatim")),
                    show_share(shares.get("near_verbatim")),
                    show_share(shares.get("attack_cost")),
                    f"{100 * mean(known):.0f} %",
                    f"{100 * mean(accuracy):.0f} %",
                    show_queries(list_costs(setting, dose)),
                    f"{mean([cost.num_supervised_tokens for cost in costs]):,.0f}",
                    f"{mean([cost.train_s for cost in costs]):.0f} s",
                    "dominated |" if point.is_dominated else "**front** |",
                )
            )
        )
    recommendation = comparison.recommendation
    seeds = sorted({run.seed for run in comparison.runs})
    num = comparison.front[0].num_documents
    return "\n".join(
        [
            f"Documents trained {dose} times, {num} of each setting over seeds "
            f"{', '.join(map(str, seeds))}; brackets are 95 % "
            "intervals, for the change of the loss over per-seed differences. Teacher-forced "
            "columns measure token predictions given the true text, not extraction.",
            "",
            *rows,
            "",
            f"**{recommendation.describe()}**",
            "",
            f"Rule: {recommendation.rule}",
        ]
    )


def write_another_seed(options: argparse.Namespace, before: Comparison) -> str:
    """Format the recommendation with one more seed added to those of ``before``."""
    seeds = sorted({run.seed for run in before.runs})
    if options.another_seed in seeds:
        raise SystemExit(f"seed {options.another_seed} is one of the study's own: {seeds}")
    after = run_sweep(options, None, [*seeds, options.another_seed])
    sentence = after.recommendation.describe()
    return f"With seed {options.another_seed} added: {sentence}"


def write_sizes(comparisons: Sequence[Comparison]) -> str:
    """Format one row for each size and setting, one column for each number of repetitions."""
    doses = list_doses(comparisons[0])
    rows = [
        f"| parameters | setting | held-out NLL | {' | '.join(map(show_dose, doses))} |",
        "|---|---|---|" + "---|" * len(doses),
    ]
    for size, comparison in zip(SIZES, comparisons, strict=True):
        before = replace(get_base(comparison), name="before")
        for setting in (before, *list_settings(comparison)):
            nll = comparison.find_loss(setting.runs[0], setting.model)
            shown = [show_extracted(setting, dose) for dose in doses]
            rows.append(
                f"| {count_parameters(size) / 1e6:.1f}M | {setting.name} "
                f"| {mean(list_values(filter(None, [nll]))):.2f} | {' | '.join(shown)} |"
            )
    num = list_settings(comparisons[0])[0].find("extraction", "verbatim", doses[0])[0].num_documents
    return "\n".join(
        [
            f"Of {num} documents in each bucket: extracted verbatim / near-verbatim, and the mean "
            "teacher-forced accuracy of the last 50 tokens, which is not extraction. 'before' is "
            "the model before training with the settings.",
            "",
            *rows,
        ]
    )


def show_extracted(setting: Setting, dose: int) -> str:
    """Format the documents of one number of repetitions of a setting with one seed."""
    verbatim, near, accuracy = (
        setting.find("extraction", metric, dose)
        for metric in ("verbatim", "near_verbatim", "token_accuracy")
    )
    return (
        f"{count_matched(verbatim)} / {count_matched(near)}, "
        f"{100 * mean(list_values(accuracy)):.0f} %"
    )


def count_parameters(size: Size, vocab_size: int = 2048) -> int:
    """Return the parameters of a Llama with tied embeddings and equal numbers of heads."""
    block = 4 * size.hidden**2 + 3 * size.hidden * size.intermediate + 2 * size.hidden
    return vocab_size * size.hidden + size.layers * block + size.hidden


if __name__ == "__main__":
    main()
