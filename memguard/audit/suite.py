"""Settings of the probes, and suites: the probes of an audit, read from a YAML file.

    extraction        the documents' continuations, in one pass (extraction.py)
    grid              other windows of the same documents (this file)
    sampling          cost of sampling the continuation (probabilistic.py)
    membership        trained against control documents (membership.py)
    canaries          random secrets, trained or not at random (canaries.py)
    generation        overlap of greedy and sampled text with the true one (generation.py)
    attacks           beam search, and an attacker who knows the mask (attacks.py)
    mask_consistency  whether reformatted copies escape the mask (mask_consistency.py)

If the definition of a probe's results changes, its VERSION changes; every record contains it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
from pydantic import Field, field_validator

from memguard.assets import find_asset
from memguard.audit.extraction import AuditDocument, ExtractionProbe, Window
from memguard.audit.membership_scores import MEMBERSHIP_SCORES
from memguard.config import AuditConfig, Document, load_yaml, validate
from memguard.config.settings import Count, Name, PositiveInt, SamplingScheme, Settings
from memguard.errors import ConfigError

_Answers = Annotated[int, Field(ge=1, le=100_000)]
_Lengths = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class GridCell(Settings):
    """One window, the same in each document that is long enough."""

    offset: int
    prefix_tokens: int
    continuation_tokens: int

    def window(self, document: AuditDocument) -> Window | None:
        """Return the window.

        None for conversations, for documents that are too short, and for windows longer than the
        model's context.
        """
        size = self.prefix_tokens + self.continuation_tokens
        ids = document.grid_ids
        is_within = self.offset + size <= len(ids) and size <= len(document.input_ids)
        if document.format != "text" or not is_within:
            return None
        if ids is not document.input_ids:
            supervised = np.ones(len(ids), dtype=bool)
            document = replace(document, input_ids=ids, supervised=supervised)
        return Window(
            document=document,
            start=self.offset,
            prefix_tokens=self.prefix_tokens,
            continuation_tokens=self.continuation_tokens,
        )


class GridProbe(Settings):
    """Other windows of a document: prefix length x offset x continuation length.

    At offset o the model receives tokens o .. o+P as if the text began there, and continues them.
    Offsets count from the start of a document, so that several windows of a text longer than the
    model's context can be audited. In a document that was trained in pieces they count from the
    start of the audited piece (`audit.window`), because no window spans two pieces.

    Extraction depends on the length and the position of the prefix: text that is not extracted in
    one window may be extracted in another. Cells with the same offset share a pass.
    """

    VERSION: ClassVar[int] = 1

    name: Literal["grid"] = Field("grid", description="Which probe.")
    offsets: Annotated[tuple[Count, ...], Field(min_length=1)] = Field(
        (0,),
        description="Tokens to skip before the prefix, counted from the start of the document, "
        "or of its audited piece (tokens).",
    )
    prefix_tokens: _Lengths = Field((25, 50), description="Lengths of the prefix (tokens).")
    continuation_tokens: _Lengths = Field(
        (50,), description="Lengths of the continuation (tokens)."
    )

    @property
    def cells(self) -> tuple[GridCell, ...]:
        """Every combination, offsets outermost."""
        return tuple(
            GridCell(offset=offset, prefix_tokens=prefix, continuation_tokens=size)
            for offset in self.offsets
            for prefix in self.prefix_tokens
            for size in self.continuation_tokens
        )


Share = Annotated[float, Field(gt=0, lt=1)]


class SamplingProbe(Settings):
    """Number of queries until sampling gives the continuation, from one teacher-forced pass."""

    VERSION: ClassVar[int] = 1

    name: Literal["sampling"] = Field("sampling", description="Which probe.")
    schemes: Annotated[tuple[SamplingScheme, ...], Field(min_length=1)] = Field(
        (SamplingScheme(), SamplingScheme(top_k=40)),
        description="Sampling schemes; the cheapest counts.",
    )


class MembershipProbe(Settings):
    """Membership inference: trained against control documents, by token log-probabilities."""

    VERSION: ClassVar[int] = 2

    name: Literal["membership"] = Field("membership", description="Which probe.")
    scores: tuple[str, ...] = Field(
        ("loss", "zlib", "min_k", "min_k_plus_plus"),
        description="Scores; lowercase, recall and reference need an additional pass.",
    )
    fpr: tuple[Share, ...] = Field(
        (0.001, 0.01, 0.1), description="False-positive rates for the true-positive rates."
    )
    recall_documents: PositiveInt = Field(
        4, description="Control documents used as prefix for 'recall' (documents)."
    )

    @field_validator("scores")
    @classmethod
    def _check_scores(cls, scores: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [score for score in scores if score not in MEMBERSHIP_SCORES]
        if unknown:
            raise ValueError(f"must be of {', '.join(MEMBERSHIP_SCORES)}; got {unknown[0]!r}")
        return scores


class CanaryProbe(Settings):
    """Likelihood of trained secrets, compared with secrets that were never trained."""

    VERSION: ClassVar[int] = 3

    name: Literal["canaries"] = Field("canaries", description="Which probe.")
    delta: Annotated[float, Field(ge=0, lt=1)] = Field(
        1e-5, description="Delta of the lower bound on epsilon."
    )


class GenerationProbe(Settings):
    """Generate text from the first wrong token on, and compare it with the true text."""

    VERSION: ClassVar[int] = 2

    name: Literal["generation"] = Field("generation", description="Which probe.")
    nucleus: SamplingScheme | None = Field(
        SamplingScheme(top_p=0.95),
        description="Sampling in addition to greedy decoding; null for none.",
    )
    max_documents_per_bucket: PositiveInt | None = Field(
        100, description="Size of the seeded sample of each bucket; null takes all."
    )


class AttackProbe(Settings):
    """Attacks by an attacker who may submit several answers and knows the mask."""

    VERSION: ClassVar[int] = 1

    name: Literal["attacks"] = Field("attacks", description="Which probe.")
    width: _Answers = Field(16, description="Beams, and answers per document.")
    candidates: _Answers = Field(64, description="Tokens tried for each dropped token.")
    samples: _Answers = Field(16, description="Samples of the sampling attack.")
    scheme: SamplingScheme = Field(SamplingScheme(), description="Sampling scheme of this attack.")
    max_documents_per_bucket: PositiveInt | None = Field(
        40, description="Size of the seeded sample of each bucket that is attacked; null takes all."
    )


class MaskConsistencyProbe(Settings):
    """Whether copies of a text with other formatting have the same mask."""

    VERSION: ClassVar[int] = 1

    name: Literal["mask_consistency"] = Field("mask_consistency", description="Which probe.")
    max_passages: PositiveInt = Field(200, description="Trained documents that are rewritten.")


Probe = (
    ExtractionProbe
    | GridProbe
    | SamplingProbe
    | MembershipProbe
    | CanaryProbe
    | GenerationProbe
    | AttackProbe
    | MaskConsistencyProbe
)

PROBES: dict[str, type[Probe]] = {
    kind.model_fields["name"].default: kind for kind in get_args(Probe)
}
"""Every probe by the name that suites use; its class defines its settings."""

ProbeT = TypeVar("ProbeT", bound=Probe)


class Suite(Settings):
    """A named list of probes, which always includes the extraction probe."""

    name: Name
    version: PositiveInt
    probes: tuple[Probe, ...]

    @property
    def extraction(self) -> ExtractionProbe:
        """The extraction probe, whose windows all other probes use."""
        return next(probe for probe in self.probes if isinstance(probe, ExtractionProbe))

    def find(self, kind: type[ProbeT]) -> ProbeT | None:
        """Return the probe of this kind; None if the suite has no such probe."""
        return next((probe for probe in self.probes if isinstance(probe, kind)), None)

    def describe_probes(self) -> list[dict[str, Any]]:
        """Return the name, version and parameters of each probe, as stored in reports."""
        return [
            {"name": probe.name, "version": probe.VERSION, **probe.model_dump(mode="json")}
            for probe in self.probes
        ]


class _SuiteFile(Settings):
    name: Name = Field(description="Name of the suite, shown in reports.")
    version: PositiveInt = Field(description="Raised when the definition of the results changes.")
    probes: tuple[dict[str, Any], ...] = Field(
        description="The probes, each with 'name' and its settings."
    )


def load_audit_suite(settings: AuditConfig) -> Suite:
    """Read the suite named in an audit's settings, and apply the lengths given there.

    Raises:
        ConfigError: see `load_suite`.
    """
    suite = load_suite(settings.suite)
    probe = suite.extraction.adapt(
        continuation_tokens=settings.continuation_tokens,
        prefix_tokens=settings.prefix_tokens,
        min_prefix_tokens=settings.min_prefix_tokens,
    )
    probes = tuple(probe if old is suite.extraction else old for old in suite.probes)
    return suite.model_copy(update={"probes": probes})


def load_suite(name_or_path: str | Path) -> Suite:
    """Read a suite of memguard by name, or any suite by path.

    Raises:
        ConfigError: the file is not found or invalid; lists every problem, one per line.
    """
    path = find_asset("eval/suites", name_or_path, setting="audit.suite")
    document = load_yaml(path)
    file = validate(_SuiteFile, document.values, document)
    probes: list[Probe] = []
    problems: list[str] = []
    for index, values in enumerate(file.probes):
        try:
            probes.append(_read_probe(values, document, index))
        except ConfigError as error:
            problems += error.problems
    names = [values.get("name") for values in file.probes]
    place = document.locate(("probes",))
    problems += [f"{place} 'probes' has '{n}' twice" for n in PROBES if names.count(n) > 1]
    if not problems and "extraction" not in names:
        problems.append(f"{place} 'probes' needs 'extraction': the others use its windows")
    if problems:
        raise ConfigError(*problems)
    return Suite(name=file.name, version=file.version, probes=tuple(probes))


def _read_probe(values: dict[str, Any], document: Document, index: int) -> Probe:
    place = ("probes", index)
    kind = PROBES.get(str(values.get("name")))
    if kind is None:
        raise ConfigError(
            f"{document.locate((*place, 'name'))} 'probes[{index}].name' must be one of "
            f"{', '.join(PROBES)}; got {values.get('name')!r}"
        )
    return validate(kind, values, document, prefix=place)
