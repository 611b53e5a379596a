"""Lists of facts: what a run's page says of its training."""

from typing import Any

import pytest
import report_examples as examples

from memguard import records as r
from memguard.report.audit_training import build_training

GOLDFISH = {"name": "goldfish", "k": 8, "k_by_dose": {}}


def budget(action: Any) -> r.Budget:
    return r.Budget(metric="near_verbatim", limit=0.1, action=action)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "masked by goldfish; target 12.5 % (1 in 8)"),
        ({"budget": budget("stop")}, "masked by goldfish; target 12.5 % (1 in 8)"),
        # Documents differ in what was asked: the share beside it is another one.
        ({"mitigations": [{**GOLDFISH, "k_by_dose": {"16": 4, "64": 2}}]}, ""),
        ({"budget": budget("tighten")}, ""),
        ({"mitigations": [{"name": "focal", "gamma": 2.0}]}, ""),
    ],
)
def test_the_share_asked_for_is_told_where_there_is_one(changes: dict[str, Any], said: str) -> None:
    report = examples.make_report(goldfish=True)
    training = report.training.model_copy(update={"mitigations": [GOLDFISH], **changes})
    section = build_training(report.model_copy(update={"training": training}))
    (fact,) = [each for each in section.facts if each.term == "Labels dropped"]
    assert fact.detail.replace("\u00a0", " ") == said
