"""Probes of other packages: found by the entry point ``memguard.probes``, loaded when used.

    [project.entry-points."memguard.probes"]
    first_word = "my_package:FirstWordProbe"

A name of memguard's own probes is refused. Nothing is imported to list the names.
"""

from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from memguard.audit.probe import Probe
from memguard.errors import ConfigError

GROUP = "memguard.probes"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignProbe:
    """A probe of another package."""

    kind: type[Probe]
    package: str
    """Name and version: ``my-package 1.2``."""


def list_points() -> list[EntryPoint]:
    """Return the entry points of installed probes, sorted by name and package."""
    return sorted(entry_points(group=GROUP), key=lambda point: (point.name, name_package(point)))


def list_installed(own: Collection[str]) -> list[str]:
    """Return the names of installed probes of other packages, without those of an own name.

    Args:
        own: names of memguard's probes.
    """
    return list(dict.fromkeys(point.name for point in list_points() if point.name not in own))


def name_package(point: EntryPoint) -> str:
    """Return name and version of the package of an entry point."""
    return "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def load_foreign(name: str, own: Collection[str]) -> ForeignProbe | None:
    """Return a probe of another package; None if none of this name is installed.

    Args:
        name: of the probe.
        own: names of memguard's probes, which no other package can define.

    Raises:
        ConfigError: it cannot be imported, is no probe of this name, or two packages have it.
    """
    points = [point for point in list_points() if point.name == name and name not in own]
    if not points:
        return None
    if len(points) > 1:
        packages = " and ".join(map(name_package, points))
        raise ConfigError(
            f"the packages {packages} both define the probe '{name}': uninstall one of them"
        )
    return load_point(points[0])


def load_point(point: EntryPoint) -> ForeignProbe:
    """Return the probe of an entry point.

    Raises:
        ConfigError: it cannot be imported, or is no probe of this name.
    """
    name, package = point.name, name_package(point)
    try:
        kind = point.load()
    except Exception as error:  # Whatever another package raises when it is imported.
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"the probe '{name}' of package {package} cannot be imported ({text}). Repair the "
            "package, or leave the probe out of the suite"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Probe)):
        raise ConfigError(
            f"'{point.value}' of package {package} is no subclass of memguard.audit.probe.Probe, "
            f"as the entry point '{name}' of '{GROUP}' must be"
        )
    field = kind.model_fields.get("name")
    if field is None or field.default != name:
        raise ConfigError(
            f"the probe '{name}' of package {package} must have the setting 'name' with the "
            f"default '{name}'; it has {None if field is None else field.default!r}"
        )
    return ForeignProbe(kind=kind, package=package)
