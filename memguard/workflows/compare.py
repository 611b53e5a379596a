"""`memguard compare`: trains and compares a sweep, compares finished runs, or fixes a run.

Modules are imported late, so that an invalid sweep is rejected before torch is imported.
"""

from pathlib import Path

from memguard.assets import find_asset
from memguard.compare import load_sweep
from memguard.errors import RecordError
from memguard.records import Comparison, write_atomically
from memguard.records.audit_files import REPORT
from memguard.records.comparison import COMPARISON, load_comparison
from memguard.report import render_comparison
from memguard.workflows.auditing.pages import render_audit
from memguard.workflows.common.folder import locked
from memguard.workflows.common.requests import CompareRequest, check_sweep


def compare(request: CompareRequest) -> tuple[Path, Comparison | None]:
    """Run `memguard compare`.

    Args:
        request: the checked arguments.

    Returns:
        The page and its content; the run's folder and None if there was nothing to fix.
    """
    first, *others = request.given
    if not request.are_runs:
        sweep = load_sweep(find_asset("configs", first, setting="SWEEP"), others)
        check_sweep(sweep)
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
    """Render the page of a run, an audit folder or a sweep; return its path.

    Raises:
        ConfigError: another process is using the folder.
        RecordError: report.json or comparison.json is missing or damaged.
    """
    for audit in (folder / "audit", folder):
        if (audit / REPORT).is_file():
            run = audit.resolve().parent
            is_own = audit.name == "audit" and (run / "config.yaml").is_file()
            with locked(run if is_own else audit):
                return render_audit(audit)
    record = folder / COMPARISON
    if not record.is_file():
        raise RecordError(
            f"'{folder}' has neither a report.json (of a run or an audit) nor a comparison.json"
        )
    page = record.with_suffix(".html")
    write_atomically(page, render_comparison(load_comparison(record), folder).encode())
    return page
