"""A finished run again, changed by what its audit found, and the two side by side."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from memguard.cli.auditing import find_current_report
from memguard.cli.comparing import compare_folders
from memguard.cli.forgetting import make_forgetting_run, tell_forgotten
from memguard.cli.launching import launch
from memguard.cli.run_folder import check_same_settings
from memguard.cli.training import train_run
from memguard.compare import Copies, Findings, find_early_end, find_fix, find_recited
from memguard.config import RunConfig, apply_settings, dump_yaml, load_yaml, validate
from memguard.config.mitigations import DeduplicateConfig
from memguard.data.deduplication import find_copies, find_deduplicate
from memguard.data.documents import document_text
from memguard.data.run_texts import read_texts
from memguard.errors import ConfigError, DataError, RecordError
from memguard.records import (
    AuditReport,
    Comparison,
    load_manifest,
    load_record,
    write_atomically,
)
from memguard.runtime import Console, default_cache_dir


def fix_run(
    folder: Path, out: Path | None, *, keep_weights: bool, num_processes: int
) -> tuple[Path, Comparison | AuditReport] | None:
    """Train a run once more with what its report asks for and audit it.

    The new run, NAME-fix, and its settings, NAME-fix.yaml, lie beside the old one. The same command
    goes on where it was interrupted.

    Args:
        folder: of a finished run.
        out: where the comparison goes; None: ``comparison`` beside the run.
        keep_weights: train its model on until it forgets, instead of training again. There is then
            nothing to compare: the new run's report has the model before beside it.
        num_processes: to train on, as for a run.

    Returns:
        The page, with the comparison or the new run's report; None where there was nothing to
        change, and nothing was done.

    Raises:
        ConfigError: the run's settings cannot be read or may have ended it early, or the new run is
            another one.
        DataError: the run's documents have changed since.
        RecordError: the run has no audit, or one that its settings did not ask for.
    """
    console = Console()
    document = load_yaml(folder / "config.yaml")
    config = validate(RunConfig, document.values, document)
    report = load_record(AuditReport, folder / "audit" / "report.json")
    if find_current_report(folder, config) is None:
        # The new run is audited as its settings say: what was found must be of that kind too.
        raise RecordError(
            f"the audit of '{folder}' is not the one that its config.yaml asks for; audit it again "
            f"as it says: memguard audit {folder}"
        )
    console.info(f"found: {report.verdict.sentence}")
    if report.verdict.level != "recites":
        console.info(_tell_nothing_to_do(report))
        return None
    if keep_weights:
        again = make_forgetting_run(folder, config, console)
        if again is None:
            return None
        _train(again, num_processes, console)
        audit = Path(again.output_dir) / again.name / "audit"
        after = load_record(AuditReport, audit / "report.json")
        console.info(tell_forgotten(after))
        return audit / "report.html", after
    if ends_early := find_early_end(config):
        raise ConfigError(
            f"'{folder}' may have been ended early by '{ends_early}': a change would give its "
            "documents other doses, and the two could not be compared. Train again without it, or "
            "take --keep-weights"
        )
    copies = _count_copies(folder, config, report, console)
    fix = find_fix(Findings(config=config, report=report, copies=copies))
    if fix is None:
        console.info(
            "no rule is left: goldfish drops every second label, and no epoch can be spared; "
            "--keep-weights makes the model forget"
        )
        return None
    fixed, beside = f"{config.name}-fix", folder.resolve().parent
    place = {"name": fixed, "output_dir": str(beside), "audit.enabled": True}
    values = apply_settings(document.values, {**place, **fix.settings})
    again = validate(RunConfig, values, document)
    console.info(f"changed: {fix.change} ({fix.why})")
    _train(again, num_processes, console)
    compared, comparison = compare_folders([str(folder), str(beside / fixed)], out)
    return compared / "comparison.html", comparison


def _train(config: RunConfig, num_processes: int, console: Console) -> None:
    """Write a run's settings beside its folder and train it.

    Raises:
        ConfigError: the folder holds another run; nothing is written then.
        SystemExit: it did not end well on its processes, which have said why.
    """
    folder = Path(config.output_dir) / config.name
    check_same_settings(config, folder)
    path = folder.with_name(f"{config.name}.yaml")
    write_atomically(path, dump_yaml(config).encode())
    console.info(f"trained: {folder}, by {path}")
    if num_processes == 1:
        train_run(config)
        return
    with _own_output():
        code = launch([sys.executable, "-m", "memguard", "train", str(path)], num_processes)
    if code:
        raise SystemExit(code)


@contextmanager
def _own_output() -> Iterator[None]:
    """Let what other processes print go to standard error: the output is this command's."""
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)


def _tell_nothing_to_do(report: AuditReport) -> str:
    if report.verdict.level == "not-above-control":
        return "nothing to fix: documents are extracted no more often than in the control"
    return (
        "nothing is changed: the report cannot tell whether this training is what made them known"
    )


def _count_copies(
    folder: Path, config: RunConfig, report: AuditReport, console: Console
) -> Copies | None:
    """Look for copies among what was trained; None where 'deduplicate' was on, or cannot be.

    Fewer documents would end at another step, and a sample of them would be another one.
    """
    if config.data.study is not None or find_deduplicate(config) is not None:
        return None
    if config.train.max_steps is not None or report.method.sample_size is not None:
        return None
    manifest = load_manifest(folder / "manifest.jsonl")
    trained = [entry for entry in manifest if entry.role == "trained"]
    try:
        texts = read_texts(config, folder, trained, cache_dir=default_cache_dir())
    except DataError as error:
        console.warn(f"no copies are looked for: {error}")
        return None
    similarity: float | Literal["exact"] = 0.8
    if find_spec("rensa") is None:
        console.info("copies: only the same texts are looked for; pip install 'memguard[dedup]'")
        similarity = "exact"
    is_copy = find_copies(
        [document_text(texts[entry.id]) for entry in trained],
        DeduplicateConfig(name="deduplicate", similarity=similarity),
    )
    copied = {entry.cluster for entry, copy in zip(trained, is_copy, strict=True) if copy}
    recited = {name for name, comes_back in find_recited(folder).items() if comes_back}
    return Copies(
        similarity=similarity,
        num_copies=int(is_copy.sum()),
        num_recited=len(recited),
        num_recited_with_copy=sum(e.id in recited and e.cluster in copied for e in trained),
    )
