"""What the control of a run can show, told before training.

If none of m control documents is extracted, the upper end of the 95 % interval of 0 of m bounds the
rate at which documents that were never trained are extracted.
"""

from memguard.audit.statistics import clopper_pearson
from memguard.audit.warnings import FEW_DOCUMENTS
from memguard.config import DataConfig, RunConfig
from memguard.data.buckets import draws_control, size_control
from memguard.data.corpus import Corpus
from memguard.planner.dry_run import Remark, note, warn
from memguard.records.texts import format_percent
from memguard.runtime import Console
from memguard.workflows.training.data import list_audit_needs

_VERY_FEW = 10
"""Below this many control documents, 0 of m allows a rate of more than 30 %."""


def report_control(config: RunConfig, corpus: Corpus, console: Console) -> None:
    """Print what the control can show, or why there is none; nothing if the user turned it off.

    Args:
        config: the run's settings.
        corpus: its documents.
        console: prints the line.
    """
    has_control = any(entry.role == "control" for entry in corpus.manifest)
    if not _wants_control(config.data) or (has_control and not config.audit.enabled):
        return
    remark = remark_on_control(config, corpus, count_audited_control(config, corpus))
    if remark.level == "warning":
        console.warn(remark.text)
    else:
        console.info(f"control: {remark.text}")


def count_audited_control(config: RunConfig, corpus: Corpus) -> int:
    """Return how many control documents the audit of a run will score.

    Those too short for it, and near-duplicates of documents that the model is fed, are left out.
    """
    is_auditable = list_audit_needs(config).is_auditable
    fed = {entry.cluster for entry in corpus.manifest if entry.role in ("trained", "forget")}
    num = sum(
        entry.role == "control"
        and entry.cluster not in fed
        and is_auditable(corpus.document(index))
        for index, entry in enumerate(corpus.manifest)
    )
    return min(num, config.audit.max_documents_per_bucket or num)


def remark_on_control(config: RunConfig, corpus: Corpus, num_audited: int) -> Remark:
    """Return what the control of a run can show, or why there is none, with the way out.

    Args:
        config: the run's settings.
        corpus: its documents.
        num_audited: control documents that will be scored.
    """
    num_control = sum(entry.role == "control" for entry in corpus.manifest)
    if not num_control:
        return warn("audit", _explain_missing(config, corpus))
    more = _suggest_more(config, num_audited)
    if not num_audited:
        return warn(
            "audit",
            f"None of the {num_control:,} control documents can be audited: they are too short, or "
            f"near-duplicates of trained documents. {more}, or lower 'audit.continuation_tokens'.",
        )
    rate = clopper_pearson(0, num_audited)
    if rate.ci is None:
        text = f"One control document is audited: too few for an interval. {more}."
        return warn("audit", text)
    text = (
        f"If none of the {num_audited:,} control documents is extracted, up to "
        f"{format_percent(rate.ci[1])} of unseen documents still could be (95 %)."
    )
    num_left_out = num_control - num_audited
    if num_left_out and num_audited != config.audit.max_documents_per_bucket:
        text += (
            f" {num_left_out:,} more cannot be audited: too short, or near-duplicates of trained "
            "documents."
        )
    if num_audited < FEW_DOCUMENTS:
        text += f" To lower this bound: {more[0].lower()}{more[1:]}."
    return warn("audit", text) if num_audited < _VERY_FEW else note("audit", text)


def _wants_control(data: DataConfig) -> bool:
    """Return whether the settings ask for a control."""
    if data.study is not None:
        return 0 in data.study.num_repetitions
    return bool(data.control) or draws_control(data)


def _suggest_more(config: RunConfig, num_audited: int) -> str:
    """Return how to have more control documents."""
    if num_audited and num_audited == config.audit.max_documents_per_bucket:
        return "Raise 'audit.max_documents_per_bucket'"
    if config.data.study is not None:
        return "Raise 'data.study.documents_per_bucket', or add documents"
    if config.data.control:
        return "Add documents to 'data.control'"
    return "Add documents to 'data.train', or name your own in 'data.control'"


def _explain_missing(config: RunConfig, corpus: Corpus) -> str:
    """Return why no document is held back, and the way out."""
    data = config.data
    if not _wants_control(data):
        return (
            "There is no control: without documents that are never trained, memorization cannot be "
            f"distinguished from text that the model can predict anyway. {_suggest_any(data)}."
        )
    if not draws_control(data):
        return (
            "There is no control: no document of 'data.control' has enough tokens. Add longer "
            "documents there."
        )
    needs = list_audit_needs(config)
    num = sum(
        entry.role in ("trained", "removed") and needs.is_auditable(corpus.document(index))
        for index, entry in enumerate(corpus.manifest)
    )
    goal = size_control(num, data.control_fraction)
    ways = "name your own documents in 'data.control'"
    if not goal:
        return (
            f"There is no control: {num:,} document{'' if num == 1 else 's'} long enough for the "
            f"audit {'is' if num == 1 else 'are'} too few to hold one back. Add documents to "
            f"'data.train', or {ways}."
        )
    if num - goal < needs.min_documents:
        return (
            f"There is no control: holding back {goal:,} of {num:,} documents would leave fewer "
            f"than 'audit.min_documents' = {needs.min_documents:,} to train. Add documents to "
            f"'data.train', {ways}, or lower 'audit.min_documents'."
        )
    return (
        f"There is no control: each near-duplicate cluster of the {num:,} documents is larger than "
        f"the {goal:,} to hold back. Add other documents to 'data.train', or {ways}."
    )


def _suggest_any(data: DataConfig) -> str:
    if data.study is not None:
        return "Put 0 in 'data.study.num_repetitions'"
    if data.forget:
        return "Name documents that the model never saw in 'data.control'"
    return "Set 'data.control_fraction' above 0, or name your own documents in 'data.control'"
