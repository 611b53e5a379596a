"""Recognises documents in the rows that a trainer feeds, by a hash of their tokens.

    row            a a a b b . .      position_ids 0 1 2 0 1, or the attention mask: runs aaa, bb
    padded, bfd    run = a document, with or without EOS, or its first `max_length` tokens
    bfd_split      run = the tokens of a document between multiples of `max_length`
    wrapped        run = a slice of the documents of 1,000 rows joined together

The index is built from the documents as they are before truncation and packing. It holds one key of
16 bytes for each piece that these can leave of a document.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memguard.workflows.auditing.trained_counts import TrainedCounts

Packing = Literal["bfd", "bfd_split", "wrapped"]
PACKINGS: tuple[str, ...] = get_args(Packing)
_MAP_ROWS = 1000
"""Rows that TRL packs together: the default batch of `datasets.Dataset.map`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """How a trainer makes rows of documents; by default one document is one row."""

    eos_id: int | None = None
    """Token that may have been appended to a document; None if there is none."""
    max_length: int | None = None
    """Length at which documents are cut or split, and that of a packed row (tokens)."""
    packing: Packing | None = None
    """TRL's strategy."""
    num_proc: int | None = None
    """Processes that pack a dataset, each its own part of the rows."""
    shuffle_seed: int | None = None
    """Seed with which rows are shuffled before they are packed; None leaves their order."""

    @classmethod
    def of_trainer(cls, arguments: Any, *, eos_id: int | None) -> Self:
        """Return how a trainer makes rows, by its `TrainingArguments` or TRL's `SFTConfig`.

        ``eos_id`` is the token that it may append to a document; None if there is none.
        """
        strategy = getattr(arguments, "packing_strategy", None)
        is_packed = getattr(arguments, "packing", False) and strategy in PACKINGS
        is_shuffled = is_packed and getattr(arguments, "shuffle_dataset", False)
        return cls(
            eos_id=eos_id,
            max_length=getattr(arguments, "max_length", None),
            packing=strategy if is_packed else None,
            num_proc=getattr(arguments, "dataset_num_proc", None) if is_packed else None,
            shuffle_seed=arguments.seed if is_shuffled else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Layout:
    """The P pieces of D documents, and the E keys by which they are found."""

    first_piece: NDArray[np.int64]
    """[D] number of the first piece of each document."""
    piece_of_entry: NDArray[np.int64]
    """[E] number of a piece; a piece may have several keys, e.g. with and without EOS."""
    key_of_entry: NDArray[np.int64]
    """[E]"""
    owner_of_entry: NDArray[np.int64]
    """[E] number of the document, or of the slice in which it is; a key with two owners has equal
    tokens in two places."""
    times_of_entry: NDArray[np.int64]
    """[E] pieces of the document that have this key, which one training of it feeds all."""
    first_piece_tokens: Mapping[int, int] = field(default_factory=dict)
    """Length of the first piece of a document, by the document's number (tokens)."""

    def count(self, counts_K: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how often each document was trained in full, ``[D]``."""
        if not len(self.first_piece):
            return np.empty(0, dtype=np.int64)
        per_piece = np.zeros(self._num_pieces, dtype=np.int64)
        trained = counts_K[self.key_of_entry] // self.times_of_entry
        np.add.at(per_piece, self.piece_of_entry, trained)
        return np.minimum.reduceat(per_piece, self.first_piece)

    def count_equal(self, num_keys: int) -> int:
        """Return the number of documents of which each piece has a key with another owner."""
        if not len(self.first_piece):
            return 0
        owned = np.unique(np.stack([self.owner_of_entry, self.key_of_entry]), axis=1)
        owners_K = np.bincount(owned[1], minlength=num_keys)
        is_shared = np.zeros(self._num_pieces, dtype=bool)
        np.logical_or.at(is_shared, self.piece_of_entry, owners_K[self.key_of_entry] > 1)
        return int(np.logical_and.reduceat(is_shared, self.first_piece).sum())

    @property
    def _num_pieces(self) -> int:
        last = self.piece_of_entry.max(initial=-1) + 1
        return int(max(last, self.first_piece[-1] + 1))


class _LayoutBuilder:
    """Collects the pieces of one document after the other."""

    def __init__(self, keys: dict[bytes, int]) -> None:
        self._keys = keys
        self._first: list[int] = []
        self._pieces: list[int] = []
        self._entries: list[int] = []
        self._owners: list[int] = []
        self._times: list[int] = []
        self._num_pieces = 0
        self.first_piece_tokens: dict[int, int] = {}

    def number(self, run: NDArray[np.int64]) -> int:
        """Return the number of a run's key."""
        return self._keys.setdefault(hash_run(run), len(self._keys))

    def add(self, pieces: Sequence[set[int]], slices: Sequence[int] | None = None) -> None:
        """Add a document: the numbers of the keys of each of its pieces, and of their slices."""
        owners = [len(self._first)] * len(pieces) if slices is None else slices
        self._first.append(self._num_pieces)
        times = Counter(key for keys in pieces for key in keys)
        for keys, owner in zip(pieces, owners, strict=True):
            self._pieces += [self._num_pieces] * len(keys)
            self._entries += sorted(keys)
            self._owners += [owner] * len(keys)
            self._times += [times[key] for key in sorted(keys)]
            self._num_pieces += 1
        if not pieces:  # A document without tokens: never trained.
            self._num_pieces += 1

    def build(self) -> _Layout:
        return _Layout(
            first_piece=np.array(self._first, dtype=np.int64),
            piece_of_entry=np.array(self._pieces, dtype=np.int64),
            key_of_entry=np.array(self._entries, dtype=np.int64),
            owner_of_entry=np.array(self._owners, dtype=np.int64),
            times_of_entry=np.array(self._times, dtype=np.int64),
            first_piece_tokens=self.first_piece_tokens,
        )


class RunIndex:
    """The runs that documents leave in the rows of a trainer, by their hash."""

    def __init__(self, documents: Iterable[tuple[str, ArrayLike]], rows: RowFormat) -> None:
        """Read the documents once.

        Args:
            documents: id and token ids ``[N]`` of each, neither truncated nor packed, without an
                appended EOS; for packing `wrapped` in the order of the dataset.
            rows: how rows are made of them.
        """
        self._rows = rows
        self._keys: dict[bytes, int] = {}
        self._cut: set[int] = set()
        self._has_split = False
        ids: list[str] = []
        whole: list[NDArray[np.int64]] = []
        digest = hashlib.blake2b(repr(rows).encode(), digest_size=16)
        pieces = _LayoutBuilder(self._keys)
        for id, tokens in documents:
            run = np.asarray(tokens, dtype=np.int64)
            ids.append(id)
            digest.update(f"\0{id}\0".encode(errors="surrogatepass") + hash_run(run))
            if rows.packing == "wrapped":
                whole.append(run)
            elif rows.packing == "bfd_split" and rows.max_length is not None:
                pieces.add(self._list_split(run, rows.max_length, pieces))
            else:
                pieces.add(self._list_whole(run, pieces))
        self.ids = tuple(ids)
        self.digest = digest.hexdigest()
        """Identifies documents and format, so that counts are never those of others."""
        self._layouts: tuple[_Layout, ...] = (pieces.build(),)
        if rows.packing == "wrapped":
            ends = dict.fromkeys((None, rows.eos_id))
            self._layouts = tuple(self._join(whole, has_eos=eos is not None) for eos in ends)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._keys)

    def find(self, run: NDArray[np.int64]) -> int | None:
        """Return the number of a run's key; None if no document leaves such a run."""
        return self._keys.get(hash_run(run))

    def count(
        self, counts_K: NDArray[np.int64], *, num_runs: int, num_unmatched: int, reason: str = ""
    ) -> TrainedCounts:
        """Return the repetitions of each document, by those of the run of each key, ``[K]``.

        The numbers of runs and the reason are as in `TrainedCounts`.
        """
        # With and without EOS the stream of packing `wrapped` is cut elsewhere: one of them holds.
        layout = max(
            self._layouts, key=lambda each: int(counts_K[np.unique(each.key_of_entry)].sum())
        )
        piece: Literal["cut", "split"] | None = "split" if self._has_split else None
        if any(counts_K[key] for key in self._cut):
            piece = "cut"
        return TrainedCounts(
            num_repetitions=dict(zip(self.ids, layout.count(counts_K).tolist(), strict=True)),
            num_runs=num_runs,
            num_unmatched=num_unmatched,
            num_equal=layout.count_equal(len(self)),
            max_tokens=None if piece is None else self._rows.max_length,
            piece=piece,
            first_piece_tokens={
                self.ids[number]: size for number, size in layout.first_piece_tokens.items()
            },
            reason=reason,
        )

    def _list_whole(self, run: NDArray[np.int64], pieces: _LayoutBuilder) -> list[set[int]]:
        if not len(run):
            return []
        keys = {pieces.number(run), pieces.number(self._add_eos(run))}
        limit = self._rows.max_length
        if limit is not None and len(run) > limit:
            cut = pieces.number(run[:limit])
            self._cut.add(cut)
            keys.add(cut)
        return [keys]

    def _list_split(
        self, run: NDArray[np.int64], size: int, pieces: _LayoutBuilder
    ) -> list[set[int]]:
        self._has_split |= len(run) > size
        parts = [run[begin : begin + size] for begin in range(0, len(run), size)]
        keys = [{pieces.number(part)} for part in parts]
        if parts:
            ended = self._add_eos(run)[size * (len(parts) - 1) :]
            keys[-1].add(pieces.number(ended[:size]))
            if len(ended) > size:
                # An EOS alone in a piece of its own is known, and no part of the document.
                pieces.number(ended[size:])
        return keys

    def _add_eos(self, run: NDArray[np.int64]) -> NDArray[np.int64]:
        eos = self._rows.eos_id
        return run if eos is None or run[-1] == eos else np.append(run, eos)

    def _join(self, whole: Sequence[NDArray[np.int64]], *, has_eos: bool) -> _Layout:
        """Return the slices of the joined documents in which each of them is."""
        size = self._rows.max_length
        assert size is not None, "TRL packs no rows without a length"
        builder = _LayoutBuilder(self._keys)
        places: list[list[int]] = [[] for _ in whole]
        keys: list[int] = []
        for batch in _list_batches(len(whole), self._rows):
            runs = [
                self._add_eos(whole[number]) if has_eos and len(whole[number]) else whole[number]
                for number in batch
            ]
            stream = np.concatenate(runs)
            first = len(keys)
            keys += [
                builder.number(stream[begin : begin + size])
                for begin in range(0, len(stream), size)
            ]
            begin = 0
            for number, run in zip(batch, runs, strict=True):
                # Its tokens alone, not the EOS, which may be in the next slice.
                end = begin + len(whole[number])
                if end > begin:
                    places[number] = [
                        first + place for place in range(begin // size, (end - 1) // size + 1)
                    ]
                    builder.first_piece_tokens[number] = min(size - begin % size, end - begin)
                    self._has_split |= len(places[number]) > 1
                begin += len(run)
        for slices in places:
            builder.add([{keys[each]} for each in slices], slices)
        return builder.build()


def hash_run(run: NDArray[np.int64]) -> bytes:
    """Return the hash of token ids ``[N]``, 16 bytes."""
    tokens = np.ascontiguousarray(run, dtype=np.int64)
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def cut_runs(
    input_ids: NDArray[np.int64],
    position_ids: NDArray[np.int64] | None,
    attention_mask: NDArray[np.int64] | None,
) -> Iterator[NDArray[np.int64]]:
    """Yield the token ids of each run of a batch, without padding.

    Shapes are those of `find_starts`.
    """
    starts = find_starts(input_ids.shape, position_ids, attention_mask)
    is_kept = np.ones(input_ids.shape, dtype=bool)
    if attention_mask is not None and attention_mask.shape == input_ids.shape:
        is_kept = attention_mask != 0
    for row, starts_T, kept_T in zip(input_ids, starts, is_kept, strict=True):
        begins = np.flatnonzero(starts_T)
        for begin, run in zip(begins, np.split(row, begins[1:]), strict=True):
            if kept_T[begin]:
                yield run


def find_starts(
    shape: tuple[int, ...],
    position_ids: NDArray[np.int64] | None,
    attention_mask: NDArray[np.int64] | None,
) -> NDArray[np.bool_]:
    """Return ``[B, T]`` where runs begin: at a row, at position 0, and where the mask changes.

    Args:
        shape: ``[B, T]``, of the token ids.
        position_ids: ``[B, T]`` or ``[1, T]``; another shape is not used.
        attention_mask: ``[B, T]``, 0 at padding; another shape is not used.
    """
    starts = np.zeros(shape, dtype=bool)
    starts[:, :1] = True
    if position_ids is not None and position_ids.shape in (shape, (1, shape[1])):
        starts |= position_ids == 0
    if attention_mask is not None and attention_mask.shape == shape:
        starts[:, 1:] |= attention_mask[:, 1:] != attention_mask[:, :-1]
    return starts


def _list_batches(num_rows: int, rows: RowFormat) -> Iterator[list[int]]:
    """Yield the numbers of the rows that TRL packs together, in their order."""
    order = np.arange(num_rows)
    if rows.shuffle_seed is not None:
        order = np.random.default_rng(rows.shuffle_seed).permutation(num_rows)
    for part in np.array_split(order, max(1, min(rows.num_proc or 1, num_rows))):
        for begin in range(0, len(part), _MAP_ROWS):
            yield part[begin : begin + _MAP_ROWS].tolist()
