"""Which probes of the suite ran, on how many documents, and why the others did not.

A number counts what a probe has a result for: a document that is too short for every window of a
grid, or has no membership score, is not in it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from memguard.audit.cache import Numbers
from memguard.audit.extraction import Window
from memguard.audit.membership import is_member
from memguard.audit.suite import Suite
from memguard.audit.tables import ProbeTable
from memguard.records import BLIND, AttackedBucket, CanaryScores, MembershipScores, ProbeRun

_COUNTED = {"canaries": "canaries", "mask_consistency": "texts"}
"""What a probe's number counts, where that is not documents."""
_MIN_OF_EACH = 2
"""Members, and control documents, below which there is no membership score."""


def list_probe_runs(
    suite: Suite,
    *,
    windows: Sequence[Window],
    model: Numbers,
    membership: Sequence[MembershipScores],
    canaries: CanaryScores | None,
    written: Sequence[ProbeTable],
    attacks: Sequence[AttackedBucket],
    num_mask_texts: int,
    why_not: Mapping[str, str],
) -> list[ProbeRun]:
    """Return a record for each probe of the suite, in its order.

    Args:
        suite: the probes.
        windows: ``[N]`` the documents.
        model: ``[N]`` of one pass of the model.
        membership: the report's rows.
        canaries: None where none were scored.
        written: what was generated, ``[N]``.
        attacks: the report's rows.
        num_mask_texts: texts whose masks were compared with those of copies.
        why_not: by a probe's name, why there was nothing to run it on.
    """
    num_canaries = 0 if canaries is None else canaries.num_trained + canaries.num_references
    found = {
        "extraction": (len(windows), "no document is long enough"),
        "grid": (_count_measured(model, "grid."), "every document is too short for its windows"),
        "sampling": (_count_measured(model, "sampled."), "it names no way to draw"),
        "membership": (_count_compared(membership), _explain_no_membership(windows)),
        "canaries": (num_canaries, "there were no canaries"),
        "generation": (_count_written(written), "no document was continued"),
        "attacks": (_count_attacked(attacks), "no document was attacked"),
        "mask_consistency": (num_mask_texts, "no trained document is plain text"),
    }
    runs = []
    for probe in suite.probes:
        number, reason = found[probe.name]
        runs.append(
            ProbeRun.model_validate(
                {
                    "name": probe.name,
                    "version": probe.VERSION,
                    "num_documents": number or None,
                    "counted": _COUNTED.get(probe.name, "documents"),
                    "reason_not_run": None if number else why_not.get(probe.name, reason),
                }
            )
        )
    return runs


def _count_measured(numbers: Numbers, start: str) -> int:
    """Return the documents with any number whose name begins with ``start``."""
    columns = [index for index, name in enumerate(numbers.names) if name.startswith(start)]
    return int((~np.isnan(numbers.rows[:, columns])).any(axis=1).sum())


def _count_written(tables: Sequence[ProbeTable]) -> int:
    known = [~np.isnan(values_N) for table in tables for values_N in table.model.values()]
    return int(np.any(known, axis=0).sum()) if known else 0


def _count_attacked(attacks: Sequence[AttackedBucket]) -> int:
    """Every attack takes the same documents: return those of the first."""
    first = attacks[0].attack if attacks else ""
    return sum(each.any_verbatim.num_documents for each in attacks if each.attack == first)


def _count_compared(membership: Sequence[MembershipScores]) -> int:
    """Return the members and control documents that some score of the model compares."""
    sizes = [
        each.num_members + each.num_nonmembers
        for each in membership
        if each.score != BLIND and each.auc is not None
    ]
    return max(sizes, default=0)


def _explain_no_membership(windows: Sequence[Window]) -> str:
    num_members = sum(is_member(window.document) for window in windows)
    num_control = sum(window.document.role == "control" for window in windows)
    if not num_control:
        return "no control documents"
    if min(num_members, num_control) < _MIN_OF_EACH:
        return (
            f"{num_members} trained and {num_control} control documents; it needs "
            f"{_MIN_OF_EACH} of each"
        )
    return "none of its scores could be computed"
