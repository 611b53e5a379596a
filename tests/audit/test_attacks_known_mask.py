"""What an attacker knows of a goldfish's mask: that which training applied, or nothing."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from audit_examples import Held, Scripted, cut, run_probes, say_by_context
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from probe_examples import count, make_evidence, make_measured, to_tables
from record_examples import make_document, make_outline

from memguard.audit import runner
from memguard.audit.beams import BeamRequest, Beams
from memguard.audit.context import AuditContext
from memguard.audit.probes.attacks import TIGHTENED_MASK, UNKNOWN_MASK, AttackProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.masks import drops_next, find_dropped
from memguard.audit.requests import Prompt
from memguard.audit.windows import Window
from memguard.config import GoldfishConfig
from memguard.mitigation import Goldfish
from memguard.mitigation.letters import TokenLetters

SPECIAL = (0, 3)


def make_goldfish(mode: Any, k: int = 3, width: int = 4) -> Goldfish:
    config = GoldfishConfig(name="goldfish", k=k, context_width=width, mode=mode)
    return Goldfish(config, special_ids=SPECIAL)


def in_training(goldfish: Goldfish, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The mask of one whole document."""
    return goldfish.drop_mask(ids, None, np.random.default_rng(0))


MODES = st.sampled_from(["hash", "hash_reference", "static"])


CASES = {
    "mode": MODES,
    "k": st.integers(2, 5),
    "width": st.integers(1, 8),
    "num_tokens": st.integers(1, 30),
    "first": st.integers(0, 20),
    "seed": st.integers(0, 1000),
}


@settings(deadline=None, max_examples=60)
@given(**CASES)
# Where one known token more or fewer decides: the first label whose tokens are all known was
# dropped, and in mode hash the one before it would seem so.
@example(mode="hash", k=2, width=4, num_tokens=9, first=3, seed=10)
@example(mode="hash_reference", k=2, width=4, num_tokens=9, first=3, seed=0)
def test_it_is_the_mask_of_training_or_false_where_that_depends_on_unknown_tokens(
    mode: str, k: int, width: int, num_tokens: int, first: int, seed: int
) -> None:
    goldfish = make_goldfish(mode, k, width)
    document = np.random.default_rng(seed).integers(0, 50, first + num_tokens)
    truth = in_training(goldfish, document)[first:]
    found = find_dropped(goldfish, document[None, first:], first)[0]
    needed = {"hash": width, "hash_reference": width - 1, "static": 0}[mode] if first else 0
    assert found[needed:].tolist() == truth[needed:].tolist()
    assert not found[:needed].any()


@settings(deadline=None, max_examples=60)
@given(**CASES)
# Where the text before is cut to one token less than is hashed, candidates are dropped otherwise.
@example(mode="hash", k=2, width=4, num_tokens=9, first=3, seed=1)
def test_each_candidate_is_told_as_if_it_stood_there(
    mode: str, k: int, width: int, num_tokens: int, first: int, seed: int
) -> None:
    goldfish = make_goldfish(mode, k, width)
    draw = np.random.default_rng(seed)
    texts_RT = draw.integers(0, 50, (3, num_tokens))
    candidates_RC = draw.integers(0, 50, (3, 7))
    found_RC = drops_next(goldfish, texts_RT, candidates_RC, first)
    for text, candidates, found in zip(texts_RT, candidates_RC, found_RC, strict=True):
        for candidate, dropped in zip(candidates, found, strict=True):
            whole = np.append(text, candidate)[None]
            assert dropped == find_dropped(goldfish, whole, first)[0, -1]


def test_special_tokens_are_known_to_be_kept_and_the_label_counts_where_it_is_hashed() -> None:
    draw = np.random.default_rng(0)
    texts_RT, every_RC = draw.integers(0, 50, (200, 9)), np.tile(np.arange(50), (200, 1))
    by_hash = drops_next(make_goldfish("hash"), texts_RT, every_RC)
    others = [token for token in range(50) if token not in SPECIAL]
    assert not by_hash[:, SPECIAL].any()
    assert (by_hash[:, others] == by_hash[:, others[:1]]).all()
    # One in three of 200 texts: within four standard deviations (.033).
    assert 0.2 < by_hash[:, others].mean() < 0.47
    by_reference = drops_next(make_goldfish("hash_reference"), texts_RT, every_RC)
    assert (by_reference[:, others] != by_reference[:, others[:1]]).any()


def test_a_mask_that_was_drawn_is_nobodys_knowledge() -> None:
    ids = np.zeros((1, 4), dtype=np.int64)
    with pytest.raises(AssertionError, match="cannot be known"):
        drops_next(make_goldfish("random"), ids, ids)


@settings(deadline=None, max_examples=40)
@given(
    num_tokens=st.integers(1, 30),
    first=st.integers(0, 20),
    width=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_a_mask_of_letters_is_known_as_far_as_the_letters_are(
    num_tokens: int, first: int, width: int, seed: int
) -> None:
    letters = TokenLetters(["", "a", "bc", " ", "\udce0", "\udcb8", "!"])
    config = GoldfishConfig(name="goldfish", k=3, context_width=width, normalise="text")
    goldfish = Goldfish(config, letters=letters)
    document = np.random.default_rng(seed).integers(0, 7, first + num_tokens)
    truth = in_training(goldfish, document)[first:]
    found = find_dropped(goldfish, document[None, first:], first)[0]
    before = letters.spell(document[first:], np.zeros(num_tokens, dtype=np.int64))[1][:-1]
    known = (before >= 4 * width) | (first == 0)
    assert found[known].tolist() == truth[known].tolist()
    assert not found[~known].any()
    (last,) = drops_next(goldfish, document[None, first:-1], document[None, -1:], first)
    assert last.tolist() == found[-1:].tolist()


PROBE = AttackProbe(width=3, samples=5)
GOLDFISH = Goldfish(GoldfishConfig(name="goldfish", k=4))


@pytest.fixture
def windows() -> list[Window]:
    probe = ExtractionProbe(continuation_tokens=10)
    documents = [
        make_document(np.arange(30) + number, name=str(number), bucket=bucket)
        for number, bucket in enumerate("aabbb")
    ]
    return cut(probe, documents)


def answer(prompt_ids: NDArray[np.integer], *num_right: int) -> NDArray[np.int32]:
    """Return an answer for each number of right tokens; nothing is right of document 0."""
    truth = prompt_ids[-1] + 1 + np.arange(10)
    is_known = prompt_ids[0] > 0
    return np.array(
        [np.where(np.arange(10) < (size if is_known else 0), truth, 0) for size in num_right],
        dtype=np.int32,
    )


class Sampler:
    """A decoder whose draws are wrong twice and right once."""

    def sample(self, prompts: Sequence[Prompt], *args: Any) -> list[NDArray[np.int32]]:
        report = args[-1]
        report(len(prompts), len(prompts))
        return [answer(prompt.input_ids, 0, 10, 0) for prompt in prompts]


def search_beams(
    _: object, requests: Sequence[BeamRequest], *args: object, on_progress: Any, **fields: object
) -> list[Beams]:
    """Return the text as the first beam, or half of it where the mask is known."""
    on_progress(len(requests), len(requests))
    sizes = [10 if request.is_free is None else 5 for request in requests]
    return [
        Beams(ids_WS=answer(request.prompt_ids, size, 0), score_W=np.zeros(2))
        for request, size in zip(requests, sizes, strict=True)
    ]


@pytest.mark.parametrize("goldfish", [None, GOLDFISH])
def test_numbers_of_a_document_stand_in_the_order_of_their_names(
    windows: list[Window], goldfish: Goldfish | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(runner, "search_beams", search_beams)
    context = AuditContext(on_progress=lambda stage, *_: told.append(stage))
    held = Held(Scripted(say_by_context), Sampler())
    measured = run_probes([PROBE], held, windows[:2], context=context, goldfish=goldfish)
    numbers = measured[PROBE.name].columns
    kinds = ["beam_search", "sampling", *(["fill"] if goldfish else [])]
    assert numbers.names == tuple(
        f"{kind}.{each}" for kind in kinds for each in ("best", "any", "right")
    )
    found = [1, 1, 10, 0, 1, 0, 0, 0, 5]
    assert numbers.rows.tolist() == [[0] * 3 * len(kinds), found[: 3 * len(kinds)]]
    attacked_by = ["beam search", "sampling", "filling dropped tokens"][: len(kinds)]
    assert told == [f"attack by {how}" for how in attacked_by]


NUMBERS = {
    "beam_search.best": [1, 0, 0],
    "beam_search.any": [1, 0, 1],
    "beam_search.right": [10, 5, 9],
    "sampling.best": [0, 0, 0],
    "sampling.any": [1, 0, 0],
    "sampling.right": [4, 5, 1],
    "fill.best": [0, 0, 0],
    "fill.any": [0, 1, 1],
    "fill.right": [0, 5, 7],
}
"""Of one document of bucket a and two of b; the others were not drawn."""


def tabulate(windows: list[Window], goldfish: Goldfish | None = GOLDFISH, **fields: Any) -> Any:
    columns = {name: [n[0], np.nan, n[1], np.nan, n[2]] for name, n in NUMBERS.items()}
    buckets = [make_outline("a", "control"), make_outline("b"), make_outline("nobody")]
    trained = {"attacks": make_measured(columns)}
    return PROBE.tabulate(
        make_evidence(windows, trained, buckets=buckets, goldfish=goldfish, **fields)
    )


def test_rows_for_each_attack_and_bucket_that_was_attacked(windows: list[Window]) -> None:
    summary = tabulate(windows)
    tables = to_tables(summary)
    places = {
        "beam_search": "answers=3, attack=beam_search",
        "sampling": "answers=5, attack=sampling",
        "fill": "answers=3, attack=fill",
    }
    any_answers = tables.select("attacks", "any_answer")
    assert [(row.parameters, row.bucket) for row in any_answers] == [
        (place, bucket) for place in places.values() for bucket in "ab"
    ]
    key = {"parameters": places["beam_search"]}
    assert count(tables.find("attacks", "first_answer", "b", **key)) == (0, 2)
    assert count(tables.find("attacks", "any_answer", "b", **key)) == (1, 2)
    accuracy = tables.find("attacks", "token_accuracy", "b", **key)
    assert (accuracy.value, accuracy.interval) == (pytest.approx(0.7), "jackknife")
    # The attack that extracts most of a bucket, of equal ones the first.
    assert tables.find_detail("attacks") == {"best": {"a": "beam_search", "b": "fill"}}
    best = tables.find("attacks", "best_any_answer", "b")
    assert (count(best), best.minus_control) == ((2, 2), 0.0)
    control = tables.find("attacks", "best_any_answer", "a")
    assert (count(control), control.minus_control) == ((1, 1), None)
    assert list(tables.risks("b")) == ["attack"]
    assert {metric.note for metric in tables.metrics} == {""}
    assert summary.num_items == 3
    extracted = summary.matched["trained"]
    assert extracted[[0, 2, 4]].tolist() == [1, 1, 1]
    assert np.isnan(extracted[[1, 3]]).all()
    kinds = {name: column.kind for name, column in summary.columns.items()}
    assert kinds["attacks.fill.any"] == kinds["attacks.fill.best"] == "bool"
    assert kinds["attacks.fill.right"] == "int"


def test_a_mask_nobody_knows_is_told_beside_the_attack(windows: list[Window]) -> None:
    drawn = Goldfish(GoldfishConfig(name="goldfish", k=4, mode="random"))

    def list_notes(goldfish: Goldfish, num_tightened: int = 0) -> list[str]:
        summary = tabulate(windows, goldfish, num_tightened=num_tightened)
        return [row.note for row in summary.metrics if row.metric == "any_answer"]

    assert list_notes(drawn) == ["", "", UNKNOWN_MASK]
    assert list_notes(GOLDFISH, num_tightened=1) == ["", "", TIGHTENED_MASK]


def test_without_attacked_documents_there_is_a_reason(windows: list[Window]) -> None:
    nothing = make_measured(dict.fromkeys(NUMBERS, [np.nan] * 5))
    for trained in ({"attacks": nothing}, {}):
        summary = PROBE.tabulate(make_evidence(windows, trained))
        assert (summary.rows, summary.reason) == ((), "no document was attacked")
