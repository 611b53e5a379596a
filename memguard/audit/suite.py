"""Suites: the probes of an audit, read from a YAML file."""

from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import Field

from memguard.assets import find_asset
from memguard.audit.probes.attacks import AttackProbe
from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.generation import GenerationProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.mask_consistency import MaskConsistencyProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.config import AuditConfig, Document, load_yaml, validate
from memguard.config.settings import Name, PositiveInt, Settings
from memguard.errors import ConfigError

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
