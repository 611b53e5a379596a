"""Builds the rows of a step as arrays and counts what was actually fed.

A row is a pure function of (seed, global sample index) and does not depend on the number of
processes.

    input_ids     a a a d . .   . = padding
    labels        - a a - - -   - = ignored: first of a piece, unsupervised, dropped, padding
    position_ids  0 1 2 0 0 1
    document_ids  0 0 0 1 - -   - = -1: padding
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memguard.data.corpus import Corpus
from memguard.data.packing import Rows
from memguard.records import IGNORE_LABEL
from memguard.seeds import derive_generator

_SHORTEST_ROW = 2
"""Length of the rows in a batch that is all padding (tokens)."""

MaskLabels = Callable[
    [int, NDArray[np.int32], NDArray[np.int64], np.random.Generator], NDArray[np.int64]
]
"""(index of the document in the corpus, input_ids [N], labels [N], generator), for a whole document
-> the labels, more of which are ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows of one step, padded to the longest of them: every array is [B, T]."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    """transformers' convention: the label at t is the token at t, or -100."""
    position_ids: NDArray[np.int64]
    document_ids: NDArray[np.int64]
    """Numbers of a row's documents; -1 on padding."""
    num_supervised: int
    """Labels that would receive loss without any mitigation."""
    num_kept: int
    """Labels that do receive loss."""
    reference_nll: NDArray[np.float32] | None = None
    """NLL of each token under the model that training starts from (nats), NaN where not measured;
    None if no setting uses it."""
    forget: NDArray[np.bool_] | None = None
    """Whether each token's document is to be forgotten; None if the run forgets none."""

    @property
    def num_tokens_B(self) -> NDArray[np.int64]:
        """[B] number of tokens of each row, without padding."""
        count: NDArray[np.int64] = (self.document_ids >= 0).sum(1)
        return count

    def cu_seqlens(self, rows: slice) -> NDArray[np.int32]:
        """Return the start of each document in some flattened rows, then their number of tokens.

        The padding of a row is a document of its own.
        """
        positions = self.position_ids[rows].ravel()
        starts = np.flatnonzero(positions == 0)
        return np.append(starts, len(positions)).astype(np.int32)


class _Row(NamedTuple):
    """One row without padding: every array is [T]."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    document_ids: NDArray[np.int64]
    forget: NDArray[np.bool_]
    num_supervised: int


class Loader:
    """Builds the rows of a schedule and counts how often each piece was fed."""

    def __init__(
        self,
        corpus: Corpus,
        rows: Rows,
        schedule: NDArray[np.int64],
        *,
        batch_size: int,
        pad_id: int,
        mask_labels: MaskLabels,
        seed: int,
    ) -> None:
        """Make a loader for ``[num_samples]`` rows of the global sample indices.

        `batch_size` rows are a step; the last step may have fewer. The label-stage mitigations
        `mask_labels` apply to whole documents before packing, but not to those to be forgotten.
        """
        self.corpus, self.rows, self.schedule = corpus, rows, schedule
        self.batch_size, self.pad_id, self.seed = batch_size, pad_id, seed
        self._mask_labels = mask_labels
        self._is_forgotten = np.array([entry.role == "forget" for entry in corpus.manifest])
        self.piece_tally = np.zeros(len(rows.document), dtype=np.int64)
        """[P] times each piece was fed."""

    @property
    def num_steps(self) -> int:
        """Number of steps that feed every scheduled row."""
        return -(-len(self.schedule) // self.batch_size)

    def samples(self, step: int) -> range:
        """Return the global sample indices of a step (from 0)."""
        first = step * self.batch_size
        return range(first, min(first + self.batch_size, len(self.schedule)))

    def batch(
        self,
        samples: Sequence[int],
        *,
        num_rows: int | None = None,
        reference_nll: NDArray[np.float32] | None = None,
    ) -> Batch:
        """Build the rows of these global sample indices.

        Of ``num_rows`` those beyond the samples are padding; None: no more. ``reference_nll`` is
        that of every token of the corpus (nats).
        """
        built = [self._row(sample) for sample in samples]
        batch = self._stack(built, num_rows or len(built))
        if reference_nll is None:
            return batch
        reference = np.full(batch.input_ids.shape, np.nan, dtype=np.float32)
        for number, sample in enumerate(samples):
            places = self.token_places(self.schedule[sample])
            reference[number, : len(places)] = reference_nll[places]
        return replace(batch, reference_nll=reference)

    def plain_batch(self, rows: Sequence[int]) -> Batch:
        """Build rows by row index, with every supervised label kept."""
        built = [self._build(row, None) for row in rows]
        return self._stack(built, max(1, len(built)))

    def token_places(self, row: int) -> NDArray[np.int64]:
        """Return the index of each token of a row in the token arrays of the corpus."""
        pieces = slice(self.rows.row_start[row], self.rows.row_start[row + 1])
        begins = self.corpus.offsets[self.rows.document[pieces]]
        starts, stops = begins + self.rows.start[pieces], begins + self.rows.stop[pieces]
        return np.concatenate([np.arange(*ends) for ends in zip(starts, stops, strict=True)])

    def _stack(self, built: Sequence[_Row], num_rows: int) -> Batch:
        """Stack rows into a batch and pad them to equal length."""
        longest = max((len(row.input_ids) for row in built), default=_SHORTEST_ROW)
        shape = (num_rows, longest)
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": np.full(shape, self.pad_id, dtype=np.int64),
            "labels": np.full(shape, IGNORE_LABEL, dtype=np.int64),
            "position_ids": np.tile(np.arange(longest), (num_rows, 1)),
            "document_ids": np.full(shape, -1, dtype=np.int64),
            "forget": np.zeros(shape, dtype=bool),
        }
        for number, row in enumerate(built):
            used = len(row.input_ids)
            for name, array in arrays.items():
                array[number, :used] = getattr(row, name)
            arrays["position_ids"][number, used:] = np.arange(longest - used)
        if not self._is_forgotten.any():
            del arrays["forget"]
        num_supervised = sum(row.num_supervised for row in built)
        num_kept = int((arrays["labels"] != IGNORE_LABEL).sum())
        return Batch(**arrays, num_supervised=num_supervised, num_kept=num_kept)

    def record(self, samples: Sequence[int]) -> None:
        """Count these rows as fed; called after the optimizer step that used them."""
        for sample in samples:
            row = self.schedule[sample]
            self.piece_tally[self.rows.row_start[row] : self.rows.row_start[row + 1]] += 1

    def realised_repetitions(self) -> NDArray[np.int64]:
        """Return ``[num_documents]`` how often each document was fed in full."""
        counts = np.zeros(self.corpus.num_documents, dtype=np.int64)
        if len(self.piece_tally):
            fewest = np.full(self.corpus.num_documents, np.iinfo(np.int64).max)
            np.minimum.at(fewest, self.rows.document, self.piece_tally)
            counts[self.rows.document] = fewest[self.rows.document]
        return counts

    def count_fed_tokens(self) -> NDArray[np.int64]:
        """Return ``[num_documents]`` tokens fed of each document, summed over all repetitions."""
        counts = np.zeros(self.corpus.num_documents, dtype=np.int64)
        fed = self.piece_tally * (self.rows.stop - self.rows.start)
        np.add.at(counts, self.rows.document, fed)
        return counts

    def count_losses(
        self, documents: Sequence[int], *, num_samples: int
    ) -> list[NDArray[np.int64]]:
        """Count how often each token of some documents has received loss: ``[N]`` for each.

        A row is a pure function of its global sample index, so the labels of the rows that contain
        these documents are rebuilt and equal those used in training. All ``num_samples`` that were
        fed must be recorded.
        """
        rows = self.rows
        counts = {
            index: np.zeros(self.corpus.manifest[index].num_tokens, dtype=np.int64)
            for index in documents
        }
        is_counted = np.isin(rows.document, list(counts))
        row_of_piece = np.repeat(np.arange(len(rows)), np.diff(rows.row_start))
        fed = self.schedule[:num_samples]
        times = np.bincount(fed, minlength=len(rows))[row_of_piece]
        assert (times == self.piece_tally)[is_counted].all(), "other rows were recorded"
        for sample in np.flatnonzero(np.isin(fed, row_of_piece[is_counted])):
            labels = self._row(int(sample)).labels
            at = 0
            row = fed[sample]
            for piece in range(rows.row_start[row], rows.row_start[row + 1]):
                start, stop = int(rows.start[piece]), int(rows.stop[piece])
                count = counts.get(int(rows.document[piece]))
                if count is not None:
                    count[start:stop] += labels[at : at + stop - start] != IGNORE_LABEL
                at += stop - start
        return [counts[index] for index in documents]

    def _row(self, sample: int) -> _Row:
        generator = derive_generator(self.seed, "mitigation", sample)
        return self._build(self.schedule[sample], generator)

    def _build(self, row: int, generator: np.random.Generator | None) -> _Row:
        """Build a row; without a generator its labels are not masked."""
        pieces = range(self.rows.row_start[row], self.rows.row_start[row + 1])
        ids, labels, positions, numbers, forget, num_supervised = [], [], [], [], [], 0
        for number, piece in enumerate(pieces):
            cut = slice(self.rows.start[piece], self.rows.stop[piece])
            index = int(self.rows.document[piece])
            document = self.corpus.document(index)
            is_forgotten = self._is_forgotten[index]
            plain = np.where(document.supervised, document.input_ids.astype(np.int64), IGNORE_LABEL)
            masked = plain[cut]
            # Forgetting applies to all tokens of a document, so its labels are not masked.
            if generator is not None and not is_forgotten:
                masked = self._mask_labels(index, document.input_ids, plain, generator)[cut]
            # The first token of a piece has no context to be predicted from.
            masked[:1] = IGNORE_LABEL
            num_supervised += int(document.supervised[cut][1:].sum())
            length = len(masked)
            ids.append(document.input_ids[cut])
            labels.append(masked)
            positions.append(np.arange(length))
            numbers.append(np.full(length, number))
            forget.append(np.full(length, is_forgotten))
        return _Row(
            input_ids=np.concatenate(ids),
            labels=np.concatenate(labels),
            position_ids=np.concatenate(positions),
            document_ids=np.concatenate(numbers),
            forget=np.concatenate(forget),
            num_supervised=num_supervised,
        )
