"""`memguard compare`: a sweep trained and compared, finished runs compared, or one run fixed.

Each is imported when it is due: a wrong sweep is refused before torch is imported.
"""

from pathlib import Path

from memguard.assets import find_asset
from memguard.compare import load_sweep
from memguard.errors import RecordError
from memguard.records import AuditReport, Comparison, load_record, write_atomically
from memguard.report import render_comparison, render_report
from memguard.workflows.requests import CompareRequest, check_sweep


def compare(request: CompareRequest) -> tuple[Path, Comparison | AuditReport | None]:
    """Do what `memguard compare` was given.

    Args:
        request: the arguments; checked.

    Returns:
        The page, and what is on it. The run's folder and None where there was nothing to fix.
    """
    first, *others = request.given
    if not request.are_runs:
        sweep = load_sweep(find_asset("configs", first, setting="SWEEP"), others)
        check_sweep(sweep)
        from memguard.workflows.sweep import run_sweep

        return run_sweep(sweep, num_jobs=request.jobs or 1)
    if not request.fix:
        from memguard.workflows.compare_runs import compare_folders

        return compare_folders(request.given, request.out)
    from memguard.workflows.fix import fix_run

    fixed = fix_run(
        Path(first),
        request.out,
        keep_weights=request.keep_weights,
        num_processes=request.num_processes,
    )
    return fixed or (Path(first), None)


# Pages rendered again from the JSON beside them. No torch.


def render_folder(folder: Path) -> Path:
    """Render the page of a run, an audit folder or a sweep; return its path.

    Raises:
        RecordError: no report.json or comparison.json there, or one that cannot be read.
    """
    for record in (folder / "audit" / "report.json", folder / "report.json"):
        if record.is_file():
            text = render_report(load_record(AuditReport, record))
            break
    else:
        record = folder / "comparison.json"
        if not record.is_file():
            raise RecordError(
                f"'{folder}' holds neither a report.json (of a run or an audit) nor a "
                "comparison.json"
            )
        text = render_comparison(load_record(Comparison, record))
    page = record.with_suffix(".html")
    write_atomically(page, text.encode())
    return page
