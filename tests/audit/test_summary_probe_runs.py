"""Each probe of a suite has the number of items it ran on, or the reason why it did not."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from audit_examples import (
    CHARACTERS,
    EVERY_PROBE,
    Held,
    Scripted,
    audit,
    build_canaries,
    build_documents,
    build_suite,
    say_by_context,
)

from memguard.audit.context import AuditContext
from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.mask_consistency import MaskConsistencyProbe
from memguard.audit.probes.masks import MaskChange
from memguard.audit.probes.membership import MembershipProbe
from memguard.records import ProbeRun


def run(documents: Any, *probes: Any, **fields: Any) -> dict[str, ProbeRun]:
    suite = fields.pop("suite", None) or build_suite(ExtractionProbe(), *probes)
    outcome = audit(documents, Held(Scripted(say_by_context)), suite=suite, **fields)
    runs = {each.name: each for each in outcome.summary.probe_runs}
    assert [(name, each.version) for name, each in runs.items()] == [
        (probe.name, probe.VERSION) for probe in suite.probes
    ]
    return runs


def test_what_ran_has_the_items_it_has_results_of() -> None:
    documents = build_documents()
    context = AuditContext(codec=CHARACTERS)
    runs = run(documents, suite=EVERY_PROBE, canaries=build_canaries(12), context=context)
    counts = {name: (each.num_documents, each.counted) for name, each in runs.items()}
    whole = (len(documents), "documents")
    names = ("extraction", "grid", "sampling", "membership")
    assert counts == {**dict.fromkeys(names, whole), "canaries": (12, "canaries")}


def test_a_grid_counts_only_documents_that_are_long_enough() -> None:
    documents = build_documents(size=60)
    short = [
        replace(d, input_ids=d.input_ids[:55], supervised=d.supervised[:55]) for d in documents[:7]
    ]
    documents = [*short, *documents[7:]]

    def grid(size: int) -> ProbeRun:
        suite = build_suite(
            ExtractionProbe(continuation_tokens=5),
            GridProbe(prefix_tokens=(size - 5,), continuation_tokens=(5,)),
        )
        return run(documents, suite=suite)["grid"]

    assert grid(55).num_documents == len(documents)
    assert grid(56).num_documents == len(documents) - 7
    nothing = grid(61)
    assert nothing.num_documents is None
    assert nothing.reason_not_run == "every document is an answer, or too short for its windows"


# A reference score without a reference model leaves the blind baseline alone, which is none.
@pytest.mark.parametrize(
    ("num_control", "scores", "reason"),
    [
        (0, ("loss",), "no control documents"),
        (1, ("loss",), "40 trained and 1 control documents; it needs 2 of each"),
        (20, ("reference",), "none of its scores could be computed"),
    ],
)
def test_membership_says_what_it_lacks(
    num_control: int, scores: tuple[str, ...], reason: str
) -> None:
    documents = build_documents()
    control = [d for d in documents if d.role == "control"][:num_control]
    trained = [d for d in documents if d.role == "trained"]
    found = run([*trained, *control], MembershipProbe(scores=scores))["membership"]
    assert (found.num_documents, found.reason_not_run) == (None, reason)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "no canaries were given"),
        (
            {
                "context": AuditContext(
                    why_not={"canaries": "the model was not trained by memguard"}
                )
            },
            "the model was not trained by memguard",
        ),
        (
            {"canaries": [replace(c, was_trained=False) for c in build_canaries(4)]},
            "none of the 4 canaries were selected for training",
        ),
    ],
)
def test_canaries_are_missing_or_all_on_one_side(fields: dict[str, Any], reason: str) -> None:
    assert run(build_documents(), CanaryProbe(), **fields)["canaries"].reason_not_run == reason


def test_masks_are_counted_in_texts() -> None:
    probe = MaskConsistencyProbe(max_passages=9)
    seen: list[int] = []

    def compare(texts: Sequence[str], pairs: Any) -> list[MaskChange]:
        seen.append(len(texts))
        return []

    context = AuditContext(codec=CHARACTERS, compare_masks=compare)
    found = run(build_documents(), probe, context=context)["mask_consistency"]
    assert (found.num_documents, found.counted, seen) == (9, "texts", [9])
    chats = [
        replace(d, format="messages", supervised=np.arange(len(d.input_ids)) >= 30)
        for d in build_documents()
    ]
    found = run(chats, probe, context=context)["mask_consistency"]
    assert (found.reason_not_run, seen) == ("no trained document is plain text", [9])
