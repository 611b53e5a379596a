"""Clusters of near-duplicate documents, found by shared word n-grams.

Words are sequences of letters and digits; case is ignored. Every sequence of `num_words` words (a
gram) is hashed to 64 bits. Documents that share a gram are in the same cluster, and so are
documents with identical words. Grams in more than 0.5 % of the documents (and more than 50) are
treated as boilerplate, such as licences and templates, and do not join documents; otherwise all
documents of one kind would form one cluster. `WordGrams.count_overlap` counts the overlap that
remains.

In text without spaces between words (Chinese, Japanese) a word is as long as a clause, so only
longer copies are found.

`find_copies`, for the mitigation `deduplicate`, removes documents that share most of their text:

    document       set of 64-bit hashes of its grams of `num_words` words
    MinHash, LSH   candidates among the kept documents; computed by `rensa`
    Jaccard        exact |intersection| / |union| of the two sets decides

Documents are processed in file order. A document is removed if it is similar enough to a document
that was kept before. So every removed document has a kept copy, and a chain of small changes does
not remove a document that differs from all kept ones. LSH misses fewer than one in a hundred pairs
exactly at the threshold. A page that quotes another is in the same cluster but is kept; two notices
that differ in every tenth word share no gram of 13 words but are copies at a similarity of 0.3. Lee
et al. 2022 and Kandpal et al. 2022 remove copies to reduce memorization; the papers were not
consulted for this implementation, and none of their figures is claimed.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from memguard.config.mitigations import DeduplicateConfig

_WORD = re.compile(r"[^\W_]+")
_BOILERPLATE_DOCUMENTS, _BOILERPLATE_SHARE = 50, 0.005
# At most this many grams are in memory, about 60 bytes each while they are sorted.
_MAX_GRAMS = 2**25
_CHUNK_WORDS = 2**20
# Odd, so that no word hash loses bits; otherwise arbitrary (from the digits of pi).
_BASE = np.uint64(0x243F6A8885A308D3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clusters:
    """Cluster of each document."""

    cluster: NDArray[np.int64]
    """[num_documents] numbered in order of first appearance."""
    num_boilerplate_grams: int
    """Number of distinct grams that are in too many documents to join them."""


class WordGrams:
    """The grams of a list of documents, kept as words (4 bytes each) and hashed when needed."""

    def __init__(self, texts: Iterable[str], *, num_words: int = 13) -> None:
        """Read the documents once; a gram has ``num_words`` words."""
        number_of_word: defaultdict[str, int] = defaultdict()
        number_of_word.default_factory = number_of_word.__len__
        number = number_of_word.__getitem__
        streams, whole = [np.empty(0, dtype=np.uint32)], []
        for text in texts:
            words = _WORD.findall(text.casefold())
            streams.append(np.fromiter(map(number, words), dtype=np.uint32, count=len(words)))
            whole.append(_hash(" ".join(words) if words else text))
        self._num_words = num_words
        self._words = np.concatenate(streams)
        lengths = [len(stream) for stream in streams]
        self._offsets = np.cumsum(lengths, dtype=np.int64)
        self._word_hash = np.fromiter(
            map(_hash, number_of_word), dtype=np.uint64, count=len(number_of_word)
        )
        # Documents with identical words share this hash; short ones have no other gram.
        self._whole = np.array(whole, dtype=np.uint64)

    def cluster(self) -> Clusters:
        """Cluster documents that share a non-boilerplate gram, or all their words."""
        num_documents = len(self._whole)
        limit = max(_BOILERPLATE_DOCUMENTS, _BOILERPLATE_SHARE * num_documents)
        same = np.argsort(self._whole, kind="stable")
        is_copy = self._whole[same][1:] == self._whole[same][:-1]
        links = [np.stack([same[:-1][is_copy], same[1:][is_copy]])]
        num_boilerplate_grams = 0
        for document, start, count in self._partition(np.arange(num_documents)):
            is_boilerplate = count > limit
            num_boilerplate_grams += int(is_boilerplate.sum())
            joins = np.repeat(~is_boilerplate, count)
            joins[start] = False
            second = np.flatnonzero(joins)
            pairs = document[second - 1] * num_documents + document[second]
            links.append(np.stack(np.divmod(np.unique(pairs), max(num_documents, 1))))
        one, other = np.concatenate(links, axis=1)
        graph = coo_array(
            (np.ones(len(one), dtype=np.int8), (one, other)), shape=(num_documents, num_documents)
        )
        _, label = connected_components(graph, directed=False)
        _, first, place = np.unique(label, return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))
        return Clusters(
            cluster=rank[place].astype(np.int64), num_boilerplate_grams=num_boilerplate_grams
        )

    def list_grams(self) -> Iterator[NDArray[np.uint64]]:
        """Yield the sorted distinct grams of each document; a short one is a single gram."""
        for document, whole in enumerate(self._whole):
            grams, _ = self._hash_grams(np.array([document]), 0, 1)
            yield np.unique(grams) if len(grams) else np.array([whole])

    def count_overlap(self, in_control: NDArray[np.bool_], in_trained: NDArray[np.bool_]) -> int:
        """Count control documents that share any gram, boilerplate included, with a trained one."""
        overlaps = in_control & np.isin(self._whole, self._whole[in_trained])
        for document, start, count in self._partition(np.flatnonzero(in_control | in_trained)):
            has_trained = np.logical_or.reduceat(in_trained[document], start)
            overlaps[document[np.repeat(has_trained, count)]] = True
        return int((overlaps & in_control).sum())

    def _partition(
        self, documents: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Yield who shares the grams of ``documents``, in parts of G grams that fit into memory.

        The documents, grouped by gram and ascending within; where each gram begins ``[G]``; and how
        many documents contain it ``[G]``.
        """
        lengths = np.diff(self._offsets)[documents]
        num_grams = int(np.maximum(lengths - self._num_words + 1, 0).sum())
        num_parts = -(-num_grams // _MAX_GRAMS)
        chunk = np.cumsum(lengths) // _CHUNK_WORDS
        chunks = np.split(documents, np.flatnonzero(np.diff(chunk)) + 1)
        for part in range(num_parts):
            pieces = [self._hash_grams(piece, part, num_parts) for piece in chunks]
            gram = np.concatenate([grams for grams, _ in pieces])
            document = np.concatenate([owners for _, owners in pieces])
            del pieces
            # Stable: documents stay in order within a gram, so that equal neighbours are repeats.
            order = np.argsort(gram, kind="stable")
            gram, document = gram[order], document[order]
            is_start = np.ones(len(gram), dtype=bool)
            is_start[1:] = gram[1:] != gram[:-1]
            keep = is_start.copy()
            keep[1:] |= document[1:] != document[:-1]
            start = np.flatnonzero(is_start[keep])
            document = document[keep]
            if len(start):
                yield document, start, np.diff(start, append=len(document))

    def _hash_grams(
        self, documents: NDArray[np.int64], part: int, num_parts: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return grams, as polynomials over the hashes of their words, and whose they are."""
        lengths = np.diff(self._offsets)[documents]
        position = np.repeat(self._offsets[documents] - np.cumsum(lengths) + lengths, lengths)
        position += np.arange(len(position))
        owner = np.repeat(documents, lengths)
        hashes = self._word_hash[self._words[position]]
        num_starts = max(len(hashes) - self._num_words + 1, 0)
        gram = np.zeros(num_starts, dtype=np.uint64)
        for word in range(self._num_words):
            gram *= _BASE
            gram += hashes[word : word + num_starts]
        # The last bits of a product depend on few bits: mix before they choose the part.
        gram ^= gram >> np.uint64(32)
        keep = owner[:num_starts] == owner[len(owner) - num_starts :]
        if num_parts > 1:
            keep &= gram % np.uint64(num_parts) == part
        return gram[keep], owner[:num_starts][keep]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


# -- copies that a mitigation removes -------------------------------------------------------------

_NUM_HASHES = 256
_SEED = 0
"""Of the hash functions. Not the run's: what is a copy does not depend on it."""
_MAX_MISSED = 0.01


def find_copies(texts: Sequence[str], config: DeduplicateConfig) -> NDArray[np.bool_]:
    """Return a mask of the documents to remove, ``[num_documents]``; the earlier copy is kept.

    Raises:
        ConfigError: the threshold is below an exact match and rensa is not installed.
    """
    if config.similarity == "exact":
        first: dict[str, int] = {}
        return np.array(
            [first.setdefault(text, number) != number for number, text in enumerate(texts)],
            dtype=bool,
        )
    config.check_library(by_import=True)
    import rensa

    is_copy = np.zeros(len(texts), dtype=bool)
    # The smallest number of bands that misses fewer than 1 % of pairs at the threshold: a pair with
    # Jaccard index s agrees in a band of r hashes with probability s^r.
    num_bands = 8
    while (1 - config.similarity ** (_NUM_HASHES // num_bands)) ** num_bands > _MAX_MISSED:
        num_bands *= 2
    index = rensa.RMinHashLSH(
        threshold=config.similarity, num_perm=_NUM_HASHES, num_bands=num_bands
    )
    kept: dict[int, NDArray[np.uint64]] = {}
    grams_of = WordGrams(texts, num_words=config.num_words).list_grams()
    for number, grams in enumerate(grams_of):
        sketch = rensa.RMinHash(num_perm=_NUM_HASHES, seed=_SEED)
        sketch.update(grams.view("S8").tolist())
        candidates = index.query(sketch)
        similarities = (_compute_jaccard(kept[other], grams) for other in candidates)
        if any(similarity >= config.similarity for similarity in similarities):
            is_copy[number] = True
        else:
            index.insert(number, sketch)
            kept[number] = grams
    return is_copy


def _compute_jaccard(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> float:
    """Return the Jaccard index of two sorted arrays of distinct numbers."""
    num_both = len(np.intersect1d(one, other, assume_unique=True))
    return num_both / (len(one) + len(other) - num_both)
