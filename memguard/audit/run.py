"""One audit: documents in, report and scores out; one model is in memory at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from memguard.audit.context import AuditContext, AuditedModel
from memguard.audit.document_scores import DocumentScores, build_scores
from memguard.audit.metrics import Evidence
from memguard.audit.parts import WhichWindow, find_cut
from memguard.audit.probes.canary_results import AuditCanary
from memguard.audit.requests import Inputs, Measured, Model
from memguard.audit.runner import Runner
from memguard.audit.selection import select_windows
from memguard.audit.suite import Suite
from memguard.audit.summary import Circumstances, summarise, tabulate
from memguard.audit.warnings import Tally
from memguard.audit.windows import AuditDocument
from memguard.records import AuditResults, CanaryScore


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOutcome:
    """Results of an audit; the caller adds identities, method and environment."""

    summary: AuditResults
    scores: DocumentScores
    """In the order of the documents."""
    canaries: Sequence[CanaryScore]


def run_audit(
    *,
    documents: Sequence[AuditDocument],
    model: AuditedModel,
    base: AuditedModel | None = None,
    reference: AuditedModel | None = None,
    canaries: Sequence[AuditCanary] = (),
    suite: Suite,
    tally: Tally,
    tiny_margin: float,
    seed: int,
    is_other_kind: bool = False,
    window: WhichWindow = "last",
    min_documents: int = 5,
    max_documents_per_bucket: int | None = None,
    context: AuditContext | None = None,
    also_measure: Callable[[Model], None] | None = None,
) -> AuditOutcome:
    """Run the probes of a suite and summarise their results.

    The documents are checked before a model is loaded. Models are loaded one after the other, so
    that only one is in memory at a time.

    Args:
        documents: trained, control and, optionally, background documents.
        model: the audited model.
        base: the model before training; None leaves its columns null.
        reference: another model with the same vocabulary, for membership scores.
        canaries: random secrets, in an order that does not depend on whether they were trained.
        suite: the probes, with their final settings.
        tally: state of the counts of repetitions.
        tiny_margin: margin (logits) below which a result may change, see `TINY_MARGINS`.
        seed: seed of the sample of each bucket and of all other random choices.
        is_other_kind: whether the control was given and is another kind of text.
        window: which part of long documents was chosen, for the report.
        min_documents: minimum number of trained documents that are long enough (documents).
        max_documents_per_bucket: size of each bucket's sample; None takes all.
        context: tokenizer, cache, ranks, progress.
        also_measure: called after the probes of each model, before the model is freed.

    Raises:
        DataError: too few trained documents are long enough, or an id is duplicated.
        ModelError: tokenizer or length do not fit the model, or its logits are not finite.
    """
    context = context or AuditContext()
    selection = select_windows(
        documents,
        suite.extraction,
        seed=seed,
        min_documents=min_documents,
        max_documents_per_bucket=max_documents_per_bucket,
    )
    windows = selection.windows
    inputs = Inputs(
        windows=windows,
        max_edit_share=suite.extraction.max_edit_share,
        seed=seed,
        tiny_margin=tiny_margin,
        canaries=canaries,
        codec=context.codec,
        goldfish=context.goldfish,
        has_reference=reference is not None,
        compare_masks=context.compare_masks,
    )
    failed: dict[str, str] = {}
    stopped: set[tuple[Model, str]] = set()
    run = partial(Runner, context=context, seed=seed, packages=suite.packages, stopped=stopped)

    def measure(audited: AuditedModel, kind: Model, name: str) -> dict[str, Measured]:
        with run(audited=audited, model=kind, name=name) as runner:
            measured = runner.measure(
                suite.probes, inputs, has_base=base is not None, failed=failed
            )
            if also_measure is not None:
                also_measure(kind)
            return measured

    evidence = Evidence(
        inputs=inputs,
        outlines=selection.buckets,
        trained=measure(model, "trained", "model"),
        other=None if base is None else measure(base, "base", "base model"),
        reference={} if reference is None else measure(reference, "reference", "reference model"),
        dose_response=tally == "complete",
        skipped_because={**context.why_not, **failed},
        num_tightened=context.num_tightened,
    )
    summaries = tabulate(evidence, suite)
    scores = build_scores(windows, summaries)
    return AuditOutcome(
        summary=summarise(
            evidence,
            summaries,
            scores,
            suite=suite,
            circumstances=Circumstances(
                tally=tally,
                cut=find_cut(documents, windows, window=window),
                is_other_kind=is_other_kind,
                is_limited=any(kind == "trained" or name in failed for kind, name in stopped),
            ),
        ),
        scores=scores,
        canaries=[canary for summary in summaries.values() for canary in summary.canaries],
    )
