"""Base class and types of all settings: frozen, without unknown keys, within bounds.

Bounds are far above what can be run and far below what overflows, so that a typing error is
reported by the name of its setting before a schedule of 10^12 epochs takes all memory.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from memguard.errors import escape_name, shorten

MAX_COUNT = 10**9
"""Steps, rows, documents, tokens."""
MAX_TIMES = 10**6
"""Epochs and repetitions, which multiply the rows of the schedule."""
MAX_SEED = 2**63 - 1
_MAX_FLOAT = 1e12
_MAX_TEXT = 4096
"""Characters of a name or path, Linux's limit for paths."""

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Times = Annotated[int, Field(ge=1, le=MAX_TIMES)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Positive = Annotated[float, Field(gt=0, le=_MAX_FLOAT)]
NonNegative = Annotated[float, Field(ge=0, le=_MAX_FLOAT)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


class Settings(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    _sources: ClassVar[tuple[str, ...]] = ()
    """Fields that name documents, whose names are checked with the files."""

    @field_validator("*")
    @classmethod
    def _check_texts(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse texts that no file system or record takes: they are names and paths."""
        _check_text(value, must_be_utf8=info.field_name not in cls._sources)
        return value


def _check_text(value: Any, *, must_be_utf8: bool) -> None:
    if isinstance(value, str):
        if must_be_utf8 and escape_name(value) != value:
            raise ValueError(f"must be UTF-8; got {shorten(repr(value))}")
        if "\0" in value:
            raise ValueError(f"must not hold a NUL character; got {shorten(repr(value))}")
        if len(value) > _MAX_TEXT:
            raise ValueError(
                f"must have at most {_MAX_TEXT:,} characters; got {len(value):,}: "
                f"{shorten(repr(value))}"
            )
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check_text(key, must_be_utf8=must_be_utf8)
            _check_text(inner, must_be_utf8=must_be_utf8)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_text(inner, must_be_utf8=must_be_utf8)


class SamplingScheme(Settings):
    """How tokens are drawn: temperature, then top-k, then top-p, in the order of transformers."""

    temperature: Positive = Field(1.0, description="Divides the logits.")
    top_k: PositiveInt | None = Field(
        None, description="Draw from this many most likely tokens; null draws from all."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Draw from the fewest most likely tokens that reach this probability; null "
        "draws from all.",
    )

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn with the model's own probabilities."""
        return self.temperature == 1 and self.top_k is None and self.top_p in (None, 1)

    @property
    def label(self) -> str:
        """Short name, e.g. ``T=1, top-k 40``; different schemes have different ones."""
        parts = [f"T={_format_number(self.temperature)}"]
        if self.top_k is not None:
            parts.append(f"top-k {self.top_k}")
        if self.top_p is not None:
            parts.append(f"top-p {_format_number(self.top_p)}")
        return ", ".join(parts)


def _format_number(number: float) -> str:
    return repr(number).removesuffix(".0")
