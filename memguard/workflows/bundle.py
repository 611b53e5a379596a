"""`memguard bundle`: collects the files of a finished run's audit, or of an audit, in one archive.

    run or audit folder  ->  checked as `verify` does  ->  members  ->  statement  ->  archive

Nothing private is read but records.parquet, of which the bundle keeps the answers; see
`evidence.contents`. Torch is not imported.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memguard
from memguard.config import load_yaml
from memguard.errors import MAX_PATH, ConfigError, RecordError, shorten
from memguard.evidence import members as names
from memguard.evidence.archive import write_archive
from memguard.evidence.check import Checked, check_bundle
from memguard.evidence.contents import shorten_config, write_answers, write_first_page
from memguard.evidence.signature import sign
from memguard.evidence.sources import hash_code, hash_suite
from memguard.evidence.statement import Sources, build_statement, describe_audit, hash_bytes
from memguard.hf.checkpoint_files import ADAPTER_CONFIG
from memguard.hf.identity import BASE, hash_sums, sum_model
from memguard.records import AuditReport
from memguard.records.answers import load_answers
from memguard.records.audit_files import (
    AUDIT_FILES,
    CARDS,
    PAGE,
    REPORT,
    RESULTS,
    SCORES,
    find_audit_damage,
    load_audit_files,
    load_audit_report,
)
from memguard.records.gate import (
    GATE,
    GATE_FOLDER,
    find_gate_damage,
    has_gate,
    load_gate,
)
from memguard.records.record import PRIVATE_MODE, describe_unread, format_json, write_atomically
from memguard.records.run_files import TrainedRun, has_begun, load_summary, load_trained
from memguard.records.sealed import Damage, FileSum, sum_file
from memguard.workflows.run_folder import (
    check_finished,
    check_free,
    check_outside_runs,
    load_own_config,
)
from memguard.workflows.verify import OnRead

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_CONFIG = "config.yaml"
_AGAIN = "Run 'memguard audit' again: it reuses the cached scores"


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleRequest:
    """The arguments of `memguard bundle`."""

    folder: Path
    """Of a run, or of an audit with --out."""
    out: Path
    gate: Path | None = None
    """Folder of the gate's result; None: gate/ in ``folder``, if it is there."""
    policy: Path | None = None
    with_records: bool = False

    @property
    def audit(self) -> Path:
        """Folder of the audit."""
        return self.folder / "audit" if self.is_run else self.folder

    @property
    def is_run(self) -> bool:
        """Whether the folder is that of a run."""
        return (self.folder / _CONFIG).is_file() or has_begun(self.folder)

    def check(self) -> None:
        """Refuse arguments that cannot work, before anything is read.

        Raises:
            ConfigError: names the argument.
        """
        folder, out = self.folder, self.out
        shown = shorten(str(out), MAX_PATH)
        if not self.is_run:
            if not any((folder / name).exists() for name in (AUDIT_FILES, REPORT)):
                raise ConfigError(
                    f"'{folder}' is neither the folder of a run (no {_CONFIG}) nor of an audit "
                    f"(no {AUDIT_FILES})"
                )
            run = folder.resolve().parent
            if folder.resolve().name == "audit" and (run / _CONFIG).is_file():
                raise ConfigError(f"'{folder}' is the audit of a run: give the run, '{run}'")
        if out.suffix.lower() != ".zip":
            raise ConfigError(f"'OUT.zip' must end in .zip; got '{shown}'")
        if out.exists() or out.is_symlink():
            raise ConfigError(f"'{shown}' exists: name another file, or delete it")
        if folder.resolve() in out.resolve().parents:
            raise ConfigError(
                f"'OUT.zip' must be outside '{folder}', which it is about; got '{shown}'"
            )
        check_outside_runs(out, "OUT.zip")
        if self.gate is not None and not (self.gate / GATE).is_file():
            raise ConfigError(f"'--gate': '{self.gate}' has no {GATE}; 'memguard gate' writes it")
        if self.policy is not None:
            load_yaml(self.policy)
        with suppress(OSError):  # A read-only folder is not an error here.
            check_free(folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundled:
    """A bundle that was written."""

    path: Path
    checked: Checked
    notes: tuple[str, ...]
    """Sentences about what is in the bundle, or missing from it, that its reader would miss."""

    def describe(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {"bundle": str(self.path), **self.checked.describe(), "notes": list(self.notes)}


def write_bundle(
    request: BundleRequest, on_read: OnRead, *, key: "Ed25519PrivateKey | None" = None
) -> Bundled:
    """Write a bundle of a finished and undamaged audit.

    Args:
        request: checked.
        on_read: called before the model's files are read, since that may take long.
        key: signs the statement; None leaves the bundle unsigned.

    Raises:
        ConfigError: the policy is not the one that was judged.
        ModelError: training has not ended.
        RecordError: a file of the run or the audit is damaged, or they do not belong together.
        UnreadableError: only another user can read the records.
    """
    members, sources, notes = _collect(request, on_read, is_signed=key is not None)
    report, gate = load_audit_report(request.audit), _find_gate(request)
    evidence = describe_audit(report, sources)
    members[names.EVIDENCE] = evidence.write()
    listed = {*members, names.FIRST_PAGE, names.STATEMENT, *([names.ENVELOPE] if key else [])}
    judged = None if gate is None else load_gate(gate)
    members[names.FIRST_PAGE] = write_first_page(evidence, listed, judged)
    members[names.STATEMENT] = b""
    statement = build_statement(names.sort_members(members), evidence)
    members[names.STATEMENT] = statement
    if key is not None:
        members[names.ENVELOPE] = sign(statement, key).write()
    archive = write_archive(names.sort_members(members))
    checked = check_bundle(archive, None if key is None else key.public_key())
    write_atomically(request.out, archive, PRIVATE_MODE if request.with_records else 0o644)
    return Bundled(path=request.out, checked=checked, notes=tuple(notes))


def _collect(
    request: BundleRequest, on_read: OnRead, *, is_signed: bool
) -> tuple[dict[str, bytes], Sources, list[str]]:
    """Return the files of a run that a bundle has, what is recorded of others, and notes."""
    trained = _check_run(request, on_read) if request.is_run else None
    audit = request.audit
    _refuse_damaged_audit(request)
    report, written = load_audit_report(audit), load_audit_files(audit)
    if trained is not None:
        check_same_run(request.folder, trained, report)
    members = {
        name: _read_whole(audit / name, written.files[name]) for name in (PAGE, REPORT, RESULTS)
    }
    answers = load_answers(audit)
    members[names.ANSWERS] = write_answers(answers)
    if request.with_records:
        members[SCORES] = _read_whole(audit / SCORES, written.scores)
    notes = []
    if any(text_hmac is None for text_hmac in answers.text_hmac_N):
        notes.append(
            "documents without a keyed id are among the answers: the audit had no key, so that "
            "they cannot be matched with those of another audit"
        )
    config = None
    suites = [report.method.suite]
    if trained is not None:
        suites.insert(0, load_own_config(request.folder).audit.suite)
        config = _read(request.folder / _CONFIG)
        members[names.CONFIG], shortened = shorten_config(config)
        if shortened:
            paths = ", ".join(dict.fromkeys(shortened))
            notes.append(f"paths in {names.CONFIG} are shortened: {shorten(paths, MAX_PATH)}")
    training = _read_environment(request.folder) if trained is not None else None
    environment = {"audit": report.environment, "training": training}
    members[names.ENVIRONMENT] = f"{format_json(environment)}\n".encode()
    members |= _collect_policy(request)
    suite = next(filter(None, (hash_suite(suite, report) for suite in suites)), None)
    if suite is None:
        notes.append(
            f"the hash of the suite '{report.method.suite}' is missing: its file is not there, or "
            "no longer says what the audit ran"
        )
    sources = Sources(
        files=None if trained is None else trained.model,
        adapted_files=(trained.base or None) if trained is not None else None,
        manifest_sha256=None if trained is None else trained.manifest.sha256,
        suite_sha256=suite,
        bundled_by=memguard.__version__,
        bundled_by_code_sha256=hash_code(),
        config_sha256=None if config is None else hash_bytes(config),
        scores_sha256=written.scores.sha256,
        has_private_records=request.with_records,
        is_signed=is_signed,
    )
    return members, sources, notes


def _check_run(request: BundleRequest, on_read: OnRead) -> TrainedRun:
    def read(path: Path) -> FileSum:
        on_read(path.name, path.stat().st_size)
        return sum_file(path)

    check_finished(request.folder, without_documents=True, read=read)
    return load_trained(request.folder)


def _refuse(folder: Path, damages: Sequence[Damage], way_out: str) -> None:
    """Refuse damage; if there is none, what this user may not read."""
    if damages:
        first = min(damages, key=lambda damage: damage.is_unreadable)
        if first.is_unreadable:
            raise describe_unread(folder / first.file, PermissionError())
        raise RecordError(f"'{folder / first.file}' {first.what}. {way_out}")


def _refuse_damaged_audit(request: BundleRequest) -> None:
    load_audit_files(request.audit)  # Says that an audit has not ended.
    damages = find_audit_damage(request.audit)
    render = f"'memguard report {request.folder}' renders it again"
    others = [damage for damage in damages if damage.file not in CARDS]
    is_page = all(damage.file == PAGE for damage in others)
    _refuse(request.audit, others, render if is_page else _AGAIN)
    _refuse(request.audit.parent, damages, render)


def check_same_run(folder: Path, trained: TrainedRun, report: AuditReport) -> None:
    """Refuse a report of other weights or documents than those of the run that it is in.

    Args:
        folder: of the run.
        trained: its record of the end of training.
        report: of its audit.

    Raises:
        RecordError: says what differs.
    """
    summary = load_summary(folder)
    for what, is_same in (
        ("weights", report.model.weights_sha256 == _hash_weights(folder, trained)),
        (
            "documents",
            summary is None or report.data.documents_sha256 == summary.documents_sha256,
        ),
    ):
        if not is_same:
            raise RecordError(
                f"the audit of '{folder}' is of other {what} than those of the run. Run "
                f"'memguard audit {folder}'"
            )


def _hash_weights(folder: Path, trained: TrainedRun) -> str:
    """Return the hash that a report has of a run's weights, from the recorded hashes."""
    if trained.folder == "adapter":
        own = {
            name: trained.model[name]
            for name in trained.model
            if name == ADAPTER_CONFIG or name.endswith(".safetensors")
        }
        return hash_sums({**own, **{f"{BASE}{name}": item for name, item in trained.base.items()}})
    weights = folder / trained.folder
    return hash_sums(
        sum_model(weights, read=lambda path: trained.model[path.relative_to(weights).as_posix()])
    )


def _collect_policy(request: BundleRequest) -> dict[str, bytes]:
    """Return the gate's files, or a policy that was not judged."""
    folder = _find_gate(request)
    policy = None if request.policy is None else _read(request.policy)
    if folder is None:
        return {} if policy is None else {names.POLICY: policy}
    _refuse(folder.parent, find_gate_damage(folder, request.audit), "Run 'memguard gate' again")
    gate = load_gate(folder)
    if policy is not None and policy.decode("utf-8", "replace") != gate.policy:
        raise ConfigError(
            f"'--policy': '{request.policy}' is not the policy that '{folder / GATE}' judged. Run "
            "'memguard gate' again, or leave it out"
        )
    files = {GATE: sum_file(folder / GATE), **gate.files}
    return {
        f"{GATE_FOLDER}/{name}": _read_whole(folder / name, written)
        for name, written in files.items()
    }


def _find_gate(request: BundleRequest) -> Path | None:
    folder = request.gate or request.folder / GATE_FOLDER
    return folder if has_gate(folder) else None


def _read_environment(folder: Path) -> Any:
    try:
        return json.loads(_read(folder / "environment.json"))
    except (ValueError, RecursionError) as error:
        path = folder / "environment.json"
        raise RecordError(f"'{path}' is damaged: it is not JSON") from error


def _read_whole(path: Path, written: FileSum) -> bytes:
    """Read a file that was checked before, and check what was read."""
    content = _read(path)
    if hash_bytes(content) != written.sha256:
        raise RecordError(f"'{path}' was changed while it was read. Run the same command again")
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise describe_unread(path, error) from error
