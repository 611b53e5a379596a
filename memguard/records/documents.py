"""The documents of an audit: the rows of records.parquet, a column at a time. No torch, no pandas.

    text_hmac, id, bucket, role, ...    what a document is
    PROBE.NAME                          what a probe measured; null: not measured
    PROBE.extracted                     whether the probe extracts it in any way that the verdict
                                        counts; null: not measured
    PROBE.other_window                  whether it extracts own text of it in another window
    base.*, reference.*                 the same of other models
    not_audited                         why it could not be audited: such rows are not read here

A finding is a document that the model was trained on, or was to forget, and that any probe
extracts. Its id is its keyed hash; equal texts have one id. All pages, files and commands count
these documents.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from memguard.errors import RecordError
from memguard.records.audit_files import SCORES, check_audit_file
from memguard.records.record import describe_unread

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

EXTRACTED: Final = ".extracted"
OTHER_WINDOW: Final = ".other_window"
"""Ends of the names of columns that have a probe's answers."""
NOT_AUDITED: Final = "not_audited"
"""Column of why a document could not be audited; null of the others."""
IDENTITY: Final = ("text_hmac", "id", "bucket", "role", "num_repetitions", "cluster")
TRAINED_ROLES: Final = ("trained", "forget")
"""Roles of documents that the model was trained on."""


def list_own(names: Iterable[str], end: str) -> list[str]:
    """Return the columns that end so and are of the audited model."""
    others = ("base.", "reference.")
    return [name for name in names if name.endswith(end) and not name.startswith(others)]


def find_trained(role_N: NDArray[Any], num_repetitions_N: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return ``[N]`` which documents the model was trained on, now or before it was to forget."""
    return np.asarray((role_N == "forget") | ((role_N == "trained") & (num_repetitions_N != 0)))


def find_came_out(
    is_trained_N: NDArray[np.bool_], extracted: Mapping[str, NDArray[np.float64]]
) -> NDArray[np.bool_]:
    """Return ``[N]`` which documents are findings; ``extracted`` has each probe's answers."""
    answers = [extracted_N == 1 for extracted_N in extracted.values()]
    nothing_N = np.zeros(len(is_trained_N), dtype=bool)
    return np.asarray(is_trained_N & np.any([nothing_N, *answers], axis=0))


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentTable:
    """The N documents of an audit; a column is read when it is used."""

    file: "ParquetFile"

    @classmethod
    def read(cls, folder: Path, needs: Sequence[str] = IDENTITY) -> "DocumentTable":
        """Open the records of an audit folder, after checking their hash and the columns needed.

        Raises UnreadableError if only another user can read it, RecordError if it is damaged.
        """
        import pyarrow
        import pyarrow.parquet

        check_audit_file(folder, SCORES)
        path = folder / SCORES
        lost = "it is no parquet file"
        try:
            # Not read_table, which imports pandas: the gate has two seconds.
            file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(path.read_bytes()))
            missing = [name for name in needs if name not in file.schema_arrow.names]
            if not missing:
                return cls(file=file)
            lost = f"no column '{missing[0]}'"
        except OSError as error:
            raise describe_unread(path, error) from error
        except pyarrow.ArrowException:
            pass
        raise RecordError(
            f"'{path}' does not contain document scores ({lost}). Run 'memguard audit' again"
        )

    def __len__(self) -> int:
        return int(np.sum(self._is_audited))

    @cached_property
    def names(self) -> list[str]:
        """All columns, in the order of the file."""
        return list(self.file.schema_arrow.names)

    def list_flags(self, start: str) -> list[str]:
        """Return the columns of yes and no whose names begin so."""
        schema = self.file.schema_arrow
        return [n for n in self.names if n.startswith(start) and schema.field(n).type == "bool"]

    def texts(self, name: str) -> NDArray[Any]:
        """Return the ``[N]`` texts of a column, None for null."""
        return np.array(self._read(name), dtype=object)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return the ``[N]`` numbers of a column, 1 and 0 for true and false, NaN for null."""
        return np.array(self._read(name), dtype=np.float64)

    def _read(self, name: str) -> list[Any]:
        return list(compress(self._read_all(name), self._is_audited))

    def _read_all(self, name: str) -> list[Any]:
        values: list[Any] = self.file.read(columns=[name]).column(name).to_pylist()
        return values

    @cached_property
    def _is_audited(self) -> list[bool]:
        if NOT_AUDITED not in self.names:
            return [True] * int(self.file.metadata.num_rows)
        return [reason is None for reason in self._read_all(NOT_AUDITED)]

    @cached_property
    def text_hmac_N(self) -> NDArray[Any]:
        """Keyed hash of the text; None where the audit had no key."""
        return self.texts("text_hmac")

    @cached_property
    def id_N(self) -> NDArray[Any]:
        """Ids of the user's, or file name and row."""
        return self.texts("id")

    @cached_property
    def bucket_N(self) -> NDArray[Any]:
        """Bucket of each document."""
        return self.texts("bucket")

    @cached_property
    def role_N(self) -> NDArray[Any]:
        """Role of its bucket."""
        return self.texts("role")

    @cached_property
    def is_trained_N(self) -> NDArray[np.bool_]:
        """Documents that the model was trained on."""
        return find_trained(self.role_N, self.numbers("num_repetitions"))

    @cached_property
    def cluster_N(self) -> NDArray[np.int64]:
        """Near-duplicates share a number; a document without one is a cluster of its own."""
        known_N = self.numbers("cluster")
        return np.where(np.isnan(known_N), -1 - np.arange(len(self)), known_N).astype(np.int64)

    @cached_property
    def extracted(self) -> Mapping[str, NDArray[np.float64]]:
        """The answers of each probe: ``[N]`` 1 yes, 0 no, NaN not measured."""
        return {
            name.removesuffix(EXTRACTED): self.numbers(name)
            for name in list_own(self.names, EXTRACTED)
        }

    @cached_property
    def came_out_N(self) -> NDArray[np.bool_]:
        """The findings."""
        return find_came_out(self.is_trained_N, self.extracted)
