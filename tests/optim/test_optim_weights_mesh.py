"""Weights in bf16 on real meshes: what is written, and gradients of several micro-batches."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from meshes import mesh_of, to_file
from ranks import RankPool
from step_examples import make_batch, make_step
from tiny_families import VOCAB_SIZE, build
from torch import Tensor
from torch.distributed.tensor import DTensor

from memguard.data.loader import Batch
from memguard.hf.assembly import Assembly, assemble_loaded, build_meta_layer, fill_layer
from memguard.hf.safetensors import ModuleWeights
from memguard.model.causal_lm import CausalLM
from memguard.optim.noise import as_rows
from memguard.optim.weights import Weights
from memguard.parallel.local_parameters import LocalParameter
from memguard.parallel.mesh_shape import MeshShape
from memguard.train.step import TrainStep

pytestmark = pytest.mark.mesh

BF16, CPU = torch.bfloat16, torch.device("cpu")
# A vocabulary that no mesh divides; fused layers with biases, of weights [in, out] and [out, in];
# experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "falcon": {"bias": True},
    "gpt2": {},
    "phi3": {},
    "mixtral": {},
}
MESHES = [
    MeshShape(data=data, z=z, y=y, x=x)
    for data in (1, 2)
    for z in (1, 2)
    for y in (1, 2)
    for x in (1, 2)
    if 1 < data * z * y * x <= 8
]


def start(model: Any, shape: MeshShape) -> CausalLM:
    if shape == MeshShape():
        model = copy.deepcopy(model).to(BF16)
        return assemble_loaded(model, Assembly(mesh=None, device=CPU, dtype=BF16))
    sharding = Assembly(mesh=mesh_of(shape), device=CPU, dtype=BF16, compute_dtype=BF16)
    layer = build_meta_layer(copy.deepcopy(model.config), sharding)
    fill_layer(layer, ModuleWeights(model), name="test")
    return layer.lm


def draw(parameter: LocalParameter) -> Tensor:
    """Return a value for the whole tensor, in the order of files."""
    generator = torch.Generator().manual_seed(len(parameter.name))
    return torch.randn(parameter.source.shape, generator=generator)


def write_all(family: str, shape: MeshShape) -> dict[str, Tensor]:
    """Write a value for each parameter; return whole weights in the order of files."""
    weights, whole = Weights(seed=5), {}
    for parameter in make_step(start(build(family, **FAMILIES[family]), shape)).parameters:
        value, mine = draw(parameter), torch.empty(parameter.local.shape)
        for piece in parameter.split():
            sizes = [here.stop - here.start for here in piece.slices]
            there = [slice(a, a + n) for a, n in zip(piece.start, sizes, strict=True)]
            mine[piece.slices] = value[tuple(there)]
        for rows in weights.parts(parameter):
            weights.write(parameter, rows, as_rows(mine)[rows], step=3)
        full = parameter.source.detach()
        if isinstance(full, DTensor):
            full = full.full_tensor()
        whole[parameter.name] = full if parameter.order is None else to_file(parameter.order, full)
    return whole


def write_families(shape: MeshShape) -> dict[str, dict[str, Tensor]]:
    return {family: write_all(family, shape) for family in FAMILIES}


@pytest.mark.parametrize("shape", [*MESHES, MeshShape(x=4)], ids=str)
def test_written_weights_have_the_bits_of_one_process(ranks: RankPool, shape: MeshShape) -> None:
    expected = write_families(MeshShape())
    for written in ranks(write_families, shape.num_ranks, shape, timeout_s=280):
        assert written.keys() == expected.keys()
        for family, weights in expected.items():
            assert written[family].keys() == weights.keys()
            for name, weight in weights.items():
                assert torch.equal(written[family][name], weight), (family, name)


def take(step: TrainStep, batch: Batch, num_labels: int) -> dict[str, Tensor]:
    """Take a step without an update; return its gradients."""
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        for parameter in step.parameters:
            assert parameter.local.grad is not None
            gradients[parameter.name] = parameter.local.grad.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step.optimizer, "update", keep)
        step.run(batch, lr=1e-3, step=1, first_sample=0, labels=(num_labels, num_labels))
    assert all(parameter.local.grad is None for parameter in step.parameters)
    assert all(parameter.source.grad is None for parameter in step.parameters)
    return gradients


NUM_ROWS = 8


def sum_gradients(shape: MeshShape) -> tuple[float, float]:
    """Return the errors of sums over micro-batches, in fp32 and, as a control, in bf16."""
    lm = start(build("llama"), shape)
    ids = np.random.default_rng(lm.batch_rank).integers(3, VOCAB_SIZE, (NUM_ROWS, 16))
    batch, num_ways = make_batch(ids), lm.num_batch_ways
    num_labels = batch.num_kept * num_ways
    rows = [take(make_step(lm), make_batch(row[None]), num_labels) for row in ids]
    assert {each.dtype for each in rows[0].values()} == {BF16}
    step = make_step(lm, batch_size=NUM_ROWS * num_ways, micro_batch_size=1)
    worst, worst_bf16 = 0.0, 0.0
    # The second step starts from no sums.
    for gradients in (take(step, batch, num_labels), take(step, batch, num_labels)):
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            exact = sum(row[name].double() for row in rows)
            assert isinstance(exact, Tensor)
            in_bf16 = rows[0][name].clone()
            for row in rows[1:]:
                in_bf16 += row[name]
            scale = float(exact.abs().max()) or 1.0
            worst = max(worst, float((gradient - exact).abs().max()) / scale)
            worst_bf16 = max(worst_bf16, float((in_bf16 - exact).abs().max()) / scale)
    return worst, worst_bf16


@pytest.mark.parametrize("shape", [MeshShape(z=2), MeshShape(z=2, x=2), MeshShape(y=2)], ids=str)
def test_gradients_of_micro_batches_add_up_in_fp32(ranks: RankPool, shape: MeshShape) -> None:
    for error, error_in_bf16 in ranks(sum_gradients, shape.num_ranks, shape):
        assert error < 1e-6
        assert error_in_bf16 > 1e-3
