"""Compiled blocks with adapters: the losses of eager ones, few compilations, no dense NF4 kept."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from parity import needs_compiler
from tiny_families import COMPILES_SELECTIVE
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from memguard.config import TrainConfig
from memguard.hf.assembly import AssembledModel, Assembly, assemble, fill_layer
from memguard.hf.from_config import build_on_meta
from memguard.hf.safetensors import ModuleWeights
from memguard.model.causal_lm import CausalLM
from memguard.parallel.lora import LoraSpec, list_masks

# torch itself warns of what it imports.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def build(*, nf4: bool, is_compiled: bool, mode: Any, **spec: Any) -> CausalLM:
    train = TrainConfig(
        batch_size=2, precision="fp32", activation_checkpointing=mode, compile=is_compiled
    )
    assembly = Assembly.for_training(
        train,
        mesh=None,
        device=torch.device("cpu"),
        adapter=LoraSpec(r=4, alpha=8, **spec),
        quantization="nf4" if nf4 else None,
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(CONFIG)
    lm = assemble(build_on_meta(CONFIG, attn=None, dtype=assembly.dtype), assembly)
    fill_layer(AssembledModel(lm=lm, assembly=assembly), ModuleWeights(base), name="tiny")
    lm.model.train()
    return lm


def train(lm: CausalLM, lengths: tuple[int, ...]) -> list[float]:
    """Train on rows of these lengths; return the losses."""
    trained = [part for part in lm.model.parameters() if part.requires_grad]
    update, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for number, length in enumerate(lengths):
        drawn = torch.Generator().manual_seed(number)
        ids = torch.randint(CONFIG.vocab_size, (2, length), generator=drawn)
        for masks in list_masks(lm.model):
            masks.start(2 * number)
        loss = lm.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"nf4": False, "dropout": 0.2}, "none"),
        ({"nf4": False, "use_dora": True}, "full"),
        ({"nf4": True, "dropout": 0.2}, "full"),
        ({"nf4": True}, "selective"),
    ],
    ids=["LoRA", "DoRA, full", "QLoRA, full", "QLoRA, selective"],
)
def test_losses_are_those_of_eager_blocks(settings: dict[str, Any], mode: str) -> None:
    if mode == "selective" and not COMPILES_SELECTIVE:
        pytest.skip("refused with this transformers")
    make = partial(build, mode=mode, **settings)
    expected = train(make(is_compiled=False), (32, 32, 32))
    assert train(make(is_compiled=True), (32, 32, 32)) == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) == 3
    # The first block, whose input has no gradient, and the others.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("nf4", [False, True], ids=["LoRA", "QLoRA"])
def test_backward_keeps_no_more_than_that_of_eager_blocks(
    monkeypatch: pytest.MonkeyPatch, nf4: bool
) -> None:
    """What the compiler keeps for backward is chosen before its kernels are made."""
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition")
    )
    eager, compiled = (
        count_kept(build(nf4=nf4, is_compiled=is_compiled, mode="none"))
        for is_compiled in (False, True)
    )
    assert 0 < compiled <= eager


def count_kept(lm: CausalLM) -> int:
    """Bytes kept for backward beside the model's own."""
    own = {part.untyped_storage().data_ptr() for part in lm.model.state_dict().values()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # Small beside weights.
    ids = torch.arange(4)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = lm.model(input_ids=ids, use_cache=False).logits
    assert output.requires_grad
    return sum(kept.values())
