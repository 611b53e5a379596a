"""The settings of documents: sources, held-out parts and packing."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from memguard.config.formats import FormatConfig
from memguard.config.settings import MAX_COUNT, MAX_TIMES, Count, PositiveInt, Settings, Times

MIN_CANARIES = 8
"""With four trained canaries and four references, all trained ones rank first by chance once in 70
times; with three of each, once in 20."""

_SOURCES = ("train", "control", "background", "heldout", "forget")


class StudyConfig(Settings):
    """The controlled experiment: equal buckets, each trained a different number of times."""

    num_repetitions: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_TIMES)], ...], Field(min_length=1)
    ] = Field(
        (0, 1, 4, 6), description="One bucket for each number of repetitions; 0 is the control."
    )
    documents_per_bucket: PositiveInt | None = Field(
        None, description="Documents in each bucket; null uses as many as there are."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.num_repetitions)) != len(self.num_repetitions):
            raise ValueError(f"'num_repetitions' has a number twice: {list(self.num_repetitions)}")
        if not any(self.num_repetitions):
            raise ValueError("'num_repetitions' needs a number above 0, else nothing is trained")
        return self


class CanaryConfig(Settings):
    """Canaries: short synthetic documents, each with a random key and a random secret.

    Each canary is randomly selected for training or kept as a reference. What a model knows of the
    trained secrets beyond the references, it can only have learned in this training.
    """

    count: Count = Field(
        32,
        description="Canaries drawn, about half of them trained; never more than one in 20 trained "
        "documents, and none where that leaves fewer than 8; 0 turns them off (documents).",
    )
    num_repetitions: Times | None = Field(
        None,
        description="Times each trained canary is trained; null takes 'train.epochs', in a study "
        "its largest number of repetitions.",
    )
    secret_digits: Annotated[int, Field(ge=6, le=60)] = Field(
        12, description="Random decimal digits of a secret, each worth 3.3 bits (digits)."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if 0 < self.count < MIN_CANARIES:
            raise ValueError(
                f"'count' must be 0, which turns canaries off, or at least {MIN_CANARIES}: fewer "
                f"give no evidence; got {self.count}"
            )
        return self


class _Trained(Settings):
    """The first setting of the documents, which has no default."""

    train: tuple[str, ...] = Field(description="Sources of the documents to train on.")


class DataConfig(FormatConfig, _Trained):
    """Documents: sources, held-out parts and packing.

    A source is a jsonl, parquet or text file, a pattern such as `d/*.jsonl`, a folder, a
    `save_to_disk` folder, a hub id, or `docstrings:PACKAGE[,PACKAGE]` (reference documentation of
    installed packages). Token ids in a column `input_ids`, or a .npy of shape (documents, tokens),
    are used as they are.
    """

    _sources: ClassVar[tuple[str, ...]] = _SOURCES

    control: tuple[str, ...] = Field(
        (), description="Your own never-trained documents; empty draws them from 'train'."
    )
    control_fraction: Annotated[float, Field(ge=0, le=0.1)] = Field(
        0.02,
        description="Share of 'train' never trained, raised towards 200 documents but not above "
        "0.1; of small sets a fifth, up to 30 documents; 0 turns the control off.",
    )
    study: StudyConfig | None = Field(
        None, description="Controlled experiment: buckets drawn from 'train'; null trains it all."
    )
    background: tuple[str, ...] = Field(
        (),
        description="Documents trained beside a study's buckets; 'remainder' means those of "
        "'train' that no bucket drew.",
    )
    background_ratio: Annotated[float, Field(gt=0, le=100)] = Field(
        1.0, description="Background rows for each bucket row in a step (rows / row)."
    )
    heldout: tuple[str, ...] = Field(
        (), description="Documents for the held-out loss; empty uses 'heldout_documents'."
    )
    heldout_documents: Count = Field(
        0, description="Documents of 'train' held out for the loss; 0 uses the control's."
    )
    forget: tuple[str, ...] = Field(
        (),
        description="Documents for the model of 'model.path' to forget, by 'npo' or "
        "'gradient_ascent' in 'mitigations'; 'train' is then what it retains.",
    )
    forget_repetitions: Times | None = Field(
        None, description="Times each document of 'forget' is fed; null takes 'train.epochs'."
    )
    seq_len: Annotated[int, Field(ge=8, le=2**24)] = Field(
        1024, description="Length of a packed row (tokens); longer documents are cut into pieces."
    )
    min_document_tokens: Annotated[int, Field(ge=2, le=MAX_COUNT)] = Field(
        2, description="Shorter documents are left out and counted (tokens)."
    )
    max_document_tokens: Annotated[int, Field(ge=8, le=MAX_COUNT)] | None = Field(
        None, description="Longer documents are cut off here (tokens); null keeps them whole."
    )
    append_eos: bool = Field(True, description="End each plain document with the tokenizer's EOS.")
    near_duplicate_words: Annotated[int, Field(ge=3, le=1000)] = Field(
        13,
        description="Documents that share a run of this many words may be near-duplicates, and "
        "are compared (words).",
    )
    identity_key: str | None = Field(
        None,
        description="File of the key under which equal texts have equal hashes, the same in all "
        "runs; null: memguard-identity.key in ~/.config/memguard, made once.",
    )
    canaries: CanaryConfig = CanaryConfig()

    def list_sources(self) -> dict[str, tuple[str, ...]]:
        """Return the sources of each setting, without 'remainder', which is not a source."""
        named = {name: getattr(self, name) for name in _SOURCES}
        return {
            name: tuple(source for source in sources if source != "remainder")
            for name, sources in named.items()
        }

    @model_validator(mode="before")
    @classmethod
    def _one_or_many(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = {
                key: (value,) if key in _SOURCES and isinstance(value, str) else value
                for key, value in values.items()
            }
            # `canaries: null` is a section of the template whose lines are all commented out.
            optional = (*_SOURCES, "canaries")
            values = {k: v for k, v in values.items() if not (k in optional and v is None)}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.train:
            raise ValueError("'train' needs at least one source")
        if self.background and self.study is None:
            raise ValueError("'background' belongs to 'study'; without it add it to 'train'")
        if self.control and self.study is not None:
            raise ValueError("a study draws its own control: put 0 in 'study.num_repetitions'")
        if self.forget and self.study is not None:
            raise ValueError(
                "'forget' is for a model that is trained, and 'study' trains one: make the study a "
                "run of its own, and forget in another"
            )
        if self.forget and not self.control and self.control_fraction > 0:
            raise ValueError(
                "'forget' with a control drawn from 'train', which the model may know already: "
                "name in 'control' documents that it never saw, or set 'control_fraction' to 0"
            )
        if self.forget and self.heldout_documents:
            raise ValueError(
                "'forget' with 'heldout_documents' drawn from 'train', which the model may know "
                "already: name documents that it never saw in 'heldout'"
            )
        if self.heldout and self.heldout_documents:
            raise ValueError("set 'heldout' or 'heldout_documents', not both")
        longest = self.max_document_tokens or self.min_document_tokens
        if self.min_document_tokens > longest:
            raise ValueError("'min_document_tokens' is above 'max_document_tokens'")
        return self
