"""Audits during training: selects the documents and measures extraction from the current model."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial

import numpy as np

from memguard.audit.cache import ScoreMatrix
from memguard.audit.decoding import DECODED_TOKENS, Decoder
from memguard.audit.extraction import (
    ExtractionProbe,
    Window,
    compute_first_divergence,
    find_greedy_margin,
)
from memguard.audit.generation import measure_edits
from memguard.audit.near_verbatim import find_near_verbatim
from memguard.audit.scoring import ModelScorer
from memguard.audit.selection import select_windows
from memguard.audit.suite import load_audit_suite
from memguard.config import RunConfig
from memguard.data.corpus import Corpus
from memguard.errors import ConfigError
from memguard.mitigation.k_schedule import KSchedule
from memguard.model.causal_lm import CausalLM
from memguard.runtime import Runtime
from memguard.train.audit_callback import MemorizationMonitor, MemorizationSnapshot, Sample
from memguard.workflows.audit_inputs import list_audited


def build_monitor(
    config: RunConfig, corpus: Corpus, lm: CausalLM, k_schedule: KSchedule, runtime: Runtime
) -> MemorizationMonitor | None:
    """Return the callback that audits the model during training; None if it is not enabled.

    The callback runs the main probe of the final audit on a seeded sample of each bucket.

    Raises:
        DataError: too few trained documents are long enough.
    """
    if config.train.audit_every_steps is None:
        return None
    probe = load_audit_suite(config.audit).extraction
    windows = _choose_windows(config, corpus, probe)
    scorer = ModelScorer(lm, config.audit.batch_tokens, runtime)
    decoder = Decoder(lm, config.audit.batch_tokens or DECODED_TOKENS, runtime)
    index_of = {entry.id: index for index, entry in enumerate(corpus.manifest)}
    documents = [index_of[window.document.id] for window in windows]

    sample = Sample(
        document_N=np.array(documents, dtype=np.int64),
        sha256=_hash_sample(documents, windows, probe),
        ask=lambda: take_snapshot(
            scorer,
            decoder,
            windows,
            probe,
            seed=config.seed,
            needs_near_verbatim=config.budget is not None
            and config.budget.metric == "near_verbatim",
        ),
    )
    return MemorizationMonitor(
        sample,
        corpus.manifest,
        k_schedule,
        every_steps=config.train.audit_every_steps,
        budget=config.budget,
    )


def _hash_sample(
    documents: Sequence[int], windows: Sequence[Window], probe: ExtractionProbe
) -> str:
    passages = [
        (document, window.start, window.prefix_tokens, window.continuation_tokens)
        for document, window in zip(documents, windows, strict=True)
    ]
    text = json.dumps([passages, probe.model_dump(mode="json")])
    return hashlib.sha256(text.encode()).hexdigest()


def take_snapshot(
    scorer: ModelScorer,
    decoder: Decoder,
    windows: Sequence[Window],
    probe: ExtractionProbe,
    *,
    seed: int,
    needs_near_verbatim: bool,
) -> MemorizationSnapshot:
    """Return what the model reproduces of some windows.

    Raises:
        ConfigError: near-verbatim matches are needed but the model cannot generate text here.
    """
    names = ("num_correct", "first_divergence", "greedy_margin")
    results = scorer.score([window.passage() for window in windows])
    rows = [
        [
            result.correct.sum(),
            compute_first_divergence(result.correct),
            find_greedy_margin(result.margin, result.correct),
        ]
        for result in results
    ]
    teacher_forced = ScoreMatrix(names=names, rows=np.array(rows, dtype=np.float64))

    obstacle = decoder.find_obstacle()
    if obstacle is not None and needs_near_verbatim:
        raise ConfigError(
            "'budget.metric' near_verbatim needs generated text, and this run cannot generate "
            f"any: {obstacle}. Set budget.metric=verbatim"
        )
    near_verbatim_N = None
    if obstacle is None:
        measure = partial(measure_edits, probe, decoder, windows, teacher_forced)
        near = find_near_verbatim(probe, windows, teacher_forced, measure, seed=seed)
        near_verbatim_N = near.matched_N
    size_N = np.array([window.continuation_tokens for window in windows])
    return MemorizationSnapshot(
        token_accuracy_N=teacher_forced["num_correct"] / size_N,
        verbatim_N=teacher_forced["num_correct"] == size_N,
        near_verbatim_N=near_verbatim_N,
    )


def _choose_windows(
    config: RunConfig, corpus: Corpus, probe: ExtractionProbe
) -> tuple[Window, ...]:
    planned = [entry.planned_repetitions for entry in corpus.manifest]
    selection = select_windows(
        list_audited(corpus, planned, config.audit, seq_len=config.data.seq_len),
        probe,
        seed=config.seed,
        min_documents=config.audit.min_documents,
        max_documents_per_bucket=config.train.audit_documents,
    )
    # In the bucket order of the final audit.
    place = {outline.bucket: number for number, outline in enumerate(selection.buckets)}
    return tuple(sorted(selection.windows, key=lambda window: place[window.document.bucket]))
