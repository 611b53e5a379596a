"""An audit whose generation ended at its limit of time: what is left is counted, and said."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit_examples import (
    CHARACTERS,
    WRONG_TOKEN,
    Held,
    Scripted,
    WrongDecoder,
    audit,
    build_documents,
    build_suite,
    list_records,
    say_known,
)

from memguard.audit.cache import RecordCache
from memguard.audit.context import AuditContext
from memguard.audit.decoding import Continuation
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.generation import GenerationProbe
from memguard.audit.requests import LimitReached, Prompt
from memguard.audit.run import AuditOutcome
from memguard.audit.windows import AuditDocument
from memguard.pages.facts import write_not_run
from memguard.records import AuditReport

SIZE, PLACE = 80, 60
REASON = "the models have generated for 30 minutes"
DOCUMENTS = build_documents(size=SIZE)


@dataclass
class Limited(WrongDecoder):
    """A decoder that writes the texts of one bucket with one edit, until its time is spent."""

    num_texts: int
    """That it may still write."""
    documents: Mapping[str, AuditDocument] = field(
        default_factory=lambda: {document.id: document for document in DOCUMENTS}
    )
    asked: list[str] = field(default_factory=list)

    def continue_greedily(
        self, requests: Sequence[Prompt], on_progress: Any = None, *, is_done: Any = None
    ) -> list[Continuation]:
        texts = [self._write(request) for request in requests[: self.num_texts]]
        self.num_texts -= len(texts)
        self.asked += [request.document for request in requests]
        if len(texts) < len(requests):
            raise LimitReached(REASON, {index: [text] for index, text in enumerate(texts)})
        return texts

    def _write(self, request: Prompt) -> Continuation:
        truth = self.documents[request.document].input_ids
        ids = np.full(request.num_new, WRONG_TOKEN, dtype=np.int32)
        if request.document.startswith("x64"):
            ids[1:] = truth[len(truth) - request.num_new + 1 :]
        return Continuation(token_ids=ids, min_gap=1.0)


def audit_limited(decoder: Any, suite: Any = None, **fields: Any) -> AuditOutcome:
    """Audit a model that knows the texts of x64, but one token, and one of their prefixes."""
    rows = {
        tuple(document.input_ids[: end + 1].tolist())
        for document in DOCUMENTS
        if document.bucket == "x64"
        for end in range(SIZE)
        if end not in (20, PLACE)
    }
    model = Held(Scripted(say_known(rows.__contains__)), decoder, identity="model")
    return audit(DOCUMENTS, model, suite=suite or build_suite(ExtractionProbe()), **fields)


def list_bools(outcome: AuditOutcome, name: str) -> list[bool | None]:
    return [record[name] for record in list_records(outcome)]


def test_without_a_limit_all_are_generated() -> None:
    """Twenty documents that may be near-verbatim, and ten of each other bucket below the floor."""
    outcome = audit_limited(Limited(40))
    assert list_bools(outcome, "extraction.near_verbatim").count(True) == 20
    assert outcome.summary.tables.find("extraction", "near_verbatim", "x64").num_matched == 20
    detail = outcome.summary.tables.find_detail("extraction")
    assert detail["num_generated"] == 40
    assert "num_not_generated" not in detail
    assert audit_limited(WrongDecoder()).summary.verdict.level == "none-found"


@pytest.mark.parametrize("num_texts", [0, 20])
def test_what_is_left_is_never_none_found(num_texts: int) -> None:
    outcome = audit_limited(Limited(num_texts))
    verdict, num_left = outcome.summary.verdict, 40 - num_texts
    assert (verdict.level, verdict.reason) == ("inconclusive", "not-generated")
    assert verdict.sentence == (
        "0 of 40 training documents were extracted; generation ended at its limit of time."
    )
    assert verdict.scope.endswith(
        f"Near-verbatim text of {num_left} of 40 documents was not generated: the limit of time "
        "was reached."
    )
    tables = outcome.summary.tables
    detail = tables.find_detail("extraction")
    assert (detail["num_generated"], detail["num_not_generated"]) == (num_texts, num_left)
    reason = f"{num_left} of 40 texts were not generated: {REASON}"
    assert detail["reason_not_generated"] == reason
    (warning,) = [b.text for b in outcome.summary.banners if b.level == "warning"]
    start = "Near-verbatim extraction was not measured of all documents"
    assert warning.startswith(f"{start}: {reason}")
    for bucket in ("x0", "x4", "x64"):
        row = tables.find("extraction", "near_verbatim", bucket)
        assert not row.is_known
        assert row.missing_because == reason
    (run,) = [run for run in outcome.summary.probe_runs if run.num_documents is None]
    assert (run.name, run.reason_not_run) == ("near-verbatim", reason)


def test_what_was_found_before_counts() -> None:
    outcome = audit_limited(Limited(25))
    summary = outcome.summary
    assert summary.verdict.level in ("extracted", "memorized")
    assert summary.verdict.trained.num_matched == 5
    assert "of 15 of 40 documents" not in summary.verdict.sentence
    assert "Near-verbatim text of 15 of 40 documents was not generated" in summary.verdict.scope
    assert summary.num_findings == 5
    near = list_bools(outcome, "extraction.near_verbatim")
    assert (near.count(True), near.count(None), near.count(False)) == (5, 15, 40)
    # Neither yes nor no is said of what is left.
    assert list_bools(outcome, "extraction.extracted") == near
    assert not summary.tables.find("extraction", "near_verbatim", "x64").is_known


def test_an_audit_again_goes_on_where_it_ended(tmp_path: Path) -> None:
    context = AuditContext(cache=RecordCache(tmp_path))
    whole = audit_limited(Limited(40))
    first, second = Limited(25), Limited(15)
    audit_limited(first, context=context)
    again = audit_limited(second, context=context)
    assert len(first.asked) == 40
    assert second.asked == first.asked[25:]
    assert again.summary == whole.summary


def test_of_the_base_model_alone_it_says_nothing_about_the_model() -> None:
    base = Held(Scripted(say_known(lambda _: False)), Limited(0))
    outcome = audit_limited(WrongDecoder(), base=base)
    assert outcome.summary.verdict.level == "none-found"
    row = outcome.summary.tables.find("extraction", "near_verbatim", "x64", model="base")
    assert not row.is_known


def test_another_probe_that_ends_at_the_limit_is_not_run() -> None:
    class AllButSamples(WrongDecoder):
        def sample(self, *_: Any, **__: Any) -> Any:
            raise LimitReached(REASON)

        def continue_greedily(self, requests: Any, *args: Any, is_done: Any = None) -> Any:
            done = is_done or (lambda *_: False)
            return super().continue_greedily(requests, *args, is_done=done)

    suite = build_suite(ExtractionProbe(), GenerationProbe())
    outcome = audit_limited(AllButSamples(), suite, context=AuditContext(codec=CHARACTERS))
    verdict = outcome.summary.verdict
    assert (verdict.level, verdict.reason) == ("inconclusive", "not-generated")
    assert "Not run: generation." in verdict.scope
    assert "was not generated" not in verdict.scope
    (run,) = [run for run in outcome.summary.probe_runs if run.num_documents is None]
    assert run.name == "generation"
    assert "60 of 60 texts were not generated" in str(run.reason_not_run)


def test_the_terminal_names_what_is_left() -> None:
    runs = audit_limited(Limited(20)).summary.probe_runs
    report = AuditReport.model_construct(probe_runs=runs)
    assert write_not_run(report).startswith("near-verbatim (20 of 40 texts were not generated")
