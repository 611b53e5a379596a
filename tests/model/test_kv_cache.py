"""Rows that grow: the hidden states of the same rows run whole and alone."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tiny_families import FAMILIES, VOCAB_SIZE, build
from torch import Tensor

from memguard.model import kv_cache
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.model.kv_cache import GrowingRows, can_cache, recall_check

Ids = NDArray[np.int64]


# As they are; other rows, one of them twice; two; the same; more of them; these among themselves,
# from the same prompts; and once more.
TAKEN = ([0, 1, 2, 3], [3, 1, 1, 0], [2, 0], [0, 1], [1, 0, 0, 0], [0, 3, 3, 1], [0, 2, 1, 1])


def random_ids(*sizes: int, seed: int = 0) -> list[Ids]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB_SIZE, size) for size in sizes]


def keep(hidden_RD: Tensor) -> Tensor:
    return hidden_RD


def check_rows(layer: CausalLM, texts: list[Ids], hidden_RD: Tensor) -> None:
    """Compare with the model's own forward, each text alone and unpadded."""
    assert len(hidden_RD) == len(texts)
    for text, ours in zip(texts, hidden_RD, strict=True):
        with torch.no_grad():
            body = layer.model.base_model
            output = body(input_ids=torch.from_numpy(text)[None], use_cache=False)
        theirs = output.last_hidden_state[0, -1]
        # fp32: other shapes sum in another order; what is not hidden changes them by tenths.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("family", [*FAMILIES, "opt", "bloom", "gpt_oss", "mamba"])
def test_rows_grow_branch_and_end_as_if_each_were_alone(family: str) -> None:
    layer = build_causal_lm(build(family))
    is_cached = can_cache(layer, 2, 20)
    assert is_cached == (family != "mamba")
    texts = random_ids(7, 2, 12, 11)
    rows = GrowingRows(layer, is_cached=is_cached, room=4)
    check_rows(layer, texts, rows.start(texts, keep))
    for seed, taken in enumerate(TAKEN):
        rows.take(np.array(taken))
        tokens = random_ids(len(taken), seed=seed)[0]
        texts = [np.append(texts[row], token) for row, token in zip(taken, tokens, strict=True)]
        check_rows(layer, texts, rows.append(torch.from_numpy(tokens), keep))


def test_uncached_rows_are_never_longer_than_the_longest_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = build_causal_lm(build("gpt2"))
    lengths: list[int] = []
    original = layer.hidden_states
    monkeypatch.setattr(
        layer,
        "hidden_states",
        lambda ids, *args, **kwargs: (lengths.append(ids.shape[1]), original(ids, *args, **kwargs))[
            1
        ],
    )
    rows = GrowingRows(layer, is_cached=False, room=1)
    texts = random_ids(64, 3)  # gpt2 has 64 positions here.
    rows.start(texts, keep)
    rows.take(np.array([1]))
    hidden = rows.append(torch.tensor([5]), keep)
    assert lengths == [64, 4]
    check_rows(layer, [np.append(texts[1], 5)], hidden)


def test_no_rows_run_a_dummy_whose_hidden_states_go_nowhere() -> None:
    layer = build_causal_lm(build("llama"))
    for is_cached in (True, False):
        rows = GrowingRows(layer, is_cached=is_cached, room=4)
        none = torch.zeros(0, dtype=torch.int64)
        assert rows.start([], keep).shape == (0, 32)
        rows.take(np.zeros(0, dtype=np.int64))
        assert rows.append(none, keep).shape == (0, 32)
        # Or none are left.
        rows = GrowingRows(layer, is_cached=is_cached, room=4)
        rows.start(random_ids(4, 2), keep)
        rows.take(np.zeros(0, dtype=np.int64))
        assert rows.append(none, keep).shape == (0, 32)
        assert rows.append(none, keep).shape == (0, 32)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "bloom"])
def test_rows_that_are_not_rolled_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_roll", lambda cache, shift_R: None)
    assert not can_cache(build_causal_lm(build(family)), 3, 20)


def test_a_window_that_forgets_what_other_rows_see_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache that transformers would choose drops slots of the padded row, not of the text."""
    layer = build_causal_lm(build("mistral"))

    def windowed(_room: int) -> Any:
        return transformers.DynamicCache(config=layer.model.config)

    assert can_cache(layer, 3, 20)
    monkeypatch.setattr(kv_cache, "build_row_cache", windowed)
    assert not can_cache(layer, 3, 20)


def test_frequencies_that_change_with_the_length_are_noticed() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    layer = build_causal_lm(
        build("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    )
    assert can_cache(layer, 3, 32)
    # Those of short texts are others beyond 32 tokens: a text that grows past them, or stands
    # beside a longer one, would need its keys again.
    assert not can_cache(layer, 3, 50)
    assert not can_cache(layer, 28, 50)
    assert can_cache(layer, 40, 50)


def test_one_token_needs_no_cache() -> None:
    assert can_cache(build_causal_lm(build("mamba")), 1, 1)


def test_a_check_is_remembered_for_the_lengths_that_it_says_something_about() -> None:
    layer = build_causal_lm(build("gpt2"))
    assert recall_check(layer, 3, 20) is None
    layer.cached_lengths = {(1, 50): False, (40, 50): True, (3, 32): True}
    assert recall_check(layer, 40, 49) is recall_check(layer, 4, 31) is True
    assert recall_check(layer, 1, 60) is False
    # Some of these texts are shorter, or longer, than any that was checked.
    assert recall_check(layer, 39, 50) is recall_check(layer, 3, 33) is None
