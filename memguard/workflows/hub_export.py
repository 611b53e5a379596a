"""`memguard export RUN --to hub:NAME`: sends the model or adapter of a run to the hub.

    run  ->  checked as `verify` does  ->  files of an allow-list, and a new card  ->  hub

Sent are weights, configuration, tokenizer and README.md; never anything else of the run. In the
JSON files, fields that name places of this machine are left out. `--dry-run` lists the files, byte
for byte those that would be sent, and needs neither token nor network. Torch is imported to merge
only.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memguard
from memguard.config import RunConfig
from memguard.errors import MAX_PATH, ConfigError, RecordError, shorten
from memguard.pages.formatting import is_hub_id
from memguard.records import AuditReport
from memguard.records.audit_files import (
    CARDS,
    find_audit_damage,
    has_audit,
    load_audit_files,
    load_audit_report,
)
from memguard.records.manifest import load_manifest
from memguard.records.run_files import CARD, TrainedRun, load_trained
from memguard.records.sealed import FileSum, sum_file
from memguard.report.hub_card import HubCard, redact, render_hub_card
from memguard.runtime import Console
from memguard.runtime.interruptible import call_interruptibly
from memguard.workflows.bundle import check_same_run
from memguard.workflows.hub_files import (
    clean_file,
    find_base_id,
    find_datasets,
    is_allowed,
    list_places,
    read_license,
)
from memguard.workflows.run_folder import check_finished, load_own_config
from memguard.workflows.verify import OnRead, format_bytes

if TYPE_CHECKING:
    from memguard.hf.hub_upload import HubFile, Sent
    from memguard.workflows.export import MergedExport

_HUB = "hub:"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
ALLOW_EXTRACTED, ALLOW_UNAUDITED = "--allow-extracted", "--allow-unaudited"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubExportRequest:
    """The arguments of `memguard export --to`."""

    folder: Path
    """Of a run."""
    to: str
    """``hub:NAME`` or ``hub:ORG/NAME``."""
    is_public: bool = False
    is_dry_run: bool = False
    allow_extracted: bool = False
    allow_unaudited: bool = False
    base: str | None = None
    """Hub id of the base model, to name it; or its present location, for a merge."""
    merge: bool = False
    out: Path | None = None
    """Folder of the merged model; None: a temporary one."""
    dtype: str | None = None
    """Of the merged weights."""

    @property
    def repo(self) -> str:
        """Name of the repository, with or without its owner."""
        return self.to.removeprefix(_HUB)

    def check(self) -> None:
        """Refuse arguments that cannot work, before anything is read.

        Raises:
            ConfigError: names the argument, or says that there is no token.
        """
        # Imports the hub's client.
        from memguard.hf.hub_upload import find_token

        shown = shorten(self.to, MAX_PATH)
        is_name = _NAME.fullmatch(self.repo) and not re.search(r"\.\.|--|\.git$", self.repo)
        if not self.to.startswith(_HUB) or not is_name:
            raise ConfigError(
                f"'--to' must be hub:NAME or hub:ORG/NAME, of letters, digits, '.', '_' and '-'; "
                f"got '{shown}'"
            )
        if not (self.folder / "config.yaml").is_file():
            raise ConfigError(
                f"'--to' needs the folder of a run, and '{self.folder}' has no config.yaml: what "
                "a folder alone memorized is not known"
            )
        if not self.merge and (self.out is not None or self.dtype is not None):
            option = "OUT" if self.out is not None else "--dtype"
            raise ConfigError(f"{option} is for --merge; with --to alone nothing is written here")
        if not self.is_dry_run:
            find_token()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRun:
    """A run that is finished and not damaged."""

    config: RunConfig
    trained: TrainedRun
    report: AuditReport | None
    """None: no audit was made."""
    needs: tuple[str, ...]
    """Options without which it is not sent, because of its audit."""
    sentence: str
    """The verdict, or that there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubUpload:
    """What is sent, and what was decided about it."""

    repo: str
    is_public: bool
    run: CheckedRun
    files: tuple["HubFile", ...]
    left_out: tuple[str, ...]
    """Files of the model's folder that are not sent."""
    card: str
    notes: tuple[str, ...]
    sent: "Sent | None" = None
    """None: nothing was sent."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files)

    def describe(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        sent, report = self.sent, self.run.report
        return {
            "repo": self.repo if sent is None else sent.repo,
            "is_public": self.is_public,
            "is_sent": sent is not None,
            "url": None if sent is None else sent.url,
            "commit": None if sent is None else sent.commit,
            "is_new_commit": None if sent is None else sent.is_new_commit,
            "verdict": None if report is None else report.verdict.level,
            "sentence": self.run.sentence,
            "needs": list(self.run.needs),
            "files": [
                {"name": file.name, "num_bytes": file.num_bytes, "sha256": file.sha256}
                for file in self.files
            ],
            "left_out": list(self.left_out),
            "notes": list(self.notes),
            "card": self.card,
        }


def export_to_hub(request: HubExportRequest, run: CheckedRun) -> HubUpload:
    """Send the weights of a run to the hub, or list what would be sent.

    Args:
        request: checked.
        run: from `check_run`.

    Raises:
        ConfigError: there is no token; the audit needs an option; the repository has another
            visibility or other weights.
        ModelError: the hub cannot be reached; a file names a place of this machine.
        RecordError: a file was changed since it was checked.
    """
    console = Console()
    console.info(f"export: verdict: {run.sentence}")
    if not request.is_dry_run:
        _refuse_unsaid(run)
    with _merged(request, console) as merged:
        upload = plan_upload(request, run, merged)
        for note in upload.notes:
            console.warn(note)
        return upload if request.is_dry_run else _send(upload, console)


def check_run(request: HubExportRequest, on_read: OnRead) -> CheckedRun:
    """Check a run and its audit.

    Args:
        request: checked.
        on_read: called before a file is read.

    Raises:
        ModelError: training has not ended.
        RecordError: a file is damaged, or the audit is of other weights.
    """

    def read(path: Path) -> FileSum:
        on_read(path.name, path.stat().st_size)
        return sum_file(path)

    folder = request.folder
    check_finished(folder, without_documents=True, read=read)
    trained = load_trained(folder)
    report = _load_audit(folder)
    if report is None:
        needs: tuple[str, ...] = () if request.allow_unaudited else (ALLOW_UNAUDITED,)
        sentence = "none, these weights have not been audited"
    else:
        check_same_run(folder, trained, report)
        verdict = report.verdict
        is_open = verdict.colour == "amber" and request.is_public
        is_alarming = verdict.colour == "red" or is_open
        needs = (ALLOW_EXTRACTED,) if is_alarming and not request.allow_extracted else ()
        sentence = verdict.describe()
    return CheckedRun(
        config=load_own_config(folder),
        trained=trained,
        report=report,
        needs=needs,
        sentence=sentence,
    )


def _load_audit(folder: Path) -> AuditReport | None:
    """Return the report of a run's audit; None if there was no audit.

    Files that only their owner may read are not needed and not compared by others.
    """
    audit = folder / "audit"
    if not has_audit(audit):
        return None
    load_audit_files(audit)  # Says that an audit has not ended.
    damages = [damage for damage in find_audit_damage(audit) if not damage.is_unreadable]
    if damages:
        first = damages[0]
        place = folder if first.file in CARDS else audit
        raise RecordError(
            f"'{place / first.file}' {first.what}. 'memguard audit {folder}' makes it again, and "
            f"'memguard report {folder}' the pages and the card"
        )
    return load_audit_report(audit)


def _refuse_unsaid(run: CheckedRun) -> None:
    if not run.needs:
        return
    (option,) = run.needs
    why = (
        "the weights have not been audited, so that it is not known what can be extracted"
        if run.report is None
        else "trained documents can be extracted from these weights by anyone who has them"
    )
    way_out = f"Give {option} to send them all the same; --dry-run lists what would be sent"
    raise ConfigError(f"{why}. Verdict: {run.sentence.rstrip('.')}. {way_out}")


@contextmanager
def _merged(request: HubExportRequest, console: Console) -> Iterator["MergedExport | None"]:
    """Merge the adapter of a run if the request says so; yield None otherwise."""
    if not request.merge:
        yield None
        return
    from memguard.workflows.requests import ExportRequest

    with tempfile.TemporaryDirectory(prefix="memguard-") as temporary:
        merge = ExportRequest(
            folder=request.folder,
            out=request.out or Path(temporary) / "merged",
            merge=True,
            dtype=request.dtype,
            base=request.base,
        )
        merge.check()
        console.info("export: loading torch, transformers and peft")
        from memguard.workflows.export import export_merged

        yield export_merged(merge)


def plan_upload(
    request: HubExportRequest, run: CheckedRun, merged: "MergedExport | None" = None
) -> HubUpload:
    """Collect the files and write the card; nothing is sent.

    Args:
        request: checked.
        run: from `check_run`.
        merged: its adapter merged into the base; None sends the run's own weights.

    Raises:
        ModelError: a file that must be sent names a place of this machine.
    """
    from memguard.hf.hub_upload import HubFile, make_hub_file

    folder = request.folder / run.trained.folder if merged is None else merged.folder
    sums = run.trained.model if merged is None else _sum_folder(folder)
    base = find_base_id(request.base, run.config)
    datasets = find_datasets(run.config)
    places = list_places(request.folder, run.config, {base or "", *datasets})
    files = []
    for name, written in sorted(sums.items()):
        if not is_allowed(name):
            continue
        content = clean_file(folder / name, base=base, places=places)
        files.append(
            HubFile(name=name, content=folder / name, **dict(written))
            if content is None
            else make_hub_file(name, content)
        )
    card = render_hub_card(
        run.report,
        HubCard(
            title=request.repo.rpartition("/")[2],
            is_adapter=merged is None and run.trained.folder == "adapter",
            base=base,
            has_base=run.config.model.path is not None,
            license=read_license(base, run.config),
            datasets=datasets,
            config=run.config.model_dump(mode="json"),
            merged=None if merged is None else merged.describe(),
        ),
    )
    ids = {entry.id for entry in load_manifest(request.folder / "manifest.jsonl")}
    card = redact(card, places, ids)
    files.append(make_hub_file(CARD, card.encode()))
    return HubUpload(
        repo=request.repo,
        is_public=request.is_public,
        run=run,
        files=tuple(sorted(files, key=lambda file: file.name)),
        left_out=tuple(sorted(name for name in sums if not is_allowed(name))),
        card=card,
        notes=tuple(_list_notes(run.config, base)),
    )


def _sum_folder(folder: Path) -> dict[str, FileSum]:
    names = (path.name for path in folder.iterdir() if path.is_file() and path.name != CARD)
    return {name: sum_file(folder / name) for name in names}


def _list_notes(config: RunConfig, base: str | None) -> Iterator[str]:
    path, scratch = config.model.path, config.model.scratch
    if path is not None and base is None:
        is_folder = " is a local folder"
        if is_hub_id(path):
            is_folder = " may be a folder: no model of this id was downloaded here"
        yield (
            f"the base model is not named: '{shorten(path, MAX_PATH)}'"
            f"{is_folder}. --base ORG/NAME names its hub id"
        )
    if scratch is not None and scratch.tokenizer is None:
        yield "the tokenizer was trained on the documents: its vocabulary has their words"


def _send(upload: HubUpload, console: Console) -> HubUpload:
    from memguard.hf.hub_upload import HubFile, find_token, send_files

    token = find_token()
    place, size = f"hub:{upload.repo}", format_bytes(upload.num_bytes)
    visibility = "public" if upload.is_public else "private"
    console.info(f"export: sending {len(upload.files)} files, {size}, to {place} ({visibility})")
    current = [""]
    with console.progress("export", len(upload.files), "files") as advance:

        def show(file: HubFile, num_done: int) -> None:
            current[0] = f"{file.name}, {format_bytes(file.num_bytes)}"
            advance(num_done, current[0])

        sent = call_interruptibly(
            lambda: send_files(
                upload.files,
                repo=upload.repo,
                token=token,
                is_public=upload.is_public,
                message=f"Model and audit, by memguard {memguard.__version__}",
                on_file=show,
            ),
            lambda: advance(0, current[0]),
        )
    done = f"export: sent to hub:{sent.repo}, commit {sent.commit[:12]}"
    if not sent.is_new_commit:
        done = f"export: hub:{sent.repo} has these files already; there is no new commit"
    console.info(done)
    return replace(upload, sent=sent)
