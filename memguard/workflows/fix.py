"""Trains a finished run again, changed according to its audit, and compares the two."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from memguard.compare import Copies, Findings, find_early_end, find_fix
from memguard.config import RunConfig, apply_settings, dump_yaml, load_yaml, validate
from memguard.config.mitigations import DeduplicateConfig, find_mitigation
from memguard.data.documents import document_text
from memguard.data.duplicates import find_copies
from memguard.data.given import read_texts
from memguard.errors import ConfigError, DataError, RecordError, advise_install
from memguard.hf.checkpoint import load_tokenizer
from memguard.records import (
    AuditReport,
    Comparison,
    Reason,
    Verdict,
    load_manifest,
    write_atomically,
)
from memguard.records.audit_files import load_audit_report
from memguard.records.documents import DocumentTable
from memguard.records.run_files import find_weights_folder
from memguard.runtime import Console, default_cache_dir
from memguard.workflows.auditing.audit import is_current
from memguard.workflows.common.folder import RunFolder, check_same_settings
from memguard.workflows.common.launch import launch
from memguard.workflows.compare_runs import compare_folders
from memguard.workflows.training.checks import check_run
from memguard.workflows.training.train import train_run


def fix_run(
    folder: Path, out: Path | None, *, num_processes: int | None
) -> tuple[Path, Comparison] | None:
    """Train a run again with the change that its report suggests, and audit it.

    The new run, NAME-fix, and its settings, NAME-fix.yaml, are written next to the old run. The
    same command resumes after an interruption. ``out`` is the comparison's folder; None is
    ``comparison`` next to the run. Returns None if there was nothing to change.
    """
    console = Console()
    RunFolder(folder).require_trained()
    document = load_yaml(folder / "config.yaml")
    config = validate(RunConfig, document.values, document)
    report = load_audit_report(folder / "audit")
    if not is_current(report, folder, config):
        # The new run is audited with its own settings: the earlier audit must match them.
        raise RecordError(
            f"the audit of '{folder}' does not match its config.yaml; audit it again with these "
            f"settings: memguard audit {folder}"
        )
    console.info(f"verdict: {report.verdict.describe()}")
    console.info(f"findings: {report.describe_findings()}")
    if not report.verdict.may_be_fixed:
        console.info(_explain_no_fix(report.verdict))
        return None
    if ends_early := find_early_end(config):
        raise ConfigError(
            f"'{folder}' may have been ended early by '{ends_early}': a change would alter the "
            "repetitions of its documents, and the runs could not be compared. Train again without "
            "it"
        )
    copies = _count_copies(folder, config, report, console)
    fix = find_fix(Findings(config=config, report=report, copies=copies))
    if fix is None:
        console.info(
            "no further change is possible: goldfish already drops every second label, and the "
            "number of epochs cannot be reduced; 'data.forget' with 'npo' makes the model forget"
        )
        return None
    fixed, beside = f"{config.name}-fix", folder.resolve().parent
    place = {"name": fixed, "output_dir": str(beside), "audit.enabled": True}
    values = apply_settings(document.values, {**place, **fix.settings})
    again = validate(RunConfig, values, document)
    console.info(f"changed: {fix.change} ({fix.why})")
    _train(again, num_processes, console)
    return compare_folders([str(folder), str(beside / fixed)], out)


def _train(config: RunConfig, num_processes: int | None, console: Console) -> None:
    """Write a run's settings next to its folder and train it."""
    folder = Path(config.output_dir) / config.name
    check_same_settings(config, folder, console)
    run = check_run(config, nproc=num_processes)
    path = folder.with_name(f"{config.name}.yaml")
    write_atomically(path, dump_yaml(config).encode())
    console.info(f"trained: {folder}, by {path}")
    for note in run.notes:
        console.info(note)
    if run.num_to_start == 1:
        train_run(run)
        return
    # Standard output is for the result of this command.
    command = [sys.executable, "-m", "memguard", "train", str(path)]
    code = launch(command, run.num_to_start, stdout=2)
    if code:
        raise SystemExit(code)


_NO_FIX: Mapping[Reason, str] = {
    "base-too": "the base model produces the same documents",
    "control-too": "unseen documents are extracted too, so other settings may not lower the rate",
    "forgotten": "only documents to be forgotten are still extracted; train with 'npo' for longer",
    "canaries-too": "references that were never trained are extracted too",
}


def _explain_no_fix(verdict: Verdict) -> str:
    """Return why no other settings are tried."""
    if verdict.level == "none-found":
        return "nothing to fix: no training document was extracted"
    if verdict.level == "inconclusive" or verdict.reason is None:
        return "nothing to fix: no training document was extracted; the audit shows no more"
    return f"nothing is changed: {_NO_FIX[verdict.reason]}"


def _count_copies(
    folder: Path, config: RunConfig, report: AuditReport, console: Console
) -> Copies | None:
    """Count copies among the trained documents; None if 'deduplicate' was on or cannot be used.

    With 'train.max_steps' fewer documents would change the number of epochs, and a sampled audit
    would draw another sample.
    """
    if config.data.study is not None or find_mitigation(config.mitigations, DeduplicateConfig):
        return None
    if config.train.max_steps is not None or report.method.sample_size is not None:
        return None
    manifest = load_manifest(folder / "manifest.jsonl")
    trained = [entry for entry in manifest if entry.role == "trained"]
    try:
        texts = read_texts(
            config.data,
            folder,
            trained,
            cache_dir=default_cache_dir(),
            has_chat_template=lambda: (
                getattr(load_tokenizer(str(find_weights_folder(folder))), "chat_template", None)
                is not None
            ),
        )
    except (ConfigError, DataError) as error:
        console.warn(f"copies are not searched for: {error}")
        return None
    similarity: float | Literal["exact"] = 0.8
    if find_spec("rensa") is None:
        console.info(
            "copies: only identical texts are searched for; for near-copies: "
            f"{advise_install('rensa')}"
        )
        similarity = "exact"
    is_copy = find_copies(
        [document_text(texts[entry.id]) for entry in trained],
        DeduplicateConfig(name="deduplicate", similarity=similarity),
    )
    copied = {entry.cluster for entry, copy in zip(trained, is_copy, strict=True) if copy}
    table = DocumentTable.read(folder / "audit")
    extracted = {*table.id_N[table.came_out_N].tolist()}
    return Copies(
        similarity=similarity,
        num_copies=int(is_copy.sum()),
        num_extracted=len(extracted),
        num_extracted_with_copy=sum(e.id in extracted and e.cluster in copied for e in trained),
    )
