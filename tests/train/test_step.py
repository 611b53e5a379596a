"""One optimizer step: which labels belong together, and which numbers dropout draws."""

from typing import Any

import numpy as np
import pytest
import step_examples
import torch
from plain_losses import reduce_plainly
from step_examples import make_batch
from tiny_families import VOCAB_SIZE, build

from memguard.config import OptimConfig
from memguard.config.mitigations import NgramPenaltyConfig, NpoConfig
from memguard.model.checks import build_causal_lm
from memguard.runtime import Runtime
from memguard.train.step import TrainStep

NUM_TOKENS = 8


def make_step(model: Any, batch_size: int, *mitigations: Any, **train: Any) -> TrainStep:
    lm, optim = build_causal_lm(model), OptimConfig()
    return step_examples.make_step(
        lm, mitigations, optim=optim, seed=5, batch_size=batch_size, **train
    )


@pytest.mark.parametrize(
    "config",
    [NgramPenaltyConfig(name="ngram_penalty", n=3, margin=0.1), NpoConfig(name="npo", beta=0.5)],
    ids=lambda config: config.name,
)
def test_pieces_of_two_rows_stay_two(config: Any) -> None:
    """Rows of one document each: all that tells the documents apart is the row."""
    draw = np.random.default_rng(0)
    ids = draw.integers(3, VOCAB_SIZE, (2, NUM_TOKENS))
    # Around the first model's own losses, log(97), so that windows lie on both sides of a margin.
    reference = draw.normal(np.log(VOCAB_SIZE), 3, ids.shape).astype(np.float32)
    forget = np.ones_like(ids, dtype=bool)
    model = build("llama").double()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids)).logits[:, :-1]
    expected = reduce_plainly(
        logits.flatten(0, 1),
        torch.from_numpy(ids[:, 1:]).flatten(),
        [config],
        reference_nll_N=torch.from_numpy(reference[:, 1:]).double().flatten(),
        piece_N=torch.arange(2).repeat_interleave(NUM_TOKENS - 1),
        forget_N=torch.from_numpy(forget[:, 1:]).flatten(),
    )
    batch = make_batch(ids, reference_nll=reference, forget=forget)
    found = make_step(model, 2, config).run(batch, lr=1e-3, step=1, first_sample=0)
    # float64, but for what transformers computes in fp32 on both sides.
    assert found.loss == pytest.approx(float(expected), rel=1e-9)


def test_every_micro_batch_draws_dropout_of_its_own() -> None:
    """What a row's dropout is depends on its place in the run, not on the accumulation."""
    # Equal rows: only dropout tells them apart.
    ids = np.tile(np.arange(3, 3 + NUM_TOKENS), (3, 1))

    def drop(first_sample: int) -> list[torch.Tensor]:
        model = build("gpt2", embd_pdrop=0.5).train()
        dropped: list[torch.Tensor] = []
        step = make_step(model, 3, micro_batch_size=1)
        model.transformer.drop.register_forward_hook(lambda _, __, out: dropped.append(out == 0))
        step.run(make_batch(ids), lr=1e-3, step=1, first_sample=first_sample)
        return dropped

    masks, shifted = drop(0), drop(1)
    assert len(masks) == len(shifted) == 3
    for one, other in ((0, 1), (1, 2), (0, 2)):
        # 256 coins each.
        assert not torch.equal(masks[one], masks[other])
    assert torch.equal(torch.cat(masks[1:]), torch.cat(shifted[:2]))


def test_arrays_go_to_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spied on the CPU: a copy from other memory would make the host wait."""
    step, calls = make_step(build("llama"), 2), []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pinned")
        return tensor

    def move(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        calls.append(f"{device}, {non_blocking}")
        return tensor

    array = np.arange(3)
    assert step._to_device(array).tolist() == [0, 1, 2]
    step.runtime = Runtime(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", move)
    step._to_device(array)
    assert calls == ["pinned", "cuda:0, True"]
