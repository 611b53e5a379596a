"""`memguard gate`: judges the audit of a run by a policy, and writes the result. No torch.

    gate_folder    place -> policy -> weights, if requested -> audit -> judgement -> files
    judge_folder   the same for Python; writes only if a folder is given
    draft_policy   a policy to begin with (`--init`)

The result is written as a set: either all of its files or none appear, in place of those of an
earlier gate.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.errors import MAX_PATH, ConfigError, RecordError, UnreadableError, shorten
from memguard.gate.gaps import find_audit_folder, load_audited
from memguard.gate.judge import judge_audit
from memguard.gate.policy import LoadedPolicy, load_policy, read_policy
from memguard.gate.template import render_policy
from memguard.records.audit_files import PAGE, load_audit_report
from memguard.records.gate import GATE, GATE_FILES, GATE_FOLDER, JUNIT, SUMMARY, GateResult
from memguard.records.record import atomic_folder, clear_left_folders, write_new
from memguard.records.sealed import save_sealed, sum_file
from memguard.workflows.common.folder import RunFolder, check_outside_runs, locked
from memguard.workflows.verify import OnRead, verify


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """An audit and where its gate belongs."""

    audit: Path
    home: Path
    """The run; of an audit outside a run its own folder."""

    @property
    def is_run(self) -> bool:
        """Whether the audit is the one of a run."""
        return self.audit != self.home


def gate_folder(
    folder: Path,
    policy: Path,
    *,
    out: Path | None = None,
    weights: bool = False,
    on_read: OnRead = lambda name, size: None,
) -> tuple[Path, GateResult]:
    """Judge the audit of a run or audit folder by a policy file; write and return the result.

    ``out`` is by default ``gate`` in that folder; ``weights``: all files of the run are checked.
    """
    place = find_place(folder)
    target = _choose_out(place, out)
    loaded = load_policy(policy)
    if weights:
        _check_run(place, on_read)
    return target, _judge(place.audit, loaded, target, place=place if out is None else None)


def judge_folder(
    folder: Path, policy: str | Path | Mapping[str, Any], *, out: Path | None = None
) -> GateResult:
    """Judge an audit folder for Python; nothing is written without ``out``."""
    loaded = read_policy(policy) if isinstance(policy, Mapping) else load_policy(Path(policy))
    return _judge(folder, loaded, None if out is None else _choose_out(find_place(folder), out))


def draft_policy(folder: Path, path: Path | None, *, every: bool = False) -> str:
    """Return a policy from the metrics of an audit, and write it if a path is given."""
    text = render_policy(load_audited(find_place(folder).audit).report, every=every)
    if path is not None:
        check_outside_runs(path.parent, "--policy")
        write_new(path, text)
    return text


def find_place(folder: Path) -> Place:
    """Return the audit of a run or audit folder."""
    audit = find_audit_folder(folder)
    run = audit.resolve().parent if audit == folder else audit.parent
    is_own = audit.resolve().name == "audit" and (run / "config.yaml").is_file()
    return Place(audit=audit, home=run if is_own else audit)


def _choose_out(place: Place, out: Path | None) -> Path:
    """Return the folder to write to; refuse one with files that no gate wrote, or of a run."""
    own = place.home / GATE_FOLDER
    target = own if out is None else out
    if out is not None and out.resolve() != own.resolve():
        check_outside_runs(out, "--out")
    try:
        others = sorted({path.name for path in target.iterdir()} - {*GATE_FILES})
    except FileNotFoundError:
        return target
    except OSError as error:
        raise _refuse_out(target, f"cannot be written to ({error.strerror})") from error
    if others:
        raise _refuse_out(
            target,
            f"has files that 'memguard gate' did not write, such as '{shorten(others[0])}', and "
            "would be replaced whole",
        )
    return target


def _refuse_out(target: Path, why: str) -> ConfigError:
    shown = shorten(str(target), MAX_PATH)
    return ConfigError(f"'{shown}' {why}: choose another folder with --out")


def _check_run(place: Place, on_read: OnRead) -> None:
    """Check all files of a run, its weights too, and that the audit is of these."""
    if not place.is_run:
        raise ConfigError(
            f"--weights checks the files of a run; '{place.home}' is an audit without one. Leave "
            "it out"
        )
    # An earlier gate is about to be replaced.
    parts = [part for part in verify(place.home, on_read).parts if part.name != GATE_FOLDER]
    damaged = next((part for part in parts if part.state == "damaged"), None)
    if damaged is not None:
        raise RecordError(
            f"'{place.home}' is damaged and is not judged: {damaged.name}: {damaged.damages[0]}; "
            f"{damaged.repair}"
        )
    unread = next((p for p in parts if p.name == "model" and p.state != "intact"), None)
    if unread is not None:
        raise UnreadableError(
            f"the weights in '{place.home}' were not checked ({unread.note}), and --weights asks "
            "for it. Leave it out, or run this command as their owner"
        )
    RunFolder(place.home).check_audited(load_audit_report(place.audit))


def _judge(
    audit: Path, policy: LoadedPolicy, target: Path | None, *, place: Place | None = None
) -> GateResult:
    """Judge an audit, and write the result as one set of files that replaces an earlier one.

    Returns the result with the hashes of the files, of which `gate.json` is the last.
    """
    audited = load_audited(audit)
    result = judge_audit(audited, policy)
    if target is None:
        return result
    from memguard.gate.rendered import render_junit, render_summary
    from memguard.pages.judgements import build_gate_head
    from memguard.report.html import render_report

    report = audited.report
    # From the gate/ of a run, the links of its audit/ lead to the same files.
    beside = place.audit if place is not None and place.is_run else None
    head = build_gate_head(result, report, Path(policy.document.path).name)
    contents = {
        JUNIT: render_junit(result),
        SUMMARY: render_summary(result, report).encode(),
        PAGE: render_report(report, beside, gate=head).encode(),
    }
    try:
        with contextlib.ExitStack() as stack:
            if place is not None:
                stack.enter_context(locked(place.home))
            clear_left_folders(target)
            temporary = stack.enter_context(atomic_folder(target))
            for name, content in contents.items():
                (temporary / name).write_bytes(content)
            sums = {name: sum_file(temporary / name) for name in contents}
            result = result.model_copy(update={"files": sums})
            save_sealed(result, temporary / GATE)
    except OSError as error:
        raise _refuse_out(target, f"cannot be written ({error.strerror})") from error
    return result
