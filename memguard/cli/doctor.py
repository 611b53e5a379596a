"""`memguard doctor`: what this machine and this version of transformers can do."""

import json
from typing import Annotated

import typer

from memguard.cli.options import Json, say
from memguard.errors import ConfigError


def doctor(
    types: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TYPE]...", help="With --models: only these model types."),
    ] = None,
    models: Annotated[
        bool,
        typer.Option("--models", help="List the meshes that each model type can use instead."),
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=2, help="Processes that test collectives; 2 if left out."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check libraries, devices and collectives of this machine.

    With --models it tries every causal language model type of the installed transformers instead,
    and lists which can use any mesh, only the axes data and z, or one process, and why.
    """
    if types and not models:
        raise ConfigError(f"'TYPE' needs --models: memguard doctor --models {' '.join(types)}")
    if models and nproc is not None:
        raise ConfigError("'--nproc' tests collectives, which --models does not: leave out one")
    say("doctor: loading torch and transformers")
    import rich.console

    from memguard.cli.doctor_screen import render_diagnosis, render_families
    from memguard.runtime import quiet_libraries

    quiet_libraries()
    out = rich.console.Console(highlight=False)
    if models:
        from memguard.runtime import Console
        from memguard.workflows.families import list_model_types, survey_families

        total = len(types or list_model_types())
        with Console().progress("doctor", total, "model types") as advance:
            families = survey_families(types or (), lambda name: advance(1, name))
        if as_json:
            typer.echo(json.dumps(families.model_dump(mode="json"), indent=2))
        else:
            render_families(families, out)
        return
    from memguard.runtime.environment import MORE_MACHINES, check_num_processes
    from memguard.workflows.doctor import diagnose, refuse_problems

    if nproc is not None:
        check_num_processes(nproc, option="--nproc", way_out=MORE_MACHINES)
    diagnosis = diagnose(num_ranks=nproc or 2, on_step=lambda step: say(f"doctor: {step}"))
    if as_json:
        typer.echo(json.dumps(diagnosis.model_dump(mode="json"), indent=2))
    else:
        render_diagnosis(diagnosis, out)
    refuse_problems(diagnosis)
