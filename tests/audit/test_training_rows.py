"""Rows of a training: its held-out losses, and the audits during it."""

import pytest
from result_examples import rate_row

from memguard.audit.summary import tabulate_training
from memguard.records import ONE_TEXT, TrainingSummary, WatchedLine


@pytest.mark.parametrize(("nll", "num", "reason"), [(1.25, 9, None), (None, 1, ONE_TEXT)])
def test_losses_and_audits_during_training(nll: float | None, num: int, reason: str | None) -> None:
    training = TrainingSummary(
        num_steps=10,
        last_step=10,
        num_supervised_tokens=100,
        dropped_fraction=None,
        mitigations=[],
        train_s=1.0,
        heldout_nll=nll,
        base_heldout_nll=nll,
        heldout_bucket="heldout",
        heldout_num_documents=num,
        heldout_num_tokens=50,
    )
    learned = rate_row("extraction", "learned", "x4", 3, step=5)
    line = WatchedLine(step=5, audit_s=0.1, results=(learned,), trained=["x4"])
    tables = tabulate_training(training, [line])
    for model in ("trained", "base"):
        row = tables.find("heldout", "nll", "heldout", model=model)
        assert (row.value, row.num_documents, row.missing_because) == (nll, num, reason)
    assert tables.find("extraction", "learned", "x4", step=5) == learned
    assert [metric.metric for metric in tables.metrics] == ["nll", "learned"]
    assert not tabulate_training(None, []).results
    without = training.model_copy(update={"heldout_bucket": None})
    assert not tabulate_training(without, []).metrics
