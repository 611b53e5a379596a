"""The blind baseline against scikit-learn's naive Bayes; kinds of documents that it tells apart."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.naive_bayes import MultinomialNB

from memguard.audit.plan import AuditPlan
from memguard.audit.statistics import blind, compute_auc
from memguard.audit.statistics.blind import (
    NUM_FOLDS,
    compare_kinds,
    score_blind,
    score_blind_documents,
)
from memguard.audit.suite import load_suite
from memguard.audit.windows import AuditDocument
from memguard.seeds import derive_generator


def _draw_documents(
    draw: np.random.Generator, count: int, *, shift: float = 0.0, num_ids: int = 300
) -> list[NDArray[np.int64]]:
    """Documents of 20 to 80 tokens; ``shift`` makes the first ids more frequent."""
    weights = 1.0 / np.arange(1, num_ids + 1)
    weights[:20] *= 1 + shift
    weights /= weights.sum()
    return [draw.choice(num_ids, size=draw.integers(20, 81), p=weights) for _ in range(count)]


def _generator() -> np.random.Generator:
    return derive_generator(0, "blind baseline")


def test_scores_are_scikit_learns() -> None:
    draw = np.random.default_rng(0)
    documents = [*_draw_documents(draw, 30, shift=1), *_draw_documents(draw, 20)]
    documents[3] = 50_000 + 7 * documents[3]  # Ids need not be dense.
    member = np.arange(50) < 30
    scores = score_blind(documents, member, generator=_generator())
    assert scores is not None
    fold = blind._assign_folds(member, None, _generator())
    assert fold is not None
    ids = np.unique(np.concatenate(documents))
    counts = np.array([[(tokens == i).sum() for i in ids] for tokens in documents])
    for held in range(NUM_FOLDS):
        model = MultinomialNB(alpha=1.0, fit_prior=False)
        model.fit(counts[fold != held], member[fold != held])
        log_proba = model.predict_joint_log_proba(counts[fold == held])
        # Sums of 80 terms of about 5; the order of the sums differs.
        np.testing.assert_allclose(
            scores[fold == held], log_proba[:, 1] - log_proba[:, 0], atol=1e-9, rtol=0
        )


def test_folds_hold_alike_shares_of_either_kind() -> None:
    member = np.arange(53) < 21
    fold = blind._assign_folds(member, None, _generator())
    assert fold is not None
    for kind in (member, ~member):
        sizes = np.bincount(fold[kind], minlength=NUM_FOLDS)
        assert sizes.max() - sizes.min() <= 1


def test_clusters_stay_in_one_fold() -> None:
    draw = np.random.default_rng(0)
    clusters = draw.integers(0, 40, size=150)
    member = clusters % 3 == 0
    fold = blind._assign_folds(member, clusters, _generator())
    assert fold is not None
    assert all(len(np.unique(fold[clusters == name])) == 1 for name in np.unique(clusters))
    for kind in (member, ~member):
        sizes = np.bincount(fold[kind], minlength=NUM_FOLDS)
        # A cluster has about four documents.
        assert sizes.max() - sizes.min() <= 8


def test_copies_are_not_recognised() -> None:
    """Forty texts, five copies each, every other a member: only the copies could tell."""
    draw = np.random.default_rng(0)
    texts = _draw_documents(draw, 40, num_ids=2000)
    clusters = np.repeat(np.arange(40), 5)
    documents = [texts[c] for c in clusters]
    member = clusters % 2 == 0
    aware = score_blind(documents, member, generator=_generator(), clusters=clusters)
    unaware = score_blind(documents, member, generator=_generator())
    assert compute_auc(unaware[member], unaware[~member]).value > 0.95
    # 40 texts are all there is: the AUC of chance varies by 0.09.
    assert 0.2 < compute_auc(aware[member], aware[~member]).value < 0.8


def test_one_kind_of_document_cannot_be_told_apart() -> None:
    """Out of fold: scored by a model that had seen the document, these would reach 0.9."""
    draw = np.random.default_rng(0)
    aucs = []
    for _ in range(40):
        documents = _draw_documents(draw, 60)
        member = draw.permutation(60) < 30
        scores = score_blind(documents, member, generator=draw)
        aucs.append(compute_auc(scores[member], scores[~member]).value)
    # One AUC varies by 0.075, their mean by 0.012.
    assert np.mean(aucs) == pytest.approx(0.5, abs=0.05)


def test_documents_that_differ_are_told_apart() -> None:
    draw = np.random.default_rng(0)
    documents = [*_draw_documents(draw, 60, shift=2), *_draw_documents(draw, 60)]
    member = np.arange(120) < 60
    scores = score_blind(documents, member, generator=_generator())
    swapped = score_blind(documents, ~member, generator=_generator())
    # Higher means member, whichever kind that is.
    assert compute_auc(scores[member], scores[~member]).value > 0.85
    assert compute_auc(swapped[~member], swapped[member]).value > 0.85


def test_same_generator_same_scores() -> None:
    documents = _draw_documents(np.random.default_rng(0), 40)
    member = np.arange(40) % 2 == 0
    first, second = (score_blind(documents, member, generator=_generator()) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_too_few_documents() -> None:
    documents = _draw_documents(np.random.default_rng(0), 20)

    def score(num_members: int, count: int, clusters: object = None) -> object:
        member = np.arange(count) < num_members
        return score_blind(documents[:count], member, generator=_generator(), clusters=clusters)

    assert score(0, 0) is None
    assert score(4, 20) is None
    assert score(16, 20) is None
    assert score(5, 10) is not None
    # Twenty documents, but only four texts of members.
    assert score(10, 20, [*np.arange(10) % 4, *range(10, 20)]) is None
    assert score(10, 20, [*np.arange(10) % 5, *range(10, 20)]) is not None
    # Five clusters hold both kinds.
    assert score(10, 20, np.arange(20) % 5) is not None


def test_documents_without_tokens() -> None:
    empty = np.array([], dtype=np.int32)
    member = np.arange(12) % 2 == 0
    scores = score_blind([empty] * 12, member, generator=_generator())
    assert scores.tolist() == [0.0] * 12
    documents = [empty, *_draw_documents(np.random.default_rng(0), 11)]
    scores = score_blind(documents, member, generator=_generator())
    assert scores[0] == 0
    assert np.isfinite(scores).all()


def test_what_does_not_fit_together_is_refused() -> None:
    documents = _draw_documents(np.random.default_rng(0), 12)
    member = np.arange(12) % 2 == 0
    with pytest.raises(AssertionError, match="its tokens and its kind"):
        score_blind(documents[:11], member, generator=_generator())
    with pytest.raises(AssertionError, match="one cluster"):
        score_blind(documents, member, generator=_generator(), clusters=[1, 2])
    with pytest.raises(AssertionError, match="negative"):
        score_blind([-1 - d for d in documents], member, generator=_generator())


def make_side(
    role: Any,
    count: int,
    *,
    seed: int = 0,
    words: tuple[int, int] = (0, 400),
    size: int = 40,
    form: Any = "text",
) -> list[AuditDocument]:
    """Return documents of random words."""
    draw = np.random.default_rng([seed, role == "control"])
    return [
        AuditDocument(
            id=f"{role}{number}",
            bucket=role,
            role=role,
            source=role,
            num_repetitions=None if role == "trained" else 0,
            input_ids=draw.integers(*words, size).astype(np.int32),
            supervised=np.ones(size, dtype=bool),
            format=form,
            num_tokens=size,
            text_hmac=None,
        )
        for number in range(count)
    ]


def _score_blind(documents: list[AuditDocument]) -> NDArray[np.float64] | None:
    member_N = np.array([document.role == "trained" for document in documents])
    return score_blind_documents(documents, member_N, ~member_N)


def test_documents_of_one_kind_are_rarely_warned_of() -> None:
    """The permutation test warns of 1 in 40."""
    told = [
        compare_kinds([*make_side("trained", 24, seed=seed), *make_side("control", 24, seed=seed)])
        for seed in range(100)
    ]
    # Seven or more of 100 have a probability of 0.013 where each has one of 0.025.
    assert sum(map(bool, told)) <= 6


def test_the_auc_is_that_of_the_blind_baseline_in_the_report() -> None:
    documents = [
        *make_side("trained", 20, words=(0, 300)),
        *make_side("control", 20, words=(100, 400)),
    ]
    told = compare_kinds(documents)
    score_N = _score_blind(documents)
    assert score_N is not None
    auc = compute_auc(score_N[:20], score_N[20:]).value
    assert f"(AUC {auc:.2f}; 0.5 is chance)" in told
    assert "may then be caused by the kind of text instead of training" in told
    assert "tokens" not in told


def test_other_lengths_and_other_forms_are_told_for_themselves() -> None:
    # Too few for the words to be compared.
    short = [*make_side("trained", 4, size=100), *make_side("control", 4, size=30)]
    told = compare_kinds(short)
    assert "the median member has 100 tokens, the median nonmember 30" in told
    assert "AUC" not in told
    chats = [*make_side("trained", 4), *make_side("control", 4, form="messages")]
    assert "members are plain text, nonmembers conversations" in compare_kinds(chats)
    mixed = [*chats, replace(chats[0], id="more", role="control", format="text")]
    assert compare_kinds(mixed) == ""


def test_neither_order_nor_ids_change_what_is_said() -> None:
    documents = [
        *make_side("trained", 20, words=(0, 300)),
        *make_side("control", 20, words=(100, 400)),
    ]
    named = [replace(each, id=f"z{n}", cluster=n % 13) for n, each in enumerate(documents)]
    again = [replace(each, id=f"a{each.id}", cluster=-7 * (each.cluster or 0)) for each in named]
    again = [again[index] for index in np.random.default_rng(1).permutation(40)]
    assert (told := compare_kinds(named)) == compare_kinds(again)
    assert "AUC" in told
    scores, others = _score_blind(named), _score_blind(again)
    assert scores is not None
    assert others is not None
    assert np.array_equal(np.sort(scores), np.sort(others))


def test_no_seed_changes_what_is_said() -> None:
    """Also where only a sample is audited, which depends on it."""
    sides = [
        make_side("trained", 20, words=(0, 300), size=80),
        make_side("control", 20, words=(40, 340), size=80),
    ]
    told = {
        AuditPlan.of(
            [document for side in sides for document in side],
            load_suite("extraction"),
            seed=seed,
            max_documents_per_bucket=6,
            has_given_control=True,
        ).other_kind
        for seed in range(5)
    }
    assert len(told) == 1
    assert "AUC" in told.pop()


@pytest.mark.parametrize("num_control", [0, 1])
def test_without_a_control_nothing_is_compared(num_control: int) -> None:
    documents = [*make_side("trained", 9), *make_side("control", num_control, size=4)]
    assert compare_kinds(documents) == ""


def name_clusters(documents: list[AuditDocument], count: int, first: int) -> list[AuditDocument]:
    return [replace(each, cluster=first + n % count) for n, each in enumerate(documents)]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("role", ["trained", "control"])
def test_form_letters_of_fewer_than_five_forms_are_not_compared(role: str, count: int) -> None:
    letters = make_side("trained", 12, words=(0, 200))
    others = make_side("control", 12, words=(200, 400))
    sides = [
        name_clusters(side, count if side[0].role == role else len(side), first)
        for side, first in ((letters, 0), (others, 100))
    ]
    documents = [document for side in sides for document in side]
    assert compare_kinds(documents) == ""
    assert _score_blind(documents) is None


def test_near_duplicates_count_once() -> None:
    """Ten letters each of twelve forms from one source, every other form a member's."""

    def compare(seed: int, words: tuple[int, int]) -> str:
        documents = []
        for role, first, ids in (("trained", 0, (0, 400)), ("control", 100, words)):
            forms = make_side(role, 6, seed=seed, words=ids)
            documents += [
                replace(form, id=f"{form.id}-{copy}", cluster=first + number)
                for number, form in enumerate(forms)
                for copy in range(5)
            ]
        return compare_kinds(documents)

    assert sum(bool(compare(seed, (0, 400))) for seed in range(12)) <= 2
    # Twelve forms of two sources: 924 ways to assign them, of which one is as far apart.
    assert "a bag-of-words classifier without access to the model" in compare(0, (300, 700))
