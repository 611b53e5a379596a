"""The rule of the verdict and of its second line: levels by hand.

Flips of small audits that are drawn at random: test_verdict_monotone.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from verdict_examples import (
    Group,
    build_results,
    control,
    forget,
    make_canaries,
    make_coverage,
    trained,
    unreached,
)

from memguard.audit.statistics import compute_auc
from memguard.audit.verdict import Decision, decide_level, judge_membership, list_tests
from memguard.records import MembershipVerdict, VerdictTest


def _list_tests(groups: Sequence[Group], **coverage: Any) -> list[VerdictTest]:
    documents = build_results(groups)
    return list_tests(documents, make_coverage(documents, **coverage))


def _decide(groups: Sequence[Group], canaries: Any = None, **coverage: Any) -> Decision:
    documents = build_results(groups)
    return decide_level(documents, canaries, make_coverage(documents, **coverage))


# Of k of k trained against 0 of m, p = (k / (k + m))^k (m / (k + m))^m; of 1 of n against 0 of
# r n, p = (r / (r + 1))^r / (r + 1). The others are SciPy's Fisher tests.
GIVEN = {"control": "given"}
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
    ("another kind, own text and a base", [trained(30, 40), control(0, 8)],
     {"other_kind": True, "base": True}, "memorized", "control"),
    ("another kind, form letters", [trained(60, 60, own=0), control(0, 8)],
     {"other_kind": True, "base": True}, "extracted", "other-kind"),
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
    ("nothing audited", [], {"unaudited": 9}, "inconclusive", "unaudited"),
    # Not audited: u + (1 - u) b of at most 20 %, with b = 1 - .025^(1 / n).
    ("3 not audited beside 30", [trained(0, 30)], {"unaudited": 3}, "none-found", None),
    ("4 beside 30", [trained(0, 30)], {"unaudited": 4}, "inconclusive", "unaudited"),
    ("4 beside 36", [trained(0, 36)], {"unaudited": 4}, "none-found", None),
    ("30 beside 36", [trained(0, 36)], {"unaudited": 30}, "inconclusive", "unaudited"),
    ("5 beside 40", [trained(0, 40)], {"unaudited": 5}, "none-found", None),
    ("6 beside 40", [trained(0, 40)], {"unaudited": 6}, "inconclusive", "unaudited"),
    ("10 beside 60", [trained(0, 60)], {"unaudited": 10}, "none-found", None),
    ("29 beside 135", [trained(0, 135)], {"unaudited": 29}, "none-found", None),
    ("245 beside 1,000", [trained(0, 1000)], {"unaudited": 245}, "none-found", None),
    ("246 beside 1,000", [trained(0, 1000)], {"unaudited": 246}, "inconclusive", "unaudited"),
    ("30 short answers not audited, extracted", [trained(1, 36), control(0, 5)],
     {"unaudited": 30}, "extracted", "too-few"),
    ("half of them copies of one: they count as 4", [trained(0, 29), trained(0, 29, copies=29)],
     {}, "inconclusive", "too-few"),
    ("a weaker prefix", [trained(0, 40)], {"weakened": ("5 tokens of prefix",)},
     "inconclusive", "weakened"),
    ("a weaker prefix, but extracted", [trained(8, 8), control(0, 2)],
     {"weakened": ("5 tokens of prefix",)}, "memorized", "control"),
    ("generation ended at its limit", [trained(0, 40)], {"limited": True},
     "inconclusive", "not-generated"),
    # A given control: its own texts with own ones, others with others, each at half the level.
    ("given, all own", [trained(22, 135), control(0, 14)], GIVEN, "memorized", "control"),
    ("given: letters that were learned beside passages", [trained(20, 60, own=20), control(0, 30)],
     GIVEN, "memorized", "control"),
    ("the same, 20 letters extracted of which the control has none",
     [trained(20, 20, own=0), trained(0, 40), control(0, 30)], GIVEN, "extracted", "too-few"),
    ("both kinds on both sides: p = .0346 of 5 %", [trained(2, 2), trained(0, 8, own=0),
     control(0, 3), control(0, 3, own=0)], GIVEN, "extracted", "too-few"),
    ("others with others: p = .0067", [trained(8, 8, own=0), trained(0, 2), control(0, 2, own=0),
     control(0, 3)], GIVEN, "memorized", "control"),
    ("a control of four texts", [trained(40, 40), control(0, 4)], GIVEN, "extracted", "other-kind"),
    ("the same with a base", [trained(40, 40), control(0, 4)], {**GIVEN, "base": True},
     "memorized", "control"),
    ("the same, drawn", [trained(40, 40), control(0, 4)], {}, "memorized", "control"),
    ("against one own passage, with a base", [trained(12, 12), control(0, 1)],
     {**GIVEN, "base": True}, "memorized", "control"),
    ("letters against four passages, with a base", [trained(60, 60, own=0), control(0, 4)],
     {**GIVEN, "base": True}, "extracted", "other-kind"),
    ("four letters against many, with a base", [trained(4, 4, own=0), control(0, 40, own=0)],
     {**GIVEN, "base": True}, "extracted", "other-kind"),
    # Another window has .5 %, which the main test gives up; generation shares 1 % with attacks.
    ("windows: 6 of 40 against 30, p = .0088", [trained(0, 40, windows=6),
     control(0, 30, windows=0)], {}, "extracted", "too-few"),
    ("windows: 7 of 40 against 30, p = .0044", [trained(0, 40, windows=7),
     control(0, 30, windows=0)], {}, "memorized", "control"),
    ("windows: what the base produces is not counted", [trained(0, 40, windows=7, of_base=7),
     control(0, 30, windows=0)], {"base": True}, "extracted", "base-too"),
    ("22 of 135 beside windows: p = .0459 of 4.5 %", [trained(22, 135, windows=0),
     control(0, 14, windows=0)], {}, "extracted", "too-few"),
    ("windows of the control alone", [trained(0, 40, windows=0), control(0, 30, windows=9)], {},
     "none-found", None),
    ("windows of documents to be forgotten", [trained(0, 40, windows=0), forget(0, 5, windows=1)],
     {}, "extracted", "forgotten"),
    ("generated: 6 of 40 against 30, p = .0088", [trained(0, 40, generated=6),
     control(0, 30, generated=0)], {}, "memorized", "control"),
    ("generated beside attacks: .5 % each", [trained(0, 40, generated=6, attacked=20),
     control(0, 30, generated=0, attacked=15)], {}, "extracted", "too-few"),
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
    (test,) = _list_tests([trained(26, 135), control(0, 14)])
    # Given as .027: half of its last digit.
    assert test.p_value == pytest.approx(0.027, abs=5e-4)
    assert (test.documents, test.texts, test.bucket, test.level) == ("all", "all", None, 0.05)
    assert (test.trained.num_matched, test.trained.num_clusters) == (26, 135)
    assert (test.control.num_matched, test.control.num_clusters) == (0, 14)


@pytest.mark.parametrize(
    ("kind", "levels"),
    [
        # 5 % less .5 % of windows and 1 % each of buckets and of attacks with generation.
        ("drawn", {
            "all all": 0.025, "bucket all": 0.005, "attacked all": 0.005, "generated all": 0.005,
            "windows all": 0.005}),
        # Bucket b has no other texts; text of windows and of generation is own text.
        ("given", {
            "all own": 0.0125, "all others": 0.0125, "bucket own": 0.0025, "bucket others": 0.0025,
            "attacked own": 0.0025, "attacked others": 0.0025, "generated own": 0.005,
            "windows own": 0.005}),
        ("other-kind", {
            "all own": 0.025, "bucket own": 0.005, "attacked own": 0.005, "generated own": 0.005,
            "windows own": 0.005}),
    ],
)  # fmt: skip
def test_levels_are_fixed_before_anything_is_extracted(kind: str, levels: dict[str, float]) -> None:
    def list_levels(extracted: int) -> list[tuple[str, str | None, float]]:
        found = {"generated": extracted, "windows": extracted, "by_attack": extracted}
        tests = _list_tests(
            [
                trained(extracted, 9, "a", own=4, attacked=9, **found),
                trained(extracted, 9, "b", attacked=9, **found),
                control(0, 9, own=4, attacked=9, generated=0, windows=0),
            ],
            control=kind,
            base=True,
        )
        return [(f"{test.documents} {test.texts}", test.bucket, test.level) for test in tests]

    found = list_levels(0)
    assert found == list_levels(3)
    assert sum(level for *_, level in found) == pytest.approx(0.05, abs=1e-12)
    of_a = {name: level for name, bucket, level in found if bucket != "b"}
    assert of_a == pytest.approx(levels, abs=1e-12)


def test_a_passage_beside_a_control_of_forms_is_not_compared_by_its_windows() -> None:
    """A form has no own text, so that none of the 30 could have been counted."""
    groups = [trained(0, 40, windows=40, generated=40), control(0, 30, own=0, windows=0,
              generated=0)]  # fmt: skip
    assert _list_tests(groups, control="given") == []
    assert _decide(groups, control="given").level == "extracted"


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
    nearest = min(_list_tests(groups), key=lambda test: test.p_value / test.level)
    assert decision.test == nearest


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
        # Perfectly apart: violet from ten of either kind on, however few the controls.
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
        (_spread(30, 0, 1), _spread(30, 0, 1), "not-seen"),
        # Few trained texts show nothing, so that leaving some out does not turn a sign into none.
        (_spread(29, 0, 1), _spread(30, 0, 1), "cannot-be-judged"),
        # Uniform, shifted by .12: AUC .62 with an interval of about .57 to .67.
        (_spread(400, 0.12, 1.12), _spread(400, 0, 1), "slightly"),
        (_spread(400, 0, 1), _spread(400, 0.12, 1.12), "slightly"),
    ],
)
def test_levels_of_membership_by_hand(
    members: list[float], nonmembers: list[float], level: str
) -> None:
    groups = [trained(0, len(members)), control(0, len(nonmembers))]
    scores = {"loss_minus_base": np.array(members + nonmembers)}
    found = _judge(groups, scores, has_base=True)
    assert found.level == level
    # Without a base, scores that show nothing are no sign of anything.
    alone = _judge(groups, members + nonmembers)
    assert alone.level == ("cannot-be-judged" if level == "not-seen" else level)
    assert (alone.lack == "no-base") == (level == "not-seen")
    assert (found.num_members, found.num_nonmembers) == (len(members), len(nonmembers))
    if len(members) > 1:
        assert found.auc == compute_auc(members, nonmembers)
    other = _judge(groups, members + nonmembers, is_other_kind=True)
    assert other.level == "cannot-be-judged"
    assert other.sentence == (
        "Whether an outsider can tell which documents were trained was not judged: the control is "
        "another kind of text."
    )


def test_sentences_of_membership() -> None:
    far, near = _spread(40, 2, 3), _spread(40, 0, 1)
    told = _judge([trained(0, 40), control(0, 40)], far + near).sentence
    assert told.startswith(
        "An outsider can tell which documents were trained: AUC 1.00 (95 % CI 0."
    )
    assert told.endswith("–1.00; 0.5 is guessing).")
    lower = _judge([trained(0, 40), control(0, 40)], near + far).sentence
    assert "can tell which documents were trained, by lower scores: AUC 0.00 (" in lower
    few = _judge([trained(0, 40), control(0, 9)], far + near[:9]).sentence
    assert few.endswith(" was not judged: 9 of 30 unseen texts.")
    one = _judge([trained(0, 1), control(0, 40)], far[:1] + near).sentence
    assert one.endswith(" was not judged: 1 of 30 trained texts.")
    groups = [trained(0, 40), control(0, 40)]
    assert _judge(groups, near + near).sentence.endswith(
        " was not judged: losses of a base model were not compared."
    )
    scores = {"loss_minus_base": np.array(near + near)}
    same = _judge(groups, scores, has_base=True).sentence
    assert same.startswith("No sign of which documents were trained: AUC 0.50 (")
    shifted = [value + 0.12 for value in _spread(400, 0, 1)]
    slightly = _judge([trained(0, 400), control(0, 400)], shifted + _spread(400, 0, 1)).sentence
    assert slightly.startswith("An outsider has a slight sign of which documents were trained: AUC")


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
    assert "no unseen text was audited" in lonely.sentence


def test_documents_without_a_score_or_never_trained_are_left_out() -> None:
    groups = [trained(0, 12), unreached(0, 5), forget(0, 5), control(0, 12)]
    scores = np.array(_spread(12, 2, 3) + [9.0] * 10 + _spread(12, 0, 1))
    scores[[0, 30]] = np.nan
    found = _judge(groups, scores)
    assert (found.num_members, found.num_nonmembers) == (11, 11)
    assert found.level == "told-apart"
