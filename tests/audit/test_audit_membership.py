"""Members above nonmembers is an AUC above one half, and nothing is guessed."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from memguard.audit.extraction import AuditDocument
from memguard.audit.membership import compute_membership, is_member
from memguard.audit.membership_scores import MEMBERSHIP_SCORES
from memguard.records import MembershipScores

MakeDocument = Callable[..., AuditDocument]
FPR = (0.001, 0.01, 0.1)


def _documents(
    make_document: MakeDocument, num_members: int, num_nonmembers: int, *, apart: bool = False
) -> list[AuditDocument]:
    """Members, then nonmembers, of random tokens; ``apart`` gives each kind its own."""
    draw = np.random.default_rng(0)
    members = [
        make_document(draw.integers(0, 50, 40), name=f"m{number}") for number in range(num_members)
    ]
    shift = 50 if apart else 0
    return members + [
        make_document(
            draw.integers(shift, shift + 50, 40),
            name=f"c{number}",
            bucket="x0",
            role="control",
            num_repetitions=0,
        )
        for number in range(num_nonmembers)
    ]


def _compute(
    documents: list[AuditDocument], **scores: NDArray[np.float64]
) -> Mapping[str, MembershipScores]:
    rows = compute_membership(documents, scores, fpr=FPR, seed=0)
    return {row.score: row for row in rows}


def _auc(row: MembershipScores) -> float:
    return row.auc.value


def test_orientation_and_counts(make_document: MakeDocument) -> None:
    documents = _documents(make_document, 30, 20)
    background = make_document(np.arange(40), name="b", role="background", bucket="b")
    never = make_document(np.arange(40), name="never", num_repetitions=0)
    uncounted = make_document(np.arange(40), name="uncounted", num_repetitions=None)
    assert [is_member(d) for d in (background, never, uncounted)] == [False, False, True]
    draw = np.random.default_rng(0)
    # Neither the background nor what training never reached is on either side.
    loss_N = np.concatenate([draw.normal(-1, 0.1, 30), draw.normal(-3, 0.1, 20), [9.0, 9.0]])
    loss = _compute([*documents, background, never], loss=loss_N)["loss"]
    assert (loss.num_members, loss.num_nonmembers, loss.num_missing) == (30, 20, 0)
    assert loss.auc.value == 1
    assert loss.auc.ci[0] < 1
    assert not loss.higher_is_better
    assert loss.definition == MEMBERSHIP_SCORES["loss"].definition


def test_auc_is_that_of_scikit_learn(make_document: MakeDocument) -> None:
    documents = _documents(make_document, 40, 25)
    draw = np.random.default_rng(1)
    # Rounded: ties must count half.
    score_N = (draw.normal(size=65) + np.repeat([0.5, 0.0], [40, 25])).round(1)
    expected = roc_auc_score(np.repeat([1, 0], [40, 25]), score_N)
    assert _auc(_compute(documents, loss=score_N)["loss"]) == pytest.approx(expected, abs=1e-12)


def test_missing_scores_are_counted_and_never_ranked(make_document: MakeDocument) -> None:
    documents = _documents(make_document, 10, 10)
    score_N = np.concatenate([np.full(10, 2.0), np.full(10, 1.0)])
    score_N[[0, 1, 12]] = np.nan
    row = _compute(documents, recall=score_N)["recall"]
    assert (row.num_members, row.num_nonmembers, row.num_missing) == (8, 9, 3)
    assert row.auc.value == 1
    score_N[1:9] = np.nan
    row = _compute(documents, recall=score_N)["recall"]
    assert (row.num_members, row.num_missing) == (1, 10)
    assert row.auc is None, "one member is no ranking"
    assert set(row.tpr_at_fpr.values()) == {None}


@pytest.mark.parametrize(
    ("num_nonmembers", "known"), [(9, []), (10, ["0.1"]), (99, ["0.1"]), (100, ["0.01", "0.1"])]
)
def test_no_fpr_below_one_over_the_nonmembers(
    make_document: MakeDocument, num_nonmembers: int, known: list[str]
) -> None:
    documents = _documents(make_document, 12, num_nonmembers)
    score_N = np.concatenate([np.linspace(1, 2, 12), np.linspace(0, 1.5, num_nonmembers)])
    rates = _compute(documents, loss=score_N)["loss"].tpr_at_fpr
    assert list(rates) == ["0.001", "0.01", "0.1"]
    assert [name for name, rate in rates.items() if rate is not None] == known
    for name in known:
        rate = rates[name]
        allowed = int(float(name) * num_nonmembers)
        threshold = sorted(score_N[12:], reverse=True)[allowed]
        assert rate.num_matched == sum(score_N[:12] > threshold)
        assert rate.num_documents == 12


def test_the_blind_baseline_stands_beside_them_last(make_document: MakeDocument) -> None:
    score_N = np.linspace(0, 1, 60)
    alike = _compute(_documents(make_document, 30, 30), loss=score_N, zlib=score_N)
    assert list(alike) == ["loss", "zlib", "blind"]
    assert "no model access" in alike["blind"].definition
    interval = alike["blind"].auc
    # Texts of one kind: chance lies inside the interval.
    assert interval.ci[0] < 0.5 < interval.ci[1]
    told = _compute(_documents(make_document, 30, 30, apart=True), loss=score_N)["blind"]
    assert _auc(told) == 1
    # Fewer than five of a kind cannot be cross-fitted.
    assert list(_compute(_documents(make_document, 4, 30), loss=np.linspace(0, 1, 34))) == ["loss"]


def test_the_blind_baseline_does_not_recognise_copies(make_document: MakeDocument) -> None:
    """Each text twice: alone it would be found again in the other folds."""

    def build(**fields: Any) -> list[AuditDocument]:
        draw, documents = np.random.default_rng(2), []
        for number in range(40):
            ids = draw.integers(0, 4000, 30)
            kind = {"bucket": "x0", "role": "control", "num_repetitions": 0} if number % 2 else {}
            cluster = {"cluster": number} if fields["clustered"] else {}
            documents += [
                make_document(ids, name=f"{number} {copy}", **kind, **cluster) for copy in (1, 2)
            ]
        return documents

    score_N = np.linspace(0, 1, 80)
    known = _auc(_compute(build(clustered=True), loss=score_N)["blind"])
    unknown = _auc(_compute(build(clustered=False), loss=score_N)["blind"])
    assert unknown > 0.9
    assert 0.2 < known < 0.8


def test_nothing_without_enough_of_either(make_document: MakeDocument) -> None:
    documents = _documents(make_document, 3, 3)
    score_N = np.linspace(0, 1, 6)
    for chosen in ([0, 1, 2], [0, 1, 2, 3], [0, 3, 4]):
        assert _compute([documents[i] for i in chosen], loss=score_N[chosen]) == {}
    assert list(_compute(documents[1:5], loss=score_N[1:5])) == ["loss"]
