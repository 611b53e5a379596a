"""What an audit works with: models that are loaded when first used, tokenizer, cache, ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memguard.audit.cache import RecordCache
from memguard.audit.decoding import Decoder
from memguard.audit.membership_scores import Codec
from memguard.audit.scoring import Scorer
from memguard.mitigation import Goldfish
from memguard.records import MaskChange
from memguard.runtime import Runtime

Stage = str
"""What is measured, in words: ``model``, ``base model``, ``canaries``, ..."""
OnProgress = Callable[[Stage, int, int], None]
"""Called with the stage, the documents done and all documents."""
CompareMasks = Callable[[Sequence[str], Sequence[tuple[str, str]]], list[MaskChange]]
"""Given texts and near-duplicate pairs, returns how a copy changes the mitigation's mask."""


class AuditedModel(Protocol):
    """A model that is loaded when first used, and freed after its last probe."""

    @property
    def identity(self) -> str | None:
        """Everything its numbers depend on, as one string; None where that is not known."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Positions it has; None where it states none."""
        ...

    def scorer(self) -> Scorer:
        """Return its scorer; the same one until it is freed."""
        ...

    def decoder(self) -> Decoder:
        """Return its decoder, likewise."""
        ...

    def free(self) -> None:
        """Free its memory."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Workshop:
    """What an audit works with beside models and documents."""

    codec: Codec | None = None
    """The tokenizer; scores that need the text are missing without it."""
    cache: RecordCache | None = None
    peers: Runtime = field(default_factory=Runtime)
    on_progress: OnProgress | None = None
    compare_masks: CompareMasks | None = None
    goldfish: Goldfish | None = None
    """That of the training, which an attacker may know; None where it dropped no labels."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """By a probe's name, why there is nothing to run it on; told where it did not run."""
    num_tightened: int = 0
    """Documents of which a risk budget dropped more labels than it, while they were trained."""
