"""What is written from the first divergence on is what generate writes from the prefix."""

import numpy as np
import pytest
import torch
from audit_examples import Held, run_probes
from probe_examples import make_evidence, to_tables
from record_examples import make_document
from tiny_families import build

from memguard.audit.decoding import Decoder
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.generation import GenerationProbe
from memguard.audit.probes.window_scores import compute_overlap
from memguard.audit.requests import Measured
from memguard.audit.scoring import ModelScorer
from memguard.audit.windows import Window
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm

VOCAB, SIZE = 53, 12
PROBE = GenerationProbe(nucleus=None)
EXTRACTION = ExtractionProbe(continuation_tokens=SIZE)


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = build(
        "llama", vocab_size=VOCAB, num_key_value_heads=4, initializer_range=0.02, **special
    )
    return build_causal_lm(model)


def _generate(lm: CausalLM, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        whole = lm.model.generate(
            torch.from_numpy(ids.astype(np.int64))[None],
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=SIZE,
            min_new_tokens=SIZE,
            do_sample=False,
            pad_token_id=0,
        )
    written: np.ndarray = whole[0, len(ids) :].numpy().astype(np.int32)
    return written


@pytest.fixture(scope="module")
def windows(lm: CausalLM) -> list[Window]:
    """Texts that greedy decoding leaves at once, late, or never."""
    draw, probe = np.random.default_rng(2), ExtractionProbe(continuation_tokens=SIZE)
    found = []
    for index, prefix in enumerate((6, 9, 20, 13, 7)):
        start = draw.integers(0, VOCAB, prefix).astype(np.int32)
        text = _generate(lm, start)
        kept = (0, 5, SIZE - 1, SIZE, 1)[index]
        if kept < SIZE:
            text[kept] = (text[kept] + 1) % VOCAB
            text[kept + 1 :] = draw.integers(0, VOCAB, SIZE - kept - 1)
        window = probe.window(make_document(np.concatenate([start, text]), name=str(index)))
        assert window is not None
        found.append(window)
    return found


def _measure(
    lm: CausalLM,
    windows: list[Window],
    decoder: Decoder,
    probe: GenerationProbe = PROBE,
    *,
    seed: int = 0,
) -> dict[str, Measured]:
    held = Held(ModelScorer(lm, 256), decoder)
    return run_probes([EXTRACTION, probe], held, windows, seed=seed)


@pytest.mark.parametrize("batch_tokens", [40, 4096])
def test_numbers_are_those_of_what_generate_writes(
    lm: CausalLM, windows: list[Window], batch_tokens: int
) -> None:
    measured = _measure(lm, windows, Decoder(lm, batch_tokens))
    divergence_N = measured["extraction"].columns["first_divergence"]
    assert divergence_N.tolist() == [0, 5, SIZE - 1, SIZE, 1]
    numbers = measured["generation"].columns
    for window, row in zip(windows, numbers.rows, strict=True):
        written = _generate(lm, window.input_ids[: window.prefix_tokens])
        expected = compute_overlap(window.continuation_ids, written)
        found = dict(zip(numbers.names, row, strict=True))
        # The same tokens: exact.
        assert found["greedy.rouge_l"] == expected.rouge_l
        assert found["greedy.longest_copied_run"] == expected.longest_run_tokens
        assert found["greedy.edit_distance"] == expected.edit_distance
        assert found["greedy.near_verbatim"] == (expected.edit_distance * SIZE <= SIZE // 10)
        assert found["greedy.bleu_above_0.75"] == (expected.bleu > 0.75)
        assert found["greedy.type_token_ratio"] == expected.type_token_ratio


def test_what_is_verbatim_costs_no_step(
    lm: CausalLM, windows: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = build_causal_lm(lm.model)
    writer.cached_lengths[1, 100] = True  # Which would be checked otherwise.
    monkeypatch.setattr(writer, "hidden_states", lambda *_, **__: pytest.fail("a forward"))
    numbers = _measure(lm, [windows[3]], Decoder(writer, 256))["generation"].columns
    assert numbers["greedy.edit_distance"].tolist() == [0]


def test_draws_do_not_depend_on_the_batch(lm: CausalLM, windows: list[Window]) -> None:
    together, alone = (
        _measure(lm, windows, Decoder(lm, tokens), GenerationProbe(), seed=1)["generation"].columns
        for tokens in (4096, 1)
    )
    assert not np.isnan(together.rows).any()
    assert together.rows.tolist() == alone.rows.tolist()


def test_each_number_has_a_row_and_a_meaning(lm: CausalLM, windows: list[Window]) -> None:
    probe = GenerationProbe()
    measured = _measure(lm, windows, Decoder(lm, 4096), probe)
    numbers = measured["generation"].columns
    summary = probe.tabulate(make_evidence(windows, measured, measured))
    tables = to_tables(summary)
    labels = {"greedy": "greedy", "nucleus": "T=1, top-p 0.95"}
    for decoding, label in labels.items():
        key = {"parameters": f"decoding={label}"}
        for metric in probe.metrics:
            row = tables.find("generation", metric.name, "trained", **key)
            mean = numbers[f"{decoding}.{metric.name}"].mean()
            assert row.value == pytest.approx(mean, abs=1e-12)
            base = tables.find("generation", metric.name, "trained", model="base", **key)
            assert base.value == row.value
            assert tables.find("generation", metric.name, "trained", against="base", **key)
            described = tables.find_metric("generation", metric.name, f"decoding={label}")
            assert described.settings == {"decoding": label}
            assert described.risk_rank is None
        # A length cannot exceed the continuation.
        run = tables.find("generation", "longest_copied_run", "trained", **key)
        assert 0 <= run.low <= run.high <= SIZE
    assert (summary.num_items, summary.matched) == (len(windows), {})
    assert {"generation.greedy.rouge_l", "base.generation.nucleus.edit_distance"} <= set(
        summary.columns
    )
    alone = probe.tabulate(make_evidence(windows, {}))
    assert (alone.rows, alone.reason) == ((), "no document was continued")
