"""Each probe of a suite has the number of documents it ran on, or the reason why it did not."""

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
from memguard.audit.probes.membership import MembershipProbe
from memguard.records import MaskChange, ProbeRun


def run(documents: Any, suite: Any, **fields: Any) -> dict[str, ProbeRun]:
    outcome = audit(documents, Held(Scripted(say_by_context)), suite=suite, **fields)
    runs = {each.name: each for each in outcome.summary.probe_runs}
    assert list(runs) == [probe.name for probe in suite.probes]
    assert [each.version for each in runs.values()] == [probe.VERSION for probe in suite.probes]
    return runs


def test_what_ran_has_the_documents_it_has_results_of() -> None:
    documents = build_documents()
    runs = run(
        documents, EVERY_PROBE, canaries=build_canaries(12), context=AuditContext(codec=CHARACTERS)
    )
    counts = {name: (each.num_documents, each.counted) for name, each in runs.items()}
    whole = (len(documents), "documents")
    assert counts == {
        "extraction": whole,
        "grid": whole,
        "sampling": whole,
        "membership": whole,
        "canaries": (12, "canaries"),
    }


def test_a_grid_counts_only_documents_that_are_long_enough() -> None:
    documents = build_documents(size=60)
    short = [
        replace(d, input_ids=d.input_ids[:55], supervised=d.supervised[:55]) for d in documents[:7]
    ]
    documents = [*short, *documents[7:]]
    probe = ExtractionProbe(continuation_tokens=5)

    def grid(size: int) -> ProbeRun:
        cells = GridProbe(prefix_tokens=(size - 5,), continuation_tokens=(5,))
        return run(documents, build_suite(probe, cells))["grid"]

    assert grid(55).num_documents == len(documents)
    assert grid(56).num_documents == len(documents) - 7
    nothing = grid(61)
    assert (nothing.num_documents, nothing.reason_not_run) == (
        None,
        "every document is too short for its windows",
    )


@pytest.mark.parametrize(
    ("num_control", "reason"),
    [(0, "no control documents"), (1, "40 trained and 1 control documents; it needs 2 of each")],
)
def test_membership_says_what_it_lacks(num_control: int, reason: str) -> None:
    documents = build_documents()
    control = [d for d in documents if d.role == "control"][:num_control]
    trained = [d for d in documents if d.role == "trained"]
    found = run([*trained, *control], build_suite(ExtractionProbe(), MembershipProbe()))
    assert (found["membership"].num_documents, found["membership"].reason_not_run) == (None, reason)


def test_membership_without_a_score_of_the_model_did_not_run() -> None:
    """'reference' without a reference model: the blind baseline alone is no membership score."""
    suite = build_suite(ExtractionProbe(), MembershipProbe(scores=("reference",)))
    found = run(build_documents(), suite)["membership"]
    assert found.reason_not_run == "none of its scores could be computed"


def test_canaries_are_missing_or_all_on_one_side() -> None:
    suite = build_suite(ExtractionProbe(), CanaryProbe())
    assert run(build_documents(), suite)["canaries"].reason_not_run == "no canaries were given"
    context = AuditContext(why_not={"canaries": "the model was not trained by memguard"})
    told = run(build_documents(), suite, context=context)["canaries"]
    assert told.reason_not_run == "the model was not trained by memguard"
    one_side = [replace(canary, was_trained=False) for canary in build_canaries(4)]
    told = run(build_documents(), suite, canaries=one_side)["canaries"]
    assert told.reason_not_run == "none of the 4 canaries were selected for training"


def test_masks_are_counted_in_texts() -> None:
    suite = build_suite(ExtractionProbe(), MaskConsistencyProbe(max_passages=9))
    seen: list[int] = []

    def compare(texts: Sequence[str], pairs: Any) -> list[MaskChange]:
        seen.append(len(texts))
        return []

    context = AuditContext(codec=CHARACTERS, compare_masks=compare)
    found = run(build_documents(), suite, context=context)["mask_consistency"]
    assert (found.num_documents, found.counted, seen) == (9, "texts", [9])
    chats = [
        replace(d, format="messages", supervised=np.arange(len(d.input_ids)) >= 30)
        for d in build_documents()
    ]
    found = run(chats, suite, context=context)["mask_consistency"]
    assert (found.reason_not_run, seen) == ("no trained document is plain text", [9])
