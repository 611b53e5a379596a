"""Packing changes nothing that is learned: loss and gradients of packed rows and of single ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from corpus_examples import make_corpus, tokenized
from tiny_families import build
from torch import Tensor

from memguard.config import GoldfishConfig
from memguard.data.corpus import Corpus
from memguard.data.loader import Loader
from memguard.data.packing import pack
from memguard.mitigation import build_mitigations
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.records import IGNORE_LABEL

VOCAB_SIZE = 53


@pytest.fixture(scope="module")
def layer() -> CausalLM:
    model = build("llama", vocab_size=VOCAB_SIZE, tie_word_embeddings=True, pad_token_id=None)
    return build_causal_lm(model.double().train(), chunk_tokens=16)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    draw = np.random.default_rng(0)
    # Some longer than a row of 24, some of one token, a fifth of the tokens unsupervised.
    sizes = [*draw.integers(2, 24, 12), 60, 31, 1]
    return make_corpus(
        [
            tokenized(index, draw.integers(0, VOCAB_SIZE, size), draw.random(size) < 0.8)
            for index, size in enumerate(sizes)
        ]
    )


def loss_and_gradients(
    layer: CausalLM, corpus: Corpus, *, share_rows: bool, batch_size: int, mitigations: Any
) -> tuple[float, dict[str, Tensor]]:
    """Feed every row once, as a step of training does; one mean over all labels that are left."""
    lengths = [entry.num_tokens for entry in corpus.manifest]
    rows = pack(range(len(lengths)), lengths, 24, share_rows=share_rows)
    loader = Loader(
        corpus,
        rows,
        np.arange(len(rows)),
        batch_size=batch_size,
        pad_id=0,
        mask_labels=lambda _, ids, labels, generator: mitigations.mask_labels(
            ids, labels, generator=generator
        ),
        seed=0,
    )
    batches = [loader.batch(loader.samples(step)) for step in range(loader.num_steps)]
    num_kept = sum(batch.num_kept for batch in batches)

    def terms() -> Iterator[Tensor]:
        for batch in batches:
            labels = torch.from_numpy(batch.labels)[:, 1:]
            keep = labels != IGNORE_LABEL
            hidden = layer.hidden_states(
                torch.from_numpy(batch.input_ids), torch.from_numpy(batch.position_ids)
            )
            terms = layer.token_terms(hidden[:, :-1][keep], labels[keep])
            yield mitigations.reduce(terms) / num_kept

    layer.model.zero_grad()
    loss = torch.stack(list(terms())).sum()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in layer.model.named_parameters()}


@pytest.mark.parametrize("mode", [None, "hash", "hash_reference", "static"])
def test_packed_rows_give_the_loss_and_gradients_of_one_document_a_row(
    layer: CausalLM, corpus: Corpus, mode: Any
) -> None:
    configs = [GoldfishConfig(name="goldfish", k=3, context_width=4, mode=mode)] if mode else []
    mitigations = build_mitigations(configs, special_ids=[7])
    packed, alone = (
        loss_and_gradients(
            layer, corpus, share_rows=share, batch_size=size, mitigations=mitigations
        )
        for share, size in ((True, 3), (False, 1))
    )
    # fp64, but for the norms and rotary angles that transformers computes in fp32 (6e-8). What
    # leaks from one document into another changes both by hundredths.
    assert packed[0] == pytest.approx(alone[0], rel=1e-6)
    scale = max(float(grad.abs().max()) for grad in alone[1].values())
    for name, grad in alone[1].items():
        torch.testing.assert_close(packed[1][name], grad, rtol=1e-5, atol=1e-6 * scale)


def test_rows_that_leak_would_be_noticed(
    layer: CausalLM, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    mitigations = build_mitigations([], special_ids=[])
    arguments: dict[str, Any] = {"batch_size": 1, "mitigations": mitigations}
    alone, _ = loss_and_gradients(layer, corpus, share_rows=False, **arguments)
    plain = layer.hidden_states
    monkeypatch.setattr(CausalLM, "hidden_states", lambda self, ids, positions: plain(ids, None))
    leaking, _ = loss_and_gradients(layer, corpus, share_rows=True, **arguments)
    assert abs(leaking - alone) > 1e-3
