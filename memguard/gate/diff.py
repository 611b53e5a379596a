"""What became of each extracted document between two audits, also of other documents.

For each probe that extracts it, and for the document by any probe:

    both find it                                             unchanged
    only new finds it    the old one measured the same       new
                         it did not                          not audited
    only old finds it    the new one measured the same       gone
                         it did not                          not audited

A document is gone only if every probe that found it measured the same and no probe finds it now.

Documents are matched by the keyed hashes of their texts, so both audits need one identity key. The
same was measured if settings of the probe, window and dtype are equal, and of the document the
tokens and the parts of the answer; null is no answer. Without this rule, a smaller sample or
another window would look like a cure. Equal texts of an audit count once: found if any of them is.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

import memguard
from memguard.audit.statistics import compute_paired_rates
from memguard.errors import RecordError
from memguard.gate.diffed import (
    KINDS,
    AuditDiff,
    DiffedAudit,
    DiffedDocument,
    DiffedFinding,
    DiffedProbe,
    FindingKind,
    FoundBy,
)
from memguard.gate.gaps import Audited, find_audit_folder, load_audited
from memguard.records import AuditReport
from memguard.records.audit_files import SCORES
from memguard.records.documents import EXTRACTED, OTHER_WINDOW, DocumentTable
from memguard.records.record import describe_unread

METHOD_FIELDS: Final = ("dtype", "window")
"""Fields of a report's method on which the answers of all probes depend."""
_WITHOUT_SEED: Final = ("extraction", "sampling")
"""Probes whose answers do not depend on the audit's seed."""
_WINDOWS: Final = ("continuation_tokens", "prefix_tokens", "min_prefix_tokens")
"""Settings of the extraction probe that all probes depend on, because they use its windows."""
_WINDOW: Final = ("num_tokens", "prefix_tokens", "continuation_tokens")
"""Columns of the tokens that were audited of a document."""
_PARTS: Final = {
    "extraction": (".verbatim", ".near_verbatim", OTHER_WINDOW),
    "attacks": (".any",),
}
"""Ends of the columns that decide a probe's answer; of other probes all columns of yes and no."""
OTHER_TOKENS = "the audits count the tokens of their shared texts differently (another tokenizer?)"


@dataclass(kw_only=True, slots=True)
class Answer:
    """What an audit says of one text with one probe, by its documents that have an answer."""

    row: int
    """A document, an extracted one if there is one."""
    measured: AbstractSet[str]
    """Parts of the answer that were measured of each document."""
    windows: set[tuple[float, ...]] = field(default_factory=set)
    found: set[str] = field(default_factory=set)
    """Parts that are yes of at least one."""
    is_yes: bool = False
    is_trained: bool = False
    is_finding: bool = False
    """Whether one of the extracted documents was trained, or was to be forgotten."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DiffSide:
    """One of the two audits, by the keyed hashes of its texts."""

    which: Literal["old", "new"]
    audited: Audited

    @property
    def documents(self) -> DocumentTable:
        """The records of the audit."""
        if self.audited.documents is None:
            raise describe_unread(self.audited.folder / SCORES, PermissionError())
        return self.audited.documents

    @cached_property
    def rows(self) -> Mapping[str, list[int]]:
        """Documents of each text; those without a keyed hash are left out."""
        rows: dict[str, list[int]] = {}
        for row, digest in enumerate(self.documents.text_hmac_N.tolist()):
            if digest is not None:
                rows.setdefault(digest, []).append(row)
        return rows

    @cached_property
    def trained(self) -> set[str]:
        """Texts that the model was trained on."""
        return {*self.documents.text_hmac_N[self.documents.is_trained_N].tolist()} - {None}

    @cached_property
    def windows(self) -> list[tuple[float, ...]]:
        """Tokens that were audited of each document, and where a long one was cut."""
        columns = [self.documents.numbers(name) for name in _WINDOW]
        used = np.inf if self.audited.report.cut is None else self.audited.report.cut.used_tokens
        return list(zip(*columns, np.where(columns[0] > used, used, 0), strict=True))

    def read_answers(self, probe: str) -> dict[str, Answer]:
        """Return the answers of a probe by text; no entry where all of them are null."""
        if probe not in self.documents.extracted:
            return {}
        start, answers_N = f"{probe}.", self.documents.extracted[probe]
        parts = {
            name.removeprefix(start): self.documents.numbers(name)
            for name in self.documents.list_flags(start)
            if name != f"{probe}{EXTRACTED}" and name.endswith(_PARTS.get(probe, ("",)))
        }
        texts: dict[str, Answer] = {}
        for row in np.flatnonzero(~np.isnan(answers_N)).tolist():
            if (digest := self.documents.text_hmac_N[row]) is None:
                continue
            measured = {name for name, part_N in parts.items() if not np.isnan(part_N[row])}
            answer = texts.setdefault(digest, Answer(row=row, measured=measured))
            answer.measured &= measured
            answer.windows.add(self.windows[row])
            answer.is_trained |= bool(self.documents.is_trained_N[row])
            if answers_N[row] == 1:
                answer.row = answer.row if answer.is_yes else row
                answer.is_yes = True
                answer.is_finding |= bool(self.documents.came_out_N[row])
                answer.found |= {name for name in measured if parts[name][row] == 1}
        return texts

    def describe(self) -> DiffedAudit:
        """Return the audit as the result names it."""
        return DiffedAudit(
            name=self.audited.name,
            created=self.audited.report.created,
            report_sha256=self.audited.report_sha256,
            num_texts=len(self.trained),
            num_findings=int(self.documents.came_out_N.sum()),
        )


def diff_folders(old: Path, new: Path) -> AuditDiff:
    """Compare the findings of two audits, also of other documents, by a common identity key."""
    return diff_audits(
        *(load_audited(find_audit_folder(folder), with_card=False) for folder in (old, new))
    )


def diff_audits(old: Audited, new: Audited) -> AuditDiff:
    """Compare the findings of two audits; see `diff_folders`."""
    keys = [audited.report.data.identity_key for audited in (old, new)]
    if keys[0] is None or keys[0] != keys[1]:
        raise RecordError(
            "the two audits have no identity key in common, so no document can be matched. Audit "
            "both with the same 'data.identity_key'"
        )
    before, after = DiffSide(which="old", audited=old), DiffSide(which="new", audited=new)
    names = list({**after.documents.extracted, **before.documents.extracted})
    findings: dict[str, list[DiffedFinding]] = {}
    probes = [_diff_probe(before, after, name, findings) for name in names]
    kinds = list(KINDS)
    documents = [_join(before, after, text, found) for text, found in findings.items()]
    documents.sort(key=lambda one: (-one.continuation_tokens, one.id, one.text_hmac))
    documents.sort(key=lambda one: (kinds.index(one.kind), one.found_by))
    return AuditDiff(
        tool_version=memguard.__version__,
        old=before.describe(),
        new=after.describe(),
        num_texts_in_both=len(after.trained & before.rows.keys()),
        notes=list(_list_notes(before, after, names)),
        probes=probes,
        documents=documents,
    )


def _join(old: DiffSide, new: DiffSide, text: str, findings: list[DiffedFinding]) -> DiffedDocument:
    """Return what became of a document by all probes that extract it."""
    kinds, found_by = ({getattr(one, name) for one in findings} for name in ("kind", "found_by"))
    kind: FindingKind = "not-audited"
    if found_by != {"old"} and found_by != {"new"}:
        kind = "unchanged"
    elif "new" in kinds or kinds == {"gone"}:
        kind = "new" if "new" in kinds else "gone"
    which: FoundBy = "both" if kind == "unchanged" else findings[0].found_by
    side = old if which == "old" else new
    answers = side.documents.extracted.values()
    # Of equal texts one that is extracted.
    row = max(side.rows[text], key=lambda row: any(by_N[row] == 1 for by_N in answers))
    return DiffedDocument(
        kind=kind,
        found_by=which,
        text_hmac=text,
        id=side.documents.id_N[row],
        bucket=side.documents.bucket_N[row],
        continuation_tokens=int(side.windows[row][2]),
        probes=findings,
    )


def _diff_probe(
    old: DiffSide, new: DiffSide, probe: str, findings: dict[str, list[DiffedFinding]]
) -> DiffedProbe:
    """Add what became of each document by a probe; return its rates."""
    obstacle = _find_obstacle(old, new, probe)
    before, after = old.read_answers(probe), new.read_answers(probe)
    pairs = []
    for text in {**after, **before}:
        was, now = before.get(text), after.get(text)
        if any(answer.is_finding for answer in (was, now) if answer is not None):
            kind, reason = _classify(old, new, text, was, now, obstacle)
            side, answer = (new, now) if now is not None and now.is_yes else (old, was)
            assert answer is not None, "it is found"
            findings.setdefault(text, []).append(
                DiffedFinding(
                    kind=kind,
                    found_by="both" if kind == "unchanged" else side.which,
                    probe=probe,
                    parts=sorted(answer.found),
                    reason=reason,
                )
            )
        if was is None or now is None or obstacle or not (was.is_trained and now.is_trained):
            continue
        if (was.windows, was.measured) == (now.windows, now.measured):
            pairs.append((was.is_yes, now.is_yes, int(new.documents.cluster_N[now.row])))
    olds, news, clusters = zip(*pairs, strict=True) if pairs else ((), (), ())
    return DiffedProbe(
        probe=probe,
        num_texts=len(pairs),
        num_old=sum(olds),
        num_new=sum(news),
        difference=compute_paired_rates(news, olds, clusters=clusters),
        missing_because=obstacle or (None if pairs else "no trained text was measured by both"),
    )


def _classify(
    old: DiffSide,
    new: DiffSide,
    text: str,
    was: Answer | None,
    now: Answer | None,
    obstacle: str | None,
) -> tuple[FindingKind, str | None]:
    """Return what became of a finding, and why."""
    if was is not None and now is not None and was.is_yes and now.is_yes:
        return "unchanged", obstacle
    kind: FindingKind
    if now is not None and now.is_yes:
        kind, found, side, other = "new", now, old, was
        # One part of the new answer that the old audit measured, too, is enough.
        parts = (set() if was is None else now.found & was.measured) or now.measured
    else:
        assert was is not None, "one of them finds it"
        kind, found, side, other, parts = "gone", was, new, now, was.measured
    if text not in side.rows:
        why = f"not audited in the {side.which} audit"
    elif obstacle is not None:
        why = obstacle
    elif other is None:
        why = f"not measured in the {side.which} audit"
    elif other.windows != found.windows:
        why = f"other tokens were measured in the {side.which} audit"
    elif missing := sorted(parts - other.measured):
        why = f"not measured in the {side.which} audit: {', '.join(missing)}"
    else:
        return kind, None
    return "not-audited", why


def _find_obstacle(old: DiffSide, new: DiffSide, probe: str) -> str | None:
    """Return why no text was measured by both audits in the same way; None if some may be."""
    for side in (old, new):
        if probe not in side.documents.extracted:
            runs = {run.name: run.reason_not_run for run in side.audited.report.probe_runs}
            reason = runs.get(probe, "its suite does not have it") or "it has no yes or no"
            return f"not run in the {side.which} audit: {reason}"
    if differences := list_differences(old.audited.report, new.audited.report, probe):
        return f"other settings: {', '.join(differences)}"
    for text in old.rows.keys() & new.rows.keys():
        sizes = [{side.windows[row][0] for row in side.rows[text]} for side in (old, new)]
        if sizes[0] != sizes[1]:
            return OTHER_TOKENS
    return None


def list_differences(old: AuditReport, new: AuditReport, probe: str) -> list[str]:
    """Return the differences of what a probe's answers depend on, one clause each."""
    before, after = _find_settings(old, probe), _find_settings(new, probe)
    return [
        f"'{name}' is {after.get(name)} instead of {before.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _find_settings(report: AuditReport, probe: str) -> dict[str, Any]:
    listed = {str(entry.get("name")): entry for entry in report.method.probes}
    names = METHOD_FIELDS if probe in _WITHOUT_SEED else (*METHOD_FIELDS, "seed")
    windows = {} if probe == "extraction" else listed.get("extraction", {})
    return {
        **{f"extraction.{name}": windows.get(name) for name in _WINDOWS},
        **listed.get(probe, {}),
        **{name: getattr(report.method, name) for name in names},
    }


def _list_notes(old: DiffSide, new: DiffSide, probes: list[str]) -> Iterator[str]:
    """Yield what was not compared."""
    if new.audited.report.created < old.audited.report.created:
        yield "The old audit is younger than the new one: are they in the wrong order?"
    for side in (old, new):
        if missing := sum(bucket.num_not_sampled for bucket in side.audited.report.tables.buckets):
            yield f"The {side.which} audit scored a sample: {missing:,} documents were left out."
        if lost := sum(digest is None for digest in side.documents.text_hmac_N):
            yield f"{lost:,} documents of the {side.which} audit have no keyed hash to match them."
        yield from (f"The {side.which} audit is not whole: {gap}." for gap in side.audited.gaps)
    runs = [run for side in (new, old) for run in side.audited.report.probe_runs]
    if others := dict.fromkeys(run.name for run in runs if run.name not in probes):
        yield f"Not compared: {', '.join(others)} (no yes or no for each document)."
