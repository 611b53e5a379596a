"""Scores that take a pass of their own, against plain forwards of a tiny model."""

from typing import Any

import numpy as np
import pytest
import torch
from audit_examples import CHARACTERS, Held, audit, build_suite, build_tiny_layer, cut
from record_examples import make_document

from memguard.audit.context import AuditContext
from memguard.audit.passages import Codec
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.membership_scores import (
    choose_shots,
    compare_passes,
    plan_lowercase,
    plan_plain,
    plan_recall,
)
from memguard.audit.run import AuditOutcome
from memguard.audit.scoring import ModelScorer
from memguard.audit.windows import AuditDocument, Window
from memguard.model.causal_lm import CausalLM
from memguard.pages.membership import list_aucs
from memguard.pages.roc import read_score
from memguard.records import ResultRow

PROBE = ExtractionProbe(continuation_tokens=8)
POSITIONS = 160


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return build_tiny_layer(95, max_position_embeddings=POSITIONS)


@pytest.fixture(scope="module")
def other() -> CausalLM:
    return build_tiny_layer(95, seed=1, max_position_embeddings=POSITIONS)


@pytest.fixture(scope="module")
def documents() -> list[AuditDocument]:
    draw = np.random.default_rng(0)
    kinds = [("x4", "trained", 4)] * 8 + [("x0", "control", 0)] * 9
    made = [
        make_document(
            draw.integers(0, 95, draw.integers(20, 60)),
            name=f"{bucket}-{number}",
            bucket=bucket,
            role=role,
            num_repetitions=count,
        )
        for number, (bucket, role, count) in enumerate(kinds)
    ]
    # Whoever lower-cases a conversation breaks its marks.
    supervised = np.arange(40) >= 25
    chat = make_document(
        draw.integers(0, 95, 40),
        name="chat",
        bucket="x4",
        num_repetitions=4,
        supervised=supervised,
        format="messages",
    )
    return [*made, chat]


def _windows(documents: list[AuditDocument]) -> list[Window]:
    return cut(PROBE, documents)


def _mean_logprob(layer: CausalLM, ids: Any, first_label: int = 1) -> float:
    """By the model's own forward, in float64 from its logits on."""
    tokens = torch.tensor(np.asarray(ids), dtype=torch.int64)
    with torch.no_grad():
        logits = layer.model(tokens[None], use_cache=False).logits[0, first_label - 1 : -1].double()
    return float(logits.log_softmax(1).gather(1, tokens[first_label:, None]).mean())


def _audit(
    documents: list[AuditDocument],
    model: CausalLM,
    reference: CausalLM | None = None,
    scores: tuple[str, ...] = ("lowercase", "recall", "reference"),
    max_tokens: int | None = POSITIONS,
    codec: Codec | None = CHARACTERS,
) -> AuditOutcome:
    return audit(
        documents,
        Held(ModelScorer(model, 400), max_tokens=max_tokens),
        reference=None
        if reference is None
        else Held(ModelScorer(reference, 400), max_tokens=max_tokens),
        suite=build_suite(PROBE, MembershipProbe(scores=scores, recall_documents=3)),
        seed=5,
        context=AuditContext(codec=codec),
    )


def _rows(outcome: AuditOutcome) -> dict[str, ResultRow]:
    return {read_score(row): row for row in list_aucs(outcome.summary.tables)}


def _auc(members: list[float], nonmembers: list[float]) -> float:
    pairs = [(a > b) + (a == b) / 2 for a in members for b in nonmembers]
    return sum(pairs) / len(pairs)


def test_each_score_is_the_direct_computation(
    documents: list[AuditDocument], model: CausalLM, other: CausalLM
) -> None:
    rows = _rows(_audit(documents, model, other))
    assert list(rows) == ["lowercase", "recall", "reference", "blind"]

    windows = _windows(documents)
    ids = {window.document.id: window.document.input_ids for window in windows}
    plain = {name: _mean_logprob(model, row) for name, row in ids.items()}
    lower, recall, reference = {}, {}, {}
    shots = choose_shots(windows, count=3, seed=5)
    before = np.concatenate([windows[index].input_ids for index in shots])
    for index, window in enumerate(windows):
        name, row = window.document.id, window.input_ids
        reference[name] = plain[name] - _mean_logprob(other, row)
        if name != "chat":
            text = "".join(chr(32 + id) for id in row).lower()
            small = [ord(character) - 32 for character in text]
            lower[name] = _mean_logprob(model, small) / plain[name]
        if index not in shots:
            room = before[: POSITIONS + 1 - len(row)]
            given = np.concatenate([room, row])
            recall[name] = _mean_logprob(model, given, len(room) + 1) / plain[name]
    for score, expected in (("lowercase", lower), ("recall", recall), ("reference", reference)):
        row = rows[score]
        members = [value for name, value in expected.items() if not name.startswith("x0")]
        nonmembers = [value for name, value in expected.items() if name.startswith("x0")]
        assert (row.num_documents, row.num_other) == (len(members), len(nonmembers)), score
        assert row.num_missing == len(windows) - len(expected), score
        # No two of these differ by less than fp32 can tell.
        assert row.value == pytest.approx(_auc(members, nonmembers), abs=1e-9), score
    # Three control documents stood before the others.
    assert rows["recall"].num_other == 6
    assert rows["lowercase"].num_missing == 1


def test_numbers_of_the_passes_are_the_direct_ones(
    documents: list[AuditDocument], model: CausalLM
) -> None:
    """The same without ranks in between: every document's own number."""
    windows = _windows(documents)
    shots = [windows[index] for index in choose_shots(windows, count=2, seed=1)]
    scorer = ModelScorer(model, 400)
    for window in windows:
        for plan in (
            plan_plain(window, max_tokens=POSITIONS),
            plan_lowercase(window, CHARACTERS, max_tokens=POSITIONS),
            plan_recall(window, shots, max_tokens=POSITIONS),
        ):
            if plan is None:
                assert window.document.format == "messages"
                continue
            assert plan.first_choice == len(plan.input_ids)
            (result,) = scorer.score([plan])
            expected = _mean_logprob(model, plan.input_ids, plan.first_label)
            # fp32, a mean of up to 60 log-probabilities good to about 1e-6.
            assert result.logprob.mean() == pytest.approx(expected, abs=1e-5)


def test_shots_are_half_of_the_control_at_most_and_never_scored(
    documents: list[AuditDocument],
) -> None:
    windows = _windows(documents)
    shots = choose_shots(windows, count=4, seed=0)
    assert len(set(shots)) == 4
    assert all(windows[index].document.role == "control" for index in shots)
    assert choose_shots(windows, count=4, seed=0) == shots
    assert any(choose_shots(windows, count=4, seed=seed) != shots for seed in (1, 2))
    assert len(choose_shots(windows, count=100, seed=0)) == 4
    assert choose_shots(windows[:8], count=4, seed=0) == []


def test_only_the_window_is_scored_after_the_shots() -> None:
    window = PROBE.window(make_document(np.arange(30)))
    shot = PROBE.window(make_document(np.arange(50, 90)))
    assert window is not None
    assert shot is not None
    plan = plan_recall(window, [shot, shot], max_tokens=None)
    assert plan.input_ids.tolist() == [*range(50, 90), *range(50, 90), *range(30)]
    # The same tokens as in the plain pass: the first has nothing before it there.
    assert plan.first_label == 81
    plain = plan_plain(window, max_tokens=None)
    assert plan.num_labels == plain.num_labels == 29
    # The shots give way where positions are few; a handful of tokens is no shot.
    cut = plan_recall(window, [shot, shot], max_tokens=49)
    assert cut.input_ids.tolist() == [*range(50, 70), *range(30)]
    assert plan_recall(window, [shot, shot], max_tokens=44) is None
    assert plan_recall(window, [], max_tokens=None) is None
    long = PROBE.window(make_document(np.arange(300)))
    assert long is not None
    shortened = plan_recall(window, [long], max_tokens=None)
    assert len(shortened.input_ids) == 128 + 30


def test_lower_case_that_outgrows_the_model_is_cut() -> None:
    """Tokenizers know fewer lower-case words: each letter may become three tokens."""
    longer = Codec(
        decode=CHARACTERS.decode, encode=lambda text: [ord(c) - 32 for c in text for _ in range(3)]
    )
    window = PROBE.window(make_document(np.arange(33, 53)))
    assert window is not None
    whole = plan_lowercase(window, longer, max_tokens=None)
    cut = plan_lowercase(window, longer, max_tokens=24)
    assert len(whole.input_ids) == 60
    # The last token is only ever a label.
    assert cut.input_ids.tolist() == whole.input_ids[:25].tolist()
    assert plan_plain(window, max_tokens=18) is None
    assert plan_plain(window, max_tokens=19) is not None


def test_an_audit_at_the_models_last_position_goes_through(
    model: CausalLM, other: CausalLM
) -> None:
    draw = np.random.default_rng(4)
    full = [
        make_document(
            draw.integers(0, 95, POSITIONS + 1),
            name=f"{n}",
            **({"bucket": "x0", "role": "control", "num_repetitions": 0} if n % 2 else {}),
        )
        for n in range(12)
    ]
    rows = _rows(_audit(full, model, other))
    assert list(rows) == ["lowercase", "recall", "reference", "blind"]
    assert (rows["lowercase"].num_missing, rows["reference"].num_missing) == (0, 0)
    # There is no room for anything before them, which is said.
    assert (rows["recall"].value, rows["recall"].num_missing) == (None, 12)


def test_what_cannot_be_asked_is_left_out(documents: list[AuditDocument], model: CausalLM) -> None:
    assert list(_rows(_audit(documents, model))) == ["lowercase", "recall", "blind"]
    assert list(_rows(_audit(documents, model, codec=None))) == ["recall", "blind"]
    outcome = _audit(documents, model, scores=("loss", "reference"))
    assert list(_rows(outcome)) == ["loss", "blind"]


def test_missing_passes_give_missing_scores() -> None:
    plain_N = np.array([-2.0, np.nan, -4.0])
    found = compare_passes(
        plain_N,
        {
            "lowercase": np.array([-3.0, -3.0, np.nan]),
            "reference": np.array([-3.0, -3.0, -5.0]),
            "recall": np.array([-1.0, -1.0, -6.0]),
        },
    )
    np.testing.assert_array_equal(found["lowercase"], [1.5, np.nan, np.nan])
    np.testing.assert_array_equal(found["reference"], [1.0, np.nan, 1.0])
    np.testing.assert_array_equal(found["recall"], [0.5, np.nan, 1.5])
