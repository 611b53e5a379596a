"""The report of an audit from what was measured: its tables, its method, and private excerpts."""

from collections.abc import Callable, Sequence
from typing import Any

import memguard
from memguard.audit.benchmarks.rows import tabulate_utility
from memguard.audit.findings import FindingList
from memguard.audit.plan import AuditPlan
from memguard.audit.summary import tabulate_training
from memguard.config import AuditConfig
from memguard.records import (
    PRIVATE_MODE,
    AuditReport,
    AuditResults,
    Banner,
    LoadAs,
    Method,
    ModelIdentity,
    TrainingSummary,
    format_now,
    merge_tables,
    write_atomically,
)
from memguard.runtime import Runtime, describe_environment
from memguard.runtime.environment import hash_code
from memguard.workflows.auditing.target import Subject
from memguard.workflows.auditing.utility import SEED, UtilityRun, describe_tasks


def add_tables(
    subject: Subject, summary: AuditResults, load_as: LoadAs, utility: UtilityRun
) -> AuditResults:
    """Return the results with the rows of the training and, after the probes', of the tasks."""
    training = tabulate_training(_choose_training(subject, load_as), subject.watched, load_as)
    tasks = tabulate_utility(utility.list_results(), seed=SEED)
    run = utility.describe_run()
    return summary.model_copy(
        update={
            "tables": merge_tables([summary.tables, training, tasks]),
            "probe_runs": [*summary.probe_runs, *([] if run is None else [run])],
        }
    )


def _choose_training(subject: Subject, load_as: LoadAs) -> TrainingSummary | None:
    """Return the training; its loss is left out where it is not that of the loaded weights."""
    if subject.training is None or load_as == "stored":
        return subject.training
    return subject.training.model_copy(update={"heldout_nll": None})


def build_report(
    subject: Subject,
    summary: AuditResults,
    model: ModelIdentity,
    method: Method,
    banners: Sequence[Banner],
    runtime: Runtime,
) -> AuditReport:
    """Return the report; ``banners`` are shown before those of the results."""
    parts: dict[str, Any] = dict(summary)
    notes = [Banner(level="note", text=text) for text in subject.notes]
    parts["banners"] = [*banners, *summary.banners, *notes]
    return AuditReport(
        **parts,
        tool_version=memguard.__version__,
        code_sha256=hash_code(),
        created=format_now(),
        run=subject.run,
        model=model,
        data=subject.data,
        training=_choose_training(subject, model.load_as),
        method=method,
        environment=describe_environment(runtime.device, runtime.world_size),
    )


def describe_method(plan: AuditPlan, settings: AuditConfig, command: str, wall_s: float) -> Method:
    """Return the settings of an audit for its report."""
    suite, probe = plan.suite, plan.suite.extraction
    is_text = {window.document.format == "text" for window in plan.selection.windows}
    return Method(
        suite=suite.name,
        suite_version=suite.version,
        probes=suite.describe_probes(),
        continuation_tokens=probe.continuation_tokens,
        prefix_tokens=probe.prefix_tokens,
        answers="none" if False not in is_text else "some" if True in is_text else "all",
        window=settings.window,
        max_edit_share=probe.max_edit_share,
        tiny_margin=plan.tiny_margin,
        dtype=settings.dtype,
        batch_tokens=settings.batch_tokens,
        sample_size=settings.max_documents_per_bucket,
        seed=plan.seed,
        command=command,
        wall_s=round(wall_s, 3),
        utility=describe_tasks(plan.tasks),
    )


def write_excerpts(plan: AuditPlan, subject: Subject, findings: FindingList) -> None:
    """Write the text of the findings, or token ids if there is no tokenizer, to a private file."""
    decode: Callable[[Any], str] = str
    if subject.tokenizer is not None:
        decode = subject.tokenizer.decode
    documents = {document.id: document for document in plan.documents}
    parts = []
    for finding in findings:
        # The continuation is the end of the document or of its audited part.
        ids = documents[finding.id].input_ids
        split = len(ids) - finding.continuation_tokens
        prefix, continuation = decode(ids[:split].tolist()), decode(ids[split:].tolist())
        parts.append(
            f"== {finding.id}: {finding.sentence}\n-- prefix\n{prefix}\n-- continuation\n"
            f"{continuation}\n"
        )
    content = "\n".join(parts) or "No document was extracted.\n"
    private = subject.out / "private"
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)
    write_atomically(private / "excerpts.txt", content.encode(), mode=PRIVATE_MODE)
