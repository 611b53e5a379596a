"""MeZO on every mesh: the derivatives of the loss and the weights of one process."""

import itertools
import math

import pytest
import torch
from meshes import mesh_of, to_mesh
from parity import (
    NUM_ROWS,
    TIED,
    UNTIED,
    Case,
    Degrees,
    build_reference,
    build_sharded,
    make_batch,
    own_piece,
    share,
    upcasting_to,
)
from ranks import RankPool
from torch import Tensor
from torch.distributed.tensor import DTensor

from memguard.config import OptimConfig, TrainConfig
from memguard.mitigation import build_mitigations
from memguard.model.checks import build_causal_lm
from memguard.optim.mezo import EPSILON, Mezo
from memguard.parallel.local_parameters import LocalParameter
from memguard.parallel.mesh_shape import MeshShape
from memguard.runtime import Runtime
from memguard.train.step import TrainStep

pytestmark = pytest.mark.slow

CASES = [
    Case(family="qwen2", changes=TIED, micro_batch_size=2),
    Case(family="phi3", changes=(("tie_word_embeddings", True), ("pad_token_id", 90))),
    Case(family="llama", changes=UNTIED),
]
LR, NUM_STEPS = 1e-3, 3


def make_step(lm: object, case: Case) -> TrainStep:
    return TrainStep(
        lm=lm,  # type: ignore[arg-type]
        mitigations=build_mitigations((), special_ids=[]),
        train=TrainConfig(batch_size=NUM_ROWS, micro_batch_size=case.micro_batch_size),
        optim=OptimConfig(name="mezo", lr=LR, max_grad_norm=None, num_seeds=2),
        seed=5,
        runtime=Runtime(),
    )


def take_piece(parameter: LocalParameter, whole: Tensor) -> Tensor:
    if not isinstance(parameter.source, DTensor):
        return whole
    whole = whole if parameter.order is None else to_mesh(parameter.order, whole)
    return whole[own_piece(parameter.source)]


@torch.no_grad()
def compare(degrees: Degrees, case: Case) -> tuple[float, float, bool]:
    """Train on a mesh and on one process; on every rank.

    Returns the largest differences of derivatives and weights, and whether directions are equal.
    """
    build_reference(case)  # Imports the code of the family, which is patched.
    with upcasting_to(torch.float64), torch.enable_grad():
        names = ("data", "z", "y", "x")
        mesh = mesh_of(MeshShape(**dict(zip(names, degrees, strict=True))), "cpu")
        sharded = make_step(build_sharded(case, build_reference(case), mesh), case)
        alone = make_step(build_causal_lm(build_reference(case), chunk_tokens=7), case)
        slopes = 0.0
        for number in range(1, NUM_STEPS + 1):
            batch = make_batch(number, alone.lm.vocab_size)
            expected = alone.run(batch, lr=LR, step=number, first_sample=0)
            result = sharded.run(share(batch, mesh), lr=LR, step=number, first_sample=0)
            assert result.slope is not None
            assert expected.slope is not None
            assert result.grad_norm is None
            slopes = max(slopes, abs(result.slope - expected.slope))
        whole = {each.name: each.local.detach() for each in alone.parameters}
        worst = max(
            float((each.local.detach() - take_piece(each, whole[each.name])).abs().max())
            for each in sharded.parameters
            if each.local.numel()
        )
        for step in (sharded, alone):
            for each in step.parameters:
                each.local.detach().zero_()
            assert isinstance(step.optimizer, Mezo)
            step.optimizer.move(1.0)
        equal = all(
            torch.equal(each.local, take_piece(each, whole[each.name]))
            for each in sharded.parameters
        )
        return slopes, worst, equal


def check(ranks: RankPool, degrees: Degrees, case: Case) -> None:
    for slopes, worst, equal in ranks(compare, math.prod(degrees), degrees, case):
        assert slopes <= 1e-9
        assert worst <= 1e-12
        assert equal


@pytest.mark.quick
def test_a_step_follows_the_derivative_along_its_direction() -> None:
    build_reference(CASES[0])
    with upcasting_to(torch.float64):
        step = make_step(build_causal_lm(build_reference(CASES[0])), CASES[0])
        batch = make_batch(1, 131)
        before = {each.name: each.local.detach().clone() for each in step.parameters}
        # The derivative by autograd, of the direction that the step moved along.
        step.optimizer.begin(step=1, lr=0.0)
        for piece in step._micro_batches(NUM_ROWS):
            step.rehearse(batch, piece)
        gradients = {each.name: each.source.grad for each in step.parameters}
        for each in step.parameters:
            each.source.grad = None
        result = step.run(batch, lr=LR, step=1, first_sample=0)
        assert result.slope is not None
        derivative = 0.0
        for each in step.parameters:
            move = (each.local.detach() - before[each.name]) / (-LR * result.slope)
            assert torch.allclose(move.abs(), torch.ones_like(move), rtol=1e-6)
            gradient = gradients[each.name]
            assert gradient is not None
            derivative += float((gradient * move).sum()) / batch.num_kept
        assert math.isclose(result.slope, derivative, rel_tol=1e3 * EPSILON**2)


def test_a_mesh_has_the_steps_of_one_process(ranks: RankPool) -> None:
    check(ranks, (1, 2, 2, 1), CASES[0])


@pytest.mark.mesh
@pytest.mark.parametrize(
    "degrees",
    [
        *[each for each in itertools.product((1, 2), repeat=4) if 1 < math.prod(each) <= 8],
        (1, 1, 1, 4),
    ],
    ids=str,
)
def test_meshes_have_the_steps_of_one_process(ranks: RankPool, degrees: Degrees) -> None:
    for case in CASES:
        check(ranks, degrees, case)
