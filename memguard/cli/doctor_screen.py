"""Prints the results of `memguard doctor`: a diagnosis of the machine, or the table of families."""

from collections.abc import Iterable

import rich.console
from rich.columns import Columns
from rich.table import Table
from rich.text import Text

from memguard.cli.options import print_indented, print_title
from memguard.planner.disk import format_bytes
from memguard.workflows.backends import Backend, Check, State
from memguard.workflows.capacity import SHAPES, Capacity
from memguard.workflows.collective_checks import DTYPES, OPERATIONS
from memguard.workflows.doctor import Diagnosis, Extra, Gpu, Library
from memguard.workflows.families import GROUPS, Families, Family, Group

_SHORT: dict[State, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "not supported": ("no", "yellow"),
    "wrong": ("wrong", "bold red"),
    "hung": ("hung", "bold red"),
    "not tested": ("-", "dim"),
}
_NAME = 22
"""Width of the first column."""
_TITLES: dict[Group, str] = {
    "any mesh": "Any mesh, layers split over y and x",
    "data and z": "Data and z, layers not split",
    "one process": "One process",
    "none": "Not at all",
    "unknown": "Not known, as no default model can be built here",
}


def render_diagnosis(diagnosis: Diagnosis, out: rich.console.Console) -> None:
    """Print a diagnosis."""
    head = Text(f"memguard {diagnosis.memguard}", style="bold")
    head.append(f"  Python {diagnosis.python}, {diagnosis.platform}", style="not bold")
    out.print(head)
    print_title(out, "Libraries")
    _print_columns(out, [_name_library(library) for library in diagnosis.libraries])
    print_title(out, "Extras")
    _print_rows(out, ((extra.name, _describe_extra(extra)) for extra in diagnosis.extras))
    print_title(out, "Devices")
    _print_rows(out, _describe_devices(diagnosis))
    for backend in diagnosis.backends:
        ranks = f", {backend.num_ranks} processes" if backend.num_ranks else ""
        print_title(out, f"Collectives of {backend.name}{ranks}")
        _print_backend(out, backend)
    out.print()
    if not diagnosis.problems:
        out.print(Text("All that memguard needs works here.", style="green"))
    _print_capacities(out, diagnosis.capacities)
    if diagnosis.problems:
        print_title(out, "Problems")
        for problem in diagnosis.problems:
            _print_line(out, Text(problem, style="red"))


def _print_capacities(out: rich.console.Console, capacities: tuple[Capacity, ...]) -> None:
    """Print what can be trained here, and what that estimate is worth."""
    if not capacities:
        return
    first = capacities[0]
    print_title(out, "What this machine can train, by estimate")
    _print_rows(out, ((each.kind, _describe_capacity(each)) for each in capacities))
    _print_line(
        out,
        Text(
            f"Each line names the largest of {len(SHAPES)} published models whose step should fit: "
            f"rows of {first.seq_len:,} tokens, one at a time, other settings as by default. "
            "Nothing was trained or timed; other programs and a container's limit are not counted.",
            style="dim",
        ),
    )
    _print_line(out, Text("For your model: memguard plan --model PATH/config.json"))


def _describe_capacity(capacity: Capacity) -> Text:
    if capacity.model is None or capacity.needed_bytes is None or capacity.usable_bytes is None:
        return Text(f"nothing: {capacity.reason}", style="yellow")
    place = f" on each of {capacity.num_gpus} GPUs" if capacity.num_gpus > 1 else ""
    memory = f"{format_bytes(capacity.needed_bytes)} of {format_bytes(capacity.usable_bytes)}"
    text = Text.assemble("up to ", (capacity.model, "bold"), f", {memory}{place}")
    if capacity.tokens_per_s is not None:
        rounded = float(f"{capacity.tokens_per_s:.2g}")
        text.append(f", about {rounded:,.0f} tokens/s" if rounded >= 1 else ", below 1 token/s")
    return text


def _print_line(out: rich.console.Console, text: Text) -> None:
    if out.is_terminal:
        print_indented(out, text)
    else:
        # Lines are not wrapped in a log.
        out.print(Text.assemble("  ", text), soft_wrap=True)


def _print_columns(out: rich.console.Console, items: Iterable[Text]) -> None:
    print_indented(out, Columns(items, padding=(0, 3), column_first=True))


def _print_rows(out: rich.console.Console, rows: Iterable[tuple[str, Text]]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    print_indented(out, table)


def _name_library(library: Library) -> Text:
    if library.is_ok:
        return Text.assemble(library.name, " ", (library.version or "", "dim"))
    got = library.version or "missing"
    return Text(f"{library.name} {got}, needs {library.required or 'any'}", style="bold red")


def _describe_extra(extra: Extra) -> Text:
    if extra.is_installed:
        names = ", ".join(f"{library.name} {library.version}" for library in extra.libraries)
        return Text.assemble(names, (f"  for {extra.enables}", "dim"))
    missing = ", ".join(library.name for library in extra.libraries if not library.is_ok)
    text = Text.assemble((f"without {missing}", "yellow"), f": no {extra.enables}.")
    return text.append(f" pip install 'memguard[{extra.name}]'", style="cyan")


def _describe_devices(diagnosis: Diagnosis) -> Iterable[tuple[str, Text]]:
    cores = f"{diagnosis.num_cores} core{'' if diagnosis.num_cores == 1 else 's'}"
    available = diagnosis.available_bytes
    free = "" if available is None else f", {format_bytes(available)} available"
    yield "CPU", Text(f"{cores}, {format_bytes(diagnosis.memory_bytes)} of memory{free}")
    for gpu in diagnosis.gpus:
        yield f"GPU {gpu.index}", _describe_gpu(gpu)
    if not diagnosis.gpus:
        build = "is for CPUs" if diagnosis.cuda is None else f"is for CUDA {diagnosis.cuda}"
        yield "GPU", Text(f"none that torch can use; its build {build}")


def _describe_gpu(gpu: Gpu) -> Text:
    memory = f"{format_bytes(gpu.memory_bytes)}, {format_bytes(gpu.free_bytes)} free"
    text = Text(f"{gpu.name}, capability {gpu.capability}, {memory}")
    for name, state in (("bf16", gpu.bf16), ("flash", gpu.flash), ("varlen", gpu.varlen)):
        text.append(f"\n{name}: ")
        text.append(state, style="green" if state == "ok" else "yellow")
    return text


def _print_backend(out: rich.console.Console, backend: Backend) -> None:
    if backend.reason is not None:
        _print_line(out, Text(backend.reason, style="yellow"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", min_width=_NAME, no_wrap=True)
    for dtype in DTYPES:
        table.add_column(dtype, no_wrap=True)
    checks = {(check.operation, check.dtype): check for check in backend.checks}
    for operation in OPERATIONS:
        states = [checks[operation, dtype].state for dtype in DTYPES]
        table.add_row(operation, *(Text(*_SHORT[state]) for state in states))
    print_indented(out, table)
    for line in _list_reasons(backend.checks):
        _print_line(out, Text(line, style="dim"))


def _list_reasons(checks: Iterable[Check]) -> list[str]:
    """Return one line for each operation and reason."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for check in checks:
        if check.state != "ok":
            key = check.operation, check.state, check.reason or ""
            need = " (needed)" if check.is_needed else ""
            lines.setdefault(key, []).append(f"{check.dtype}{need}")
    return [
        f"{operation} in {', '.join(dtypes)}: {state}: {reason}"
        for (operation, state, reason), dtypes in lines.items()
    ]


# -- the table of families -----------------------------------------------------------------------


def render_families(families: Families, out: rich.console.Console) -> None:
    """Print the table of families, each group with its reasons."""
    for group in GROUPS:
        members = [family for family in families.families if family.group == group]
        if not members:
            continue
        if group == "any mesh":
            _print_any_mesh(out, members)
        else:
            out.print(Text(f"{_TITLES[group]} ({len(members)})", style="bold"))
            _print_reasons(out, members)
        out.print()
    _print_conditions(out, families)
    counts = ", ".join(f"{count} {group}" for group, count in families.counts.items() if count)
    number = len(families.families)
    types = f"{number} model type{'' if number == 1 else 's'}"
    text = f"{types} of transformers {families.transformers}: {counts}"
    out.print(Text(text), soft_wrap=not out.is_terminal)


def _print_any_mesh(out: rich.console.Console, members: list[Family]) -> None:
    out.print(Text(f"{_TITLES['any mesh']} ({len(members)})", style="bold"))
    for is_compared, line in (
        (True, "tests compare their numbers with those of one process:"),
        (False, "split by transformers' plan or memguard's roles, but not compared:"),
    ):
        names = [member.model_type for member in members if member.is_compared is is_compared]
        if names:
            print_indented(out, Text(line, style="dim"))
            _print_columns(out, [Text(name) for name in names])


def _print_reasons(out: rich.console.Console, members: list[Family]) -> None:
    if not out.is_terminal:
        # Lines are not wrapped in a log.
        for member in members:
            line = f"  {member.model_type:<{_NAME + 3}}{member.reason or ''}"
            out.print(Text(line), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for member in members:
        table.add_row(member.model_type, Text(member.reason or "", style="dim"))
    print_indented(out, table)


def _print_conditions(out: rich.console.Console, families: Families) -> None:
    """Print what checkpoints or runs must set, where the defaults do not."""
    lines: dict[str, list[str]] = {}
    for family in families.families:
        if family.condition is not None:
            lines.setdefault(family.condition, []).append(family.model_type)
    if not lines:
        return
    out.print(Text("Only with these settings", style="bold"))
    for condition, names in lines.items():
        _print_line(out, Text(f"{condition}:"))
        _print_line(out, Text(f"  {', '.join(names)}", style="dim"))
    out.print()
