"""`memguard bundle`, and `memguard verify` of what it wrote."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memguard.cli.options import Json, say

if TYPE_CHECKING:
    from memguard.workflows.bundle_format import Checked

_UNSIGNED = (
    "the hashes show damage, not forgery, since anyone can write another bundle with other hashes; "
    "sign the file, e.g. with 'ssh-keygen -Y sign'"
)


def bundle(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or of an audit with --out.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.zip", help="File to write; must not exist.")],
    gate: Annotated[
        Path | None,
        typer.Option(help="Folder of the result of 'memguard gate'; RUN/gate if left out."),
    ] = None,
    with_records: Annotated[
        bool, typer.Option("--with-records", help="Add the scores of each document: PRIVATE.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Pack an audit's report, results and hashes into one file, to hand on.

    Documents are in it by their keyed hash: extracted or not, without scores. 'memguard verify
    OUT.zip' finds damage. To show who wrote the file, sign it with the tools you sign with.
    """
    from memguard.cli.verify_screen import shown_reading
    from memguard.workflows.bundle import BundleRequest, write_bundle

    request = BundleRequest(folder=folder, out=out, gate=gate, with_records=with_records)
    request.check()
    with shown_reading() as on_read:
        bundled = write_bundle(request, on_read)
    for note in bundled.notes:
        say(f"bundle: {note}")
    if as_json:
        typer.echo(json.dumps(bundled.describe(), indent=2))
        return
    _show(out, "", bundled.checked)


def verify_bundle(path: Path, *, as_json: bool) -> None:
    """Check a bundle, and print what it is.

    Raises:
        RecordError: the bundle was changed, or is none.
    """
    from memguard.workflows.bundle_format import check_bundle

    checked = check_bundle(path)
    if as_json:
        result = {"bundle": str(path), "intact": True, **checked.describe()}
        typer.echo(json.dumps(result, indent=2))
        return
    _show(path, "intact; ", checked)


def _show(path: Path, state: str, checked: "Checked") -> None:
    from memguard.pages import formatting as fmt
    from memguard.workflows.bundle import PRIVATE_RECORDS
    from memguard.workflows.verify import format_bytes

    evidence, size = checked.evidence, format_bytes(checked.num_bytes)
    shown = fmt.clean_text(str(path), fmt.COMMAND_LIMIT)
    typer.echo(f"{shown}: {state}{len(checked.members)} files, {size}")
    typer.echo(f"audit of {fmt.clean_text(evidence.audit)}: {fmt.clean_text(evidence.verdict)}")
    if evidence.sources.has_private_records:
        typer.echo(PRIVATE_RECORDS)
    typer.echo(_UNSIGNED)
