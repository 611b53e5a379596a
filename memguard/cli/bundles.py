"""`memguard bundle`, and `memguard verify` of what it wrote."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memguard.cli.options import Json, say
from memguard.errors import MAX_PATH, ConfigError, RecordError, shorten

if TYPE_CHECKING:
    from memguard.evidence.check import Checked

_SIGN, _KEY = "--sign", "--key"
_UNSIGNED = (
    "not signed: the hashes show damage, not forgery, since anyone can write another bundle with "
    "other hashes"
)


def bundle(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or of an audit with --out.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.zip", help="File to write; must not exist.")],
    sign: Annotated[
        Path | None,
        typer.Option(_SIGN, metavar="KEY", help="Private ed25519 key, PEM or OpenSSH."),
    ] = None,
    gate: Annotated[
        Path | None,
        typer.Option(help="Folder of the result of 'memguard gate'; RUN/gate if left out."),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="The policy that was judged; it is added if none was."),
    ] = None,
    with_records: Annotated[
        bool, typer.Option("--with-records", help="Add the scores of each document: PRIVATE.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Pack an audit's report, results and hashes into one file, to hand on.

    Documents are in it by their keyed hash: extracted or not, without scores. 'memguard verify
    OUT.zip' finds damage; with --sign, it also shows who wrote the file.
    """
    from memguard.cli.verify_screen import shown_reading
    from memguard.evidence.signature import load_private_key
    from memguard.workflows.bundle import BundleRequest, write_bundle

    request = BundleRequest(
        folder=folder, out=out, gate=gate, policy=policy, with_records=with_records
    )
    request.check()
    key = None if sign is None else load_private_key(sign, _SIGN, _ask_password)
    with shown_reading() as on_read:
        bundled = write_bundle(request, on_read, key=key)
    for note in bundled.notes:
        say(f"bundle: {note}")
    if as_json:
        typer.echo(json.dumps(bundled.describe(), indent=2))
        return
    typer.echo(f"{_clean(out)}: {_measure(bundled.checked)}")
    _show(bundled.checked)
    if key is None:
        typer.echo(f"{_UNSIGNED}; {_SIGN} KEY signs")
    else:
        typer.echo(f"signed with key id {bundled.checked.key_id}")


def verify_bundle(path: Path, key: Path | None, *, as_json: bool) -> None:
    """Check a bundle, and print what it is and who signed it.

    Args:
        path: of the bundle.
        key: public key that must have signed it; None leaves a signature unchecked.
        as_json: whether to print the result as JSON.

    Raises:
        ConfigError: the key cannot be read.
        RecordError: the bundle was changed, or another key signed it.
    """
    from memguard.evidence.check import check_bundle, read_bundle
    from memguard.evidence.signature import load_public_key

    public = None if key is None else load_public_key(key, _KEY)
    archive = read_bundle(path)
    try:
        checked = check_bundle(archive, public)
    except RecordError as error:
        raise type(error)(f"'{shorten(str(path), MAX_PATH)}' {error}") from error
    if as_json:
        typer.echo(
            json.dumps({"bundle": str(path), "intact": True, **checked.describe()}, indent=2)
        )
        return
    typer.echo(f"{_clean(path)}: intact; {_measure(checked)}")
    _show(checked)
    if checked.key_id is None:
        typer.echo(_UNSIGNED)
    elif checked.is_signature_checked:
        typer.echo(f"signed by the owner of this key (id {checked.key_id})")
    else:
        typer.echo(
            f"signed by key id {checked.key_id}, not checked: give {_KEY} PUB, the public key that "
            "you have from the signer"
        )


def _measure(checked: "Checked") -> str:
    from memguard.workflows.verify import format_bytes

    return f"{len(checked.members)} files, {format_bytes(checked.num_bytes)}"


def _show(checked: "Checked") -> None:
    from memguard.evidence.contents import PRIVATE_RECORDS
    from memguard.pages.formatting import clean_text

    evidence = checked.evidence
    typer.echo(f"audit of {clean_text(evidence.audit)}: {clean_text(evidence.verdict)}")
    if evidence.sources.has_private_records:
        typer.echo(PRIVATE_RECORDS)


def _clean(path: Path) -> str:
    from memguard.pages import formatting

    return formatting.clean_text(str(path), formatting.COMMAND_LIMIT)


def _ask_password() -> str | None:
    if not sys.stdin.isatty():
        return None
    password: str = typer.prompt("password of the key", hide_input=True, err=True)
    return password


def refuse_key(key: Path | None, folder: Path) -> None:
    """Refuse a key for the folder of a run.

    Raises:
        ConfigError: a key is given.
    """
    if key is not None:
        raise ConfigError(
            f"'{_KEY}' checks the signature of a bundle (OUT.zip); '{folder}' is a folder. Leave "
            "it out"
        )
