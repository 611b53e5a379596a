"""Commands on the folders of finished runs, audits and sweeps."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.console
import typer

from memguard.cli.options import AuditedFolder, Json, print_json, print_result, say
from memguard.errors import ConfigError

if TYPE_CHECKING:
    from memguard.workflows.bundle_format import Checked
    from memguard.workflows.training.hub import HubRequest

_UNSIGNED = (
    "the hashes show damage, not forgery, since anyone can write another bundle with other hashes; "
    "sign the file, e.g. with 'ssh-keygen -Y sign'"
)


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run; with --merge alone also a peft folder.")
    ],
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", help="Folder of the written model; must not exist."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="Write the run's model of this step, from its checkpoint."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into its base model.")
    ] = False,
    from_seeds: Annotated[
        bool,
        typer.Option("--from-seeds", help="Rebuild the weights of a mezo run from its seeds.json."),
    ] = False,
    to: Annotated[
        str | None,
        typer.Option(metavar="hub:NAME", help="Send the run's weights to this hub repository."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what --to would send; needs no network.")
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", help="The repository is public; private if left out.")
    ] = False,
    allow_extracted: Annotated[
        bool,
        typer.Option(
            "--allow-extracted",
            help="Send weights with a red verdict; with --public, with an amber one.",
        ),
    ] = False,
    allow_unaudited: Annotated[
        bool, typer.Option("--allow-unaudited", help="Send weights without an audit.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of merged weights: float32, bfloat16 or float16; the base's if absent."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Base model: its present location; for --to its hub id."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's model, merge an adapter, or send a run's weights to the hub.

    --step needs neither a GPU nor the run's mesh. --merge compares logits with those of adapter and
    base, and writes nothing if they differ by more than rounding. --to sends weights,
    configuration, tokenizer and a card, nothing else, to a private repository unless --public is
    given.
    """
    of_hub = {
        "dry_run": dry_run,
        "public": public,
        "allow_extracted": allow_extracted,
        "allow_unaudited": allow_unaudited,
    }
    problem = ""
    if from_seeds and (merge or to or dtype or base or step is not None):
        problem = "--from-seeds stands alone: leave out --step, --merge, --to, --dtype and --base"
    elif to is not None:
        if merge or step is not None or out is not None or dtype is not None:
            problem = "OUT, --step, --merge and --dtype write here; --to sends a run as it is"
    elif given := [option for option, is_given in of_hub.items() if is_given]:
        option = given[0].replace("_", "-")
        problem = f"'--{option}' is for --to hub:NAME, which is missing"
    elif step is not None and (merge or dtype is not None):
        problem = "--step takes neither --merge nor --dtype; merge the adapter that it writes"
    elif step is None and not merge and not from_seeds:
        problem = (
            "give --step N, which writes a checkpoint's model, --merge, which merges an adapter "
            "into its base, or --to hub:NAME, which sends weights"
        )
    elif out is None:
        problem = "OUT, the folder of the written model, is missing"
    if problem:
        raise ConfigError(problem)
    if to is not None:
        from memguard.workflows.training.hub import HubRequest

        request = HubRequest(folder=folder, to=to, base=base, **of_hub)
        _send_to_hub(request, as_json=as_json)
        return
    assert out is not None, "refused above"
    if from_seeds:
        from memguard.workflows.training.seeds import export_from_seeds

        export_from_seeds(folder, out)
        print_result(as_json, {"folder": str(out)}, out)
        return
    from memguard.workflows.training.checks import ExportRequest

    wanted = ExportRequest(folder=folder, out=out, dtype=dtype, base=base, step=step)
    wanted.check()
    say("export: loading torch, transformers and peft")
    from memguard.workflows.training.export import export_merged, export_step

    result = export_merged(wanted).describe() if step is None else export_step(wanted)
    print_result(as_json, result, out)


def _send_to_hub(request: "HubRequest", *, as_json: bool) -> None:
    from memguard.cli.screens import shown_reading
    from memguard.workflows.training.hub import export_to_hub

    with shown_reading("export") as on_read:
        export = export_to_hub(request, on_read)
    if as_json:
        print_json(asdict(export))
        return
    if export.url is not None:
        typer.echo(export.url)
        return
    visibility = "public" if export.is_public else "private"
    typer.echo(f"would go to hub:{export.repo} ({visibility}); nothing was sent:")
    for file in export.files:
        typer.echo(f"  {file['name']}  {file['num_bytes']:,} bytes")
    for name in export.left_out:
        typer.echo(f"  {name}  stays here: not on the list of files of a model")
    if export.needs:
        state = "; ".join(export.badges) or "no audit was made"
        say(f"it is sent with {export.needs} only. {state}", err=False)
    say(f"README.md:\n\n{export.card.rstrip()}", err=False)


def track(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    to: Annotated[str, typer.Option(metavar="NAME,...", help="tensorboard, wandb or trackio.")],
) -> None:
    """Send the numbers of a run's metrics.jsonl, and its verdict, to trackers.

    They replace what a tracker has of the run. No text, id or path is sent.
    """
    from memguard.config import load_run_config
    from memguard.records.audit_files import REPORT, load_audit_report
    from memguard.records.run_files import has_trained
    from memguard.train.tracking import Tracking
    from memguard.workflows.common.folder import RunFolder, locked

    RunFolder(folder).read_config()
    names = load_run_config(folder / "config.yaml", [f"track=[{to}]"]).track
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"'{folder}' has no metrics.jsonl to send yet: train it first")
    with locked(folder):
        tracking = Tracking(names, folder, say)
        tracking.start()
        if has_trained(folder) and (folder / "audit" / REPORT).is_file():
            tracking.send(load_audit_report(folder / "audit"))
        tracking.close()
    if tracking.failed:
        raise typer.Exit(1)


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, an audit or a sweep.")],
) -> None:
    """Render the HTML page again from its JSON."""
    from memguard.workflows.compare import render_folder

    typer.echo(render_folder(folder))


def verify(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Folder of a run, or of an audit with --out; or a bundle (OUT.zip)."
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(help="Present location of the base of the run's adapters, if it was moved."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a run's files for damage, or a bundle for any change.

    For each damaged part it shows how to repair it. Private files of another user are not checked.
    """
    if folder.is_file() or (folder.suffix == ".zip" and not folder.is_dir()):
        if base is not None:
            raise ConfigError(f"'--base' is for a run; '{folder}' is a bundle. Leave it out")
        from memguard.workflows.bundle_format import check_bundle

        checked = check_bundle(folder)
        if as_json:
            print_json({"bundle": str(folder), "intact": True, **checked.describe()})
        else:
            _show_bundle(folder, "intact; ", checked)
        return
    from memguard.cli.screens import render_verified, shown_reading
    from memguard.workflows.verify import verify as verify_folder

    with shown_reading() as on_read:
        verified = verify_folder(folder, on_read, base=base)
    if as_json:
        print_json(verified.describe())
    else:
        render_verified(verified, rich.console.Console(highlight=False))
    if verified.is_damaged:
        raise typer.Exit(3)


def diff(
    old: Annotated[
        Path, typer.Argument(metavar="OLD", help="The earlier run, or audit with --out.")
    ],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The later one.")],
    as_json: Json = False,
) -> None:
    """Compare the findings of two audits, also of different documents.

    A finding is gone only if both audits measured the same: text, tokens, probe, settings,
    dtype. The exit code is 0 whatever was found; 'memguard gate' judges.
    """
    from memguard.gate.diff import diff_folders

    result = diff_folders(old, new)
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    from memguard.cli.screens import render_diff

    render_diff(result, rich.console.Console(highlight=False))


def gate(
    folder: AuditedFolder,
    policy: Annotated[
        Path | None, typer.Option(help="The policy's YAML; with --init the file to write.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result; RUN/gate/ if left out.")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Check all files of the run first, its weights too.")
    ] = False,
    init: Annotated[
        bool, typer.Option("--init", help="Write a policy for this audit, of three rules.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="With --init: every other rule as a comment.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Judge an audit by a policy, for CI.

    Judged are the 95 % intervals. Exit code 0: pass; 10: fail; 12: cannot be judged; 11:
    inconclusive; 2: the policy is wrong; 3: the audit is damaged.
    """
    from memguard.workflows.gate import draft_policy, gate_folder

    if init:
        if out is not None or weights or as_json:
            raise ConfigError("--init takes no --out, --weights or --json: it judges nothing")
        text = draft_policy(folder, policy, every=every)
        typer.echo(text if policy is None else f"wrote {policy}", nl=policy is not None)
        return
    if every:
        raise ConfigError("--all is for --init, which writes a policy")
    if policy is None:
        raise ConfigError(
            f"--policy is missing: 'memguard gate {folder} --init --policy policy.yaml' writes one"
        )
    from memguard.cli.screens import render_gate, shown_reading

    with shown_reading() as on_read:
        target, result = gate_folder(folder, policy, out=out, weights=weights, on_read=on_read)
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        render_gate(result, target, rich.console.Console(highlight=False))
    raise typer.Exit(result.exit_code)


def accept(
    folder: AuditedFolder,
    document: Annotated[
        str,
        typer.Argument(
            metavar="DOCUMENT",
            help="Its id in findings.csv, or 8 digits or more of its hash.",
        ),
    ],
    by: Annotated[str, typer.Option(metavar="NAME", help="Who accepts it.")],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for all who read the verdict.")],
    until: Annotated[
        str | None,
        typer.Option(metavar="DATE", help="Last day, as 2027-01-31; without end if absent."),
    ] = None,
    triage: Annotated[
        Path, typer.Option(metavar="FILE", help="File of the policy's 'triage'; made if missing.")
    ] = Path("triage.yaml"),
    as_json: Json = False,
) -> None:
    """Accept a document that can be extracted, for a gate's 'findings' rule.

    It stays counted and listed, whatever extracts it, and counts as open again after its last day.
    An earlier entry of the document is replaced; comments in the file are then lost.
    """
    from memguard.gate.gaps import find_audit_folder, load_audited
    from memguard.gate.triage import accept as accept_document
    from memguard.pages import formatting as fmt

    audited = load_audited(find_audit_folder(folder), with_card=False)
    done = accept_document(audited, document, triage, by=by, reason=reason, until=until)
    if as_json:
        entry = done.entry.model_dump(mode="json")
        print_json({**asdict(done), "entry": entry, "triage": str(triage)})
        return
    end = "without end" if done.entry.until is None else f"until {done.entry.until}"
    also = f" and {len(done.ids) - 1:,} more with its text" if len(done.ids) > 1 else ""
    again = " again" if done.is_replaced else ""
    name = fmt.clean_name(done.ids[0], 160)
    say(f"accepted{again}: {name}{also}, {end}, by {fmt.clean_name(by)}, in {triage}", err=False)
    say(f"next: memguard gate {folder} --policy policy.yaml, with 'triage: {triage}'", err=False)


def bundle(
    folder: AuditedFolder,
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
    """Pack an audit's report, results and hashes into one file.

    Documents are in it by their keyed hash: extracted or not, without scores. 'memguard verify
    OUT.zip' finds damage. To show who wrote the file, sign it with the tools you sign with.
    """
    from memguard.cli.screens import shown_reading
    from memguard.workflows.bundle import BundleRequest, write_bundle

    request = BundleRequest(folder=folder, out=out, gate=gate, with_records=with_records)
    request.check()
    with shown_reading() as on_read:
        bundled = write_bundle(request, on_read)
    for note in bundled.notes:
        say(f"bundle: {note}")
    if as_json:
        print_json(bundled.describe())
        return
    _show_bundle(out, "", bundled.checked)


def _show_bundle(path: Path, state: str, checked: "Checked") -> None:
    from memguard.pages import formatting as fmt
    from memguard.workflows.bundle import PRIVATE_RECORDS
    from memguard.workflows.verify import format_bytes

    evidence, size = checked.evidence, format_bytes(checked.num_bytes)
    shown = fmt.clean_text(str(path), fmt.COMMAND_LIMIT)
    say(f"{shown}: {state}{len(checked.members)} files, {size}", err=False)
    say(f"audit of {fmt.clean_text(evidence.audit)}: {fmt.clean_text(evidence.verdict)}", err=False)
    if evidence.sources.has_private_records:
        say(PRIVATE_RECORDS, err=False)
    say(_UNSIGNED, err=False)
