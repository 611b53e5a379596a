"""`memguard audit --list-probes`: memguard's probes, and those of installed packages."""

from collections.abc import Sequence
from functools import partial
from importlib.metadata import EntryPoint

import rich.console
from pydantic import Field
from rich.table import Table
from rich.text import Text

from memguard.audit.plugins import contain, list_points, load_foreign, name_package
from memguard.audit.probe import Probe
from memguard.audit.suite import PROBES
from memguard.cli.options import print_json
from memguard.cli.screens import LOG_WIDTH
from memguard.errors import ConfigError
from memguard.pages import formatting as fmt
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


def print_probes(*, as_json: bool) -> None:
    """Print the probes that a suite can name, as a table or as JSON."""
    probes = list_probes()
    if as_json:
        print_json([probe.model_dump(mode="json") for probe in probes])
    else:
        render_probes(probes, rich.console.Console(highlight=False))


def render_probes(probes: Sequence[ListedProbe], out: rich.console.Console) -> None:
    """Print one row for each probe: name, package, needs, metrics or why it cannot be used."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("probe", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("package", max_width=18, overflow="fold")
    table.add_column("needs", max_width=9, overflow="fold")
    table.add_column("metrics", overflow="fold")
    for probe in probes:
        name, package = fmt.clean_name(probe.name, 24), fmt.clean_text(probe.package, 60)
        metrics = Text(fmt.clean_text(", ".join(probe.metrics)))
        if probe.reason is not None:
            metrics = Text(fmt.clean_text(probe.reason), style="yellow")
        table.add_row(Text(name), Text(package), Text(", ".join(probe.needs) or "-"), metrics)
    width = out.width if out.is_terminal else LOG_WIDTH
    out.print(table, width=width, highlight=False)
    out.print(
        Text("A probe does not run without what it needs; the report then says so."), width=width
    )
