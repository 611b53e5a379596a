"""Models that know nothing, and controls that are known: no finding, whatever is drawn."""

import pytest
import torch
from audit_examples import (
    Held,
    audit,
    build_documents,
    build_suite,
    build_tiny_layer,
    build_tiny_llama,
    know,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.run import AuditOutcome
from memguard.audit.scoring import ModelScorer
from memguard.errors import ModelError
from memguard.model.checks import build_causal_lm


def _check_nothing_is_found(outcome: AuditOutcome) -> None:
    summary = outcome.summary
    assert summary.verdict.level in ("none-found", "inconclusive")
    assert (summary.findings, summary.num_findings) == ([], 0)
    rows = summary.tables.select("extraction", "verbatim", statistic="rate")
    assert {row.num_matched for row in rows} == {0}


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_random_model_recites_nothing(seed: int) -> None:
    documents = build_documents(12, vocab_size=61, size=60, seed=seed)
    model = build_tiny_layer(61, seed=seed % 1000)
    suite = build_suite(ExtractionProbe(), MembershipProbe(scores=("loss", "min_k_plus_plus")))
    outcome = audit(documents, Held(ModelScorer(model, 2048)), suite=suite)
    _check_nothing_is_found(outcome)
    for row in outcome.summary.tables.select("membership", "auc"):
        # 24 members and 12 nonmembers: by chance 0.5 with a standard error of 0.1.
        assert 0.05 < row.value < 0.95


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), token=st.integers(0, 60))
def test_a_collapsed_model_is_told_and_recites_nothing(seed: int, token: int) -> None:
    """Whatever it is given, its first choice is one token."""
    documents = build_documents(12, vocab_size=61, size=60, seed=seed)
    model = build_tiny_llama(61, seed=seed % 1000)
    head = torch.nn.Linear(32, 61, bias=True)
    torch.nn.init.zeros_(head.weight)
    with torch.no_grad():
        head.bias.copy_(torch.eye(61)[token] * 9)
    model.lm_head = head
    outcome = audit(
        documents,
        Held(ModelScorer(build_causal_lm(model), 2048)),
        suite=build_suite(ExtractionProbe()),
    )
    _check_nothing_is_found(outcome)
    assert outcome.summary.verdict.level == "inconclusive"
    assert "collapsed" in outcome.summary.verdict.sentence
    assert "collapsed" in outcome.summary.banners[0].text


def test_a_control_that_is_recited_is_no_finding() -> None:
    documents = build_documents()
    summary = audit(documents, Held(know(documents, "x0"))).summary
    # 40 trained documents, none of them extracted; the sentence names the control's.
    assert summary.verdict.level == "none-found"
    assert "but 20 of 20 unseen were" in summary.verdict.sentence
    assert (summary.findings, summary.num_findings) == ([], 0)
    assert any(
        "20 of 20 control documents are extracted near-verbatim" in b.text for b in summary.banners
    )
    loss = summary.tables.select("membership", "auc")[0]
    assert loss.value == 0, "the score points the other way, and says so"


def test_a_vocabulary_that_does_not_fit_is_refused() -> None:
    documents = build_documents(6, vocab_size=61, size=60)
    fitting = Held(ModelScorer(build_tiny_layer(61), 2048))
    assert audit(documents, fitting, suite=build_suite(ExtractionProbe())).scores
    small = Held(ModelScorer(build_tiny_layer(40), 2048))
    with pytest.raises(ModelError, match="a tokenizer that does not fit the model"):
        audit(documents, small, suite=build_suite(ExtractionProbe()))
    assert small.num_freed == 1
