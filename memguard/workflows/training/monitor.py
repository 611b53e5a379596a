"""Audits during training: selects the documents and measures extraction from the current model."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memguard.audit.context import AuditContext
from memguard.audit.decoding import Decoder, GenerationLimit
from memguard.audit.plan import AuditPlan
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.runner import Runner
from memguard.audit.scoring import ModelScorer
from memguard.audit.windows import Window
from memguard.config import RunConfig
from memguard.data.corpus import Corpus
from memguard.errors import ConfigError
from memguard.mitigation.k_schedule import KSchedule
from memguard.model.causal_lm import CausalLM
from memguard.parallel.linear import to_local
from memguard.runtime import Runtime
from memguard.train.audit_callback import MemorizationMonitor, MemorizationSnapshot, Sample
from memguard.workflows.auditing.target import plan_training

_STATE_BYTES = 12
"""Of a trained weight: its gradient and AdamW's two moments, in fp32."""


def build_monitor(
    config: RunConfig, corpus: Corpus, lm: CausalLM, k_schedule: KSchedule, runtime: Runtime
) -> MemorizationMonitor | None:
    """Return the callback that audits the model during training; None if it is not enabled.

    The callback runs the main probe of the final audit on a seeded sample of each bucket.
    """
    if config.train.audit_every_steps is None:
        return None
    needs_near_verbatim = config.budget is not None and config.budget.metric == "near_verbatim"
    if needs_near_verbatim and runtime.agree_any(not _fits_in_training(lm)):
        raise ConfigError(
            "'budget.metric' near_verbatim generates text, and the weights of this model would be "
            "gathered for each token. Use a larger x or y, or budget.metric=verbatim"
        )
    plan = _plan(config, corpus)
    plan.check_same(runtime)
    windows = plan.selection.windows
    if config.budget is not None and all(w.document.role != "trained" for w in windows):
        raise ConfigError(
            "'budget' needs trained documents that can be audited; all have short answers that "
            "many share. Leave out 'budget', or train other documents"
        )
    model = ModelInTraining(
        lm=lm,
        batch_tokens=config.audit.batch_tokens,
        runtime=runtime,
        limit=GenerationLimit(max_minutes=config.audit.max_generation_minutes),
    )
    index_of = {entry.id: index for index, entry in enumerate(corpus.manifest)}
    documents = [index_of[window.document.id] for window in windows]

    sample = Sample(
        document_N=np.array(documents, dtype=np.int64),
        sha256=_hash_sample(documents, windows, plan.suite.extraction),
        ask=lambda: take_snapshot(model, plan, needs_near_verbatim=needs_near_verbatim),
    )
    return MemorizationMonitor(
        sample,
        corpus.manifest,
        k_schedule,
        every_steps=config.train.audit_every_steps,
        budget=config.budget,
    )


def _fits_in_training(lm: CausalLM) -> bool:
    """Return whether all weights fit at once beside gradients and moments, which come later."""
    trained = [to_local(part) for part in lm.model.parameters() if part.requires_grad]
    return lm.fits_gathered(reserved_bytes=_STATE_BYTES * sum(part.numel() for part in trained))


def _hash_sample(
    documents: Sequence[int], windows: Sequence[Window], probe: ExtractionProbe
) -> str:
    passages = [
        (document, window.start, window.prefix_tokens, window.continuation_tokens)
        for document, window in zip(documents, windows, strict=True)
    ]
    text = json.dumps([passages, probe.model_dump(mode="json")])
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInTraining:
    """The model that is being trained, for the runner of an audit; nothing is loaded or freed."""

    lm: CausalLM
    batch_tokens: int | None
    runtime: Runtime
    limit: GenerationLimit | None = None
    """Longest time that it generates in all looks together."""
    identity: None = None
    """Weights change at each step: their numbers are not cached."""
    max_tokens: None = None

    def scorer(self) -> ModelScorer:
        """Return a scorer."""
        return ModelScorer(self.lm, self.batch_tokens, self.runtime)

    def decoder(self) -> Decoder:
        """Return a decoder."""
        return Decoder(self.lm, self.batch_tokens, self.runtime, self.limit)

    def free(self) -> None:
        """Keep the model."""


def take_snapshot(
    model: ModelInTraining, plan: AuditPlan, *, needs_near_verbatim: bool
) -> MemorizationSnapshot:
    """Return what the model reproduces of a plan's windows."""
    probe, context = plan.suite.extraction, AuditContext(peers=model.runtime)
    runner = Runner(audited=model, model="trained", name="", context=context, seed=plan.seed)
    inputs = replace(plan.inputs(context), in_training=True)
    measured = runner.measure([probe], inputs)[probe.name]
    near, numbers = measured.detail, measured.columns
    if isinstance(near, NotGenerated) and needs_near_verbatim:
        raise ConfigError(
            "'budget.metric' near_verbatim needs generated text, and this run cannot generate "
            f"any: {near.reason}. Set budget.metric=verbatim"
        )
    size_N = np.array([window.continuation_tokens for window in plan.selection.windows])
    return MemorizationSnapshot(
        token_accuracy_N=numbers["num_correct"] / size_N,
        verbatim_N=numbers["num_correct"] == size_N,
        near_verbatim_N=near.matched_N if isinstance(near, NearVerbatim) else None,
    )


def _plan(config: RunConfig, corpus: Corpus) -> AuditPlan:
    planned = [entry.planned_repetitions for entry in corpus.manifest]
    plan = plan_training(
        config,
        corpus,
        planned,
        min_documents=config.audit.min_documents,
        size=config.train.audit_documents,
    )
    # In the bucket order of the final audit.
    place = {outline.bucket: number for number, outline in enumerate(plan.selection.buckets)}
    windows = sorted(plan.selection.windows, key=lambda window: place[window.document.bucket])
    return replace(plan, selection=replace(plan.selection, windows=tuple(windows)))
