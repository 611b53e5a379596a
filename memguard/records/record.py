"""What every record is, and how it is written and read back."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from memguard.errors import RecordError
from memguard.records.writing import write_atomically

RecordT = TypeVar("RecordT", bound="Record")


class Record(BaseModel):
    """Frozen, closed, without NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


def save_record(record: Record, path: Path) -> None:
    """Write a record as indented JSON, whole or not at all."""
    write_atomically(path, (record.model_dump_json(indent=2, by_alias=True) + "\n").encode())


def load_record(kind: type[RecordT], path: Path) -> RecordT:
    """Read a record back.

    Raises:
        RecordError: missing, not JSON, or of another schema.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"'{path}' cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "top level"
        raise RecordError(
            f"'{path}' is not a {kind.__name__} this version reads ({place}: {first['msg']}). "
            "Make it again, or use the version that wrote it."
        ) from error
