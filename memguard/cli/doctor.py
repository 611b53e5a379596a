"""`memguard doctor`: whether the libraries, devices and collectives of this machine work."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import rich.console
import typer
from rich.columns import Columns
from rich.table import Table
from rich.text import Text

from memguard.cli.options import Json, print_facts, print_indented, print_json, print_title, say

if TYPE_CHECKING:  # these import torch
    from memguard.workflows.collective_checks import Backend, Check, State
    from memguard.workflows.doctor import Diagnosis, Extra, Gpu, Library

_SHORT: dict["State", tuple[str, str]] = {
    "ok": ("ok", "green"),
    "not supported": ("no", "yellow"),
    "wrong": ("wrong", "bold red"),
    "hung": ("hung", "bold red"),
    "not tested": ("-", "dim"),
}
_NAME = 22
"""Width of the first column."""


def doctor(
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=2, help="Processes that test collectives; 2 if left out."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check libraries, devices and collectives of this machine."""
    say("doctor: loading torch and transformers")
    from memguard.runtime import quiet_libraries
    from memguard.runtime.environment import MORE_MACHINES, check_num_processes
    from memguard.workflows.doctor import diagnose, refuse_problems

    quiet_libraries()
    if nproc is not None:
        check_num_processes(nproc, option="--nproc", way_out=MORE_MACHINES)
    diagnosis = diagnose(num_ranks=nproc or 2, on_step=lambda step: say(f"doctor: {step}"))
    if as_json:
        print_json(diagnosis.model_dump(mode="json"))
    else:
        render_diagnosis(diagnosis, rich.console.Console(highlight=False))
    refuse_problems(diagnosis)


def render_diagnosis(diagnosis: "Diagnosis", out: rich.console.Console) -> None:
    """Print a diagnosis."""
    head = Text(f"memguard {diagnosis.memguard}", style="bold")
    head.append(f"  Python {diagnosis.python}, {diagnosis.platform}", style="not bold")
    out.print(head)
    print_title(out, "Libraries")
    libraries = [_name_library(library) for library in diagnosis.libraries]
    print_indented(out, Columns(libraries, padding=(0, 3), column_first=True))
    print_title(out, "Extras")
    extras = ((extra.name, _describe_extra(extra)) for extra in diagnosis.extras)
    print_facts(out, extras, min_width=None)
    print_title(out, "Devices")
    print_facts(out, _describe_devices(diagnosis), min_width=None)
    for backend in diagnosis.backends:
        ranks = f", {backend.num_ranks} processes" if backend.num_ranks else ""
        print_title(out, f"Collectives of {backend.name}{ranks}")
        _print_backend(out, backend)
    out.print()
    if not diagnosis.problems:
        out.print(Text("All that memguard needs works here.", style="green"))
    else:
        print_title(out, "Problems")
        for problem in diagnosis.problems:
            _print_line(out, Text(problem, style="red"))


def _print_line(out: rich.console.Console, text: Text) -> None:
    if out.is_terminal:
        print_indented(out, text)
    else:
        # Lines are not wrapped in a log.
        out.print(Text.assemble("  ", text), soft_wrap=True)


def _name_library(library: "Library") -> Text:
    if library.is_ok:
        return Text.assemble(library.name, " ", (library.version or "", "dim"))
    got = library.version or "missing"
    return Text(f"{library.name} {got}, needs {library.required or 'any'}", style="bold red")


def _describe_extra(extra: "Extra") -> Text:
    if extra.is_installed:
        names = ", ".join(f"{library.name} {library.version}" for library in extra.libraries)
        return Text.assemble(names, (f"  for {extra.enables}", "dim"))
    missing = [library for library in extra.libraries if not library.is_ok]
    names = ", ".join(library.name for library in missing)
    install = " ".join(f"'{library.name}{library.required}'" for library in missing)
    text = Text.assemble((f"without {names}", "yellow"), f": no {extra.enables}.")
    return text.append(f" pip install {install}", style="cyan")


def _describe_devices(diagnosis: "Diagnosis") -> Iterable[tuple[str, Text]]:
    from memguard.planner.dry_run import format_bytes

    cores = f"{diagnosis.num_cores} core{'' if diagnosis.num_cores == 1 else 's'}"
    available = diagnosis.available_bytes
    free = "" if available is None else f", {format_bytes(available)} available"
    yield "CPU", Text(f"{cores}, {format_bytes(diagnosis.memory_bytes)} of memory{free}")
    for gpu in diagnosis.gpus:
        yield f"GPU {gpu.index}", _describe_gpu(gpu)
    if not diagnosis.gpus:
        build = "is for CPUs" if diagnosis.cuda is None else f"is for CUDA {diagnosis.cuda}"
        yield "GPU", Text(f"none that torch can use; its build {build}")


def _describe_gpu(gpu: "Gpu") -> Text:
    from memguard.planner.dry_run import format_bytes

    memory = f"{format_bytes(gpu.memory_bytes)}, {format_bytes(gpu.free_bytes)} free"
    text = Text(f"{gpu.name}, capability {gpu.capability}, {memory}")
    for name, state in (("bf16", gpu.bf16), ("flash", gpu.flash), ("varlen", gpu.varlen)):
        text.append(f"\n{name}: ")
        text.append(state, style="green" if state == "ok" else "yellow")
    return text


def _print_backend(out: rich.console.Console, backend: "Backend") -> None:
    from memguard.workflows.collective_checks import DTYPES, OPERATIONS

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


def _list_reasons(checks: "Iterable[Check]") -> list[str]:
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
