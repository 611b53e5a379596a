"""The second line of the verdict: levels by hand, one document a cluster, one score."""

from typing import Any

import numpy as np
import pytest
from verdict_examples import Group, build_results, control, forget, trained, unreached

from memguard.audit.statistics import compute_auc
from memguard.audit.verdict import judge_membership
from memguard.records import MembershipVerdict


def _judge(groups: list[Group], scores: Any, **fields: Any) -> MembershipVerdict:
    documents = build_results(groups)
    ids = fields.pop("ids", [f"{n:03}" for n in range(len(documents.cluster_N))])
    if not isinstance(scores, dict):
        scores = {"loss": np.asarray(scores, dtype=np.float64)}
    values = {"has_base": False, "is_other_kind": False, **fields}
    return judge_membership(scores, ids, documents, **values)


def _spread(num: int, low: float, high: float) -> list[float]:
    return np.linspace(low, high, num).tolist()


@pytest.mark.parametrize(
    ("members", "nonmembers", "level"),
    [
        # Perfectly apart: amber from ten of either kind on, however few the controls.
        (_spread(10, 2, 3), _spread(10, 0, 1), "told-apart"),
        (_spread(10, 0, 1), _spread(10, 2, 3), "told-apart"),
        (_spread(9, 2, 3), _spread(30, 0, 1), "slightly"),
        (_spread(9, 2, 3), _spread(29, 0, 1), "cannot-be-judged"),
        (_spread(40, 2, 3), _spread(9, 0, 1), "cannot-be-judged"),
        (_spread(2, 2, 3), _spread(30, 0, 1), "slightly"),
        (_spread(1, 2, 3), _spread(30, 0, 1), "cannot-be-judged"),
        # The same scores: AUC 0.5.
        (_spread(40, 0, 1), _spread(30, 0, 1), "not-seen"),
        (_spread(40, 0, 1), _spread(29, 0, 1), "cannot-be-judged"),
        (_spread(2, 0, 1), _spread(30, 0, 1), "not-seen"),
        # Uniform, shifted by .12: AUC .62 with an interval of about .57 to .67.
        (_spread(400, 0.12, 1.12), _spread(400, 0, 1), "slightly"),
        (_spread(400, 0, 1), _spread(400, 0.12, 1.12), "slightly"),
    ],
)
def test_levels_by_hand(members: list[float], nonmembers: list[float], level: str) -> None:
    groups = [trained(0, len(members)), control(0, len(nonmembers))]
    found = _judge(groups, members + nonmembers)
    assert found.level == level
    assert (found.num_members, found.num_nonmembers) == (len(members), len(nonmembers))
    if len(members) > 1:
        assert found.auc == compute_auc(members, nonmembers)
    other = _judge(groups, members + nonmembers, is_other_kind=True)
    assert other.level == "cannot-be-judged"
    assert other.sentence == (
        "Whether a document was trained cannot be judged: the control is another kind of text."
    )


def test_sentences() -> None:
    far, near = _spread(40, 2, 3), _spread(40, 0, 1)
    told = _judge([trained(0, 40), control(0, 40)], far + near).sentence
    assert told.startswith("Whether a document was trained can be told: AUC 1.00 (95 % CI 0.")
    assert told.endswith("–1.00; 0.5 is chance).")
    lower = _judge([trained(0, 40), control(0, 40)], near + far).sentence
    assert lower.startswith("Whether a document was trained can be told, by lower scores: AUC 0.00")
    few = _judge([trained(0, 40), control(0, 9)], far + near[:9]).sentence
    assert few == (
        "Whether a document was trained cannot be judged: it needs 30 unseen texts, there are 9."
    )
    one = _judge([trained(0, 1), control(0, 40)], far[:1] + near).sentence
    assert one == (
        "Whether a document was trained cannot be judged: it needs two trained texts, there is 1."
    )
    same = _judge([trained(0, 40), control(0, 40)], near + near).sentence
    assert same.startswith("The model gave no sign of whether a document was trained: AUC 0.50 (")
    shifted = [value + 0.12 for value in _spread(400, 0, 1)]
    slightly = _judge([trained(0, 400), control(0, 400)], shifted + _spread(400, 0, 1)).sentence
    assert "can be told slightly better than by chance: AUC 0.61 (95 % CI 0." in slightly


def test_the_first_document_by_id_stands_for_its_cluster() -> None:
    # Two of each cluster; the last in the order has the first id, and a score of its own.
    groups = [trained(0, 20, copies=2), control(0, 20, copies=2)]
    scores = [5.0, 0.0] * 10 + [5.0, 1.0] * 10
    ids = [f"{place:02}{'ba'[place % 2]}" for place in range(40)]
    swapped = [f"{place // 2:02}{'ba'[place % 2]}" for place in range(40)]
    first = _judge(groups, scores, ids=ids)
    assert (first.num_members, first.num_nonmembers) == (10, 10)
    assert first.auc is not None
    assert first.auc.value == 0.5  # the first of each, 5.0, by their ids 00b, 02b, ...
    last = _judge(groups, scores, ids=swapped)
    assert last.auc is not None
    assert last.auc.value == 0.0


def test_the_score_is_fixed_beforehand() -> None:
    groups = [trained(0, 30), control(0, 30)]
    far = np.array(_spread(30, 2, 3) + _spread(30, 0, 1))
    scores = {"loss": far, "loss_minus_base": np.zeros(60), "min_k": far}
    alone = _judge(groups, scores)
    beside = _judge(groups, scores, has_base=True)
    assert (alone.score, alone.level) == ("loss", "told-apart")
    assert (beside.score, beside.level) == ("loss_minus_base", "not-seen")
    missing = _judge(groups, {"loss": far}, has_base=True)
    assert (missing.level, missing.score, missing.auc) == ("not-measured", None, None)
    assert "the suite has no membership score" in missing.sentence
    lonely = _judge([trained(0, 30)], far[:30])
    assert lonely.level == "not-measured"
    assert "there are no unseen ones" in lonely.sentence


def test_documents_without_a_score_or_never_trained_are_left_out() -> None:
    groups = [trained(0, 12), unreached(0, 5), forget(0, 5), control(0, 12)]
    scores = np.array(_spread(12, 2, 3) + [9.0] * 10 + _spread(12, 0, 1))
    scores[[0, 30]] = np.nan
    found = _judge(groups, scores)
    assert (found.num_members, found.num_nonmembers) == (11, 11)
    assert found.level == "told-apart"
