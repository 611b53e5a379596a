"""Goldfish loss: one label in k never receives loss.

    loss = -(1/|G|) sum_t G_t log p(x_t | x_<t),   G_t = 0 for about one t in k

Hans et al., "Be like a Goldfish, Don't Memorize!" (arXiv 2406.10209). A model that recites has to
guess at every dropped token, so the same tokens must be dropped each time a text is seen: in mode
``hash`` the decision is a hash of the ``context_width`` (h) tokens BEFORE the label, as the paper
defines it.

Where we differ from the published code (ahans30/goldfish-loss): its window ends at and includes the
label, its product of ids ignores order and becomes 0 when one id is 0 or, for wide windows, by
overflow, and it runs on across documents. Mode ``hash_reference`` reproduces it bit for bit inside
one document; the others are ours. With ``normalise: text`` the hash is one of letters (see
`letters`): reformatting a text is a known way around a mask that hashes tokens.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from memguard.config import GoldfishConfig
from memguard.mitigation.letters import LETTERS_PER_TOKEN, TokenLetters

if TYPE_CHECKING:
    from memguard.mitigation import Need, Stage

# Odd, so it has an inverse modulo 2^64: 0x9E3779B97F4A7C15 is 2^64 / golden ratio.
_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_COUNT_STEP = 0xD1342543DE82EF95

_TABLE_SIZE = 1_000_003
_TABLE_SEED = 2_971_215_073


class Goldfish:
    """Drop one label in k."""

    stage: "ClassVar[Stage]" = "labels"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll"})

    def __init__(
        self,
        config: GoldfishConfig,
        *,
        special_ids: Sequence[int] = (),
        letters: TokenLetters | None = None,
    ) -> None:
        """Prepare the mask.

        Args:
            config: k, context width and mode.
            special_ids: token ids that modes ``hash`` and ``random`` never drop.
            letters: of the vocabulary; needed for ``normalise: text``.
        """
        assert letters is not None or config.normalise == "none", "the text is hashed"
        self.config = config
        self.letters = letters if config.normalise == "text" else None
        self._special_ids = np.array(sorted(set(special_ids)), dtype=np.int64)
        self._table = reference_table() if config.mode == "hash_reference" else None

    @property
    def special_ids(self) -> list[int]:
        """Token ids that modes ``hash`` and ``random`` never drop, sorted."""
        ids: list[int] = self._special_ids.tolist()
        return ids

    @property
    def target_drop_rate(self) -> float:
        """Share of the labels it means to drop: 1/k."""
        return 1 / self.config.k

    def at_dose(self, dose: int) -> "Goldfish":
        """Return the goldfish of documents that are trained so often, near-duplicates counted."""
        lower = [k for least, k in self.config.k_by_dose.items() if dose >= least]
        if not lower:
            return self
        config = self.config.model_copy(update={"k": min(lower), "k_by_dose": {}})
        return Goldfish(config, special_ids=self.special_ids, letters=self.letters)

    def drop_mask(
        self,
        input_ids: NDArray[np.integer],
        document_ids: NDArray[np.integer] | None,
        generator: np.random.Generator,
    ) -> NDArray[np.bool_]:
        """Return True where the token, as a label, is dropped.

        Args:
            input_ids: ``[..., T]`` tokens.
            document_ids: ``[..., T]``; a change of number starts a new document, as does a row.
            generator: used by mode ``random`` only.
        """
        k, width = self.config.k, self.config.context_width
        start = _document_starts(input_ids.shape, document_ids)
        ids = np.ascontiguousarray(input_ids).reshape(-1).astype(np.int64, copy=False)
        position = np.arange(ids.size) - start
        if self.config.mode == "hash":
            if self.letters is None:
                hashes = hash_before(ids, start, width)
            else:
                hashes = hash_letters(self.letters, ids, start, width)
            dropped = hashes < np.uint64((1 << 64) // k)
        elif self.config.mode == "hash_reference":
            assert self._table is not None, "the table is built with the mode"
            # A label has h-1 labels before it in the document from its second token on; the
            # published code never sees the first token as a label.
            dropped = self._table[_product_with_label(ids, width)] < np.float32(1 / k)
            dropped &= position >= width
        elif self.config.mode == "static":
            dropped = (position >= 1) & ((position - 1) % k == 0)
        else:
            dropped = generator.random(ids.size) < 1 / k
        if self.config.mode in ("hash", "random") and self._special_ids.size:
            dropped &= ~np.isin(ids, self._special_ids)
        return dropped.reshape(input_ids.shape)


def hash_before(ids: NDArray[np.int64], start: NDArray[np.int64], width: int) -> NDArray[np.uint64]:
    """Hash the ``width`` tokens before each position; fewer at a document's start, plus how many.

    With r(id) a 64-bit mix of the id, B an odd constant and everything modulo 2^64,

        prefix_t = sum_{i<t} r(x_i) B^i
        window_t = (prefix_t - prefix_{t-n}) B^-t = sum_{j=1..n} r(x_{t-j}) B^-j,  n = min(h, t)
        hash_t   = mix(window_t + n C)

    One pass whatever the width; equal windows hash equally wherever they stand; order matters.

    Args:
        ids: ``[N]`` tokens of documents laid end to end.
        start: ``[N]`` index at which the document of each token starts.
        width: h.
    """
    places = np.arange(ids.size)
    return _hash_windows(ids, np.maximum(start, places - width), places)


def hash_letters(
    letters: TokenLetters, ids: NDArray[np.int64], start: NDArray[np.int64], width: int
) -> NDArray[np.uint64]:
    """Hash the letters before each position, 4 ``width`` of them; fewer at a document's start.

    Args:
        letters: of the vocabulary.
        ids: ``[N]`` tokens of documents laid end to end.
        start: ``[N]`` index at which the document of each token starts.
        width: h.
    """
    codes, begins = letters.spell(ids)
    ends = begins[:-1]
    first = np.maximum(ends[start], ends - LETTERS_PER_TOKEN * width)
    return _hash_windows(codes, first, ends)


def _hash_windows(
    keys: NDArray[np.int64], first: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Hash keys ``[M]`` from ``first`` up to ``end``, ``[N]``, by the formula of `hash_before`."""
    prefix = np.zeros(keys.size + 1, dtype=np.uint64)
    np.cumsum(_mix(keys.astype(np.uint64)) * _powers(_BASE, keys.size), out=prefix[1:])
    window = (prefix[end] - prefix[first]) * _powers(_BASE_INVERSE, keys.size + 1)[end]
    return _mix(window + (end - first).astype(np.uint64) * np.uint64(_COUNT_STEP))


def _mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread 64-bit keys (the finaliser of SplitMix64, Steele et al. 2014)."""
    keys = keys + np.uint64(_BASE)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """Return base^0 ... base^(count-1) modulo 2^64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _product_with_label(ids: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return the published key: product of the ``width`` ids that END at each label, mod 1,000,003.

    int64 arithmetic that wraps, and a remainder that is never negative, as torch has it.
    """
    product = np.ones(ids.size, dtype=np.int64)
    for back in range(min(width, ids.size)):
        product[back:] *= ids[: ids.size - back]
    return product % _TABLE_SIZE


def reference_table() -> NDArray[np.float32]:
    """Return the published table of 1,000,003 uniform numbers, the same on every device.

    Equal to ``torch.rand(1_000_003)`` on the CPU after ``manual_seed(2971215073)``: 24 bits of each
    output of the same Mersenne Twister.
    """
    twister = np.random.RandomState(_TABLE_SEED)._bit_generator
    bits = twister.random_raw(_TABLE_SIZE) & np.uint64((1 << 24) - 1)
    return bits.astype(np.float32) / np.float32(1 << 24)


def _document_starts(
    shape: tuple[int, ...], document_ids: NDArray[np.integer] | None
) -> NDArray[np.int64]:
    """Return, for each flattened position, where its document starts."""
    places = np.arange(int(np.prod(shape))).reshape(shape)
    begins = np.zeros(shape, dtype=bool)
    begins[..., :1] = True
    if document_ids is not None:
        begins[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
    starts = np.where(begins, places, 0).reshape(-1)
    return np.maximum.accumulate(starts)
