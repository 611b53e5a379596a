"""Adapters on one process and on every mesh give the numbers of `peft` on one process."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from fake_mesh import simulated_mesh
from parity import TIED, UNTIED, Case, Degrees, check
from ranks import RankPool
from test_collectives import Operators
from test_shard import make_layer
from tiny_families import build
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from memguard.errors import MemguardError
from memguard.parallel.lora import (
    DropoutMasks,
    LoraSpec,
    attach_lora,
    fill_lora,
    find_targets,
    is_adapter_parameter,
    shorten_targets,
)
from memguard.parallel.mesh_shape import MeshShape

pytestmark = pytest.mark.slow

_LORA = LoraSpec(r=3, alpha=5)
_RSLORA = LoraSpec(r=4, alpha=8, use_rslora=True, target_modules=("q_proj", "v_proj", "down_proj"))
_DORA = LoraSpec(r=3, alpha=5, use_dora=True)
_DROPOUT = LoraSpec(r=3, alpha=5, dropout=0.3)
_FAMILIES = {"llama": (), "qwen2": (), "qwen3": (("head_dim", 8),)}
_MESHES: list[Any] = list(itertools.product((1, 2), repeat=4))


def cases_of(degrees: Degrees) -> list[Case]:
    """Every family, all layers and some of them, with and without accumulation."""
    rows = 8 // (degrees[0] * degrees[1])
    return [
        Case(family=family, changes=(*changes, *tied), adapter=adapter, micro_batch_size=micro)
        for family, changes in _FAMILIES.items()
        for tied, adapter, micro in (
            (TIED, _LORA, rows // 2),
            (TIED, _DORA, None),
            (UNTIED, _RSLORA, None),
        )
    ]


def test_a_mesh_equals_peft(ranks: RankPool) -> None:
    lora, *_, dora, rslora = cases_of((1, 1, 2, 2))
    two_steps = [replace(case, num_steps=2) for case in (lora, dora, rslora)]
    check(ranks, (1, 1, 2, 2), two_steps)


def test_adapters_of_several_projections_equal_peft(ranks: RankPool) -> None:
    cases = [
        Case(family="phi3", adapter=_DORA, num_steps=2),
        Case(family="falcon", changes=(("bias", True),), packed=False, adapter=_LORA, num_steps=2),
    ]
    check(ranks, (1, 1, 2, 2), cases)
    check(ranks, (1, 1, 1, 1), [replace(case, plain=True) for case in cases])


def test_one_process_equals_peft(ranks: RankPool) -> None:
    cases = cases_of((1, 1, 1, 1))
    cases += [
        Case(changes=UNTIED, adapter=_DROPOUT),
        Case(changes=UNTIED, adapter=_DORA, checkpointing="selective"),
    ]
    check(ranks, (1, 1, 1, 1), [replace(case, plain=True) for case in cases])


@pytest.mark.mesh
@pytest.mark.parametrize("degrees", [each for each in _MESHES if sum(each) < 8], ids=str)
def test_every_mesh_equals_peft(ranks: RankPool, degrees: Degrees) -> None:
    check(ranks, degrees, cases_of(degrees))


@pytest.mark.mesh
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_shared_key_value_heads_equal_peft(ranks: RankPool, family: str) -> None:
    changes = (*_FAMILIES[family], *UNTIED, ("num_key_value_heads", 2))
    case = Case(family=family, changes=changes, adapter=_LORA)
    check(ranks, (1, 1, 1, 4), [replace(case, adapter=spec) for spec in (_LORA, _DORA, _RSLORA)])


@pytest.mark.mesh
def test_recomputation_changes_no_number(ranks: RankPool) -> None:
    full = Case(changes=UNTIED, adapter=_DROPOUT, checkpointing="full")
    selective = replace(full, checkpointing="selective", adapter=_DORA)
    check(ranks, (1, 1, 2, 1), [full, selective])
    check(ranks, (1, 1, 1, 1), [replace(full, plain=True), replace(selective, plain=True)])


@pytest.mark.mesh
@pytest.mark.parametrize("degrees", [(1, 1, 2, 2), (1, 1, 1, 4), (2, 2, 1, 2)], ids=str)
def test_dropped_features_are_the_same_on_all_ranks_that_share_an_input(
    ranks: RankPool, degrees: Degrees
) -> None:
    """Peft's side drops what the ranks along the input's axis drop, whatever the other rank."""
    check(ranks, degrees, [Case(changes=UNTIED, adapter=_DROPOUT)])


def test_masks_differ_by_layer_sample_and_rank_and_keep_their_share() -> None:
    rows = torch.empty(300, 40)
    masks = DropoutMasks(_DROPOUT, "q_proj", 0)
    first = masks(rows)
    assert torch.equal(masks(rows), first)
    masks.start(1)
    others = [masks, DropoutMasks(_DROPOUT, "k_proj", 0), DropoutMasks(_DROPOUT, "q_proj", 1)]
    assert all(not torch.equal(other(rows), first) for other in others)
    # 12,000 draws: the share's own deviation is 0.4 %.
    assert abs(float(first.double().mean()) - 0.7) < 0.02


def test_nothing_is_dropped_in_evaluation() -> None:
    model = build("llama")
    attach_lora(model, _DROPOUT)
    fill_lora(model, _DROPOUT)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
        ids = torch.arange(12)[None]
        evaluated = [model.eval()(ids).logits for _ in range(2)]
        trained = model.train()(ids).logits
    assert torch.equal(*evaluated)
    assert not torch.allclose(trained, evaluated[0])


def read_initial(degrees: Degrees, spec: LoraSpec) -> dict[str, torch.Tensor]:
    """On a rank: the whole initial factors of a sharded model."""
    data, z, y, x = degrees
    layer = make_layer(MeshShape(data=data, z=z, y=y, x=x), build("llama"), adapter=spec)
    return {
        name: parameter.full_tensor()
        for name, parameter in layer.lm.model.named_parameters()
        if isinstance(parameter, DTensor) and is_adapter_parameter(name)
    }


@pytest.mark.mesh
def test_initial_values_are_those_of_one_process_and_of_pefts_distribution(ranks: RankPool) -> None:
    spec = LoraSpec(r=3, alpha=5, seed=4, target_modules=("q_proj", "o_proj"), use_dora=True)
    plain = build("llama")
    attach_lora(plain, spec)
    fill_lora(plain, spec)
    expected = {n: p.detach() for n, p in plain.named_parameters() if p.requires_grad}
    assert sum(is_adapter_parameter(name) for name in expected) == len(expected) == 12
    for values in ranks(read_initial, 4, (1, 2, 1, 2), spec):
        assert values.keys() == expected.keys()
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name
    weights = dict(plain.named_parameters())
    for name, value in expected.items():
        if "magnitude" in name:
            weight = weights[name.replace("lora_magnitude_vector.", "")].detach()
            torch.testing.assert_close(value, weight.norm(dim=1))
    bound = 32**-0.5  # peft: kaiming_uniform_(a=sqrt(5)) over the whole fan of 32.
    factors = torch.cat([p.flatten() for n, p in expected.items() if "lora_A" in n])
    assert 0.95 * bound < float(factors.abs().max()) <= bound
    assert all(not p.any() for n, p in expected.items() if "lora_B" in n)


@pytest.mark.quick
def test_another_seed_draws_other_values_and_gaussian_has_the_deviation_of_peft() -> None:
    drawn = []
    for seed in (0, 1):
        model = build("llama", hidden_size=256)
        attach_lora(model, spec := LoraSpec(r=8, alpha=8, init="gaussian", seed=seed))
        fill_lora(model, spec)
        factors = [p.detach() for name, p in model.named_parameters() if "lora_A" in name]
        assert len({float(factor.sum()) for factor in factors}) == len(factors) == 14
        drawn.append(torch.cat([factor.flatten() for factor in factors]))
    assert not torch.equal(*drawn)
    # 20,000 draws: the deviation's own error is 0.5 %.
    assert abs(float(drawn[0].std()) * 8 - 1) < 0.03


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("llama", ("q_prj",), "LlamaForC.*; got 'q_prj'. They are down_proj, gate_proj, k_proj"),
        ("llama", ("lm_head",), "'lm_head' is the head"),
        ("llama", ("embed_tokens",), "is a Embedding, not a plain linear layer"),
        ("llama", ("q_proj", "self_attn"), "is a LlamaAttention, not a plain linear layer"),
        ("gpt2", None, "computes with Conv1D instead of linear layers"),
        ("gpt2", ("c_attn",), "is a Conv1D, not a plain linear layer"),
        # Dense layers and shared experts have the names that experts have in checkpoints.
        ("mixtral", None, "in peft 'all-linear' of Mixtral.* name others, k_proj, o_proj, q_proj"),
        ("dots1", ("q_proj", "down_proj"), "in peft 'down_proj' of Dots1.* means its experts too"),
        ("dots1", ("layers.0.mlp.up_proj",), "in peft 'layers.0.mlp.up_proj' of Dots1"),
        ("mamba", None, "kernels of Mamba.* 'out_proj' .* name others, dt_proj, in_proj, x_proj"),
        ("mixtral", ("w1",), "got 'w1'. They are k_proj, o_proj, q_proj, v_proj"),
    ],
)
def test_layers_without_an_adapter_are_refused_by_name(
    family: str, targets: tuple[str, ...] | None, message: str
) -> None:
    model = build(family)
    with pytest.raises(MemguardError, match=message):
        attach_lora(model, LoraSpec(r=2, alpha=2, target_modules=targets))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "targets", "num_names"),
    [
        ("qwen2", None, 7),
        ("qwen2", ("q_proj", "layers.1.mlp.up_proj"), 3),
        # Its shared experts and their gates are linear layers.
        ("qwen2_moe", None, 8),
        ("mixtral", ("q_proj", "o_proj"), 2),
    ],
)
def test_targets_are_those_of_peft(
    family: str, targets: tuple[str, ...] | None, num_names: int
) -> None:
    config = peft.LoraConfig(r=2, target_modules=list(targets) if targets else "all-linear")
    wrapped = peft.get_peft_model(build(family), config)
    layers = {n.partition(".lora_A")[0] for n, _ in wrapped.named_parameters() if "lora_A" in n}
    found = find_targets(model := build(family), targets)
    assert {f"base_model.model.{name}" for name in found} == layers
    short = shorten_targets(model, found)
    assert find_targets(model, short) == found
    assert len(short) == num_names


def test_peft_refuses_the_layer_that_kernels_read() -> None:
    config = peft.LoraConfig(r=2, target_modules=["out_proj"])
    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba-based models"):
        peft.get_peft_model(build("mamba"), config)
    assert find_targets(build("mamba"), ("in_proj", "x_proj"))


class SizedOperators(Operators):
    """Lists the number of elements of each collective too."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def note(self, name: str, args: Any) -> None:
        super().note(name, args)
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        self.sizes.append(sum(tensor.numel() for tensor in tensors))


def list_collectives(shape: MeshShape, adapter: LoraSpec | None) -> list[tuple[str, int]]:
    """Return the collectives of forward and backward of one micro-batch on rank 0, sorted."""
    # The other ranks are simulated, which changes the values and no call.
    with simulated_mesh(shape) as mesh:
        layer = make_layer(mesh, build("llama"), adapter=adapter)
        ids, labels = torch.arange(24).reshape(2, 12), torch.arange(24)

        def work() -> torch.Tensor:
            return layer.lm.sum_nll(layer.lm.hidden_states(ids).flatten(0, 1), labels)

        with SizedOperators() as operators:
            layer.lm(work).backward()  # type: ignore[no-untyped-call]
    calls = zip(operators.names, operators.sizes, strict=True)
    return sorted((name, size) for name, size in calls if "wait" not in name)


def test_adapters_add_no_collective_and_a_frozen_base_is_not_reduced() -> None:
    full, lora, dora = (
        list_collectives(MeshShape(y=2, x=2), adapter) for adapter in (None, _LORA, _DORA)
    )
    assert full
    # The first block's input needs no gradient, so that its dX are not reduced over x. The norm
    # before it reduces no gradient over y.
    sizes = Counter(full)
    sizes.subtract(Counter(lora))
    assert min(sizes.values()) >= 0, "no collective is added, none is larger"
    # One of [out] numbers for each layer of the two blocks.
    assert len(dora) == len(lora) + 2 * 7
    assert max(size for name, size in (Counter(dora) - Counter(lora))) <= 48
    stored = [list_collectives(MeshShape(z=2), adapter) for adapter in (None, _LORA)]
    scattered = [sum("reduce_scatter" in name for name, _ in calls) for calls in stored]
    assert scattered[0] > 0
    assert scattered[1] == 0
