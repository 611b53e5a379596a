"""AdaLomo and LOMO where ranks hold copies, without ranks; which gradients they take."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from memguard.optim import in_backward
from memguard.optim.in_backward import AdaLomo, Lomo
from memguard.optim.weights import Weights
from memguard.parallel.local_parameters import LocalParameter
from memguard.parallel.mesh import Axis
from memguard.parallel.mesh_shape import MeshShape


@dataclass
class Copies:
    """A mesh on which both ranks along y hold and compute the same."""

    shape: MeshShape = field(default_factory=lambda: MeshShape(y=2))

    def axis(self, name: str) -> Axis:
        return Axis(name=name, degree=self.shape.degree(name))  # type: ignore[arg-type]


def build(kind: type[Lomo], mesh: Copies | None) -> tuple[nn.Module, Lomo]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    parameters = [
        LocalParameter(
            name=name,
            source=parameter,
            local=parameter,
            num_copies=1 if mesh is None else 2,
            unit=name if mesh is None else "",
        )
        for name, parameter in layer.named_parameters()
    ]
    return layer, kind(parameters, Weights(0), mesh)  # type: ignore[arg-type]


def backward(layer: nn.Module) -> None:
    layer(torch.arange(8.0).view(2, 4)).square().mean().backward()


@pytest.mark.parametrize("kind", [AdaLomo, Lomo])
def test_copies_are_averaged_and_counted_once(
    kind: type[Lomo], monkeypatch: pytest.MonkeyPatch
) -> None:
    averaged: list[str] = []

    def all_reduce(tensor: Tensor, axis: Axis, *, owned: bool = False) -> Tensor:
        return tensor * axis.degree

    monkeypatch.setattr(in_backward, "all_reduce", all_reduce)
    monkeypatch.setattr(in_backward, "world_axis", lambda: Axis(name="world", degree=2))
    monkeypatch.setattr(
        in_backward, "average_copies", lambda unit, _: averaged.extend(each.name for each in unit)
    )
    norms, weights = [], []
    for mesh in (None, Copies()):
        layer, optimizer = build(kind, mesh)
        for step in (1, 2):
            optimizer.begin(step=step, lr=0.01)
            backward(layer)
            norms.append(optimizer.finish())
            assert all(parameter.grad is None for parameter in layer.parameters())
        states = [value for p in optimizer.parameters for value in optimizer.state_of(p).values()]
        weights.append([*states, *(parameter.detach() for parameter in layer.parameters())])
    assert norms[:2] == pytest.approx(norms[2:], rel=1e-6)
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other)
    assert sorted(averaged) == ["bias", "bias", "weight", "weight"]


def test_a_step_has_one_backward_and_others_change_nothing() -> None:
    layer, optimizer = build(Lomo, None)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    backward(layer)  # A rehearsal.
    for parameter, old in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None
    optimizer.begin(step=1, lr=0.01)
    backward(layer)
    with pytest.raises(AssertionError, match="one micro-batch"):
        backward(layer)
