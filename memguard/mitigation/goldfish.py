"""Goldfish loss: one label in k never receives loss; and token dropout, its ablation.

    loss = -(1/|G|) sum_t G_t log p(x_t | x_<t),   G_t = 0 for about one t in k

Hans et al., "Be like a Goldfish, Don't Memorize!" (arXiv 2406.10209). A model that reproduces a
training text has to guess at every dropped token, so the same tokens must be dropped each time the
text is trained: in mode ``hash`` the decision is a hash of the ``context_width`` (h) tokens BEFORE
the label, as the paper defines it.

The published code (ahans30/goldfish-loss) differs: its window ends at and includes the label, its
product of ids ignores order and becomes 0 when one id is 0 or, for wide windows, by overflow, and
its windows cross document boundaries. Mode ``hash_reference`` reproduces it bit for bit inside one
document; the other modes are memguard's. With ``normalise: text`` letters are hashed (see
letters.py), because reformatting a text is a known way to evade a mask that hashes tokens.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from memguard.config import GoldfishConfig, TokenDropoutConfig
from memguard.mitigation.letters import TokenLetters

if TYPE_CHECKING:
    from memguard.mitigation import Stage

LETTERS_PER_TOKEN = 4
"""Average letters per token of English text; converts a context width from tokens to letters."""

# Odd, so it has an inverse modulo 2^64: 0x9E3779B97F4A7C15 is 2^64 / golden ratio.
_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_COUNT_STEP = 0xD1342543DE82EF95
_TABLE_SIZE = 1_000_003
_TABLE_SEED = 2_971_215_073

# Tokens masked at a time, so that intermediate arrays fit into a core's cache.
_TOKENS_AT_ONCE = 8192


class WindowHash:
    """Hashes the keys before each token in one pass, for any window width.

    With r(key) a 64-bit mix of a key, B an odd constant and everything modulo 2^64,

        prefix_t = sum_{i<t} r(x_i) B^i
        window_t = (prefix_t - prefix_{t-n}) B^-t = sum_{j=1..n} r(x_{t-j}) B^-j,  n = min(h, t)
        hash_t   = mix(window_t + n C)

    Equal windows have equal hashes at any position; order matters; a short window at a document's
    start differs from a longer one of the same keys. Caches the powers of B needed so far.
    """

    def __init__(self) -> None:
        """Start with an empty cache of powers."""
        self._powers = (_powers(_BASE, 0), _powers(_BASE_INVERSE, 0))

    def before(
        self, ids: NDArray[np.int64], start: NDArray[np.int64], width: int
    ) -> NDArray[np.uint64]:
        """Hash the ``width`` tokens before each position; fewer at a document's start.

        Arguments are those of `hash_contexts`.
        """
        places = np.arange(ids.size)
        first = places - width
        np.maximum(start, first, out=first)
        return self.windows(ids, first, places)

    def windows(
        self, keys: NDArray[np.int64], first: NDArray[np.int64], end: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Hash keys ``[M]`` from ``first`` up to ``end``, ``[N]``."""
        powers, inverses = self._powers
        if len(powers) <= keys.size:
            powers = _powers(_BASE, keys.size + 1)
            inverses = _powers(_BASE_INVERSE, keys.size + 1)
            self._powers = (powers, inverses)
        prefix = np.zeros(keys.size + 1, dtype=np.uint64)
        mixed = _mix(keys.astype(np.uint64))
        mixed *= powers[: keys.size]
        np.cumsum(mixed, out=prefix[1:])
        window = prefix[end]
        window -= prefix[first]
        window *= inverses[end]
        num_keys = (end - first).astype(np.uint64)
        num_keys *= np.uint64(_COUNT_STEP)
        window += num_keys
        return _mix(window)


def _mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64-bit keys in place (the finaliser of SplitMix64, Steele et al. 2014)."""
    keys += np.uint64(_BASE)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    keys ^= keys >> np.uint64(31)
    return keys


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """Return base^0 ... base^(count-1) modulo 2^64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


class Goldfish:
    """Drop one label in k."""

    stage: "ClassVar[Stage]" = "labels"

    def __init__(
        self,
        config: GoldfishConfig,
        *,
        special_ids: Sequence[int] = (),
        letters: TokenLetters | None = None,
    ) -> None:
        """Prepare the mask.

        Modes ``hash`` and ``random`` never drop ``special_ids``; ``normalise: text`` needs the
        vocabulary's letters.
        """
        assert letters is not None or config.normalise == "none", "'normalise: text' needs letters"
        self.config = config
        self.letters = letters if config.normalise == "text" else None
        self.special_ids = sorted(set(special_ids))
        # One flag for each id up to the largest special id, and a last one for all larger ids.
        self._is_special = np.zeros(max(special_ids, default=-1) + 2, dtype=bool)
        self._is_special[list(special_ids)] = True
        self._hash = WindowHash()
        self._table = reference_table() if config.mode == "hash_reference" else None

    def at_dose(self, dose: int) -> "Goldfish":
        """Return the goldfish for documents trained ``dose`` times, near-duplicates included."""
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
            document_ids: ``[..., T]``; a new document starts where the number changes, and at the
                start of each row.
            generator: used only by mode ``random``.
        """
        if input_ids.size == 0:
            return np.zeros(input_ids.shape, dtype=bool)
        num_tokens = input_ids.shape[-1]
        ids_RT = np.ascontiguousarray(input_ids).reshape(-1, num_tokens)
        documents_RT = None if document_ids is None else document_ids.reshape(-1, num_tokens)
        num_rows = max(1, _TOKENS_AT_ONCE // num_tokens)
        dropped_RT = np.empty(ids_RT.shape, dtype=bool)
        for at in range(0, len(ids_RT), num_rows):
            rows = slice(at, at + num_rows)
            starts = _document_starts(
                ids_RT[rows].shape, None if documents_RT is None else documents_RT[rows]
            )
            ids = ids_RT[rows].reshape(-1).astype(np.int64, copy=False)
            dropped_RT[rows] = self._drop(ids, starts, generator).reshape(-1, num_tokens)
        return dropped_RT.reshape(input_ids.shape)

    def _drop(
        self, ids: NDArray[np.int64], start: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.bool_]:
        """Mask tokens ``[N]`` of concatenated documents, which begin at ``start``, ``[N]``."""
        k, width = self.config.k, self.config.context_width
        dropped: NDArray[np.bool_]
        if self.config.mode == "hash":
            dropped = self.hash_contexts(ids, start) < np.uint64((1 << 64) // k)
        elif self.config.mode == "hash_reference":
            assert self._table is not None, "the table is built with the mode"
            # The published code never uses a document's first token as a label, so a label has h-1
            # labels before it from position h on.
            dropped = self._table[_product_with_label(ids, width)] < np.float32(1 / k)
            dropped &= np.arange(ids.size) - start >= width
        elif self.config.mode == "static":
            position = np.arange(ids.size) - start
            dropped = (position >= 1) & ((position - 1) % k == 0)
        else:
            dropped = generator.random(ids.size) < 1 / k
        if self.config.mode in ("hash", "random"):
            dropped &= ~self._is_special.take(ids, mode="clip")
        return dropped

    def hash_contexts(self, ids: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Hash the context that decides on each label: h tokens before it, or 4h letters.

        At a document's start the context is shorter, and its length is hashed too. The tokens
        ``[N]`` are of concatenated documents, which begin at ``start``, ``[N]``.
        """
        width = self.config.context_width
        if self.letters is None:
            return self._hash.before(ids, start, width)
        codes, begins = self.letters.spell(ids, start)
        ends = begins[:-1]
        first = np.maximum(ends[start], ends - LETTERS_PER_TOKEN * width)
        return self._hash.windows(codes, first, ends)


class TokenDropout:
    """Drop a random share of the labels, different ones each time a text is seen.

    The ablation of goldfish: after a few epochs every label has been trained, and the whole text
    can be memorized.
    """

    stage: "ClassVar[Stage]" = "labels"

    def __init__(self, config: TokenDropoutConfig) -> None:
        self.config = config

    def drop_mask(
        self,
        input_ids: NDArray[np.integer],
        document_ids: NDArray[np.integer] | None,
        generator: np.random.Generator,
    ) -> NDArray[np.bool_]:
        """Return True where the token, as a label, is dropped; only the shape of ids matters."""
        return generator.random(input_ids.shape) < self.config.rate


def _product_with_label(ids: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return the published key: product of the ``width`` ids that END at each label, mod 1,000,003.

    Uses int64 arithmetic that wraps, and a remainder that is never negative, like torch.
    """
    product = np.ones(ids.size, dtype=np.int64)
    for back in range(min(width, ids.size)):
        product[back:] *= ids[: ids.size - back]
    return product % _TABLE_SIZE


def find_zero_products(
    ids: NDArray[np.integer], width: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the labels of a document with a window of ``hash_reference``, and with a product of 0.

    One id 0 makes the product of a window 0, and so do 64 factors of 2, by overflow. All these
    windows have the same key: their labels are all dropped or all kept, see `drops_zero_products`.
    ``width`` is the h of `hash_contexts`.
    """
    keys = ids.astype(np.int64)
    is_window = np.arange(keys.size) >= width
    return is_window, is_window & (_product_with_label(keys, width) == 0)


def drops_zero_products(k: int) -> bool:
    """Return whether mode ``hash_reference`` drops the labels of windows whose product is 0."""
    return bool(reference_table()[0] < np.float32(1 / k))


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
    """Return, for each flattened position, the index at which its document starts."""
    begins = np.zeros(shape, dtype=bool)
    begins[..., :1] = True
    if document_ids is not None:
        begins[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
    starts = np.flatnonzero(begins)
    return np.repeat(starts, np.diff(starts, append=begins.size))
