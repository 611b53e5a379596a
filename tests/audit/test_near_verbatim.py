"""Near-verbatim matches against plain generation and another library's edit distance."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from audit_examples import Held, build_tiny_layer, run_probes
from hypothesis import given
from hypothesis import strategies as st
from nltk.metrics.distance import edit_distance
from record_examples import make_document

from memguard.audit.decoding import Decoder
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.near_verbatim import EditDistance, NearVerbatim
from memguard.audit.requests import Measured
from memguard.audit.scoring import ModelScorer
from memguard.audit.selection import rank_in_buckets
from memguard.audit.windows import Window
from memguard.model.causal_lm import CausalLM

VOCAB, SIZE, PREFIX, END = 61, 20, 9, 7
# Floor 0: no document is below it, so that all that are not verbatim are generated.
PROBE = ExtractionProbe(continuation_tokens=SIZE, generation_floor=0)

_tokens = st.integers(0, 4)


@given(
    st.lists(_tokens, min_size=1, max_size=14).flatmap(
        lambda truth: st.tuples(
            st.just(truth), st.lists(_tokens, min_size=len(truth), max_size=len(truth))
        )
    )
)
def test_edit_distance_grows_to_that_of_nltk(texts: tuple[list[int], list[int]]) -> None:
    truth, written = texts
    distance = EditDistance(np.array(truth))
    bounds = [distance.lower_bound]
    for token in written:
        distance.append(token)
        bounds.append(distance.lower_bound)
    assert bounds[-1] == edit_distance(written, truth)
    assert bounds == sorted(bounds), "a bound never falls"
    assert bounds[0] == 0


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    layer = build_tiny_layer(VOCAB, seed=3)
    layer.model.generation_config = transformers.GenerationConfig(eos_token_id=END)
    return layer


@pytest.fixture(scope="module")
def prefixes() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, (60, PREFIX))


@pytest.fixture(scope="module")
def generated(lm: CausalLM, prefixes: np.ndarray) -> list[list[int]]:
    """Each prefix continued greedily by transformers, end-of-text suppressed."""
    ids = torch.from_numpy(prefixes)
    whole = lm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=SIZE,
        max_new_tokens=SIZE,
        pad_token_id=0,
    )
    written: list[list[int]] = whole[:, PREFIX:].tolist()
    return written


@pytest.fixture(scope="module")
def windows(prefixes: np.ndarray, generated: list[list[int]]) -> list[Window]:
    """Greedy texts with 0 to 4 edits anywhere, and random ones."""
    draw = np.random.default_rng(0)
    found = []
    for index, (prefix, written) in enumerate(zip(prefixes, generated, strict=True)):
        text = list(written)
        for _ in range(index % 5):
            place = int(draw.integers(0, SIZE))
            match draw.integers(0, 3):
                case 0:
                    text[place] = int(draw.integers(0, VOCAB))
                case 1:
                    text = [*text[:place], int(draw.integers(0, VOCAB)), *text[place:]][:SIZE]
                case _:
                    text = [*text[:place], *text[place + 1 :], int(draw.integers(0, VOCAB))]
        if index >= 50:
            text = draw.integers(0, VOCAB, SIZE).tolist()
        window = PROBE.window(make_document([*prefix, *text], name=str(index)))
        assert window is not None
        found.append(window)
    return found


def measure(
    lm: CausalLM,
    windows: Sequence[Window],
    probe: ExtractionProbe = PROBE,
    decoder: Decoder | None = None,
) -> Measured:
    held = Held(ModelScorer(lm, 512), decoder or Decoder(lm, 300))
    return run_probes([probe], held, windows, max_edit_share=probe.max_edit_share)[probe.name]


def find(
    lm: CausalLM,
    windows: Sequence[Window],
    probe: ExtractionProbe = PROBE,
    decoder: Decoder | None = None,
) -> NearVerbatim:
    found = measure(lm, windows, probe, decoder).detail
    assert isinstance(found, NearVerbatim)
    return found


@pytest.mark.parametrize(
    "batch_tokens", [100, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 4000))]
)
def test_matches_are_those_of_plain_generation(
    lm: CausalLM, windows: list[Window], generated: list[list[int]], batch_tokens: int
) -> None:
    found = find(lm, windows, decoder=Decoder(lm, batch_tokens))
    edits = [
        edit_distance(written, window.continuation_ids.tolist())
        for written, window in zip(generated, windows, strict=True)
    ]
    assert found.matched_N.tolist() == [count <= SIZE // 10 for count in edits]
    assert found.num_edits_N.tolist() == [
        count if count <= SIZE // 10 else np.inf for count in edits
    ]
    assert {0, 1, 2, np.inf} <= set(found.num_edits_N.tolist()), "each kind occurs"
    assert found.num_verbatim + found.num_generated == len(windows)
    assert found.num_below_floor == 0


def test_texts_that_left_for_good_are_not_generated_to_their_end(
    lm: CausalLM, windows: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(lm, 4000)
    sizes: list[tuple[int, int]] = []
    original = decoder.continue_kept

    def note(pool: Any, num_new: Sequence[int], *args: Any) -> Any:
        done = original(pool, num_new, *args)
        sizes.extend(
            (len(one.token_ids), num) for one, num in zip(done.results, num_new, strict=True)
        )
        return done

    monkeypatch.setattr(decoder, "continue_kept", note)
    random_texts = windows[50:]
    find(lm, random_texts, decoder=decoder)
    assert len(sizes) == len(random_texts)
    assert all(size < num_new for size, num_new in sizes)
    # Two edits allowed: the third wrong token may be seen no earlier.
    assert min(size for size, _ in sizes) >= 3


def test_only_a_sample_below_the_floor_is_generated(lm: CausalLM, windows: list[Window]) -> None:
    probe = ExtractionProbe(
        continuation_tokens=SIZE, generation_floor=0.5, num_generated_below_floor=3
    )
    measured = measure(lm, windows, probe)
    accuracy_N = measured.columns["num_correct"] / SIZE
    found = measured.detail
    assert found.num_below_floor == int((accuracy_N < 0.5).sum()) >= 10
    assert (found.num_checked, found.num_matched_below_floor) == (3, 0)
    assert int(np.isnan(found.num_edits_N).sum()) == found.num_below_floor - 3
    assert not found.matched_N[np.isnan(found.num_edits_N)].any()
    # The first ones in an order of all documents, which does not depend on who is below the floor.
    ranks = rank_in_buckets(windows, seed=0, purpose="below the floor")
    first = sorted(np.flatnonzero(accuracy_N < 0.5), key=lambda index: ranks[index])[:3]
    assert not np.isnan(found.num_edits_N[first]).any()
    assert sorted(ranks) == list(range(len(windows)))
    # What is generated does not depend on the order of the documents.
    turned = find(lm, windows[::-1], probe)
    assert np.array_equal(turned.num_edits_N[::-1], found.num_edits_N, equal_nan=True)


def test_all_are_generated_once_the_sample_has_a_match(lm: CausalLM, windows: list[Window]) -> None:
    probe = ExtractionProbe(
        continuation_tokens=SIZE, generation_floor=1.0, num_generated_below_floor=12
    )
    found, whole = find(lm, windows, probe), find(lm, windows)
    assert found.num_checked == found.num_below_floor == len(windows) - found.num_verbatim
    assert found.num_matched_below_floor == int(whole.matched_N.sum()) - found.num_verbatim > 0
    assert found.matched_N.tolist() == whole.matched_N.tolist()


def test_gap_covers_the_tokens_before_and_after_the_divergence(
    lm: CausalLM, windows: list[Window], generated: list[list[int]]
) -> None:
    found = find(lm, windows)
    for index in (0, 1, 2):
        ids = np.concatenate([windows[index].input_ids[:PREFIX], generated[index]]).astype(np.int64)
        with torch.no_grad():
            logits_SV = lm.model(torch.from_numpy(ids)[None]).logits[0, PREFIX - 1 : -1]
        logits_SV[:, END] = -torch.inf
        best = logits_SV.double().topk(2).values
        gap = float((best[:, 0] - best[:, 1]).min())
        # A text generated in part has not seen all gaps; fp32 sums differ by about 1e-6.
        if np.isfinite(found.num_edits_N[index]):
            assert found.min_gap_N[index] == pytest.approx(gap, abs=1e-5)
        else:
            assert found.min_gap_N[index] >= gap - 1e-5
