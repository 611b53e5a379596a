"""One audit: documents in, report and scores out; one model is in memory at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memguard.audit.context import AuditContext, AuditedModel
from memguard.audit.document_scores import DocumentScores, build_scores
from memguard.audit.metrics import Evidence
from memguard.audit.plan import AuditPlan
from memguard.audit.requests import Measured, Model
from memguard.audit.runner import Runner
from memguard.audit.selection import find_cut
from memguard.audit.summary import summarise, tabulate
from memguard.records import AuditResults, CanaryScore

_STAGES: Mapping[Model, str] = {
    "trained": "model",
    "base": "base model",
    "reference": "reference model",
}
"""The models in the order in which they are measured, and the names of their stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOutcome:
    """Results of an audit; the caller adds identities, method and environment."""

    summary: AuditResults
    scores: DocumentScores
    """In the order of the documents."""
    canaries: Sequence[CanaryScore]


def measure(
    plan: AuditPlan,
    models: Mapping[Model, AuditedModel],
    context: AuditContext,
    *,
    also_measure: Callable[[Model], None] | None = None,
) -> AuditOutcome:
    """Run the probes of a plan and summarise their results.

    Models are loaded one after the other, so that only one is in memory at a time.

    Args:
        plan: what is measured, the same on every rank.
        models: the trained model; the base, without which its columns are null; a reference with
            the same vocabulary, for membership scores.
        context: tokenizer, cache, ranks, progress.
        also_measure: called after the probes of each model, before the model is freed.

    Raises:
        ModelError: tokenizer or length do not fit the model, or its logits are not finite.
    """
    suite, windows = plan.suite, plan.selection.windows
    inputs = plan.inputs(context, has_reference="reference" in models)
    failed: dict[str, str] = {}
    stopped: set[tuple[Model, str]] = set()
    measured: dict[Model, dict[str, Measured]] = {}
    for role, name in _STAGES.items():
        if (model := models.get(role)) is None:
            continue
        with Runner(
            audited=model,
            model=role,
            name=name,
            context=context,
            seed=plan.seed,
            packages=suite.packages,
            stopped=stopped,
        ) as runner:
            measured[role] = runner.measure(
                suite.probes, inputs, has_base="base" in models, failed=failed
            )
            if also_measure is not None:
                also_measure(role)
    evidence = Evidence(
        inputs=inputs,
        buckets=plan.selection.buckets,
        trained=measured["trained"],
        other=measured.get("base"),
        reference=measured.get("reference", {}),
        dose_response=plan.tally == "complete",
        skipped_because={**context.why_not, **failed},
        num_tightened=context.num_tightened,
        documents=plan.documents,
    )
    summaries = tabulate(evidence, suite)
    scores = build_scores(windows, summaries, plan.selection.not_audited)
    return AuditOutcome(
        summary=summarise(
            evidence,
            summaries,
            scores,
            suite=suite,
            tally=plan.tally,
            cut=find_cut(plan.documents, windows, window=plan.window),
            control=plan.control,
            is_limited=any(kind == "trained" or name in failed for kind, name in stopped),
        ),
        scores=scores,
        canaries=[canary for summary in summaries.values() for canary in summary.canaries],
    )
