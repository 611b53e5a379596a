"""Corpora of random ids and loaders of their rows."""

from typing import Any

import numpy as np
from record_examples import make_entry

from memguard.config import GoldfishConfig
from memguard.data.corpus import Corpus
from memguard.data.loader import Loader
from memguard.data.packing import plan_rows
from memguard.mitigation import build_mitigations
from memguard.records.run_files import PreparedSummary

EOS = 7


def make_corpus(lengths: list[int], *, seed: int = 0, epochs: int = 2) -> Corpus:
    """Documents of random ids; a third of the tokens, from the first on, are not supervised."""
    draw = np.random.default_rng(seed)
    entries = [
        make_entry(f"d{number}", planned_repetitions=epochs, num_tokens=length, cluster=number)
        for number, length in enumerate(lengths)
    ]
    ids = [np.append(draw.integers(10, 99, length - 1), EOS) for length in lengths]
    return Corpus(
        summary=PreparedSummary.model_construct(),
        manifest=entries,
        input_ids=np.concatenate(ids).astype(np.int32),
        supervised=np.concatenate([np.arange(length) >= length // 3 for length in lengths]),
        offsets=np.cumsum([0, *lengths]),
        content_tokens=np.array(lengths),
        format=np.zeros(len(lengths), dtype=np.uint8),
    )


def make_loader(
    corpus: Corpus, *, seq_len: int = 16, batch_size: int = 4, **goldfish: Any
) -> Loader:
    configs = [GoldfishConfig(name="goldfish", **goldfish)] if goldfish else []
    mitigations = build_mitigations(configs, special_ids=[EOS])
    rows, schedule = plan_rows(corpus.manifest, seq_len=seq_len, background_ratio=1.0, seed=1)
    return Loader(
        corpus,
        rows,
        schedule,
        batch_size=batch_size,
        pad_id=0,
        mask_labels=lambda _, ids, labels, generator: mitigations.mask_labels(
            ids, labels, generator=generator
        ),
        seed=1,
    )
