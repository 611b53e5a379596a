"""Lists the probes that a suite can name: memguard's, and those of installed packages."""

from collections.abc import Sequence
from functools import partial
from importlib.metadata import EntryPoint

from pydantic import Field

from memguard.audit.plugins import contain, list_points, load_foreign, name_package
from memguard.audit.probe import Probe
from memguard.audit.suite import PROBES
from memguard.errors import ConfigError
from memguard.records.record import Record


class ListedProbe(Record):
    """One probe, or one that an installed package defines and that cannot be used."""

    name: str
    package: str
    """``memguard``, or another package with its version: ``my-package 1.2``."""
    needs: list[str] = Field(default_factory=list)
    """Inputs without which it does not run."""
    metrics: list[str] = Field(default_factory=list)
    reason: str | None = None
    """Why no suite can use it; null if one can."""


def list_probes() -> Sequence[ListedProbe]:
    """Return memguard's probes in the order of the full suite, then those of other packages.

    The modules of other packages are imported, to list their metrics; no model is loaded.
    """
    own = [_describe(kind, name, "memguard") for name, kind in PROBES.items()]
    return [*own, *map(_describe_foreign, list_points())]


def _describe_foreign(point: EntryPoint) -> ListedProbe:
    refuse = partial(_refuse, point.name, name_package(point))
    if point.name in PROBES:
        return refuse("refused: the name is that of a probe of memguard")
    try:
        foreign = load_foreign(point.name, PROBES)
    except ConfigError as error:
        return refuse("; ".join(error.problems))
    assert foreign is not None, "it is installed"
    return contain(
        foreign.package, partial(_describe, foreign.kind, point.name, foreign.package), refuse
    )


def _refuse(name: str, package: str, reason: str) -> ListedProbe:
    return ListedProbe(name=name, package=package, reason=reason)


def _describe(kind: type[Probe], name: str, package: str) -> ListedProbe:
    return ListedProbe(
        name=name,
        package=package,
        needs=list(kind.needs),
        metrics=[metric.name for metric in kind.metrics],
    )
