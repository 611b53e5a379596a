"""The work of a run's audit, predicted before training."""

from typing import Any, Literal

from memguard.audit.bounds import list_bounds
from memguard.audit.extraction import TINY_MARGINS
from memguard.audit.requests import Inputs
from memguard.audit.selection import Selection
from memguard.audit.suite import load_audit_suite
from memguard.config import RunConfig
from memguard.data.corpus import Corpus
from memguard.planner.dry_run import AuditWork, ProbeWork
from memguard.workflows.audit_context import build_codec, build_known_goldfish
from memguard.workflows.audit_inputs import list_canaries


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
    models: list[Literal["trained", "base", "reference"]] = ["trained"]
    models += ["base"] if settings.base and config.model.path is not None else []
    models += ["reference"] if settings.reference is not None else []
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
    bounds = list_bounds(suite, inputs, models)
    whole = bounds.sum()
    names = dict.fromkeys(bound.probe for bound in bounds.bounds if bound.passages)
    works = {name: bounds.sum(name) for name in names}
    return AuditWork(
        models=tuple(models),
        probes=tuple(
            ProbeWork(
                probe=name,
                num_passages=work.passages,
                num_tokens=work.tokens,
                num_generated_tokens=work.decoded,
            )
            for name, work in works.items()
        ),
        num_passages=whole.passages,
        num_tokens=whole.tokens,
        num_generated_tokens=whole.decoded,
        not_counted=dict(bounds.unknown),
    )
