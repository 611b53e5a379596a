"""Probes of other packages: found by the entry point ``memguard.probes``, loaded, and contained.

    [project.entry-points."memguard.probes"]
    first_word = "my_package:FirstWordProbe"

A name of memguard's own probes is refused. Nothing is imported to list the names. An error of such
a probe ends the probe, not the audit, and the report says so with its package: all ranks agree
after each of its steps, so that a probe that fails on one rank ends on every rank.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from memguard.audit.passages import EXTRAS, Passage
from memguard.audit.probe import Probe
from memguard.audit.requests import Generate, Measured, Prompt, Request, Score
from memguard.errors import (
    MAX_PATH,
    ConfigError,
    ForeignError,
    describe_foreign,
    is_foreign,
    shorten,
)

if TYPE_CHECKING:
    from memguard.runtime import Runtime


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
    """Return the names of installed probes of other packages, without those of an own name."""
    return list(dict.fromkeys(point.name for point in list_points() if point.name not in own))


def name_package(point: EntryPoint) -> str:
    """Return name and version of the package of an entry point."""
    return "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def load_foreign(name: str, own: Collection[str]) -> ForeignProbe | None:
    """Return a probe of another package; None for an own name, and if none of it is installed.

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
        kind: Any = point.load()
    except BaseException as error:  # Whatever another package raises when it is imported.
        if not is_foreign(error):
            raise
        reason = str(error) if isinstance(error, ImportError) else describe_foreign(error)
        reason = shorten(" ".join(reason.split()), MAX_PATH)
        raise ConfigError(
            f"the probe '{name}' of package {package} cannot be imported ({reason}). Repair the "
            "package, or leave the probe out of the suite"
        ) from error
    fault = ""
    if not (isinstance(kind, type) and issubclass(kind, Probe)):
        fault = f"'{point.value}' must be a subclass of memguard.audit.probe.Probe"
    elif (default := getattr(kind.model_fields.get("name"), "default", None)) != name:
        fault = f"its setting 'name' must have the default '{name}'; it has {default!r}"
    if fault:
        raise ConfigError(f"the probe '{name}' of package {package}: {fault}")
    return ForeignProbe(kind=kind, package=package)


T = TypeVar("T")


def describe_failure(package: str, error: BaseException) -> str:
    """Return the reason for the report: the package and the error, in one line."""
    return f"the probe of package {package} failed ({describe_foreign(error)})"


def contain(package: str, function: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """Return the result of a function; if it fails, that of ``otherwise``, given the reason."""
    try:
        return function()
    except BaseException as error:  # Whatever another package raises.
        if not is_foreign(error):
            raise
        return otherwise(describe_failure(package, error))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Guard:
    """The probes of other packages on one model, and why they have ended."""

    packages: Mapping[str, str]
    """Package of each such probe, by its name."""
    peers: "Runtime"
    max_tokens: int | None = None
    """Number of positions of the model; None if it does not limit it."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons by name of the probe."""
    _owners: dict[int, str] = field(default_factory=dict)
    """Names of their probes, by id of their requests."""

    def advance(self, name: str, step: Callable[[], Sequence[Request]]) -> Sequence[Request] | None:
        """Return the next requests of a probe; None if it has failed on any rank.

        The package and its version become a part of the requests' parameters, so that numbers of
        another package or version are never taken from the cache.

        Raises:
            StopIteration: the probe has ended.
        """
        if name not in self.packages:
            return step()
        package = self.packages[name]
        # Its last requests exist until now; a later object may have the id of one of them.
        for key in [key for key, owner in self._owners.items() if owner == name]:
            del self._owners[key]
        ended: StopIteration | None = None
        requests: Sequence[Request] = ()
        try:
            requests = [_sign(request, name, package) for request in step()]
            longest = max(map(_count_longest, requests), default=0)
            if self.max_tokens is not None and longest > self.max_tokens:
                raise ForeignError(f"it asks for {longest} tokens of at most {self.max_tokens}")
        except StopIteration as end:
            ended = end
            if not isinstance(end.value, Measured | None):
                text = f"it returned {type(end.value).__name__}, not Measured"
                self.failed[name] = describe_failure(package, ForeignError(text))
        except BaseException as error:
            if not is_foreign(error):
                raise
            self.failed[name] = describe_failure(package, error)
        if self.peers.agree_any(name in self.failed):
            self.failed.setdefault(name, f"the probe of package {package} failed")
            return None
        if ended is not None:
            raise ended
        self._owners.update((id(request), name) for request in requests)
        return requests

    def reduce(
        self, request: Request, items: Sequence[int], results: Sequence[Any]
    ) -> NDArray[np.float64] | None:
        """Return the rows of numbers; None if the probe has failed, now or before."""
        name = self._owners.get(id(request))
        if name in self.failed:
            return None
        try:
            rows = np.array(request.reduce(items, results), dtype=np.float64)
            return rows.reshape(len(items), len(request.names))
        except BaseException as error:
            if name is None or not is_foreign(error):
                raise
            self.failed[name] = describe_failure(self.packages[name], error)
            return None


def _count_longest(request: Request) -> int:
    """Return the tokens of the longest passage, or of the longest prompt with what it adds."""
    if isinstance(request, Score):
        sizes = [len(passage.input_ids) for passage in request.passages if passage is not None]
    else:
        sizes = [len(p.input_ids) + p.num_new for p in request.prompts if p is not None]
    return max(sizes, default=0)


def _sign(request: Request, name: str, package: str) -> Request:
    """Return a request with its package in the parameters; raise if it is not well formed."""
    if not isinstance(request, Score | Generate):
        raise ForeignError(f"it yielded {type(request).__name__}, not Score or Generate")
    present: Sequence[object] = request.prompts if isinstance(request, Generate) else ()
    kind: type = Prompt
    if isinstance(request, Score):
        present, kind = request.passages, Passage
        if not request.selection.needs <= set(EXTRAS):
            raise ForeignError(f"the needs of its requests must be of {', '.join(EXTRAS)}")
    if not all(one is None or isinstance(one, kind) for one in present):
        raise ForeignError(f"its requests must have objects of {kind.__name__} or None")
    sizes = {len(present), len(request.keys)}
    if isinstance(request, Score):
        sizes.add(len(request.items))
    if len(sizes) > 1:
        raise ForeignError("the items, passages or prompts, and keys of a request differ in number")
    json.dumps(dict(request.parameters))
    parameters = {"probe": name, "package": package, "settings": dict(request.parameters)}
    if isinstance(request, Score):
        request = replace(request, continues=None)
    return replace(request, parameters=parameters)
