"""Clusters of near-duplicate documents, and copies that a mitigation removes.

Words are those of `words.py`; a sequence of words, a gram, is hashed to 64 bits.

    candidates   documents that share a gram of `num_words` words, each with the next and with the
                 first that has it, so that their number grows with the number of grams
    copy         runs of at least `_RUN_WORDS` shared words hold at least `_SHARE` of the words of
                 the shorter document; a word in a run that d of N documents share weighs
                 log((N + 1) / d), so that a system prompt, a licence or a footer counts little
    cluster      what pairs of copies connect; documents with the same words, or with the same
                 token ids, are always copies

`count_overlap` counts documents that share any gram: a quotation or a shared prompt, too, is text
that the model was trained on. Copies without a run of `num_words` words in common are not found,
and neither is a passage in two otherwise different documents. A corpus of nothing but copies of one
text seems to be a form, because every run of it is frequent.

`find_copies`, for the mitigation `deduplicate`, removes documents that share most of their text:

    document       set of 64-bit hashes of its grams of `num_words` words
    MinHash, LSH   candidates among the kept documents; computed by `rensa`
    Jaccard        exact |intersection| / |union| of the two sets decides

Documents are processed in file order. A document is removed if it is similar enough to a document
that was kept before. So every removed document has a kept copy, and a chain of small changes does
not remove a document that differs from all kept ones. LSH misses fewer than one in a hundred pairs
exactly at the threshold. Two notices that differ in every tenth word share no gram of 13 words but
are copies at a similarity of 0.3. `exact` compares whole texts in the form of `words.py`. Lee
et al. 2022 and Kandpal et al. 2022 remove copies to reduce memorization; the papers were not
consulted for this implementation, and none of their figures is claimed.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from memguard.config.mitigations import DeduplicateConfig
from memguard.data.words import hash_runs, normalize_text, split_words

_RUN_WORDS, _SHARE = 5, 0.6
# At most this many grams are in memory, about 60 bytes each while they are sorted.
_MAX_GRAMS = 2**25
_CHUNK_WORDS = 2**20
_CACHED_DOCUMENTS = 256


class WordGrams:
    """The grams of a list of documents, kept as words (4 bytes each) and hashed when needed."""

    def __init__(self, texts: Iterable[str], *, num_words: int = 13) -> None:
        """Read the documents once; a gram has ``num_words`` words."""
        number_of_word: defaultdict[str, int] = defaultdict()
        number_of_word.default_factory = number_of_word.__len__
        number = number_of_word.__getitem__
        streams, whole = [np.empty(0, dtype=np.uint32)], []
        for text in texts:
            words = split_words(text)
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

    def cluster(self, tokens: Sequence[str] | None = None) -> NDArray[np.int64]:
        """Return the cluster of each document, numbered in order of first appearance.

        ``tokens``: a hash of the token ids of each document; None if they are not compared.
        """
        num_documents = len(self._whole)
        pairs = self._find_candidates()
        is_copy = np.fromiter(self._compare(pairs), dtype=bool, count=len(pairs))
        links = [pairs[is_copy].T, _link_equal(self._whole)]
        if tokens is not None:
            links.append(_link_equal(np.array(tokens, dtype=object)))
        one, other = np.concatenate(links, axis=1)
        graph = coo_array(
            (np.ones(len(one), dtype=np.int8), (one, other)), shape=(num_documents, num_documents)
        )
        _, label = connected_components(graph, directed=False)
        _, first, place = np.unique(label, return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))
        clusters: NDArray[np.int64] = rank[place].astype(np.int64)
        return clusters

    def _find_candidates(self) -> NDArray[np.int64]:
        """Return pairs ``[P, 2]`` of documents that share a gram, and not all words.

        The pairs of a document and earlier ones follow each other.
        """
        num_documents = max(len(self._whole), 1)
        everyone = np.arange(len(self._whole))
        found = [np.empty(0, dtype=np.int64)]
        for document, start, count in self._partition(everyone, self._num_words):
            later = np.ones(len(document), dtype=bool)
            later[start] = False
            second = np.flatnonzero(later)
            first = np.repeat(document[start], count)[second]
            firsts = np.concatenate([document[second - 1], first])
            found.append(np.unique(np.tile(document[second], 2) * num_documents + firsts))
        other, one = np.divmod(np.unique(np.concatenate(found)), num_documents)
        differs = self._whole[one] != self._whole[other]
        return np.stack([one[differs], other[differs]], axis=1)

    def _compare(self, pairs: NDArray[np.int64]) -> Iterator[bool]:
        """Yield whether each pair is a copy."""
        size = min(_RUN_WORDS, self._num_words)
        weights = self._weigh(np.unique(pairs), size)
        lengths = np.diff(self._offsets)
        is_swapped = lengths[pairs[:, 0]] > lengths[pairs[:, 1]]
        ordered = np.where(is_swapped[:, None], pairs[:, ::-1], pairs)
        # Sorted once, not for each pair: a book may be compared with all others.
        runs_of = lru_cache(_CACHED_DOCUMENTS)(partial(self._hash_document, size=size))
        sorted_of = lru_cache(_CACHED_DOCUMENTS)(lambda number: np.sort(runs_of(number)))
        for short, long in ordered.tolist():
            mine, theirs = runs_of(short), sorted_of(long)
            place = np.minimum(np.searchsorted(theirs, mine), len(theirs) - 1)
            weight = weights[self._offsets[short] : self._offsets[short + 1]]
            # Words of the shorter document that a shared run holds.
            ends = np.zeros(len(weight) + 1, dtype=np.int64)
            shared = np.flatnonzero(theirs[place] == mine)
            ends[shared] += 1
            ends[shared + size] -= 1
            is_held = np.cumsum(ends[:-1]) > 0
            # Weights have 24 bits.
            yield bool(weight[is_held].sum() >= (_SHARE - 1e-6) * weight.sum())

    def _weigh(self, documents: NDArray[np.int64], size: int) -> NDArray[np.float32]:
        """Return the weight of every word, ``[num_words]``; it is of use for ``documents`` only.

        Of the runs that hold a word, the one that most of the documents share counts.
        """
        highest = np.float32(np.log(len(self._whole) + 1))
        of_run = np.full(len(self._words), highest)
        for gram, owner, position in self._sort_grams(documents, size):
            is_start = np.ones(len(gram), dtype=bool)
            is_start[1:] = gram[1:] != gram[:-1]
            is_new = is_start.copy()
            is_new[1:] |= owner[1:] != owner[:-1]
            number = np.cumsum(is_start) - 1
            count = np.bincount(number, weights=is_new)
            of_run[position] = highest - np.log(count)[number]
        # No run begins in the last words of a document, so that none reaches into the next one.
        weights = of_run.copy()
        for word in range(1, size):
            np.minimum(weights[word:], of_run[:-word], out=weights[word:])
        return weights

    def list_grams(self) -> Iterator[NDArray[np.uint64]]:
        """Yield the sorted distinct grams of each document; a short one is a single gram."""
        for document, whole in enumerate(self._whole):
            grams = self._hash_document(document, self._num_words)
            yield np.unique(grams) if len(grams) else np.array([whole])

    def count_overlap(self, in_control: NDArray[np.bool_], in_trained: NDArray[np.bool_]) -> int:
        """Count control documents that share any gram with a trained one."""
        overlaps = in_control & np.isin(self._whole, self._whole[in_trained])
        compared = np.flatnonzero(in_control | in_trained)
        for document, start, count in self._partition(compared, self._num_words):
            has_trained = np.logical_or.reduceat(in_trained[document], start)
            overlaps[document[np.repeat(has_trained, count)]] = True
        return int((overlaps & in_control).sum())

    def _partition(
        self, documents: NDArray[np.int64], size: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Yield who shares the grams of ``documents``, in parts of G grams that fit into memory.

        The documents, grouped by gram and ascending within; where each gram begins ``[G]``; and how
        many documents contain it ``[G]``.
        """
        for gram, document, _ in self._sort_grams(documents, size):
            is_start = np.ones(len(gram), dtype=bool)
            is_start[1:] = gram[1:] != gram[:-1]
            keep = is_start.copy()
            keep[1:] |= document[1:] != document[:-1]
            start = np.flatnonzero(is_start[keep])
            if len(start):
                yield document[keep], start, np.diff(start, append=int(keep.sum()))

    def _sort_grams(
        self, documents: NDArray[np.int64], size: int
    ) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the grams of ``documents`` in parts: hashes, ascending; whose they are; where."""
        lengths = np.diff(self._offsets)[documents]
        num_grams = int(np.maximum(lengths - size + 1, 0).sum())
        num_parts = -(-num_grams // _MAX_GRAMS)
        chunk = np.cumsum(lengths) // _CHUNK_WORDS
        chunks = np.split(documents, np.flatnonzero(np.diff(chunk)) + 1)
        for part in range(num_parts):
            pieces = [self._hash_grams(piece, part, num_parts, size) for piece in chunks]
            gram, owner, position = (np.concatenate(values) for values in zip(*pieces, strict=True))
            del pieces
            # Stable: documents stay in order within a gram, so that equal neighbours are repeats.
            order = np.argsort(gram, kind="stable")
            yield gram[order], owner[order], position[order]

    def _hash_grams(
        self, documents: NDArray[np.int64], part: int, num_parts: int, size: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
        """Return grams, as polynomials over the hashes of their words; whose they are; where."""
        lengths = np.diff(self._offsets)[documents]
        position = np.repeat(self._offsets[documents] - np.cumsum(lengths) + lengths, lengths)
        position += np.arange(len(position))
        owner = np.repeat(documents, lengths)
        gram = hash_runs(self._word_hash[self._words[position]], size)
        num_starts = len(gram)
        keep = owner[:num_starts] == owner[len(owner) - num_starts :]
        if num_parts > 1:
            keep &= gram % np.uint64(num_parts) == part
        return gram[keep], owner[:num_starts][keep], position[:num_starts][keep]

    def _hash_document(self, document: int, size: int) -> NDArray[np.uint64]:
        words = self._words[self._offsets[document] : self._offsets[document + 1]]
        return hash_runs(self._word_hash[words], size)


def _link_equal(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return pairs ``[2, P]`` that connect all documents with the same value."""
    order = np.argsort(values, kind="stable")
    is_same = values[order][1:] == values[order][:-1]
    return np.stack([order[:-1][is_same], order[1:][is_same]])


def _hash(text: str) -> int:
    data = text.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


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
        forms = map(normalize_text, texts)
        return np.array(
            [first.setdefault(form, number) != number for number, form in enumerate(forms)],
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
