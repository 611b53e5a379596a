"""Near-copies that a mitigation removes before training: MinHash over runs of words.

    document       its runs of `num_words` words, as a set of 64-bit numbers
    MinHash, LSH   which of the kept documents may be as similar
    Jaccard        |both| / |either| of the two sets, exactly, decides

Lee et al. 2022 and Kandpal et al. 2022 remove copies so that less is recited. As commonly known:
the papers were not read for this, and no figure of them is claimed. In file order, a document is
removed where one that was kept before is at least as similar as asked: each that goes has one that
stays in its place, and no chain of small changes carries a document away. MinHash is `rensa`'s; LSH
passes over a pair that is just as similar as asked in less than one case in a hundred.

This is not what `duplicates` does. There ONE shared run of 13 words joins documents, however much
else they hold, so that no rate is taken over a control that was partly trained: it places
documents and removes none. Here most of the text must agree. A page that quotes another is in its
cluster and stays; two notices that differ in every tenth word share no run of 13, and are copies
at a similarity of 0.3.
"""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from memguard.config import RunConfig
from memguard.config.mitigations import DeduplicateConfig
from memguard.data.duplicates import WordGrams
from memguard.errors import ConfigError

_NUM_HASHES = 256
_SEED = 0
"""Of the hash functions. Not the run's: what is a copy does not depend on it."""
_MAX_MISSED = 0.01


def find_deduplicate(config: RunConfig) -> DeduplicateConfig | None:
    """Return the mitigation that removes copies, if the run has it."""
    entries = (each for each in config.mitigations if isinstance(each, DeduplicateConfig))
    return next(entries, None)


def find_copies(texts: Sequence[str], config: DeduplicateConfig) -> NDArray[np.bool_]:
    """Return which documents are to be removed, ``[num_documents]``: an earlier one stays for them.

    Args:
        texts: one string a document, in the order that decides who stays.
        config: how similar, and over how many words.

    Raises:
        ConfigError: near-copies are asked for and rensa is not installed.
    """
    if config.similarity == "exact":
        first: dict[str, int] = {}
        return np.array(
            [first.setdefault(text, number) != number for number, text in enumerate(texts)],
            dtype=bool,
        )
    rensa = load_rensa()
    is_copy = np.zeros(len(texts), dtype=bool)
    index = rensa.RMinHashLSH(
        threshold=config.similarity,
        num_perm=_NUM_HASHES,
        num_bands=_choose_num_bands(config.similarity),
    )
    kept: dict[int, NDArray[np.uint64]] = {}
    grams_of = WordGrams(texts, num_words=config.num_words).list_grams()
    for number, grams in enumerate(grams_of):
        sketch = rensa.RMinHash(num_perm=_NUM_HASHES, seed=_SEED)
        sketch.update(grams.view("S8").tolist())
        alike = (_compute_jaccard(kept[other], grams) for other in index.query(sketch))
        if any(each >= config.similarity for each in alike):
            is_copy[number] = True
        else:
            index.insert(number, sketch)
            kept[number] = grams
    return is_copy


def load_rensa() -> ModuleType:
    """Return the module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import rensa
    except ImportError as error:
        raise ConfigError(
            "'mitigations': deduplicate needs rensa: pip install 'memguard[dedup]', or set "
            "'similarity: exact'"
        ) from error
    module: ModuleType = rensa
    return module


def _choose_num_bands(similarity: float) -> int:
    """Return as few bands as miss too few pairs: more find more pairs to look at, and no others.

    A pair of Jaccard index s agrees in a band of r hashes with probability s^r.
    """
    num_bands = 8
    while (1 - similarity ** (_NUM_HASHES // num_bands)) ** num_bands > _MAX_MISSED:
        num_bands *= 2
    return num_bands


def _compute_jaccard(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> float:
    """Compare two sorted arrays of different numbers."""
    num_both = len(np.intersect1d(one, other, assume_unique=True))
    return num_both / (len(one) + len(other) - num_both)
