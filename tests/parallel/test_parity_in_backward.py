"""AdaLomo and LOMO on every mesh: the weights of one process that keeps all gradients."""

import itertools
import math
from dataclasses import replace

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
from torch.nn import functional

from memguard.config import OptimConfig, TrainConfig
from memguard.errors import ConfigError
from memguard.mitigation import build_mitigations
from memguard.model.checks import build_causal_lm
from memguard.optim.in_backward import Lomo
from memguard.parallel.mesh_shape import MeshShape
from memguard.runtime import Runtime
from memguard.train.step import TrainStep

pytestmark = pytest.mark.slow

LR = 0.03
NUM_STEPS = 3
# Biases of q, k, v are copied over y; fused projections have an order of their own.
CASES = [
    Case(family="qwen2", changes=TIED),
    Case(family="qwen2", changes=UNTIED),
    Case(family="phi3", changes=(("tie_word_embeddings", True), ("pad_token_id", 90))),
]


class Plain:
    """AdaLomo or LOMO as its paper has it, on whole tensors after backward."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.means: dict[str, tuple[Tensor, ...]] = {}

    def update(self, name: str, weight: Tensor, gradient: Tensor, step: int) -> None:
        if self.name == "lomo":
            weight.sub_(gradient, alpha=LR)
            return
        square = gradient.square() + 1e-30
        news = (square.mean(1), square.mean(0)) if weight.ndim == 2 else (square,)
        decay = 1 - step**-0.8
        olds = self.means.get(name, news)
        means = tuple(decay * a + (1 - decay) * b for a, b in zip(olds, news, strict=True))
        self.means[name] = means
        if weight.ndim == 2:
            direction = gradient / (means[0][:, None] * means[1] / means[0].mean()).sqrt()
        else:
            direction = gradient / means[0].sqrt()
        rms_w, rms_u = (float(each.square().mean().sqrt()) for each in (weight, direction))
        weight.sub_(direction, alpha=LR * max(1e-3, rms_w) / max(1.0, rms_u))


def make_step(lm: object, name: str, runtime: Runtime) -> TrainStep:
    return TrainStep(
        lm=lm,  # type: ignore[arg-type]
        mitigations=build_mitigations((), special_ids=[]),
        train=TrainConfig(batch_size=NUM_ROWS, micro_batch_size=None),
        optim=OptimConfig(name=name, lr=LR, max_grad_norm=None),  # type: ignore[arg-type]
        seed=0,
        runtime=runtime,
    )


def distances(degrees: Degrees, case: Case, name: str) -> tuple[float, float, int, int]:
    """Train on a mesh, or on one process; on every rank.

    Returns the largest differences of weights and norms, and the most units and the most parameters
    that had gradients at a time.
    """
    build_reference(case)  # Imports the code of the family, which is patched.
    with upcasting_to(torch.float64):
        model, plain = build_reference(case), Plain(name)
        names = ("data", "z", "y", "x")
        mesh = None
        if math.prod(degrees) > 1:
            shape = MeshShape(**dict(zip(names, degrees, strict=True)))
            mesh = mesh_of(shape, "cpu")
        lm = build_causal_lm(build_reference(case), chunk_tokens=7)
        if mesh is not None:
            lm = build_sharded(case, model, mesh)
        lm.model.train()
        step = make_step(lm, name, Runtime())
        assert isinstance(step.optimizer, Lomo)
        num_units = num_alive = 0
        original = step.optimizer._update_unit

        def count() -> None:
            nonlocal num_units, num_alive
            alive = [each for each in step.parameters if each.source.grad is not None]
            num_units = max(num_units, len({each.unit for each in alive}))
            num_alive = max(num_alive, len(alive))
            original()

        step.optimizer._update_unit = count  # type: ignore[method-assign]
        norms = 0.0
        for number in range(1, NUM_STEPS + 1):
            batch = make_batch(number, model.config.vocab_size)
            logits = model(
                input_ids=torch.from_numpy(batch.input_ids),
                position_ids=torch.from_numpy(batch.position_ids),
                use_cache=False,
            ).logits[:, :-1]
            labels = torch.from_numpy(batch.labels)[:, 1:]
            model.zero_grad()
            functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            own = batch if mesh is None else share(batch, mesh)
            result = step.run(own, lr=LR, step=number, first_sample=0)
            with torch.no_grad():
                squares = []
                for each, parameter in model.named_parameters():
                    squares.append(parameter.grad.square().sum())
                    plain.update(each, parameter, parameter.grad, number)
            assert result.grad_norm is not None
            norms = max(norms, abs(result.grad_norm / math.sqrt(float(sum(squares))) - 1))
        worst = 0.0
        expected = dict(model.named_parameters())
        assert expected.keys() == {each.name for each in step.parameters}
        for each in step.parameters:
            theirs = expected[each.name].detach()
            if isinstance(each.source, DTensor):
                theirs = theirs if each.order is None else to_mesh(each.order, theirs)
                theirs = theirs[own_piece(each.source)]
            if theirs.numel():
                worst = max(worst, float((each.local.detach() - theirs).abs().max()))
        return worst, norms, num_units, num_alive


def check(ranks: RankPool, degrees: Degrees, case: Case, name: str) -> None:
    for worst, norms, num_units, _ in ranks(distances, math.prod(degrees), degrees, case, name):
        assert worst <= 1e-12
        assert norms <= 1e-12
        assert num_units == 1


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(CASES[0], "adalomo", marks=pytest.mark.quick),
        *itertools.product(CASES[1:], ["adalomo"]),
        *itertools.product(CASES, ["lomo"]),
    ],
)
def test_one_process_keeps_one_gradient_at_a_time(case: Case, name: str) -> None:
    worst, norms, _, num_alive = distances((1, 1, 1, 1), case, name)
    assert worst <= 1e-12
    assert norms <= 1e-12
    assert num_alive == 1


def test_experts_are_refused() -> None:
    lm = build_causal_lm(build_reference(Case(family="mixtral", dtype=torch.float32)))
    with pytest.raises(ConfigError, match="adalomo' updates matrices and vectors"):
        make_step(lm, "adalomo", Runtime())


def test_a_mesh_has_the_weights_of_one_process(ranks: RankPool) -> None:
    check(ranks, (1, 2, 2, 1), CASES[0], "adalomo")


@pytest.mark.mesh
@pytest.mark.parametrize("name", ["adalomo", "lomo"])
@pytest.mark.parametrize(
    "degrees",
    [
        *[d for d in itertools.product((1, 2), repeat=4) if 1 < math.prod(d) <= 8],
        (1, 1, 1, 4),
    ],
    ids=str,
)
def test_meshes_have_the_weights_of_one_process(
    ranks: RankPool, degrees: Degrees, name: str
) -> None:
    for case in CASES:
        check(ranks, degrees, case, name)
    check(ranks, degrees, replace(CASES[1], checkpointing="full"), name)
