"""Compares finished runs: writes comparison.json and .parquet, its page and chart."""

from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from memguard.compare import FinishedRun, compare_runs, describe_compiled, list_comparison_rows
from memguard.errors import ConfigError, escape_name
from memguard.pages import formatting as fmt
from memguard.records import Comparison, write_atomically
from memguard.records.comparison import (
    COMPARISON,
    COMPARISON_RESULTS,
    HELDOUT_LOSS,
    Utility,
)
from memguard.records.results import save_results
from memguard.records.sealed import save_sealed, sum_file
from memguard.records.texts import format_percent
from memguard.report.comparison_picture import render_comparison_chart
from memguard.report.html import render_comparison
from memguard.runtime import Console
from memguard.workflows.common.checks import make_command
from memguard.workflows.common.folder import FREE_IN_TRAIN, RunFolder

_NO_SETTING = ("name", "output_dir", "seed", "mitigations", "parallel", "audit", "track")
"""Parts of a run's configuration that do not distinguish settings: name, computation, audit."""


def compare_folders(
    folders: Sequence[str], out: Path | None, *, utility: str | None = None
) -> tuple[Path, Comparison]:
    """Compare finished runs; the others are tested against the first.

    ``out`` is by default ``comparison`` next to it, ``utility`` the held-out loss.
    """
    for folder in folders:
        if not (Path(folder) / "config.yaml").is_file():
            raise ConfigError(
                f"'{folder}' is not the folder of a run (no config.yaml); 'memguard compare' takes "
                "a sweep's YAML, or the folders of finished runs"
            )
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ConfigError("a run is given twice; name each once")
    console = Console()
    runs = list(_name_settings(folders))
    console.info("compare: testing the settings against the first, document by document")
    comparison = compare_runs(
        runs,
        name=", ".join(run.name for run in runs[:3]),
        command=make_command(),
        utility=utility or HELDOUT_LOSS,
    )
    out = Path(folders[0]).resolve().parent / "comparison" if out is None else out
    return publish(comparison, runs, out, console)


def publish(
    comparison: Comparison, runs: Sequence[FinishedRun], folder: Path, console: Console
) -> tuple[Path, Comparison]:
    """Write all results, the record with their hash, page and chart; print the summary table."""
    console.info("compare: drawing the page and its charts")
    save_results(list_comparison_rows(comparison, runs), folder / COMPARISON_RESULTS)
    results = sum_file(folder / COMPARISON_RESULTS)
    comparison = comparison.model_copy(update={"results": results})
    save_sealed(comparison, folder / COMPARISON)
    page = folder / "comparison.html"
    write_atomically(page, render_comparison(comparison, folder).encode())
    write_atomically(page.with_suffix(".svg"), render_comparison_chart(comparison).encode())
    for line in _headline(comparison):
        console.info(line)
    for sentence in comparison.tasks_left_out:
        console.warn(sentence)
    if (compiled := describe_compiled(comparison.runs)) is not None:
        console.warn(compiled)
    console.info(f"comparison: {page}")
    return page, comparison


def _name_settings(folders: Sequence[str]) -> Iterator[FinishedRun]:
    """Name each run by its folder, or like an earlier run that differs only in its seed."""
    known: list[tuple[str, Mapping[str, Any]]] = []
    first: Mapping[str, Any] = {}
    for number, folder in enumerate(folders):
        config = RunFolder(Path(folder)).read_config()
        values = config.model_dump(mode="json", exclude={"train": set(FREE_IN_TRAIN)})
        settings = _flatten({key: v for key, v in values.items() if key not in _NO_SETTING})
        first = settings if number == 0 else first
        decided = {**settings, "mitigations": config.mitigations}
        name = next((name for name, other in known if other == decided), None)
        if name is None:
            name = _choose_name(Path(folder).resolve(), {name for name, _ in known})
            known.append((name, decided))
        yield FinishedRun(
            name=name,
            seed=config.seed,
            folder=Path(folder),
            overrides={
                key: value for key, value in settings.items() if first.get(key, key) != value
            },
        )


def _choose_name(folder: Path, taken: Set[str]) -> str:
    """Return the folder's name, with parent folders if another setting has the same name."""
    parts = folder.parts[1:]
    names = (escape_name("/".join(parts[-count:])) for count in range(1, len(parts) + 1))
    return next((name for name in names if name not in taken), str(folder))


def _flatten(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return ``{"optim.lr": ...}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def _headline(comparison: Comparison) -> list[str]:
    """Return the terminal's summary: the sentences, and one line per setting over its seeds."""
    utility = comparison.utility
    heading = utility.heading if utility.is_task else utility.spoken
    rows: list[tuple[str, ...]] = [("setting", "text", "membership", "came out", "risk", heading)]
    for point in comparison.front:
        states = (badge.state for badge in point.badges)
        risk = fmt.percent(point.risk).replace(fmt.NBSP, " ")
        value = _show(point.utility, utility)
        rows.append((point.name, *states, f"{point.num_findings:,}", risk, value))
    base = comparison.find_mean(utility, comparison.runs[0].setting, "base")
    if base is not None:
        rows.append(("(base model)", "", "", "", "", _show(base, utility)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = ("<", "<", "<", ">", ">", ">")
    lines = [
        "  ".join(
            f"{cell:{align}{width}}" for cell, align, width in zip(row, aligns, widths, strict=True)
        )
        for row in rows
    ]
    return [*map(": ".join, comparison.recommendation.list_sentences()), *lines]


def _show(value: float, utility: Utility) -> str:
    return format_percent(value) if utility.is_share else f"{value:.3f}"
