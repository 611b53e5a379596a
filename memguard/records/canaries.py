"""`audit/canaries.parquet`: the score of each canary; only the owner of the audit can read it.

A guessed secret can be scored and compared with these numbers, so the report has none of them.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from memguard.errors import RecordError
from memguard.records.record import PRIVATE_MODE, write_atomically

SCHEMA_NAME = "memguard.canaries/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryScore:
    """One canary: a random secret that was trained or kept as a reference."""

    id: str
    was_trained: bool
    nll: float
    """Sum over the secret's tokens (nats)."""
    base_nll: float | None
    num_secret_tokens: int
    num_repetitions: int
    num_loss_tokens: int | None
    """Tokens of it that received loss at least once; None if not recorded."""
    exposure_bits: float | None
    exposure_extrapolated_bits: float | None
    verbatim: bool


def save_canaries(canaries: Iterable[CanaryScore], path: Path) -> None:
    """Write one row for each canary; equal scores give equal bytes."""
    import pyarrow
    from pyarrow import parquet

    integers, numbers = pyarrow.int64(), pyarrow.float64()
    schema = pyarrow.schema(
        [
            ("id", pyarrow.string()),
            ("was_trained", pyarrow.bool_()),
            ("nll", numbers),
            ("base_nll", numbers),
            ("num_secret_tokens", integers),
            ("num_repetitions", integers),
            ("num_loss_tokens", integers),
            ("exposure_bits", numbers),
            ("exposure_extrapolated_bits", numbers),
            ("verbatim", pyarrow.bool_()),
        ],
        metadata={"schema": SCHEMA_NAME},
    )
    buffer = io.BytesIO()
    table = pyarrow.Table.from_pylist([asdict(canary) for canary in canaries], schema=schema)
    parquet.write_table(table, buffer, compression="zstd")
    write_atomically(path, buffer.getvalue(), mode=PRIVATE_MODE)


def load_canaries(path: Path) -> Sequence[CanaryScore]:
    """Return the canaries of a file that `save_canaries` wrote.

    Raises:
        RecordError: it is no such file.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(pyarrow.BufferReader(path.read_bytes())).to_pylist()
        return [CanaryScore(**row) for row in rows]
    except (pyarrow.ArrowException, TypeError, OSError) as error:
        raise RecordError(f"'{path}' holds no scores of canaries. Audit the run again.") from error
