"""Suites: the probes of an audit, read from a YAML file."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import Field

from memguard.assets import find_asset
from memguard.audit.plugins import list_installed, load_foreign
from memguard.audit.probe import Probe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.config import AuditConfig, Document, load_yaml, validate
from memguard.config.settings import Name, PositiveInt, Settings
from memguard.errors import ConfigError

_PLACES = (
    "extraction.ExtractionProbe",
    "grid.GridProbe",
    "sampling.SamplingProbe",
    "membership.MembershipProbe",
    "canaries.CanaryProbe",
    "generation.GenerationProbe",
    "attacks.AttackProbe",
    "mask_consistency.MaskConsistencyProbe",
)
"""File and class of each probe in `probes/`."""


PROBES: Mapping[str, type[Probe]] = {
    module: getattr(import_module(f"memguard.audit.probes.{module}"), kind)
    for module, _, kind in (place.partition(".") for place in _PLACES)
}
"""Memguard's probes by the name that suites use; their classes define their settings."""


class Suite(Settings):
    """A named list of probes, which always includes the extraction probe."""

    name: Name
    version: PositiveInt
    probes: tuple[Probe, ...]
    packages: dict[str, str] = Field(default_factory=dict)
    """Package and version of the probes that are not memguard's, by name of the probe."""
    in_verdict: frozenset[str] = frozenset()
    """Those of them whose risks count in the verdict."""

    @property
    def extraction(self) -> ExtractionProbe:
        """The extraction probe, whose windows all other probes use."""
        return next(probe for probe in self.probes if isinstance(probe, ExtractionProbe))

    def counts(self, probe: Probe) -> bool:
        """Return whether the risks of a probe count in the verdict."""
        return probe.name not in self.packages or probe.name in self.in_verdict

    def describe_probes(self) -> list[dict[str, Any]]:
        """Return the name, version and parameters of each probe, as stored in reports."""
        return [
            {"name": probe.name, "version": probe.VERSION, **probe.model_dump(mode="json")}
            | (
                {"package": package, "in_verdict": probe.name in self.in_verdict}
                if (package := self.packages.get(probe.name))
                else {}
            )
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
    packages: dict[str, str] = {}
    in_verdict: set[str] = set()
    problems: list[str] = []
    for index, values in enumerate(file.probes):
        try:
            probe, package, counts = _read_probe(values, document, index)
        except ConfigError as error:
            problems += error.problems
            continue
        probes.append(probe)
        packages |= {probe.name: package} if package else {}
        in_verdict |= {probe.name} if counts else set()
    names = [values.get("name") for values in file.probes]
    place = document.locate(("probes",))
    twice = dict.fromkeys(name for name in names if names.count(name) > 1)
    problems += [f"{place} 'probes' has '{name}' twice" for name in twice]
    if not problems and "extraction" not in names:
        problems.append(f"{place} 'probes' needs 'extraction': the others use its windows")
    if problems:
        raise ConfigError(*problems)
    return Suite(
        name=file.name,
        version=file.version,
        probes=tuple(probes),
        packages=packages,
        in_verdict=frozenset(in_verdict),
    )


def _read_probe(values: dict[str, Any], document: Document, index: int) -> tuple[Probe, str, bool]:
    """Return a probe, its package ("" for memguard's own), and whether it is in the verdict."""
    place = ("probes", index)
    name = str(values.get("name"))
    if (kind := PROBES.get(name)) is not None:
        return validate(kind, values, document, prefix=place), "", False
    foreign = load_foreign(name, PROBES)
    if foreign is None:
        installed = ", ".join(list_installed(PROBES)) or "none"
        raise ConfigError(
            f"{document.locate((*place, 'name'))} 'probes[{index}].name' must be one of "
            f"{', '.join(PROBES)}, or a probe of an installed package ({installed}); got "
            f"{values.get('name')!r}"
        )
    settings = dict(values)
    counts = settings.pop("in_verdict", False)
    if not isinstance(counts, bool):
        raise ConfigError(
            f"{document.locate((*place, 'in_verdict'))} 'probes[{index}].in_verdict' must be true "
            f"or false; got {counts!r}"
        )
    return validate(foreign.kind, settings, document, prefix=place), foreign.package, counts
