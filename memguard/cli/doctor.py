"""`memguard doctor`: whether the libraries, devices and collectives of this machine work."""

import json
from typing import Annotated

import typer

from memguard.cli.options import Json, say


def doctor(
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=2, help="Processes that test collectives; 2 if left out."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check libraries, devices and collectives of this machine."""
    say("doctor: loading torch and transformers")
    import rich.console

    from memguard.cli.doctor_screen import render_diagnosis
    from memguard.runtime import quiet_libraries
    from memguard.runtime.environment import MORE_MACHINES, check_num_processes
    from memguard.workflows.doctor import diagnose, refuse_problems

    quiet_libraries()
    if nproc is not None:
        check_num_processes(nproc, option="--nproc", way_out=MORE_MACHINES)
    diagnosis = diagnose(num_ranks=nproc or 2, on_step=lambda step: say(f"doctor: {step}"))
    if as_json:
        typer.echo(json.dumps(diagnosis.model_dump(mode="json"), indent=2))
    else:
        render_diagnosis(diagnosis, rich.console.Console(highlight=False))
    refuse_problems(diagnosis)
