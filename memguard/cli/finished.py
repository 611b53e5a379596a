"""Commands on the folders of finished runs, audits and sweeps."""

from pathlib import Path
from typing import Annotated

import typer

from memguard.cli.options import Json, print_result, say


def export(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A run that trained an adapter, or a peft folder."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into its base model.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; that of the base if left out."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Present location of the base model, if it was moved."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an adapter merged into its base model.

    The result loads in plain transformers. Its logits are compared with those of adapter and base,
    and nothing is written if they differ by more than rounding.
    """
    from memguard.workflows.requests import ExportRequest

    request = ExportRequest(folder=folder, out=out, merge=merge, dtype=dtype, base=base)
    request.check()
    say("export: loading torch, transformers and peft")
    from memguard.workflows.export import export_merged

    print_result(as_json, export_merged(request).describe(), out)


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, an audit or a sweep.")],
) -> None:
    """Render the HTML page again from its JSON."""
    from memguard.workflows.compare import render_folder

    typer.echo(render_folder(folder))


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or of an audit with --out.")
    ],
    base: Annotated[
        str | None,
        typer.Option(help="Present location of the base of the run's adapters, if it was moved."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a run's files for damage.

    For each damaged part it shows how to repair it. Private files of another user are not checked.
    """
    import json

    import rich.console

    from memguard.cli.verify_screen import render_verified, shown_reading
    from memguard.workflows.verify import verify as verify_folder

    with shown_reading() as on_read:
        verified = verify_folder(folder, on_read, base=base)
    if as_json:
        typer.echo(json.dumps(verified.describe(), indent=2))
    else:
        render_verified(verified, rich.console.Console(highlight=False))
    if verified.is_damaged:
        raise typer.Exit(3)
