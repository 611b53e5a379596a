"""Members and nonmembers of different kinds are told; those of one kind are not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memguard.audit.extraction import AuditDocument
from memguard.audit.membership import BLIND, compare_kinds, compute_membership


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


def test_documents_of_one_kind_are_rarely_warned_of() -> None:
    """The permutation test warns of 1 in 40."""
    told = [
        compare_kinds(
            [*make_side("trained", 24, seed=seed), *make_side("control", 24, seed=seed)], seed=seed
        )
        for seed in range(100)
    ]
    # Seven or more of 100 have a probability of 0.013 where each has one of 0.025.
    assert sum(map(bool, told)) <= 6


def test_the_auc_is_that_of_the_blind_baseline_in_the_report() -> None:
    documents = [
        *make_side("trained", 20, words=(0, 300)),
        *make_side("control", 20, words=(100, 400)),
    ]
    told = compare_kinds(documents, seed=3)
    (blind,) = [
        row for row in compute_membership(documents, {}, fpr=(0.1,), seed=3) if row.score == BLIND
    ]
    assert blind.auc is not None
    assert f"(AUC {blind.auc.value:.2f}; 0.5 is chance)" in told
    assert "may then be caused by the kind of text instead of training" in told
    assert "tokens" not in told


def test_other_lengths_and_other_forms_are_told_for_themselves() -> None:
    # Too few for the words to be compared.
    short = [*make_side("trained", 4, size=100), *make_side("control", 4, size=30)]
    told = compare_kinds(short, seed=0)
    assert "the median member has 100 tokens, the median nonmember 30" in told
    assert "AUC" not in told
    chats = [*make_side("trained", 4), *make_side("control", 4, form="messages")]
    assert "members are plain text, nonmembers conversations" in compare_kinds(chats, seed=0)
    mixed = [*chats, replace(chats[0], id="more", role="control", format="text")]
    assert compare_kinds(mixed, seed=0) == ""


@pytest.mark.parametrize("num_control", [0, 1])
def test_without_a_control_nothing_is_compared(num_control: int) -> None:
    documents = [*make_side("trained", 9), *make_side("control", num_control, size=4)]
    assert compare_kinds(documents, seed=0) == ""
