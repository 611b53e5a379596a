"""Run a study of eval/studies and write its tables into its page.

    python scripts/study.py mitigations | goldfish_k | risk_budget | catastrophic [--jobs 2]

A study is a sweep, eval/studies/NAME.yaml, or several sweeps that differ in the model's size.
Finished runs are not repeated. The tables are written between the marks of eval/studies/NAME.md;
the text around them is written by hand and describes the results at the time of writing.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STUDIES = ROOT / "eval" / "studies"
BEGIN, END = "<!-- tables: scripts/study.py -->", "<!-- end of tables -->"


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


def main() -> None:
    """Run the study given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study", choices=sorted(path.stem for path in STUDIES.glob("*.yaml")))
    parser.add_argument("--jobs", type=int, default=1, help="runs trained at a time")
    parser.add_argument("--output-dir", default="runs/studies", help="where the runs go")
    parser.add_argument("--another-seed", type=int, help="also recommend with this seed added")
    parser.add_argument("override", nargs="*", help="key=value for the sweep")
    options = parser.parse_intermixed_args()
    if options.another_seed is not None and options.study == "catastrophic":
        parser.error("--another-seed needs a recommendation, which catastrophic does not have")
    started = time.perf_counter()
    sizes = SIZES if options.study == "catastrophic" else (None,)
    comparisons = [run_sweep(options, size) for size in sizes]
    write = write_sizes if options.study == "catastrophic" else write_settings
    tables = write(comparisons)
    if options.another_seed is not None:
        tables += "\n\n" + write_another_seed(options, comparisons[0])
    page = STUDIES / f"{options.study}.md"
    replace_tables(page, tables)
    print(tables)
    minutes = (time.perf_counter() - started) / 60
    print(f"{page}: {minutes:.1f} minutes, finished runs not counted")


def run_sweep(
    options: argparse.Namespace, size: Size | None, seeds: Sequence[int] = ()
) -> dict[str, Any]:
    """Train and compare one sweep; ``seeds``, if given, replace its own."""
    overrides = [f"output_dir={options.output_dir}", *options.override]
    if seeds:
        overrides.append(f"seeds={list(seeds)}")
    if size is not None:
        overrides += size.list_overrides(options.study)
    command = [sys.executable, "-m", "memguard", "compare", f"eval/studies/{options.study}.yaml"]
    # Without --jobs, runs are sequential, as a GPU needs them.
    jobs = ["--jobs", str(options.jobs)] if options.jobs > 1 else []
    ended = subprocess.run([*command, *jobs, *overrides], check=False, cwd=ROOT)
    if ended.returncode:
        raise SystemExit(ended.returncode)
    name = options.study if size is None else f"{options.study}-{size.hidden}"
    path = ROOT / options.output_dir / name / "comparison.json"
    comparison: dict[str, Any] = json.loads(path.read_text())
    return comparison


def write_settings(comparisons: Sequence[dict[str, Any]]) -> str:
    """Format one row per setting over its seeds, then the recommendation."""
    (comparison,) = comparisons
    dose = max((int(key) for key in comparison["settings"][0]["extraction"]), default=0)
    rows = [
        "| setting | held-out NLL | change | verbatim | near-verbatim | within 10^6 queries "
        "| teacher-forced: 90 % right | teacher-forced accuracy | median attack cost "
        "| labels trained | training time | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for point in comparison["front"]:
        runs = [run for run in comparison["settings"] if run["name"] == point["name"]]
        cells = [run["extraction"][str(dose)] for run in runs]
        risks = [point["risks"].get(name) for name in ("verbatim", "near_verbatim", "attack_cost")]
        costs = [cell["attack_cost"]["median"] for cell in cells if cell["attack_cost"]]
        rows.append(
            " | ".join(
                (
                    f"| {point['name']}",
                    f"{point['utility']:.3f}",
                    show_change(point["utility_change"]),
                    *(show_share(risk) for risk in risks),
                    f"{100 * mean([cell['teacher_forced_90']['rate'] for cell in cells]):.0f} %",
                    f"{100 * mean([cell['mean_token_accuracy'] for cell in cells]):.0f} %",
                    show_queries(costs),
                    f"{mean([run['cost']['num_supervised_tokens'] for run in runs]):,.0f}",
                    f"{mean([run['cost']['train_s'] for run in runs]):.0f} s",
                    "dominated |" if point["is_dominated"] else "**front** |",
                )
            )
        )
    recommendation = comparison["recommendation"]
    seeds = sorted({run["seed"] for run in comparison["settings"]})
    num = comparison["front"][0]["num_documents"]
    return "\n".join(
        [
            f"Documents trained {dose} times, {num} of each setting over seeds "
            f"{', '.join(map(str, seeds))}; brackets are 95 % "
            "intervals, for the change of the loss over per-seed differences. Teacher-forced "
            "columns measure token predictions given the true text, not extraction.",
            "",
            *rows,
            "",
            f"**{recommendation['sentence']}**",
            "",
            f"Rule: {recommendation['rule']}",
        ]
    )


def write_another_seed(options: argparse.Namespace, before: dict[str, Any]) -> str:
    """Format the recommendation with one more seed added to those of ``before``."""
    seeds = sorted({run["seed"] for run in before["settings"]})
    if options.another_seed in seeds:
        raise SystemExit(f"seed {options.another_seed} is one of the study's own: {seeds}")
    after = run_sweep(options, None, [*seeds, options.another_seed])
    sentence = after["recommendation"]["sentence"]
    return f"With seed {options.another_seed} added: {sentence}"


def write_sizes(comparisons: Sequence[dict[str, Any]]) -> str:
    """Format one row for each size and setting, one column for each number of repetitions."""
    doses = sorted(map(int, comparisons[0]["settings"][0]["extraction"]))
    rows = [
        f"| parameters | setting | held-out NLL | {' | '.join(map(show_dose, doses))} |",
        "|---|---|---|" + "---|" * len(doses),
    ]
    for size, comparison in zip(SIZES, comparisons, strict=True):
        settings = comparison["settings"]
        base_nll = settings[0]["utility"]["base_heldout_nll"]
        models = [("before", base_nll, comparison["base_extraction"])]
        models += [
            (run["name"], run["utility"]["heldout_nll"], run["extraction"]) for run in settings
        ]
        for name, nll, extraction in models:
            shown = [
                f"{cell['num_matched']} / {cell['near_verbatim']['num_matched']}, "
                f"{100 * cell['mean_token_accuracy']:.0f} %"
                for cell in (extraction[str(dose)] for dose in doses)
            ]
            rows.append(
                f"| {count_parameters(size) / 1e6:.1f}M | {name} | {nll:.2f} | "
                + " | ".join(shown)
                + " |"
            )
    num = comparisons[0]["settings"][0]["extraction"][str(doses[0])]["num_documents"]
    return "\n".join(
        [
            f"Of {num} documents in each bucket: extracted verbatim / near-verbatim, and the mean "
            "teacher-forced accuracy of the last 50 tokens, which is not extraction. 'before' is "
            "the model before training with the settings.",
            "",
            *rows,
        ]
    )


def show_dose(count: int) -> str:
    """Format how often a bucket is trained."""
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def count_parameters(size: Size, vocab_size: int = 2048) -> int:
    """Return the parameters of a Llama with tied embeddings and equal numbers of heads."""
    block = 4 * size.hidden**2 + 3 * size.hidden * size.intermediate + 2 * size.hidden
    return vocab_size * size.hidden + size.layers * block + size.hidden


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def show_change(change: dict[str, Any] | None) -> str:
    """Format a change of the held-out loss and its interval in percent."""
    if change is None:
        return "reference"
    text, ci = f"{show_percent(change['value'])} %", change["ci"]
    return text if ci is None else f"{text} [{', '.join(map(show_percent, ci))}]"


def show_percent(share: float) -> str:
    """Format a change with its sign; adding 0.0 turns a rounded -0.0 into 0.0."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def show_share(risk: dict[str, Any] | None) -> str:
    """Format a share of documents and its interval in percent."""
    if risk is None:
        return "not measured"
    ci = risk["ci"]
    text = f"{100 * risk['value']:.0f} %"
    return text if ci is None else f"{text} [{100 * ci[0]:.0f}, {100 * ci[1]:.0f}]"


def show_queries(log10_queries: Sequence[float | None]) -> str:
    """Format the mean over seeds of a median attack cost; None is an infinite median."""
    finite = [power for power in log10_queries if power is not None]
    if not log10_queries:
        return "not measured"
    if len(finite) < len(log10_queries):
        return "never"
    power = mean(finite)
    return "1" if power == 0 else f"10^{power:.0f}"


def replace_tables(page: Path, tables: str) -> None:
    """Write the tables between the page's marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{page} needs the marks '{BEGIN}' and '{END}'")
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
