"""What became of each finding between two audits, also of different documents.

    new finds it        the old one lacks the document       new-document
                        found it, too                        unchanged
                        asked the same and did not find it   new
                        did not ask the same                 newly-audited
    only old finds it   the new one lacks the document       no-longer-audited
                        did not ask the same                 no-longer-audited
                        asked the same and does not find it  fixed; by id: no-longer-found

Documents are the same if the keyed hashes of their texts are: with one identity key, whatever their
ids and places. Under two keys, only ids that the user's data gave are compared; an equal id does
not mean an equal text, so nothing is "fixed". Line numbers and ids made of them are never compared.

Equal texts of an audit count once: found if any of them is, and not found if one of them at least
was asked and none is found.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memguard.errors import RecordError
from memguard.gate.diff_sides import Asked, DiffSide, list_differences
from memguard.records.audit import name_finding
from memguard.records.diff import KINDS, DiffCount, DiffedFinding, FindingKind, MatchedBy

OLD_ROW, NEW_ROW = "old row", "new row"
Identity = tuple[str, str | int]
"""What a document is matched by: ("text", keyed hash) or ("id", id); else its own row, which the
other audit does not have: ("old row", 3)."""
Rows = Sequence[int]
"""Rows of an audit with one text."""
OTHER_TOKENS = "the audits count the tokens of their shared texts differently (another tokenizer?)"


@dataclass(frozen=True, kw_only=True, eq=False)
class MatchedAudits:
    """Two audits with their texts."""

    old: DiffSide
    new: DiffSide
    matched_by: MatchedBy
    old_identities: Sequence[Identity]
    """Of each row of the old audit."""
    new_identities: Sequence[Identity]

    @cached_property
    def old_texts(self) -> Mapping[Identity, Rows]:
        """Rows of each text of the old audit."""
        return _group(self.old_identities)

    @cached_property
    def new_texts(self) -> Mapping[Identity, Rows]:
        """Rows of each text of the new audit."""
        return _group(self.new_identities)

    @cached_property
    def probes(self) -> list[str]:
        """Probes that answer in at least one of the audits, in the order of the new suite."""
        return list({**self.new.answers.extracted, **self.old.answers.extracted})

    @cached_property
    def differences(self) -> dict[str, list[str]]:
        """Differences of the settings of each probe that both audits ran."""
        both = self.new.answers.extracted.keys() & self.old.answers.extracted.keys()
        return {probe: list_differences(self.old, self.new, probe) for probe in both}

    @cached_property
    def has_other_tokens(self) -> bool:
        """Whether the two audits count the tokens of a text differently: another tokenizer."""
        old_N, new_N = (side.windows_N3[:, 0].tolist() for side in (self.old, self.new))
        return any(
            {old_N[row] for row in self.old_texts[text]} != {new_N[row] for row in rows}
            for text, rows in self.new_texts.items()
            if text[0] == "text" and text in self.old_texts
        )

    @cached_property
    def reused_ids(self) -> set[str]:
        """Ids of the user's own in both audits."""
        old, new = (
            set(side.answers.id_N[side.answers.has_own_id_N].tolist())
            for side in (self.old, self.new)
        )
        return old & new

    def why_new_did_not_ask(self, probe: str, old: "Found", new: "Found") -> str | None:
        """Return why the new audit did not ask what the old one found; None if it did."""
        asked = _list_asked(self.new, probe, new.rows)
        why = self._why_not_asked("new", self.new, probe, asked)
        needed = _list_asked(self.old, probe, old.yes)
        return why or _compare_asked("new", asked, needed)

    def why_old_did_not_ask(self, probe: str, old: "Found", new: "Found") -> str | None:
        """Return why the old audit did not ask what the new one found; None if it did.

        Of the parts of the new answer that are yes, one that the old audit measured is enough.
        """
        asked = _list_asked(self.old, probe, old.rows)
        if (why := self._why_not_asked("old", self.old, probe, asked)) is not None:
            return why
        needed = _list_asked(self.new, probe, new.yes)
        measured = frozenset[str]().union(*(document.parts for document in asked))
        if self.new.find_yes_parts(probe, new.yes) & measured:
            needed = {document._replace(parts=document.parts & measured) for document in needed}
        return _compare_asked("old", asked, needed)

    def _why_not_asked(
        self, which: str, side: DiffSide, probe: str, asked: AbstractSet[Asked]
    ) -> str | None:
        if probe not in side.answers.extracted:
            return f"not run in the {which} audit: {side.find_reason_not_run(probe)}"
        if not asked:
            return f"not asked in the {which} audit"
        if self.differences[probe]:
            return f"other settings: {', '.join(self.differences[probe])}"
        if self.has_other_tokens:
            return OTHER_TOKENS
        return None


def _list_asked(side: DiffSide, probe: str, rows: Rows) -> set[Asked]:
    asked_N = side.asked.get(probe)
    if asked_N is None:
        return set()
    return {asked for row in rows if (asked := asked_N[row]) is not None}


def _compare_asked(which: str, asked: AbstractSet[Asked], needed: AbstractSet[Asked]) -> str | None:
    """Return what is missing of what was asked; None if nothing is."""
    if not {document.window for document in needed} <= {document.window for document in asked}:
        return f"other tokens were asked in the {which} audit"
    for document in needed:
        if not any(other.covers(document) for other in asked):
            measured = frozenset[str]().union(*(other.parts for other in asked))
            names = sorted(document.parts - measured) or sorted(document.parts)
            return f"not measured in the {which} audit: {', '.join(names)}"
    return None


def match_audits(old: DiffSide, new: DiffSide) -> MatchedAudits:
    """Match the documents of two audits.

    Raises:
        RecordError: no document can be matched, because the audits have two keys, and one of them
            has no id of the user's own.
    """
    has_one_key = old.identity_key is not None and old.identity_key == new.identity_key
    sides = (old, new)
    if not has_one_key and not all(side.answers.has_own_id_N.any() for side in sides):
        keys = (
            "the two audits used different identity keys"
            if all(side.identity_key is not None for side in sides)
            else "not both audits used an identity key"
        )
        raise RecordError(
            f"no document of the two audits can be matched: {keys}, and the documents of at least "
            "one of them have no 'id' in the user's data. Audit both with the same "
            "--identity-key, or give the documents ids of your own"
        )
    return MatchedAudits(
        old=old,
        new=new,
        matched_by="text" if has_one_key else "id",
        old_identities=_identify(old, OLD_ROW, by_text=has_one_key),
        new_identities=_identify(new, NEW_ROW, by_text=has_one_key),
    )


def _identify(side: DiffSide, without: str, *, by_text: bool) -> list[Identity]:
    """Return what each document is matched by; ``without`` names those that have nothing."""
    answers = side.answers
    columns = (answers.text_hmac_N, answers.id_N, answers.has_own_id_N)
    return [
        ("text", digest)
        if by_text and digest is not None
        else ("id", name)
        if is_own
        else (without, row)
        for row, (digest, name, is_own) in enumerate(zip(*map(list, columns), strict=True))
    ]


def _group(identities: Sequence[Identity]) -> dict[Identity, list[int]]:
    texts: dict[Identity, list[int]] = defaultdict(list)
    for row, identity in enumerate(identities):
        texts[identity].append(row)
    return dict(texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What an audit says of one text and probe."""

    rows: Rows
    """Empty if the audit does not have the text."""
    yes: Rows
    """Those that the probe extracts, trained or not."""
    is_finding: bool
    """Whether one of these was trained."""


def _look_up(side: DiffSide, probe: str, rows: Rows) -> Found:
    answers_N = side.answers.extracted.get(probe)
    yes = [] if answers_N is None else [row for row in rows if answers_N[row] == 1]
    is_finding = any(side.is_trained_N[row] for row in yes)
    return Found(rows=rows, yes=yes, is_finding=is_finding)


def list_findings(audits: MatchedAudits) -> list[DiffedFinding]:
    """Return what became of each finding of the two audits, worst first."""
    findings = []
    for probe in audits.probes:
        found = [
            *find_texts(audits.new, audits.new_identities, probe),
            *find_texts(audits.old, audits.old_identities, probe),
        ]
        for text in dict.fromkeys(found):
            old = _look_up(audits.old, probe, audits.old_texts.get(text, ()))
            new = _look_up(audits.new, probe, audits.new_texts.get(text, ()))
            findings.append(_describe(audits, probe, text, old, new))
    order = {kind: place for place, kind in enumerate(KINDS)}
    places = {probe: place for place, probe in enumerate(audits.probes)}
    return sorted(
        findings,
        key=lambda finding: (
            order[finding.kind],
            places[finding.probe],
            not finding.is_verbatim,
            -finding.continuation_tokens,
            _split_numbers(finding.id),
            finding.finding or "",
        ),
    )


def _split_numbers(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``a:9`` before ``a:10``."""
    return [(len(part) if part.isdecimal() else 0, part) for part in re.split("([0-9]+)", name)]


def find_texts(side: DiffSide, identities: Sequence[Identity], probe: str) -> dict[Identity, None]:
    """Return the trained texts of an audit that a probe extracts, each once, in order."""
    answers_N = side.answers.extracted.get(probe)
    if answers_N is None:
        return {}
    rows = np.flatnonzero((answers_N == 1) & side.is_trained_N).tolist()
    return dict.fromkeys(identities[row] for row in rows)


def _describe(
    audits: MatchedAudits, probe: str, text: Identity, old: Found, new: Found
) -> DiffedFinding:
    kind, reason = _classify(audits, probe, text, old, new)
    side, found = (audits.new, new) if new.rows else (audits.old, old)
    row = (found.yes or found.rows)[0]
    digest = side.answers.text_hmac_N[row]
    shown, shown_row = (audits.new, new.yes[0]) if new.yes else (audits.old, old.yes[0])
    verbatim_N = shown.parts["extraction"]["verbatim"] if probe == "extraction" else None
    return DiffedFinding(
        kind=kind,
        finding=None if digest is None else name_finding(digest, probe),
        probe=probe,
        id=side.answers.id_N[row],
        bucket=side.answers.bucket_N[row],
        num_copies=len(found.rows),
        is_verbatim=None if verbatim_N is None else bool(verbatim_N[shown_row] == 1),
        continuation_tokens=int(shown.windows_N3[shown_row, 2]),
        reason=reason,
    )


def _classify(
    audits: MatchedAudits, probe: str, text: Identity, old: Found, new: Found
) -> tuple[FindingKind, str | None]:
    """Return what became of a finding, and why, beyond what the kind says by itself."""
    if text[0] in (OLD_ROW, NEW_ROW):
        return "unmatched", "no keyed hash, and no id in the user's data"
    if not (old.rows and new.rows):
        return _classify_lone(audits, old, new)
    if old.yes and new.yes:
        return "unchanged", _explain_unchanged(audits, probe, old, new)
    is_by_id = text[0] == "id"
    if new.yes:
        why = audits.why_old_did_not_ask(probe, old, new)
        if why is not None:
            return "newly-audited", why
        return "new", "matched by id: its text may have changed" if is_by_id else None
    why = audits.why_new_did_not_ask(probe, old, new)
    if why is not None:
        return "no-longer-audited", why
    return ("no-longer-found" if is_by_id else "fixed"), None


def _classify_lone(audits: MatchedAudits, old: Found, new: Found) -> tuple[FindingKind, str | None]:
    """Return the kind of a finding in a text that only one of the audits has."""
    side, rows = (audits.old, old.rows) if old.rows else (audits.new, new.rows)
    is_reused = any(side.answers.id_N[row] in audits.reused_ids for row in rows)
    if old.rows:
        if is_reused:
            return "no-longer-audited", "the new audit has another text under this id"
        return "no-longer-audited", "not in the new audit"
    return "new-document", "the old audit has another text under this id" if is_reused else None


def _explain_unchanged(audits: MatchedAudits, probe: str, old: Found, new: Found) -> str | None:
    for which, side, found in (("new", audits.new, new), ("old", audits.old, old)):
        if not found.is_finding:
            role = side.answers.role_N[found.yes[0]]
            return f"not trained in the {which} audit (role {role}), which extracts it, too"
    if audits.differences[probe]:
        return f"other settings: {', '.join(audits.differences[probe])}"
    return None


def count_findings(findings: Sequence[DiffedFinding], probes: Sequence[str]) -> list[DiffCount]:
    """Return the number of findings of each kind and probe, zeros included."""
    numbers = Counter((finding.kind, finding.probe) for finding in findings)
    accepted = Counter(
        (finding.kind, finding.probe) for finding in findings if finding.acceptance == "accepted"
    )
    return [
        DiffCount(
            kind=kind,
            probe=probe,
            num_findings=numbers[kind, probe],
            num_accepted=accepted[kind, probe],
        )
        for kind in KINDS
        for probe in probes
    ]
