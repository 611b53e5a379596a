"""Numbers of N documents under one model, by name; scored before, or by asking it now.

    rows [N, len(names)]   float64, NaN where a number is missing

Who scores is asked for `_SHARD_DOCUMENTS` at a time: token results of more are never held, and what
is done is stored before the next begin.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memguard.audit.cache import RecordCache

_SHARD_DOCUMENTS = 2048

ValueT = TypeVar("ValueT")


class Peers(Protocol):
    """The ranks of an audit, as far as it must know; a `Runtime` is one."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which reads and writes files."""
        ...

    def broadcast_object(self, value: ValueT | None) -> ValueT:
        """Return rank 0's value on every rank."""
        ...


class Alone:
    """One process; needs no torch."""

    is_main = True

    def broadcast_object(self, value: ValueT | None) -> ValueT:
        """Return the value."""
        return cast("ValueT", value)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Numbers:
    """One row a document."""

    names: tuple[str, ...]
    rows: NDArray[np.float64]
    """[N, len(names)]"""

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """Return [N]."""
        return self.rows[:, self.names.index(name)]

    def __contains__(self, name: str) -> bool:
        return name in self.names


@dataclass(frozen=True, kw_only=True, slots=True)
class Shelf:
    """Where numbers of one kind are kept between audits."""

    cache: RecordCache | None
    """None keeps nothing, as do the ranks that are not the first."""
    fingerprint: str | None
    """See `compute_fingerprint`; None where it is not known what was measured."""


def collect_numbers(
    names: tuple[str, ...],
    keys: Sequence[bytes],
    sizes: Sequence[int],
    measure: Callable[[Sequence[int]], ArrayLike],
    *,
    shelf: Shelf,
    peers: Peers,
    on_progress: Callable[[int, int], None] | None = None,
) -> Numbers:
    """Return the numbers of all documents, measuring only those that are not on the shelf.

    Every rank calls it with the same keys, and gets all numbers.

    Args:
        names: of the numbers.
        keys: ``[N]``, see `compute_key`; of equal keys one is measured.
        sizes: ``[N]`` tokens; the longest are measured first, beside others as long.
        measure: given indices of documents, returns their rows; called by all ranks alike.
        shelf: where to look, and to put what is new.
        peers: this rank among all.
        on_progress: called with the documents done and all documents.
    """
    rows = np.full((len(keys), len(names)), np.nan)
    known: dict[bytes, NDArray[np.float64]] = {}
    if peers.is_main and shelf.cache is not None and shelf.fingerprint is not None:
        known = shelf.cache.load(shelf.fingerprint, names)
    firsts: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        if key not in known:
            firsts.setdefault(key, index)
    longest_first = sorted(firsts.values(), key=lambda index: -sizes[index])
    missing = peers.broadcast_object(longest_first)
    num_found = len(keys) - len(missing)
    if on_progress is not None and num_found:
        on_progress(num_found, len(keys))
    is_storable = True
    for start in range(0, len(missing), _SHARD_DOCUMENTS):
        shard = missing[start : start + _SHARD_DOCUMENTS]
        measured = np.array(measure(shard), dtype=np.float64).reshape(len(shard), len(names))
        rows[shard] = measured
        if peers.is_main and is_storable:
            is_storable = _store(shelf, names, [keys[index] for index in shard], measured)
        if on_progress is not None:
            on_progress(num_found + start + len(shard), len(keys))
    if peers.is_main:
        for index, key in enumerate(keys):
            rows[index] = known[key] if key in known else rows[firsts[key]]
    return Numbers(names=names, rows=peers.broadcast_object(rows))


def _store(
    shelf: Shelf, names: Sequence[str], keys: Sequence[bytes], rows: NDArray[np.float64]
) -> bool:
    """Keep what was measured; an audit does not fail because it cannot be kept."""
    if shelf.cache is None or shelf.fingerprint is None:
        return True
    try:
        shelf.cache.store(shelf.fingerprint, names, keys, rows)
    except OSError as error:
        warnings.warn(
            f"scores cannot be kept in '{shelf.cache.folder}' ({error.strerror}): an interrupted "
            "audit would begin anew",
            stacklevel=2,
        )
        return False
    return True
