"""A whole audit by made-up models: what is asked, in which order, and what comes out."""

import subprocess
import sys
from collections.abc import Callable
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
    is_same,
    know,
    list_records,
    say_by_context,
)

from memguard.audit.context import AuditContext
from memguard.audit.extraction import AuditDocument, ExtractionProbe
from memguard.audit.run import AuditOutcome
from memguard.audit.suite import MaskConsistencyProbe, MembershipProbe
from memguard.errors import DataError
from memguard.records import MaskChange

MakeDocument = Callable[..., AuditDocument]


def test_whole_audit() -> None:
    documents = build_documents()
    model, base = Held(know(documents, "x64")), Held(know(documents, "none"))
    stages: list[tuple[str, int, int]] = []
    outcome = audit(
        documents, model, base, context=AuditContext(on_progress=lambda *step: stages.append(step))
    )
    summary = outcome.summary
    assert stages == [("model", 60, 60), ("base model", 60, 60)]
    assert (model.num_freed, base.num_freed) == (1, 1)
    assert [bucket.bucket for bucket in summary.buckets] == ["x0", "x4", "x64"]
    assert (summary.verdict.level, summary.verdict.bucket) == ("memorized", "x64")
    assert summary.num_findings == 20
    assert summary.findings[0].text_hmac == f"hmac-{summary.findings[0].id}"
    auc = {row.score: row.auc and row.auc.value for row in summary.membership}
    assert list(auc) == ["loss", "zlib", "min_k", "min_k_plus_plus", "loss_minus_base", "blind"]
    assert auc["zlib"] is None, "without a tokenizer there is no text to compress"
    # Half of the members are told apart from all nonmembers, the others tie.
    assert auc["loss"] == auc["min_k"] == auc["loss_minus_base"] == 0.75
    assert [score.id for score in list_records(outcome)] == [document.id for document in documents]
    assert summary.dose_response
    assert [trend.fitted for trend in summary.trends] == [[0, 0, 1]] * 2
    known = summary.attack_cost[2]
    assert (known.model.num_never, known.model.median) == (0, 0.0)
    assert known.base is not None
    assert known.base.num_never == 20
    measured = {(measure.probe, measure.metric) for measure in summary.measures}
    assert ("extraction", "verbatim") in measured
    verbatim = next(m for m in summary.measures if m.metric == "verbatim").buckets[2]
    assert verbatim.change_from_base is not None
    assert verbatim.change_from_base.value == 1
    assert summary.extracted_copies == [], "nobody looked for copies"
    assert summary.canaries is None


def test_every_probe_at_once() -> None:
    documents = build_documents(vocab_size=90, size=60)
    model, base = Held(Scripted(say_by_context)), Held(know(documents, "none"))
    outcome = audit(
        documents,
        model,
        base,
        suite=EVERY_PROBE,
        canaries=build_canaries(),
        context=AuditContext(codec=CHARACTERS),
    )
    summary = outcome.summary
    assert [row.score for row in summary.membership] == [
        "loss", "zlib", "min_k_plus_plus", "loss_minus_base", "lowercase", "recall", "blind",
    ]  # fmt: skip
    assert summary.canaries is not None
    assert (summary.canaries.num_trained, summary.canaries.num_references) == (6, 6)
    assert all(canary.base_nll == 30 for canary in summary.canaries.canaries)
    assert {measure.probe for measure in summary.measures} == {"extraction", "grid"}
    # Seven a window, and near-verbatim of the main one.
    assert len(summary.measures) == 3 * 7 + 1
    assert model.num_freed == base.num_freed == 1


def test_same_input_same_outcome() -> None:
    documents = build_documents()

    def run(seed: int) -> AuditOutcome:
        return audit(documents, Held(know(documents, "x64")), max_documents_per_bucket=7, seed=seed)

    first = run(0)
    assert is_same(first, run(0))
    assert not is_same(first, run(1))
    assert len(first.scores) == 21
    assert any("39 documents are not in the sample" in b.text for b in first.summary.banners)


def test_documents_are_checked_before_a_model_is_asked(make_document: MakeDocument) -> None:
    model = Held(Scripted(say_by_context))
    with pytest.raises(DataError, match="continuation-tokens"):
        audit([make_document(range(24), name=str(i)) for i in range(9)], model)
    assert model.num_asked == 0


def test_a_model_is_freed_before_the_next_is_asked() -> None:
    """There is memory for one: whatever happens, the first has gone when the second comes."""
    order: list[str] = []

    class Watched(Held):
        def scorer(self) -> Any:
            order.append(f"ask {self.identity}")
            return Held.scorer(self)

        def free(self) -> None:
            order.append(f"free {self.identity}")

    documents = build_documents(6)
    models = {
        name: Watched(know(documents, "none"), identity=name)
        for name in ("model", "base", "reference")
    }
    suite = build_suite(ExtractionProbe(), MembershipProbe(scores=("loss", "reference")))
    audit(documents, models["model"], models["base"], reference=models["reference"], suite=suite)
    assert list(dict.fromkeys(order)) == [
        f"{what} {name}" for name in models for what in ("ask", "free")
    ]

    order.clear()
    models["model"].answers = None  # no scorer: it fails in the middle
    with pytest.raises(AttributeError):
        audit(documents, models["model"], suite=suite)
    assert order == ["ask model", "free model"]


def test_masks_are_compared_where_somebody_can(make_document: MakeDocument) -> None:
    draw = np.random.default_rng(0)
    documents = [
        make_document(draw.integers(0, 90, 60), name=f"{n}", cluster=n // 2) for n in range(12)
    ]
    requested: list[tuple[list[str], list[tuple[str, str]]]] = []

    def compare(texts: Any, pairs: Any) -> list[MaskChange]:
        requested.append((list(texts), list(pairs)))
        return [MaskChange(rewriting="a", num_passages=4, num_changed=1, mean_leaked_share=None)]

    suite = build_suite(ExtractionProbe(), MaskConsistencyProbe(max_passages=4))
    context = AuditContext(codec=CHARACTERS, compare_masks=compare)
    outcome = audit(documents, Held(Scripted(say_by_context)), suite=suite, context=context)
    assert [change.rewriting for change in outcome.summary.mask_changes] == ["a"]
    texts = [CHARACTERS.decode(document.input_ids) for document in documents]
    assert requested == [(texts[:4], [(texts[2 * n], texts[2 * n + 1]) for n in range(4)])]
    without = audit(documents, Held(Scripted(say_by_context)), suite=suite)
    assert without.summary.mask_changes == []


def test_planning_and_summarising_need_no_torch() -> None:
    modules = (
        "summary membership statistics suite selection extraction cache teacher_forcing "
        "membership_scores document_scores tables verdict warnings canaries"
    )
    code = (
        "import sys, importlib\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"[importlib.import_module('memguard.audit.' + n) for n in '{modules}'.split()]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
