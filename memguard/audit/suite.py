"""Which probes an audit asks, read from a suite's YAML."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from memguard.assets import find_asset
from memguard.audit.extraction import ExtractionProbe
from memguard.audit.probes import (
    PROBES,
    AttackProbe,
    CanaryProbe,
    GenerationProbe,
    GridProbe,
    MaskConsistencyProbe,
    MembershipProbe,
    Probe,
    SamplingProbe,
)
from memguard.config import AuditConfig, Document, load_yaml, validate
from memguard.config.settings import Name, PositiveInt, Settings
from memguard.errors import ConfigError

ProbeT = TypeVar("ProbeT", bound=Probe)


class Suite(Settings):
    """A named list of probes; the extraction probe is always among them."""

    name: Name
    version: PositiveInt
    probes: tuple[Probe, ...]

    @property
    def extraction(self) -> ExtractionProbe:
        """The probe whose windows all others use."""
        return next(probe for probe in self.probes if isinstance(probe, ExtractionProbe))

    @property
    def grid(self) -> GridProbe | None:
        """Other windows of the same documents; None where not asked for."""
        return self._find(GridProbe)

    @property
    def sampling(self) -> SamplingProbe | None:
        """What drawing the continuation costs."""
        return self._find(SamplingProbe)

    @property
    def membership(self) -> MembershipProbe | None:
        """Trained against control documents."""
        return self._find(MembershipProbe)

    @property
    def canaries(self) -> CanaryProbe | None:
        """Random secrets."""
        return self._find(CanaryProbe)

    @property
    def generation(self) -> GenerationProbe | None:
        """Near-verbatim by writing on."""
        return self._find(GenerationProbe)

    @property
    def attacks(self) -> AttackProbe | None:
        """Beam search, and one that knows the mask."""
        return self._find(AttackProbe)

    @property
    def mask_consistency(self) -> MaskConsistencyProbe | None:
        """Copies formatted otherwise."""
        return self._find(MaskConsistencyProbe)

    def _find(self, kind: type[ProbeT]) -> ProbeT | None:
        return next((probe for probe in self.probes if isinstance(probe, kind)), None)

    def describe_probes(self) -> list[dict[str, Any]]:
        """Return each probe's name, version and parameters, as reports carry them."""
        return [
            {"name": probe.name, "version": probe.VERSION, **probe.model_dump(mode="json")}
            for probe in self.probes
        ]


class _SuiteFile(Settings):
    name: Name = Field(description="Name of the suite, as reports give it.")
    version: PositiveInt = Field(description="Raised when the numbers mean something else.")
    probes: tuple[dict[str, Any], ...] = Field(
        description="The probes, each with 'name' and its settings."
    )


def load_audit_suite(settings: AuditConfig) -> Suite:
    """Read the suite that an audit's settings name, with the lengths that they give.

    Raises:
        ConfigError: see `load_suite`.
    """
    suite = load_suite(settings.suite)
    probe = suite.extraction.adapt(
        continuation_tokens=settings.continuation_tokens,
        prefix_tokens=settings.prefix_tokens,
        min_prefix_tokens=settings.min_prefix_tokens,
    )
    probes = tuple(probe if each is suite.extraction else each for each in suite.probes)
    return suite.model_copy(update={"probes": probes})


def load_suite(name_or_path: str | Path) -> Suite:
    """Read a shipped suite by name, or any by path.

    Raises:
        ConfigError: not found, or with every problem in it, one line each.
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
