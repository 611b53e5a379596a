"""Arguments, options, status lines and layout that several commands have."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memguard.errors import ConfigError, shorten
from memguard.runtime.children import own_rank
from memguard.runtime.console import Console, wrap_words


def refuse_split_settings(arguments: list[str] | None) -> list[str] | None:
    """Refuse settings of two words, the style of other trainers: ``--optim.lr 3e-5``."""
    problems = []
    for name, value in pairwise(arguments or ()):
        if name.startswith("--") and not value.startswith("--") and "=" not in name + value:
            setting = shorten(f"{name.removeprefix('--')}={value}")
            problems.append(
                f"argument {shorten(repr(name))} is not an option; a setting is one argument: "
                f"{setting}"
            )
    if problems:
        raise ConfigError(*problems)
    return arguments


Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A run's YAML, or the name of a shipped one.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings to change, e.g. optim.lr=1e-4.",
        callback=refuse_split_settings,
    ),
]
# `--optim.lr=1e-4`, the style of other trainers, is accepted as a setting.
TAKES_SETTINGS = {"ignore_unknown_options": True}
AuditedFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run, or of an audit with --out.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Nproc = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Run on this many processes of this machine.")
]
TrainNproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        help="Run on this many processes of this machine; one for each visible GPU if left out.",
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        min=0,
        show_default=False,
        help="Start again after a failure of a process, at most so often; not without progress.",
    ),
]

Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="Of the documents: text, prompt_completion, messages, alpaca, sharegpt or input_ids, "
        "or a mapping, '{format: alpaca, columns: {prompt: question}, template: chat}'; taken "
        "from their columns if left out.",
    ),
]
LoadAs = Annotated[
    str,
    typer.Option(
        "--load-as",
        metavar="FORM",
        show_default=False,
        help="Load the model merged (its adapter), int8 or nf4; as stored if left out.",
    ),
]


def say(text: str, *, err: bool = True) -> None:
    """Print a line on standard error, wrapped between words on a terminal; only rank 0 does."""
    Console(rich.console.Console(stderr=err, highlight=False)).info(text)


def print_title(out: rich.console.Console, title: str) -> None:
    """Print the title of a part of a screen."""
    out.print()
    out.print(Text(title, style="bold"))


def print_indented(out: rich.console.Console, content: rich.console.RenderableType) -> None:
    """Print a part of a screen."""
    out.print(Padding(content, (0, 0, 0, 2), expand=False), highlight=False)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text that is wrapped as those of `Console` are; rich itself breaks "95 %" at its space."""

    text: str
    style: str = ""

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        """Yield the wrapped text."""
        yield Text(wrap_words(self.text, options.max_width), style=self.style)

    def __rich_measure__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Measurement:
        """Return the least and the largest width."""
        return Measurement.get(console, options, Text(self.text))


def print_facts(
    out: rich.console.Console,
    facts: Iterable[tuple[str, str | Text | Sentence]],
    *,
    min_width: int | None = 11,
) -> None:
    """Print names, in a column that is at least so wide, and what is said of each."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=min_width, no_wrap=True)
    table.add_column()
    before = ""
    for name, value in facts:
        # Consecutive facts of the same name show it only once.
        sentence = Sentence(value) if isinstance(value, str) else value
        table.add_row(Text("" if name == before else name), sentence)
        before = name
    if table.row_count:
        print_indented(out, table)


def print_json(result: Any) -> None:
    """Print the result of a command for programs."""
    typer.echo(json.dumps(result, indent=2))


def print_result(as_json: bool, result: Any, path: Path) -> None:
    """Print the result of a command as JSON, or where it is; only rank 0 does."""
    if own_rank() == 0:
        print_json(result) if as_json else typer.echo(path)
