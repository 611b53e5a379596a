"""Members above nonmembers is an AUC above one half, and nothing is guessed."""

from collections.abc import Callable

import numpy as np

from memguard.audit.membership import compute_membership
from memguard.records import DocumentScore

MakeScore = Callable[..., DocumentScore]


def _control(make_score: MakeScore, name: str, **fields: object) -> DocumentScore:
    return make_score(name, bucket="control", role="control", num_repetitions=0, **fields)


def test_orientation_and_counts(make_score: MakeScore) -> None:
    draw = np.random.default_rng(0)
    scores = [make_score(f"m{i}", logprob=float(-40 + draw.normal())) for i in range(30)]
    scores += [
        _control(make_score, f"c{i}", logprob=float(-150 + draw.normal())) for i in range(20)
    ]
    scores += [make_score("b", role="background", bucket="b", logprob=-1000.0)]
    scores += [make_score("never", num_repetitions=0, logprob=-1000.0)]
    (loss,) = compute_membership(scores)
    assert (loss.score, loss.num_members, loss.num_nonmembers) == ("loss", 30, 20)
    assert loss.auc.value == 1
    assert loss.auc.ci is not None
    assert loss.auc.ci[0] < 1
    assert not loss.higher_is_better


def test_score_is_per_token(make_score: MakeScore) -> None:
    # Half the tokens and half the sum: the same likelihood a token, so chance.
    scores = [make_score(f"m{i}", continuation_tokens=20, logprob=-20.0) for i in range(3)]
    scores += [_control(make_score, f"c{i}", logprob=-50.0) for i in range(3)]
    assert compute_membership(scores)[0].auc.value == 0.5


def test_base_removes_what_was_easy_before(make_score: MakeScore) -> None:
    # Control texts are easier to begin with; only the difference shows who was trained.
    trained = [make_score(f"m{i}", base=0, logprob=-100.0 - i) for i in range(9)]
    easy = [_control(make_score, f"c{i}", base=0, logprob=-50.0) for i in range(9)]
    control = [score.model_copy(update={"base_logprob": -55.0}) for score in easy]
    loss, change = compute_membership([*trained, *control])
    assert (loss.score, loss.auc.value) == ("loss", 0)
    assert (change.score, change.auc.value) == ("loss_minus_base", 1)


def test_nothing_without_enough_of_either(make_score: MakeScore) -> None:
    two = [make_score("a"), make_score("b")]
    assert compute_membership(two) == []
    assert compute_membership([*two, _control(make_score, "c")]) == []
    controls = [_control(make_score, "c"), _control(make_score, "d")]
    assert compute_membership([two[0], *controls]) == []
    assert len(compute_membership([*two, *controls])) == 1
