"""A sweep: every run that is not finished, then the comparison and its page."""

from pathlib import Path

from memguard.cli.children import train_runs
from memguard.cli.comparing import make_command, publish
from memguard.compare import Sweep, build_comparison, describe_sweep, is_finished
from memguard.errors import ConfigError
from memguard.records import Comparison
from memguard.runtime import Console, detect_runtime


def run_sweep(sweep: Sweep, *, num_jobs: int) -> tuple[Path, Comparison]:
    """Train and audit what is not finished, then compare.

    Args:
        sweep: what to train.
        num_jobs: runs at a time; 'pretrain' is always alone.

    Raises:
        ConfigError: several jobs where there is a GPU.
        ChildFailed: a run did not end well.
        Interrupted: a signal stopped it; run the same command again.
        RecordError: the runs cannot be compared.
    """
    if num_jobs > 1 and detect_runtime().device.type == "cuda":
        raise ConfigError(
            f"'--jobs' must be 1 where there is a GPU, which all runs would share; got {num_jobs}. "
            "Leave it out, or train on the CPU: CUDA_VISIBLE_DEVICES= memguard compare ..."
        )
    console = Console()
    for line in describe_sweep(sweep):
        console.info(line)
    for stage in (sweep.in_order[: -len(sweep.runs)], sweep.runs):
        left = [run for run in stage if not is_finished(run)]
        train_runs(sweep, left, num_jobs=num_jobs, console=console)
    comparison = build_comparison(sweep, command=make_command())
    publish(comparison, sweep.folder, console)
    return sweep.folder, comparison
