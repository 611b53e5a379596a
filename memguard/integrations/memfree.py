"""MemFree decoding: never generates n consecutive tokens that occur in a protected document.

    stored     for every n-gram of the documents: hash of its first n - 1 tokens, its last token
    at a step  hash of a row's last n - 1 tokens  ->  the tokens that must not come next

Ippolito et al., arXiv 2210.17546, store the n-grams in a Bloom filter and query it for one
candidate at a time. Here they are sorted 64-bit hashes with the token that follows: 12 bytes for
each distinct n-gram, all forbidden tokens of a row by one binary search, and a false positive once
in 10^19 / num_ngrams steps. The paper was not read for this, and none of its results is claimed.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers import LogitsProcessor

from memguard.data.corpus import load_corpus
from memguard.errors import ConfigError
from memguard.mitigation.goldfish import WindowHash


class MemFreeLogitsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Forbids every token that would complete an n-gram of the protected documents.

    For ``generate(..., logits_processor=LogitsProcessorList([memfree]))``: greedy decoding,
    sampling and beam search, with rows of any length. The prompt counts: a prompt from a document
    is not continued by that document's next token. A row shorter than n - 1 tokens is not
    restricted until it reaches this length.

    It prevents only verbatim output, because the model has still memorized the text. As Ippolito
    et al. report, prompts in another style defeat it: prompted for capitals, other spacing or
    another language, the model generates the text in n-grams that are not stored. In the document's
    own style the model may change one token in n and continue. Evaluate it by near-verbatim
    overlap, never by verbatim match alone. Common n-grams, as in licences and letterheads, are
    forbidden too.
    """

    def __init__(self, documents: Iterable[ArrayLike], *, ngram_size: int = 10) -> None:
        """Store the n-grams of some documents.

        Args:
            documents: token ids ``[N]`` of each document, from the generating model's tokenizer.
            ngram_size: n (tokens).

        Raises:
            ConfigError: n below 2.
        """
        if ngram_size < 2:
            raise ConfigError(f"'ngram_size' should be 2 or more; got {ngram_size}")
        self._width = ngram_size - 1
        self._hash = WindowHash()
        keys, tokens = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int32)]
        for document in documents:
            ids = np.asarray(document, dtype=np.int64).reshape(-1)
            start = np.zeros(len(ids), dtype=np.int64)
            keys.append(self._hash.before(ids, start, self._width)[self._width :])
            tokens.append(ids[self._width :].astype(np.int32))
        key_M, token_M = np.concatenate(keys), np.concatenate(tokens)
        order = np.lexsort((token_M, key_M))
        key_M, token_M = key_M[order], token_M[order]
        is_new = np.ones(len(key_M), dtype=bool)
        is_new[1:] = (key_M[1:] != key_M[:-1]) | (token_M[1:] != token_M[:-1])
        self._key_M, self._token_M = key_M[is_new], token_M[is_new]
        self._largest = int(token_M.max(initial=-1))

    @classmethod
    def from_run(cls, run_folder: str | Path, *, ngram_size: int = 10) -> Self:
        """Protect all documents that a run of memguard trains on, with background and canaries.

        Args:
            run_folder: folder of the run, with ``manifest.jsonl`` and ``prepared/``.
            ngram_size: n (tokens).

        Raises:
            ConfigError: n below 2.
            RecordError: the folder's documents are missing or incomplete.
        """
        corpus = load_corpus(Path(run_folder))
        trained = (
            corpus.document(index).input_ids
            for index, entry in enumerate(corpus.manifest)
            if entry.role == "background" or entry.planned_repetitions > 0
        )
        return cls(trained, ngram_size=ngram_size)

    @property
    def num_ngrams(self) -> int:
        """Number of distinct stored n-grams."""
        return len(self._key_M)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores ``[B, V]`` with -inf for every forbidden token after ``[B, T]``.

        Raises:
            ConfigError: a document contains a token outside the model's vocabulary.
        """
        if self._largest >= scores.shape[-1]:
            raise ConfigError(
                f"the documents contain token {self._largest}, but the model's vocabulary has "
                f"{scores.shape[-1]} tokens: tokenise them with the model's own tokenizer"
            )
        if input_ids.shape[1] < self._width:
            return scores
        key_B = self._hash_ends(input_ids[:, -self._width :].cpu().numpy())
        first_B = np.searchsorted(self._key_M, key_B, side="left")
        num_B = np.searchsorted(self._key_M, key_B, side="right") - first_B
        if not num_B.any():
            return scores
        rows = np.repeat(np.arange(len(key_B)), num_B)
        places = np.concatenate([np.arange(n) + at for n, at in zip(num_B, first_B, strict=True)])
        forbidden = (torch.from_numpy(rows), torch.from_numpy(self._token_M[places]).long())
        scores = scores.clone()
        scores[tuple(index.to(scores.device) for index in forbidden)] = -torch.inf
        return scores

    def _hash_ends(self, ids_BW: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Hash whole rows, as `WindowHash.before` does for the token that follows them."""
        size = self._width + 1
        # The token that follows is not hashed, so any value works.
        rows = np.pad(ids_BW, ((0, 0), (0, 1))).reshape(-1)
        places = np.arange(rows.size)
        hashes = self._hash.before(rows, places - places % size, self._width)
        return hashes[self._width :: size]
