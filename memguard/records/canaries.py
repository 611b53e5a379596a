"""`audit/canaries.parquet`: the score of each canary; only the owner of the audit can read it.

A guessed secret can be scored and compared with these numbers, so the report has none of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memguard.records.record import PRIVATE_MODE
from memguard.records.row_files import ColumnTypes, build_table, load_rows, save_table

SCHEMA_NAME = "memguard.canaries/2"


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
    verbatim: bool


_TYPES: ColumnTypes = {
    **dict.fromkeys(("was_trained", "verbatim"), "bool"),
    **dict.fromkeys(("num_secret_tokens", "num_repetitions", "num_loss_tokens"), "int64"),
    **dict.fromkeys(("nll", "base_nll", "exposure_bits"), "float64"),
}


def save_canaries(canaries: Sequence[CanaryScore], path: Path) -> None:
    """Write one row for each canary, readable by the owner only; equal scores give equal bytes."""
    table = build_table(canaries, CanaryScore, _TYPES, schema=SCHEMA_NAME)
    save_table(table, path, mode=PRIVATE_MODE)


def load_canaries(path: Path) -> list[CanaryScore]:
    """Return the canaries of a file that `save_canaries` wrote.

    Raises:
        RecordError: it is no such file.
    """
    return load_rows(path, CanaryScore, of="scores of canaries")
