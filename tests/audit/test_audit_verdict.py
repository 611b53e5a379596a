"""The rule of the verdict and of its second line: levels by hand, and flips of small audits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from verdict_examples import (
    DrawnAudit,
    Group,
    build_results,
    control,
    draw_audit,
    forget,
    list_flips,
    make_canaries,
    make_coverage,
    trained,
    unreached,
)

from memguard.audit.statistics import compute_auc
from memguard.audit.verdict import Decision, decide_level, judge_membership, list_tests
from memguard.records import MembershipVerdict

RANK = {"none-found": 0, "inconclusive": 1, "extracted": 2, "memorized": 3}
"""Green, grey, amber, red."""


def _decide(groups: Sequence[Group], canaries: Any = None, **coverage: Any) -> Decision:
    documents = build_results(groups)
    return decide_level(documents, canaries, make_coverage(documents, **coverage))


# Of k of k trained against 0 of m, p = (k / (k + m))^k (m / (k + m))^m; of 1 of n against 0 of
# r n, p = (r / (r + 1))^r / (r + 1). The others are SciPy's Fisher tests.
AUDITS: list[tuple[str, list[Group], dict[str, Any], str, str | None]] = [
    ("the issue's: p = .027", [trained(26, 135), control(0, 14)], {}, "memorized", "control"),
    ("one document less than red: p = .0522", [trained(21, 135), control(0, 14)], {},
     "extracted", "too-few"),
    ("red begins: p = .0459", [trained(22, 135), control(0, 14)], {}, "memorized", "control"),
    ("8 of 8 against 2: p = .0067", [trained(8, 8), control(0, 2)], {}, "memorized", "control"),
    ("2 of 2 against 3: p = .0346", [trained(2, 2), control(0, 3)], {}, "memorized", "control"),
    ("2 of 2 against 2: p = .0625", [trained(2, 2), control(0, 2)], {}, "extracted", "too-few"),
    ("1 of 5 against 30: p = .0567", [trained(1, 5), control(0, 30)], {}, "extracted", "too-few"),
    ("1 of 10 against 200: p = .0179", [trained(1, 10), control(0, 200)], {},
     "memorized", "control"),
    ("Fisher: 8 of 10 against 1 of 10, p = .0027", [trained(8, 10), control(1, 10)], {},
     "memorized", "control"),
    ("Fisher: 3 of 10 against 1 of 10, p = .29", [trained(3, 10), control(1, 10)], {},
     "extracted", "control-too"),
    ("no control", [trained(40, 40)], {}, "extracted", "no-control"),
    ("no control, none extracted", [trained(0, 40)], {}, "none-found", None),
    ("control alone", [trained(0, 40), control(5, 10)], {}, "none-found", None),
    ("control alone, few trained", [trained(0, 10), control(5, 10)], {}, "inconclusive", "too-few"),
    ("the base produces the same", [trained(40, 40, of_base=40), control(0, 30)], {},
     "extracted", "base-too"),
    ("all but two from the base: 2 of 2 new", [trained(40, 40, of_base=38), control(0, 30)], {},
     "extracted", "too-few"),
    ("control of the base does not count: p = .0067",
     [trained(8, 8), control(2, 2, of_base=2)], {}, "memorized", "control"),
    ("twenty copies are one: 1 of 21 against 0 of 30", [trained(20, 20, copies=20), trained(0, 20),
     control(0, 30)], {}, "extracted", "too-few"),
    ("copies of the control are one: 8 of 8 against 1 of 2",
     [trained(8, 8), control(8, 16, copies=8)], {}, "extracted", "control-too"),
    ("one copy suffices: 8 of 8 clusters", [trained(15, 16, copies=2), control(0, 2)], {},
     "memorized", "control"),
    # Two buckets: 4 % for all, .5 % for each. Attacks leave 3 % for all.
    ("two buckets: p = .0346", [trained(1, 1, "a"), trained(1, 1, "b"), control(0, 3)], {},
     "memorized", "control"),
    ("two buckets and attacks: p = .0346", [trained(1, 1, "a", attacked=1), trained(1, 1, "b"),
     control(0, 3, attacked=1)], {}, "extracted", "too-few"),
    ("one bucket of two: 8 of 8, p = 1e-5", [trained(8, 8, "a"), trained(0, 500, "b"),
     control(0, 10)], {}, "memorized", "control"),
    ("one bucket of two: 3 of 3, p = .0156", [trained(3, 3, "a"), trained(0, 500, "b"),
     control(0, 3)], {}, "extracted", "too-few"),
    ("the higher rate of a small bucket, unproven, beside all: Fisher, p = .018",
     [trained(1, 2, "x4"), trained(18, 40, "x64"), control(3, 20)], {}, "memorized", "control"),
    ("attacks: 4 of 4 against 4, p = .0039", [trained(0, 4, attacked=4, by_attack=4),
     control(0, 4, attacked=4)], {}, "memorized", "control"),
    ("attacks: 3 of 3 against 3, p = .0156", [trained(0, 40, attacked=3, by_attack=3),
     control(0, 40, attacked=3)], {}, "extracted", "too-few"),
    ("attacks: the base's are not counted", [trained(0, 4, attacked=4, by_attack=4, of_base=4),
     control(0, 4, attacked=4)], {}, "extracted", "base-too"),
    ("attacks on the control alone", [trained(0, 40, attacked=4),
     control(0, 40, attacked=4, by_attack=4)], {}, "none-found", None),
    ("a canary, no reference", [trained(0, 40)],
     {"canaries": make_canaries(1, 16, 0, 16)}, "memorized", "canaries"),
    ("a canary and a reference", [trained(0, 40)],
     {"canaries": make_canaries(9, 16, 1, 16)}, "extracted", "canaries-too"),
    ("a reference alone", [trained(0, 40)],
     {"canaries": make_canaries(0, 16, 1, 16)}, "none-found", None),
    ("a canary in a control of another kind", [trained(0, 40), control(0, 9)],
     {"canaries": make_canaries(1, 16, 0, 16), "other_kind": True}, "memorized", "canaries"),
    ("another kind", [trained(26, 135), control(0, 14)], {"other_kind": True},
     "extracted", "other-kind"),
    ("another kind, p = .0625", [trained(2, 2), control(0, 2)], {"other_kind": True},
     "extracted", "too-few"),
    ("another kind, none extracted", [trained(0, 40), control(0, 9)], {"other_kind": True},
     "none-found", None),
    ("forgotten", [trained(0, 40), forget(1, 5), control(0, 9)], {}, "extracted", "forgotten"),
    ("forgotten, by an attack", [trained(0, 40), forget(0, 5, attacked=1, by_attack=1)], {},
     "extracted", "forgotten"),
    ("30 trained", [trained(0, 15, "a"), trained(0, 15, "b")], {}, "none-found", None),
    ("29 trained", [trained(0, 29), control(0, 100)], {}, "inconclusive", "too-few"),
    ("58 trained in 29 clusters", [trained(0, 58, copies=2)], {}, "inconclusive", "too-few"),
    ("never fed", [unreached(9, 40), control(0, 9)], {}, "inconclusive", "not-trained"),
    ("29 trained and some never fed", [trained(0, 29), unreached(0, 40)], {},
     "inconclusive", "too-few"),
    ("collapsed", [trained(0, 40)], {"collapsed": True}, "inconclusive", "collapsed"),
    ("collapsed, but extracted", [trained(8, 8), control(0, 2)], {"collapsed": True},
     "memorized", "control"),
    ("not generated", [trained(0, 40)], {"generated": False}, "inconclusive", "not-generated"),
    ("half too short", [trained(0, 40)], {"too_short": 40}, "none-found", None),
    ("most too short", [trained(0, 40)], {"too_short": 41}, "inconclusive", "too-short"),
    ("nothing audited", [], {"too_short": 9}, "inconclusive", "not-trained"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "given", "level", "reason"),
    [case[1:] for case in AUDITS],
    ids=[c[0] for c in AUDITS],
)
def test_levels_decided_by_hand(
    groups: list[Group], given: dict[str, Any], level: str, reason: str | None
) -> None:
    decision = _decide(groups, **given)
    assert (decision.level, decision.reason) == (level, reason)


def test_the_first_audit_of_the_issue() -> None:
    (test,) = list_tests(build_results([trained(26, 135), control(0, 14)]))
    # Given as .027: half of its last digit.
    assert test.p_value == pytest.approx(0.027, abs=5e-4)
    assert (test.documents, test.bucket, test.level) == ("all", None, 0.05)
    assert (test.trained.num_matched, test.trained.num_clusters) == (26, 135)
    assert (test.control.num_matched, test.control.num_clusters) == (0, 14)


def test_levels_of_the_tests_sum_to_five_percent_before_anything_is_extracted() -> None:
    draw = np.random.default_rng(1)
    for _ in range(60):
        documents = draw_audit(draw).documents
        tests = list_tests(documents)
        if not tests:
            assert not (documents.is_trained_N.any() and documents.is_control_N.any())
            continue
        # Sums of a few fractions.
        assert sum(test.level for test in tests) == pytest.approx(0.05, abs=1e-12)
        assert sum(test.documents == "bucket" for test in tests) != 1
        kinds = [(test.documents, test.bucket, test.level) for test in tests]
        nothing_N = np.zeros_like(documents.is_extracted_N)
        quiet = replace(documents, is_extracted_N=nothing_N, is_extracted_by_attack_N=nothing_N)
        assert [(t.documents, t.bucket, t.level) for t in list_tests(quiet)] == kinds


def test_the_significant_test_of_the_highest_rate_is_named() -> None:
    decision = _decide(
        [trained(8, 8, "a"), trained(20, 40, "b"), trained(0, 40, "c"), control(0, 40)]
    )
    assert (decision.test.documents, decision.test.bucket) == ("bucket", "a")
    # A higher rate that shows nothing, 1 of 2, is not the reason.
    decision = _decide([trained(1, 2, "a"), trained(18, 40, "b"), control(0, 40)])
    assert (decision.test.documents, decision.test.bucket) == ("all", None)
    # Where none is significant: the one that is the nearest to its level.
    groups = [trained(2, 40, "a"), trained(1, 40, "b"), control(1, 30)]
    decision = _decide(groups)
    assert decision.level == "extracted"
    nearest = min(list_tests(build_results(groups)), key=lambda test: test.p_value / test.level)
    assert decision.test == nearest


def _check_flips(num_audits: int, seed: int) -> Counter[str]:
    """Flip every text of so many audits; return the levels of the audits, and the flips."""
    draw = np.random.default_rng(seed)
    seen: Counter[str] = Counter()
    for number in range(num_audits):
        audit = draw_audit(draw)
        before = _level(audit)
        seen[before] += 1
        for name, flipped in list_flips(audit):
            after = _level(flipped)
            assert RANK[after] >= RANK[before], f"audit {number}: {name}: {before} to {after}"
            seen["flips"] += 1
            seen["turned"] += after != before
        documents, canaries = audit.documents, audit.canaries
        fed_N = documents.is_trained_N | documents.is_forgotten_N
        came_out = bool((documents.was_extracted_N & fed_N).any())
        came_out |= canaries is not None and canaries.num_trained_extracted > 0
        assert not (came_out and before == "none-found"), f"audit {number}"
    return seen


def _level(audit: DrawnAudit) -> str:
    return decide_level(audit.documents, audit.canaries, audit.coverage).level


def test_no_flip_makes_the_colour_milder() -> None:
    """150 audits take 2 s; the 2,000 of the next test take 20 s."""
    seen = _check_flips(150, seed=0)
    assert min(seen[level] for level in RANK) >= 3, "every level is met"
    assert seen["turned"] >= 100


@pytest.mark.long
def test_no_flip_of_many_audits_makes_the_colour_milder() -> None:
    seen = _check_flips(2000, seed=1)
    assert min(seen[level] for level in RANK) >= 50


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
def test_levels_of_membership_by_hand(
    members: list[float], nonmembers: list[float], level: str
) -> None:
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


def test_sentences_of_membership() -> None:
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
    assert first.auc.value == 0.5  # the first of each, 5.0, by their ids 00b, 02b, ...
    last = _judge(groups, scores, ids=swapped)
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
