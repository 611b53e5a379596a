"""`memguard bundle`: collects the files of a finished run's audit, or of an audit, in one archive.

    run or audit folder  ->  checked as `verify` does  ->  members  ->  statement  ->  archive

Nothing private is read but records.parquet, of which the bundle keeps the answers: no id of the
user's and no score. They are sorted by the keyed hash, which is as good as random, so that order of
documents and numbers of clusters are not those of the source. Torch is not imported.
"""

import json
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import memguard
from memguard.errors import MAX_PATH, ConfigError, RecordError, shorten
from memguard.pages.formatting import clean_text
from memguard.records.audit_files import (
    AGAIN,
    AUDIT_FILES,
    CARDS,
    PAGE,
    REPORT,
    RESULTS,
    SCORES,
    load_audit_files,
    load_audit_report,
)
from memguard.records.documents import DocumentTable
from memguard.records.folders import AuditFolder, GateFolder
from memguard.records.gate import GATE, GATE_FOLDER, GateResult, has_gate, load_gate
from memguard.records.record import PRIVATE_MODE, describe_unread, format_json, write_atomically
from memguard.records.run_files import has_begun
from memguard.records.sealed import FileSum, refuse_damage, sum_file
from memguard.records.texts import shorten_paths
from memguard.report.html import drop_links
from memguard.runtime.environment import hash_code
from memguard.workflows import bundle_format as form
from memguard.workflows.common.folder import RunFolder, check_free, check_outside_runs, check_stored
from memguard.workflows.verify import OnRead, sum_shown

PRIVATE_RECORDS = (
    "PRIVATE: records.parquet, the scores of each document, is inside. Anyone who knows a text but "
    "for a PIN, say, can score every PIN and see which is right. Hand this bundle only to people "
    "who may see the documents."
)
_NOT_PRIVATE = (
    "No text of a document, no key and no table of scores is inside. The report names the "
    "documents that were extracted, by their ids, and says how many of their tokens; ids and names "
    "of files are those of your data."
)
_SHOWS = (
    "'memguard verify' builds this archive and its statement again and compares every byte: that "
    "shows damage. It does not show forgery, because anyone can write another bundle with other "
    "hashes; a signature of this file does. The hashes show that files belong together, not that "
    "the audit was done well or on these documents only. 'None found' does not mean that "
    "none is possible."
)
_YES_NO = {1.0: True, 0.0: False}


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleRequest:
    """The arguments of `memguard bundle`."""

    folder: Path
    """Of a run, or of an audit with --out."""
    out: Path
    gate: Path | None = None
    """Folder of the gate's result; None: gate/ in ``folder``, if it is there."""
    with_records: bool = False

    @property
    def audit(self) -> Path:
        """Folder of the audit."""
        return self.folder / "audit" if self.is_run else self.folder

    @property
    def is_run(self) -> bool:
        """Whether the folder is that of a run."""
        return (self.folder / form.CONFIG).is_file() or has_begun(self.folder)

    def check(self) -> None:
        """Refuse arguments that cannot work, before anything is read."""
        folder, out, gate = self.folder, self.out, self.gate
        shown, real, run = shorten(str(out), MAX_PATH), folder.resolve(), folder.resolve().parent
        is_audit = not self.is_run and any((folder / n).exists() for n in (AUDIT_FILES, REPORT))
        problems = {
            f"'{folder}' is neither the folder of a run (no {form.CONFIG}) nor of an audit "
            f"(no {AUDIT_FILES})": not (self.is_run or is_audit),
            f"'{folder}' is the audit of a run: give the run, '{run}'": (
                is_audit and real.name == "audit" and (run / form.CONFIG).is_file()
            ),
            f"'OUT.zip' must end in .zip; got '{shown}'": out.suffix.lower() != ".zip",
            f"'{shown}' exists: name another file, or delete it": out.exists() or out.is_symlink(),
            f"'OUT.zip' must be outside '{folder}', which it is about; got '{shown}'": (
                real in out.resolve().parents
            ),
            f"'--gate': '{gate}' has no {GATE}; 'memguard gate' writes it": (
                gate is not None and not (gate / GATE).is_file()
            ),
        }
        if found := [problem for problem, is_there in problems.items() if is_there]:
            raise ConfigError(*found)
        check_outside_runs(out, "OUT.zip")
        with suppress(OSError):  # A read-only folder is not an error here.
            check_free(folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundled:
    """A bundle that was written."""

    path: Path
    checked: form.Checked
    notes: tuple[str, ...]
    """Sentences about what is in the bundle, or missing from it, that its reader would miss."""

    def describe(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {"bundle": str(self.path), **self.checked.describe(), "notes": list(self.notes)}


def write_bundle(request: BundleRequest, on_read: OnRead) -> Bundled:
    """Write a bundle of a finished and undamaged audit."""
    audit, run, trained = request.audit, RunFolder(request.folder), None
    if request.is_run:
        trained = run.require_trained(without_documents=True, read=sum_shown(on_read))
    _refuse_damaged_audit(request)
    report, written, notes = load_audit_report(audit), load_audit_files(audit), []
    if trained is None:
        check_stored(audit, report)
    else:
        run.check_audited(report)
    members = {
        name: _read_whole(audit / name, written.files[name]) for name in (PAGE, REPORT, RESULTS)
    }
    answers = DocumentTable.read(audit)
    members[PAGE] = drop_links(members[PAGE])
    members[form.ANSWERS] = write_answers(answers)
    if request.with_records:
        members[SCORES] = _read_whole(audit / SCORES, written.files[SCORES])
    if any(text_hmac is None for text_hmac in answers.text_hmac_N):
        notes.append(
            "documents without a keyed id are among the answers: the audit had no key, so that "
            "they cannot be matched with those of another audit"
        )
    config, training = None, None
    if trained is not None:
        config = _read(request.folder / form.CONFIG)
        members[form.CONFIG], shortened = shorten_config(config)
        if shortened:
            paths = ", ".join(dict.fromkeys(shortened))
            notes.append(f"paths in {form.CONFIG} are shortened: {shorten(paths, MAX_PATH)}")
        training = _read_environment(request.folder)
    environment = {"audit": report.environment, "training": training}
    members[form.ENVIRONMENT] = f"{format_json(environment)}\n".encode()
    gate = request.gate or request.folder / GATE_FOLDER
    judged = None
    if has_gate(gate):
        folder = GateFolder(gate, audit)
        refuse_damage(gate.parent, folder.find_damage(), "Run 'memguard gate' again")
        if folder.is_older and request.gate is not None:
            raise RecordError(f"'{gate}' is older than this audit. Run 'memguard gate' again")
        judged = None if folder.is_older else load_gate(gate)
        if judged is None:
            notes.append(f"{GATE_FOLDER}/ is not packed: it is older than this audit")
    if judged is not None:
        for name, item in {GATE: sum_file(gate / GATE), **judged.files}.items():
            members[f"{GATE_FOLDER}/{name}"] = _read_whole(gate / name, item)
    sources = form.Sources(
        files=None if trained is None else trained.model,
        adapted_files=(trained.base or None) if trained is not None else None,
        manifest_sha256=None if trained is None else trained.manifest.sha256,
        bundled_by=memguard.__version__,
        bundled_by_code_sha256=hash_code(),
        config_sha256=None if config is None else form.hash_bytes(config),
        scores_sha256=written.files[SCORES].sha256,
        has_private_records=request.with_records,
    )
    evidence = form.describe_audit(report, sources)
    members[form.FIRST_PAGE] = _write_first_page(evidence, {*members, form.FIRST_PAGE}, judged)
    members[form.STATEMENT] = form.build_statement(members, evidence)
    archive = form.write_archive(members)
    write_atomically(request.out, archive, PRIVATE_MODE if request.with_records else 0o644)
    return Bundled(path=request.out, checked=form.check_bundle(request.out), notes=tuple(notes))


def write_answers(answers: DocumentTable) -> bytes:
    """Return `answers.jsonl`: each document's keyed hash, bucket, role, and answer by probe."""
    extracted = sorted(answers.extracted.items())
    clusters = answers.cluster_N.tolist()
    rows = [
        {
            "id": answers.text_hmac_N[index],
            "bucket": answers.bucket_N[index],
            "role": answers.role_N[index],
            # NaN, not measured, has no entry.
            "extracted": {probe: _YES_NO.get(float(by_N[index])) for probe, by_N in extracted},
        }
        for index in range(len(answers))
    ]
    # A cluster is numbered by its documents; clusters of equal documents are interchangeable.
    members: dict[int, list[bytes]] = {}
    for row, cluster in zip(rows, clusters, strict=True):
        members.setdefault(cluster, []).append(form.write_canonical(row))
    order = sorted(members, key=lambda cluster: sorted(members[cluster]))
    number = {cluster: position for position, cluster in enumerate(order)}
    numbered = sorted(
        (
            (form.write_canonical(row), number[cluster], row)
            for row, cluster in zip(rows, clusters, strict=True)
        ),
        key=lambda item: item[:2],
    )
    lines = (form.write_canonical({**row, "cluster": cluster}) for _, cluster, row in numbered)
    return b"".join(line + b"\n" for line in lines)


def shorten_config(content: bytes) -> tuple[bytes, list[str]]:
    """Return settings without full paths of the machine, and the paths as they are shown now."""
    shortened: list[str] = []

    def shorten_values(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shorten_values(item) for key, item in value.items()}
        if isinstance(value, list):
            return [shorten_values(item) for item in value]
        if isinstance(value, str) and (short := shorten_paths(value)) != value:
            shortened.append(short)
            return short
        return value

    values = shorten_values(yaml.safe_load(content))
    text = (
        "# Absolute paths are shortened to their last two parts. SHA-256 of the run's own file:\n"
        f"# {form.hash_bytes(content)}\n{yaml.safe_dump(values, sort_keys=False, width=100)}"
    )
    return (text.encode() if shortened else content), shortened


def _write_first_page(evidence: form.Evidence, names: set[str], gate: GateResult | None) -> bytes:
    """Return the contents of `README.txt`."""
    policy, sources = "Policy: none was judged.", evidence.sources
    if gate is not None:
        passed = sum(judgement.outcome == "pass" for judgement in gate.judgements)
        policy = (
            f"Policy: {gate.outcome}; {passed} of {len(gate.judgements)} rules pass. The verdict "
            "above does not depend on it."
        )
        if gate.accepted:
            policy += " Findings were accepted; the files of the gate name who accepted them."
    parts = [
        f"memguard: evidence of the audit of {clean_text(evidence.audit)}, {evidence.created}",
        f"Verdict: {clean_text(evidence.verdict)}",
        f"Scope: {clean_text(evidence.scope)}",
        policy,
    ]
    if evidence.audited_by_code_sha256 != sources.bundled_by_code_sha256:
        parts.append(
            f"Code: the audit ran with other source files of memguard (version "
            f"{clean_text(evidence.audited_by)}) than wrote this bundle (version "
            f"{clean_text(sources.bundled_by)}); {form.STATEMENT} has both hashes."
        )
    parts += [PRIVATE_RECORDS if sources.has_private_records else _NOT_PRIVATE, _SHOWS]
    listed = {name: form.MEMBERS[name] for name in form.MEMBERS if name in {*names, form.STATEMENT}}
    width = max(map(len, listed)) + 2
    files = "\n".join(f"{name:<{width}}{caption}" for name, caption in listed.items())
    return "\n\n".join([*(textwrap.fill(part, 90) for part in parts), files, ""]).encode()


def _refuse_damaged_audit(request: BundleRequest) -> None:
    load_audit_files(request.audit)  # Says that an audit has not ended.
    damages = AuditFolder(request.audit).find_damage()
    render = f"'memguard report {request.folder}' renders it again"
    others = [damage for damage in damages if damage.file not in CARDS]
    is_page = all(damage.file == PAGE for damage in others)
    refuse_damage(request.audit, others, render if is_page else AGAIN)
    refuse_damage(request.audit.parent, damages, render)


def _read_environment(folder: Path) -> Any:
    try:
        return json.loads(_read(folder / "environment.json"))
    except (ValueError, RecursionError) as error:
        path = folder / "environment.json"
        raise RecordError(f"'{path}' is damaged: it is not JSON") from error


def _read_whole(path: Path, written: FileSum) -> bytes:
    """Read a file that was checked before, and check what was read."""
    content = _read(path)
    if form.hash_bytes(content) != written.sha256:
        raise RecordError(f"'{path}' was changed while it was read. Run the same command again")
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise describe_unread(path, error) from error
