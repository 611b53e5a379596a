"""`memguard export --to`: lists the files that are or would be sent to the hub, and the card."""

import json
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from memguard.workflows.hub_export import HubExportRequest, HubUpload


def send_to_hub(request: "HubExportRequest", *, as_json: bool) -> None:
    """Send the weights of a run to the hub, or list what would be sent.

    Args:
        request: not checked yet.
        as_json: whether to print the result as JSON.
    """
    request.check()
    from memguard.cli.verify_screen import shown_reading
    from memguard.workflows.hub_export import check_run, export_to_hub

    with shown_reading("export") as on_read:
        run = check_run(request, on_read)
    upload = export_to_hub(request, run)
    if as_json:
        typer.echo(json.dumps(upload.describe(), indent=2))
    elif upload.sent is not None:
        typer.echo(upload.sent.url)
    else:
        _print_plan(upload)


def _print_plan(upload: "HubUpload") -> None:
    from memguard.workflows.verify import format_bytes

    visibility = "public" if upload.is_public else "private"
    size = format_bytes(upload.num_bytes)
    typer.echo(
        f"{len(upload.files)} files, {size}, would go to hub:{upload.repo} ({visibility}); nothing "
        "was sent"
    )
    width = max(len(file.name) for file in upload.files)
    for file in upload.files:
        typer.echo(f"  {file.name:<{width}}  {file.num_bytes:>15,} bytes")
    for name in upload.left_out:
        typer.echo(f"  {name:<{width}}  stays here: not on the list of files of a model")
    for option in upload.run.needs:
        typer.echo(f"it is sent with {option} only; verdict: {upload.run.sentence}")
    typer.echo(f"README.md:\n\n{upload.card}", nl=False)
