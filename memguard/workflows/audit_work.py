"""The work of a run's audit, predicted from its documents before training."""

from collections.abc import Sequence
from typing import Any

from memguard.audit.bounds import list_bounds
from memguard.audit.extraction import TINY_MARGINS
from memguard.audit.requests import Inputs
from memguard.audit.selection import Selection, select_windows
from memguard.audit.suite import load_audit_suite
from memguard.config import RunConfig
from memguard.data.corpus import Corpus
from memguard.planner.dry_run import AuditWork
from memguard.workflows.audit_context import build_codec, build_known_goldfish
from memguard.workflows.audit_inputs import list_audited, list_canaries
from memguard.workflows.generation_plan import list_models, make_audit_work


def select_audited(config: RunConfig, corpus: Corpus, counts: Sequence[int]) -> Selection | None:
    """Return what a run's audit will measure; None if the run has no audit.

    Args:
        config: of the run.
        corpus: its documents.
        counts: times each document will have been trained in full.
    """
    if not config.audit.enabled:
        return None
    return select_windows(
        list_audited(corpus, counts, config.audit, seq_len=config.data.seq_len),
        load_audit_suite(config.audit).extraction,
        seed=config.seed,
        min_documents=0,
        max_documents_per_bucket=config.audit.max_documents_per_bucket,
    )


def predict_audit_work(
    config: RunConfig, corpus: Corpus, selection: Selection, tokenizer: Any
) -> AuditWork:
    """Return the most that a run's audit asks of its models.

    Args:
        config: of the run.
        corpus: its documents.
        selection: windows that the audit measures if the run goes as planned.
        tokenizer: of the model.
    """
    settings = config.audit
    suite = load_audit_suite(settings)
    inputs = Inputs(
        windows=selection.windows,
        max_edit_share=suite.extraction.max_edit_share,
        seed=config.seed,
        tiny_margin=TINY_MARGINS[settings.dtype],
        canaries=list_canaries(corpus, seq_len=config.data.seq_len),
        codec=build_codec(tokenizer),
        goldfish=build_known_goldfish(config.mitigations, tokenizer),
        has_reference=settings.reference is not None,
    )
    return make_audit_work(list_bounds(suite, inputs, list_models(config)))
