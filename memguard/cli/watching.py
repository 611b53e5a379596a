"""Audits inside training: which documents a run asks for, and how it asks the model in hand."""

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from memguard.audit.extraction import ExtractionProbe, Window
from memguard.audit.scoring import ModelScorer
from memguard.audit.selection import select_windows
from memguard.cli.subjects import list_audited, load_probe
from memguard.config import RunConfig
from memguard.data.corpus import Corpus
from memguard.mitigation.ladder import Ladder
from memguard.parallel.vocab import VocabLayer
from memguard.runtime import Runtime
from memguard.train.watch import Recited, Sample, Watch


def build_watch(
    config: RunConfig, corpus: Corpus, vocab: VocabLayer, ladder: Ladder, runtime: Runtime
) -> Watch | None:
    """Return what audits the model while it is trained; None where nobody asked for it.

    It asks what the audit at the end will ask of its main probe, of a seeded sample of each bucket.

    Raises:
        DataError: too few trained documents are long enough.
    """
    if config.train.audit_every_steps is None:
        return None
    probe = load_probe(config.audit)
    windows = _choose_windows(config, corpus, probe)
    scorer = ModelScorer(vocab, config.audit.batch_tokens, runtime)
    index_of = {entry.id: index for index, entry in enumerate(corpus.manifest)}
    documents = [index_of[window.document.id] for window in windows]
    sample = Sample(
        document_N=np.array(documents, dtype=np.int64),
        near_verbatim_threshold=probe.near_verbatim_threshold,
        sha256=_hash_asked(documents, windows, probe),
        ask=lambda: ask(scorer, windows, probe),
    )
    return Watch(
        sample,
        corpus.manifest,
        ladder,
        every_steps=config.train.audit_every_steps,
        budget=config.budget,
    )


def _hash_asked(documents: Sequence[int], windows: Sequence[Window], probe: ExtractionProbe) -> str:
    asked = [
        (document, window.start, window.prefix_tokens, window.continuation_tokens)
        for document, window in zip(documents, windows, strict=True)
    ]
    text = json.dumps([asked, probe.near_verbatim_threshold])
    return hashlib.sha256(text.encode()).hexdigest()


def ask(scorer: ModelScorer, windows: Sequence[Window], probe: ExtractionProbe) -> Recited:
    """Return what the model gives back of some windows."""
    results = scorer.score([window.passage() for window in windows])
    num_correct_N = np.array([int(result.correct.sum()) for result in results])
    size_N = np.array([window.continuation_tokens for window in windows])
    needed_N = np.array([probe.num_needed(int(size)) for size in size_N])
    return Recited(
        token_accuracy_N=num_correct_N / size_N,
        verbatim_N=num_correct_N == size_N,
        near_verbatim_N=num_correct_N >= needed_N,
    )


def _choose_windows(
    config: RunConfig, corpus: Corpus, probe: ExtractionProbe
) -> tuple[Window, ...]:
    planned = [entry.planned_repetitions for entry in corpus.manifest]
    selection = select_windows(
        list_audited(
            corpus,
            planned,
            seq_len=config.data.seq_len,
            probe=probe,
            window=config.audit.window,
        ),
        probe,
        seed=config.seed,
        min_documents=config.audit.min_documents,
        max_documents_per_bucket=config.train.audit_documents,
    )
    # In the order in which the audit at the end shows its buckets.
    place = {outline.bucket: number for number, outline in enumerate(selection.buckets)}
    return tuple(sorted(selection.windows, key=lambda window: place[window.document.bucket]))
