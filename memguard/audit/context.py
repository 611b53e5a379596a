"""The resources of an audit: models that are loaded at first use, tokenizer, cache, ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from memguard.audit.cache import RecordCache
from memguard.audit.decoding import Decoder
from memguard.audit.passages import Codec
from memguard.audit.requests import CompareMasks
from memguard.audit.scoring import Scorer
from memguard.mitigation import Goldfish
from memguard.runtime import Runtime

Stage = str
"""Name of the measurement: ``model``, ``base model``, ``canaries``, ..."""
OnProgress = Callable[[Stage, int, int], None]
"""Called with the stage, the number of documents done and the number of all documents."""


class AuditedModel(Protocol):
    """A model that is loaded at first use and freed after its last probe."""

    @property
    def identity(self) -> str | None:
        """A string of everything the model's numbers depend on; None if not known."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Number of positions; None if the model does not limit it."""
        ...

    def scorer(self) -> Scorer:
        """Return the model's scorer, the same object until the model is freed."""
        ...

    def decoder(self) -> Decoder:
        """Return the model's decoder, the same object until the model is freed."""
        ...

    def free(self) -> None:
        """Free the model's memory."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditContext:
    """Resources of an audit other than models and documents."""

    codec: Codec | None = None
    """The tokenizer; without it, scores that need text are missing."""
    cache: RecordCache | None = None
    peers: Runtime = field(default_factory=Runtime)
    on_progress: OnProgress | None = None
    compare_masks: CompareMasks | None = None
    goldfish: Goldfish | None = None
    """The goldfish used in training, which an attacker may know; None if no labels were dropped."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Reason, by name of a probe, why the probe has no input; reported if it does not run."""
    num_tightened: int = 0
    """Documents of which a risk budget dropped more labels during training than `goldfish` does."""
