"""`memguard compare`: trains and compares a sweep, compares finished runs, or fixes a run.

Modules are imported late, so that an invalid sweep is rejected before torch is imported.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import memguard
from memguard.assets import find_asset
from memguard.compare import load_sweep
from memguard.errors import ConfigError, RecordError
from memguard.records import Comparison, Tables, WatchedLine, write_atomically
from memguard.records.audit_files import REPORT
from memguard.records.comparison import COMPARISON, load_comparison
from memguard.report.html import render_comparison, render_training
from memguard.report.training_curve import build_page
from memguard.runtime.environment import MORE_MACHINES, check_num_processes
from memguard.train.log_summary import summarise_training
from memguard.train.metrics import EndMetrics, read_metrics
from memguard.workflows.auditing.pages import render_audit
from memguard.workflows.common.folder import RunFolder, check_outside_runs, locked
from memguard.workflows.training.checks import check_run

_SMALLER_SWEEPS = "split the settings into sweeps on several machines"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """The arguments of `memguard compare`."""

    given: tuple[str, ...]
    """A sweep and changes to its settings, or the folders of finished runs."""
    out: Path | None
    jobs: int | None
    fix: bool
    num_processes: int | None
    """Value of `--nproc`; None if left out."""
    utility: str | None = None
    """Value of `--utility`; None if left out."""

    @property
    def are_runs(self) -> bool:
        """Whether the first argument is the folder of a run instead of a sweep."""
        return (Path(self.given[0]) / "config.yaml").is_file()

    def check(self) -> None:
        """Reject arguments that contradict each other."""
        if (problem := next(self._list_problems(), None)) is not None:
            raise ConfigError(problem)

    def _list_problems(self) -> Iterator[str]:
        if (self.num_processes or 1) > 1 and not self.fix:
            yield "--nproc needs --fix; a sweep trains several runs with --jobs"
        if not self.are_runs:
            if self.fix:
                yield "--fix needs a finished RUN; a sweep names its own settings"
            if self.out is not None:
                yield "--out needs RUNs; a sweep has 'output_dir' in its YAML"
            if self.utility is not None:
                yield "--utility needs RUNs; a sweep has 'utility' in its YAML"
            check_num_processes(self.jobs or 1, option="--jobs", way_out=_SMALLER_SWEEPS)
            return
        if self.out is not None:
            check_outside_runs(self.out, "--out")
        check_num_processes(self.num_processes or 1, option="--nproc", way_out=MORE_MACHINES)
        if self.jobs is not None:
            yield "--jobs needs a sweep; finished RUNs are not trained"
        if self.fix and len(self.given) > 1:
            yield f"--fix takes one RUN; got {len(self.given)}"
        if self.fix and self.utility is not None:
            yield "--utility does not go with --fix; compare the two RUNs with it afterwards"


def compare(request: CompareRequest) -> tuple[Path, Comparison | None]:
    """Return the page and its content; the run's folder and None if there was nothing to fix."""
    first, *others = request.given
    if not request.are_runs:
        sweep = load_sweep(find_asset("configs", first, setting="SWEEP"), others)
        for run in sweep.in_order:
            # With 'pretrain' the other runs start from a model that the sweep trains first.
            has_model = run is sweep.pretrain or not sweep.pretrain
            check_run(run.config, writes=False, has_model=has_model)
        from memguard.workflows.sweep import run_sweep

        return run_sweep(sweep, num_jobs=request.jobs or 1)
    if not request.fix:
        from memguard.workflows.compare_runs import compare_folders

        return compare_folders(request.given, request.out, utility=request.utility)
    from memguard.workflows.fix import fix_run

    fixed = fix_run(Path(first), request.out, num_processes=request.num_processes)
    return fixed or (Path(first), None)


# Renders pages again from the JSON in the same folder. Does not import torch.


def render_folder(folder: Path) -> Path:
    """Render the page of a run, an audit folder or a sweep; return its path."""
    for audit in (folder / "audit", folder):
        if (audit / REPORT).is_file():
            run = audit.resolve().parent
            is_own = audit.name == "audit" and (run / "config.yaml").is_file()
            with locked(run if is_own else audit):
                return render_audit(audit)
    record = folder / COMPARISON
    if not record.is_file():
        if (page := _render_training(folder)) is not None:
            return page
        raise RecordError(
            f"'{folder}' has neither a report.json (of a run or an audit), nor a comparison.json, "
            "nor a metrics.jsonl with a step"
        )
    page = record.with_suffix(".html")
    write_atomically(page, render_comparison(load_comparison(record), folder).encode())
    return page


def _render_training(folder: Path) -> Path | None:
    """Render the page of a run that was not audited; None if the folder has no steps of a run.

    The run may be trained by another process meanwhile: nothing is locked.
    """
    lines = list(read_metrics(folder / "metrics.jsonl"))
    if not lines or not (folder / "config.yaml").is_file():
        return None
    config = RunFolder(folder).read_config()
    training = summarise_training(lines, config)
    if training is None:
        return None
    rows = tuple(row for line in lines if isinstance(line, WatchedLine) for row in line.results)
    page = build_page(
        training,
        Tables(results=rows),
        name=config.name,
        version=memguard.__version__,
        has_ended=any(isinstance(line, EndMetrics) for line in lines),
    )
    path = folder / "training.html"
    write_atomically(path, render_training(page).encode())
    return path
