"""A finished run again, changed by what its audit found, and the two side by side."""

from pathlib import Path

from memguard.cli.comparing import compare_folders
from memguard.cli.training import train_run
from memguard.compare import find_fix
from memguard.config import RunConfig, apply_settings, dump_yaml, load_yaml, validate
from memguard.errors import RecordError
from memguard.records import AuditReport, Comparison, load_record, write_atomically
from memguard.runtime import Console


def fix_run(folder: Path, out: Path | None) -> tuple[Path, Comparison] | None:
    """Train a run once more with what its report asks for, audit it, and compare the two.

    The new run, NAME-fix, and its settings, NAME-fix.yaml, lie beside the old one. The same command
    goes on where it was interrupted.

    Args:
        folder: of a finished run.
        out: where the comparison goes; None: ``comparison`` beside the run.

    Returns:
        The comparison and its folder; None where there was nothing to change, and nothing was done.

    Raises:
        ConfigError: the run's settings cannot be read, or NAME-fix is another run.
        RecordError: the run has no complete audit.
    """
    console = Console()
    document = load_yaml(folder / "config.yaml")
    config = validate(RunConfig, document.values, document)
    report = load_record(AuditReport, folder / "audit" / "report.json")
    if report.status != "complete":
        raise RecordError(
            f"the audit of '{folder}' is partial; audit it again: memguard audit {folder}"
        )
    console.info(f"found: {report.verdict.sentence}")
    fix = find_fix(config, report)
    if fix is None:
        console.info(_tell_nothing_to_do(report))
        return None
    fixed, beside = f"{config.name}-fix", folder.resolve().parent
    place = {"name": fixed, "output_dir": str(beside)}
    values = apply_settings(document.values, {**place, **fix.settings})
    again = validate(RunConfig, values, document)
    path = beside / f"{fixed}.yaml"
    write_atomically(path, dump_yaml(again).encode())
    console.info(f"changed: {fix.change} ({fix.why})")
    console.info(f"trained again: {beside / fixed}, by {path}")
    train_run(again)
    return compare_folders([str(folder), str(beside / fixed)], out)


def _tell_nothing_to_do(report: AuditReport) -> str:
    if report.verdict.level == "recites":
        return "no rule is left: goldfish drops every second label, and no epoch can be spared"
    if report.verdict.level == "not-above-control":
        return "nothing to fix: documents come back no more often than in the control"
    return (
        "nothing is changed: the report cannot tell whether this training is what made them known"
    )
