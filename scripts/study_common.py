"""What the studies share: running a sweep, the words of a table's cells, writing into a page."""

import math
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from memguard.records import Comparison, ResultRow
from memguard.records.comparison import load_comparison

ROOT = Path(__file__).resolve().parents[1]
STUDIES = ROOT / "eval" / "studies"
QUICK_PRETRAIN = (
    "pretrain.model.scratch.config.hidden_size=32",
    "pretrain.model.scratch.config.intermediate_size=48",
    "pretrain.model.scratch.config.num_hidden_layers=1",
    "pretrain.model.scratch.vocab_size=400",
    "pretrain.data.train=['docstrings:topics']",
    "pretrain.train.max_steps=4",
)
"""Settings of a base model that shows in seconds whether a study runs."""
BEGIN, END = "<!-- tables: scripts/study.py -->", "<!-- end of tables -->"


def run_compare(path: Path, folder: Path, *, jobs: int, overrides: Sequence[str]) -> Comparison:
    """Train and compare the runs of one sweep; finished ones are not repeated.

    Args:
        path: the sweep's YAML.
        folder: the sweep's folder, in which it writes its comparison.
        jobs: runs trained at a time.
        overrides: key=value for the sweep.
    """
    command = [sys.executable, "-m", "memguard", "compare", str(path)]
    # Without --jobs, runs are sequential, as a GPU needs them.
    parallel = ["--jobs", str(jobs)] if jobs > 1 else []
    ended = subprocess.run([*command, *parallel, *overrides], check=False, cwd=ROOT)
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return load_comparison(ROOT / folder / "comparison.json")


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def show_dose(count: int) -> str:
    """Format how often a bucket is trained."""
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def show_change(change: ResultRow | None) -> str:
    """Format a change of the held-out loss and its interval in percent."""
    if change is None or change.value is None:
        return "reference"
    text, ci = f"{show_percent(change.value)} %", change.ci
    return text if ci is None else f"{text} [{', '.join(map(show_percent, ci))}]"


def show_percent(share: float) -> str:
    """Format a change with its sign; adding 0.0 turns a rounded -0.0 into 0.0."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def show_share(risk: ResultRow | None) -> str:
    """Format a share of documents and its interval in percent."""
    if risk is None or risk.value is None:
        return "not measured"
    ci = risk.ci
    text = f"{100 * risk.value:.0f} %"
    return text if ci is None else f"{text} [{100 * ci[0]:.0f}, {100 * ci[1]:.0f}]"


def show_queries(log10_queries: Sequence[float]) -> str:
    """Format the mean over seeds of a median attack cost, which may be infinite."""
    if not log10_queries:
        return "not measured"
    power = mean(log10_queries)
    if power == math.inf:
        return "never"
    return "1" if power == 0 else f"10^{power:.0f}"


def replace_tables(page: Path, tables: str, *, part: str | None = None) -> None:
    """Write the tables between the page's marks, or between those of a part of the study."""
    begin = BEGIN if part is None else BEGIN.replace(" -->", f" --part {part} -->")
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{page} needs the marks '{begin}' and '{END}'")
    page.write_text(f"{before}{begin}\n\n{tables}\n\n{END}{after}", encoding="utf-8")


def count_matched(rows: Iterable[ResultRow]) -> int:
    """Return the number of documents that match, of all rows."""
    return sum(row.num_matched or 0 for row in rows)


def count_documents(rows: Iterable[ResultRow]) -> int:
    """Return the number of documents of all rows."""
    return sum(row.num_documents for row in rows)
