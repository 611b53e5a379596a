"""Prints the result of `memguard audit --list-probes`."""

import json
from collections.abc import Sequence

import rich.console
import typer
from rich.table import Table
from rich.text import Text

from memguard.pages import formatting as fmt
from memguard.workflows.list_probes import ListedProbe, list_probes

_WIDTH = 80
"""Columns of a log, which has no width of its own."""


def print_probes(*, as_json: bool) -> None:
    """Print the probes that a suite can name, as a table or as JSON."""
    probes = list_probes()
    if as_json:
        listed = [probe.model_dump(mode="json") for probe in probes]
        typer.echo(json.dumps(listed, indent=2))
    else:
        render_probes(probes, rich.console.Console(highlight=False))


def render_probes(probes: Sequence[ListedProbe], out: rich.console.Console) -> None:
    """Print one row for each probe: name, package, needs, metrics or why it cannot be used.

    Args:
        probes: result of `list_probes`.
        out: standard output.
    """
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
    width = out.width if out.is_terminal else _WIDTH
    out.print(table, width=width, highlight=False)
    out.print(
        Text("A probe does not run without what it needs; the report then says so."),
        width=width,
    )
