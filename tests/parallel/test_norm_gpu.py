"""Norms of a rank that has all features: torch's fused kernel, forward and backward, by dtype."""

import pytest
import torch
from test_norm import EPS, Case, make_norm
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

# Roundings of the output and of the gradients in the input's dtype.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "case", [Case(num_features=64), Case(num_features=64, offset=1.0)], ids=["llama", "gemma"]
)
def test_the_fused_norm_equals_its_formula(
    device: torch.device, case: Case, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        # Representable in bf16, so that both sides begin with the same numbers.
        return torch.randn(*shape, generator=generator).bfloat16().double()

    x_MD, weight_D, grad_MD = draw(32, 64), draw(64), draw(32, 64)
    exact = [x_MD.requires_grad_(), weight_D.requires_grad_()]
    expected = case.restate(x_MD, weight_D, None)
    expected.backward(grad_MD)

    norm = make_norm(case, weight_D.detach().to(device, dtype), None)
    ours_MD = x_MD.detach().to(device, dtype).requires_grad_()
    output = norm(ours_MD)
    assert output.dtype == dtype
    output.backward(grad_MD.to(device, dtype))
    tolerance = TOLERANCES[dtype]
    for ours, theirs in (
        (output, expected),
        (ours_MD.grad, exact[0].grad),
        (norm.weight.grad, exact[1].grad),
    ):
        error = (ours.detach().double().cpu() - theirs.detach()).norm() / theirs.detach().norm()
        assert float(error) < tolerance
    assert norm.formula.eps == EPS


def test_a_norm_is_one_operation(device: torch.device) -> None:
    """Not the eight of a norm written out, each of which reads and writes all features."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    norm = make_norm(Case(num_features=64), torch.ones(64, device=device), None)
    x_MD = torch.randn(128, 64, device=device)
    norm(x_MD)
    with profile(activities=[activity]) as profiler:
        norm(x_MD)
        if device.type == "cuda":
            torch.cuda.synchronize()
    if device.type == "cuda":
        names = [event.name for event in profiler.events() if event.device_type.name == "CUDA"]
        assert len(names) == 1, names
    else:
        names = [event.name for event in profiler.events() if event.cpu_parent is None]
        # A cast to the dtype that the input has does nothing.
        assert [name for name in names if name != "aten::to"] == ["aten::rms_norm"]
