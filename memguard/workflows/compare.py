"""`memguard compare`: a sweep trained and compared, finished runs compared, or one run fixed.

Each is imported when it is due: a wrong sweep is refused before torch is imported.
"""

from pathlib import Path

from memguard.assets import find_asset
from memguard.compare import load_sweep
from memguard.records import AuditReport, Comparison
from memguard.workflows.given_paths import check_sweep
from memguard.workflows.requests import CompareRequest


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
