"""Own text: words that no other document has, so that no shared form explains them.

word       of a text (`data.words`); without a tokenizer, a token id
taken      a word in a run of four that a document of another near-duplicate cluster has too,
           in the audit or outside of its samples, or that the text before has
own text   of the last 30 words (of an answer) at least half, and ten, are not taken
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.audit.passages import Codec
from memguard.audit.windows import AuditDocument, Window, list_clusters
from memguard.data.words import hash_runs, split_words

_LAST_WORDS, _MIN_OWN_WORDS, _RUN_WORDS = 30, 10, 4
_NO_CLUSTER, _LAST_RUN = np.iinfo(np.int64).min, np.iinfo(np.uint64).max


class OwnText:
    """Says which texts of an audit are own text."""

    is_own_N: NDArray[np.bool_]
    """Whether the end of each audited text is own text."""

    def __init__(
        self, documents: Sequence[AuditDocument], windows: Sequence[Window], codec: Codec | None
    ) -> None:
        """Read all documents of an audit, those of its N windows among them."""
        self._codec = codec
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__
        words = {id(w.document): self._read(w.document.grid_ids) for w in windows}
        audited = {key: hash_runs(own, _RUN_WORDS) for key, own in words.items()}
        # Only their runs are kept. The last one is there so that all others have a place.
        last = np.array([_LAST_RUN], dtype=np.uint64)
        runs = np.sort(np.concatenate([*audited.values(), last]))
        owner, is_shared = np.full(len(runs), _NO_CLUSTER), np.zeros(len(runs), dtype=bool)
        for document, cluster in zip(documents, list_clusters(documents), strict=True):
            found = audited.get(id(document))
            if found is None:
                found = hash_runs(self._read(document.grid_ids), _RUN_WORDS)
            place = np.searchsorted(runs, found)
            place = place[runs[place] == found]
            is_shared[place] |= (owner[place] != _NO_CLUSTER) & (owner[place] != cluster)
            owner[place] = cluster
        self._shared = frozenset(runs[is_shared].tolist())
        self.is_own_N = np.array([self._is_own(w, words[id(w.document)]) for w in windows], bool)

    def is_own_span(self, ids: NDArray[np.int32], begin: int, end: int) -> bool:
        """Return whether 30 words in a row of tokens begin .. end of a document are own text."""
        span = self._read(ids[begin:end])
        return self._has_own(np.concatenate([self._read(ids[:begin]), span]), len(span))

    def _is_own(self, window: Window, words: NDArray[np.uint64]) -> bool:
        document, num_last = window.document, _LAST_WORDS
        if document.whole_ids is not None:
            words = self._read(document.input_ids)
        if document.format != "text":
            num_last = min(num_last, len(self._read(window.continuation_ids)))
        return self._has_own(words, min(num_last, len(words)))

    def _has_own(self, words: NDArray[np.uint64], num_last: int) -> bool:
        """Return whether 30 in a row of the last words (all, if fewer) are own text."""
        runs = hash_runs(words, _RUN_WORDS).tolist()
        first = max(0, len(words) - num_last - _RUN_WORDS + 1)
        before = set(runs[:first])
        is_taken = [run in self._shared or run in before for run in runs[first:]]
        # A word is in the run that it begins, and in the three before.
        counts = np.convolve([False, *is_taken], np.ones(_RUN_WORDS))[1:]
        size = min(_LAST_WORDS, num_last)
        num_own = np.concatenate([[0], np.cumsum(counts[len(counts) - num_last :] == 0)])
        most = (num_own[size:] - num_own[: num_last - size + 1]).max()
        return bool(most >= max(_MIN_OWN_WORDS, size / 2))

    def _read(self, ids: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return a number of each word of a text."""
        if self._codec is None:
            return ids.astype(np.uint64)
        words = split_words(self._codec.decode(ids))
        return np.fromiter(map(self._numbers.__getitem__, words), np.uint64, len(words))
