"""A whole audit by made-up models: what is asked, in which order, what is kept and asked anew."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_examples import (
    CHARACTERS,
    EVERY_PROBE,
    Held,
    Scripted,
    WrongDecoder,
    audit,
    build_canaries,
    build_documents,
    build_suite,
    build_tiny_layer,
    build_tiny_llama,
    is_same,
    know,
    list_records,
    say_by_context,
)
from ranks import RankPool
from record_examples import make_document

import memguard
from memguard.audit.cache import RecordCache
from memguard.audit.context import AuditContext
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.mask_consistency import CHANGED, MaskConsistencyProbe
from memguard.audit.probes.masks import MaskChange
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.run import AuditOutcome
from memguard.audit.scoring import ModelScorer
from memguard.audit.windows import AuditDocument
from memguard.errors import DataError
from memguard.hf.assembly import Assembly
from memguard.hf.load import shard_scratch_model
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.runtime import start_runtime

pytestmark = pytest.mark.slow


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
    tables = summary.tables
    assert [bucket.bucket for bucket in tables.buckets] == ["x0", "x4", "x64"]
    assert (summary.verdict.level, summary.verdict.bucket) == ("memorized", "x64")
    assert summary.num_findings == 20
    assert summary.findings[0].text_hmac == f"hmac-{summary.findings[0].id}"
    auc = {row.parameters.removeprefix("score="): row for row in tables.select("membership", "auc")}
    assert list(auc) == ["loss", "zlib", "min_k", "min_k_plus_plus", "loss_minus_base", "blind"]
    assert auc["zlib"].value is None, "without a tokenizer there is no text to compress"
    # Half of the members are told apart from all nonmembers, the others tie.
    assert {auc[name].value for name in ("loss", "min_k", "loss_minus_base")} == {0.75}
    records = list_records(outcome)
    assert [record["id"] for record in records] == [document.id for document in documents]
    assert summary.dose_response
    assert [(trend.metric, trend.fitted) for trend in tables.tests] == [
        ("verbatim", (0, 0, 1)),
        ("near_verbatim", (0, 0, 1)),
    ]
    assert tables.find("sampling", "never", "x64").num_matched == 0
    assert tables.find("sampling", "never", "x64", model="base").num_matched == 20
    assert tables.find("sampling", "log10_queries", "x64", statistic="median").value == 0
    assert tables.find("extraction", "verbatim", "x64", against="base").value == 1
    assert not tables.select("extraction", "verbatim", bucket="(trained)"), "no copies were counted"
    assert not tables.select("canaries", "verbatim")


@pytest.mark.parametrize("format", ["messages", "prompt_completion"])
def test_answers_longer_than_a_window_of_text_are_audited_whole(format: str) -> None:
    """A recited answer of 140 tokens: its lengths are beyond the 50 of `continuation_tokens`."""
    answer = np.arange(150) >= 10
    documents = [
        replace(document, format=format, supervised=answer)
        for document in build_documents(size=150)
    ]
    summary = audit(documents, Held(know(documents, "x64"))).summary
    for metric in ("first_divergence", "longest_run"):
        row = summary.tables.find("extraction", metric, "x64", statistic="mean")
        assert row is not None
        assert (row.value, row.num_documents) == (140.0, 20)
    assert summary.verdict.level == "memorized"


def test_same_input_same_outcome() -> None:
    documents = build_documents()

    def run(seed: int) -> AuditOutcome:
        return audit(documents, Held(know(documents, "x64")), max_documents_per_bucket=7, seed=seed)

    first = run(0)
    assert is_same(first, run(0))
    assert not is_same(first, run(1))
    assert len(first.scores) == 21
    assert any("39 documents are not in the sample" in b.text for b in first.summary.banners)


def test_documents_are_checked_before_a_model_is_asked() -> None:
    model = Held(Scripted(say_by_context))
    with pytest.raises(DataError, match="continuation_tokens"):
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


def test_masks_are_compared_where_somebody_can() -> None:
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
    row = outcome.summary.tables.find(
        "mask_consistency", CHANGED.name, "(trained)", parameters="rewriting=a"
    )
    assert (row.num_matched, row.num_documents) == (1, 4)
    texts = [CHARACTERS.decode(document.input_ids) for document in documents]
    assert requested == [(texts[:4], [(texts[2 * n], texts[2 * n + 1]) for n in range(4)])]
    without = audit(documents, Held(Scripted(say_by_context)), suite=suite)
    assert not without.summary.tables.select("mask_consistency", CHANGED.name)


def test_planning_summarising_and_pages_need_no_torch() -> None:
    root = Path(memguard.__file__).parent
    folders = ("audit/probes", "report", "compare", "pages")
    files = [path for folder in folders for path in sorted((root / folder).glob("*.py"))]
    names = [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in files]
    assert len(names) > 30
    audit = "summary statistics suite selection windows cache probe document_scores metrics"
    others = "verdict verdict_sentences warnings plugins plan"
    names += [f"memguard.audit.{name}" for name in f"{audit} {others}".split(" ")]
    code = (
        "import sys, importlib\n"
        "for name in ('torch', 'transformers', 'datasets'): sys.modules[name] = None\n"
        f"for name in {names}: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _run_kept(
    folder: Path, documents: Sequence[AuditDocument], model: Any, base: Any = None, **fields: Any
) -> AuditOutcome:
    context = AuditContext(codec=CHARACTERS, cache=RecordCache(folder))
    values: dict[str, Any] = {"suite": EVERY_PROBE, "context": context, "min_documents": 1}
    return audit(documents, model, base, **{**values, **fields})


@pytest.fixture
def small() -> list[AuditDocument]:
    return build_documents(6, vocab_size=90, size=60)


def test_a_second_audit_asks_no_model(small: list[AuditDocument], tmp_path: Path) -> None:
    canaries = build_canaries()

    def run(name: str) -> tuple[AuditOutcome, Held, Held]:
        model = Held(Scripted(say_by_context), identity="model")
        base = Held(know(small, "none"), identity="base")
        return (_run_kept(tmp_path / name, small, model, base, canaries=canaries), model, base)

    first, model, base = run("a")
    assert model.num_asked > 0
    assert base.num_asked > 0
    again, model, base = run("a")
    assert (model.num_asked, base.num_asked) == (0, 0)
    assert is_same(again, first)
    elsewhere, _, _ = run("b")
    assert is_same(elsewhere, first)


def test_whatever_numbers_depend_on_is_asked_anew(
    small: list[AuditDocument], tmp_path: Path
) -> None:
    """Another document, setting, model or arithmetic; but not another seed, bucket or probe."""
    generated: list[int] = []

    class Counting(WrongDecoder):
        def continue_greedily(self, requests: Any, *more: Any, **fields: Any) -> Any:
            generated.append(len(requests))
            return WrongDecoder.continue_greedily(self, requests, *more, **fields)

    def count(
        documents: Sequence[AuditDocument] = small, identity: str | None = "m", **fields: Any
    ) -> int:
        generated.clear()
        scorer = Scripted(say_by_context)
        suite = build_suite(ExtractionProbe(), MembershipProbe(scores=("loss", "zlib")))
        values: dict[str, Any] = {"suite": suite, "tiny_margin": 1e-3}
        held = Held(scorer, writer=Counting(), identity=identity)
        _run_kept(tmp_path, documents, held, **{**values, **fields})
        return sum(scorer.calls)

    def change(**fields: Any) -> list[AuditDocument]:
        return [replace(small[0], **fields), *small[1:]]

    assert count() == 18
    assert count() == 0
    changed = small[0].input_ids.copy()
    changed[7] += 1
    supervised = small[0].supervised.copy()
    supervised[10] = False
    assert count(change(input_ids=changed)) == 1
    assert count(change(supervised=supervised)) == 1
    assert count(change(supervised=supervised, format="messages")) == 1
    # Who a document is, and where it stands, is not what a model says of it.
    renamed = change(id="new", source="b.jsonl", text_hmac=None, num_repetitions=3, cluster=5)
    assert count(renamed) == 0
    assert count(small[::-1], seed=3) == 0
    assert count(identity="m bf16") == 18
    assert count(identity="other weights") == 18
    assert count(tiny_margin=0.25) == 18
    grid = GridProbe(prefix_tokens=(8,), continuation_tokens=(5,))
    probes = (
        (ExtractionProbe(continuation_tokens=40),),
        (ExtractionProbe(), grid),
        (ExtractionProbe(), SamplingProbe()),
        (ExtractionProbe(), MembershipProbe(scores=("loss",))),
    )
    for each in probes:
        suite = build_suite(*each)
        assert count(suite=suite) == 18
        assert (count(suite=suite), generated) == (0, [])
    # Only the texts depend on the number of edits.
    more_edits = build_suite(ExtractionProbe(max_edit_share=0.2))
    assert (count(suite=more_edits), generated != []) == (0, True)
    assert (count(suite=more_edits), generated) == (0, [])
    # Known one by one, in whichever suite.
    together = build_suite(ExtractionProbe(), grid, SamplingProbe())
    assert count(suite=together) == 0
    # Whose numbers nobody can name is asked each time.
    assert count(identity=None) == count(identity=None) == 18


def audit_on_ranks(
    documents: list[AuditDocument], folder: Path
) -> list[tuple[list[dict[str, Any]], Any, int]]:
    """Two audits after each other: with nothing kept, and with everything."""
    mesh = build_mesh(MeshShape(z=2), "cpu")
    layer = shard_scratch_model(
        build_tiny_llama(95), Assembly(mesh=mesh, device=torch.device("cpu"))
    )
    found = []
    with start_runtime() as runtime:
        for _ in range(2):
            model = Held(ModelScorer(layer.lm, 300, runtime), identity="m", max_tokens=64)
            context = AuditContext(codec=CHARACTERS, cache=RecordCache(folder), peers=runtime)
            outcome = audit(documents, model, suite=EVERY_PROBE, context=context, min_documents=1)
            found.append((list_records(outcome), outcome.summary, model.num_asked))
    return found


def test_two_ranks_agree_with_each_other_and_with_one(
    small: list[AuditDocument], tmp_path: Path, ranks: RankPool
) -> None:
    one, other = ranks(audit_on_ranks, 2, small, tmp_path)
    for (scores, summary, num_asked), theirs in zip(one, other, strict=True):
        assert (scores, summary, num_asked) == theirs
    (cold_scores, cold, num_asked), (warm_scores, warm, num_asked_again) = one
    assert (num_asked > 0, num_asked_again) == (True, 0)
    assert (warm_scores, warm) == (cold_scores, cold)
    alone = audit(
        small,
        Held(ModelScorer(build_tiny_layer(95), 300), max_tokens=64),
        suite=EVERY_PROBE,
        context=AuditContext(codec=CHARACTERS),
        min_documents=1,
    )
    for ours, theirs in zip(list_records(alone), cold_scores, strict=True):
        for name in ("num_correct", "first_divergence"):
            assert ours[f"extraction.{name}"] == theirs[f"extraction.{name}"]
        # Fifty fp32 log-probabilities, each good to about 1e-6.
        logprob = theirs["extraction.logprob"]
        assert ours["extraction.logprob"] == pytest.approx(logprob, abs=1e-4)
    assert [row.key for row in alone.summary.tables.results] == [
        row.key for row in cold.tables.results
    ]
