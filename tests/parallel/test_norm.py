"""Norms over sharded features against torch on one process, and the formulas of real norms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import RankPool
from test_collectives import draw
from test_linear import piece
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from memguard.errors import ModelError
from memguard.parallel.mesh import Axis, Mesh4D, build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.norm import Norm4D, NormFormula, measure_norm

# float64: sums over a dozen features in another order, through a square root.
EXACT = {"rtol": 0.0, "atol": 1e-13}

EPS = 1e-2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One norm, restated in float64."""

    centred: bool = False
    offset: float = 0.0
    bias: bool = False
    num_features: int = 12

    @property
    def formula(self) -> NormFormula:
        return NormFormula(
            centred=self.centred, offset=self.offset, eps=EPS, num_features=self.num_features
        )

    def restate(self, x_MD: Tensor, weight_D: Tensor, bias_D: Tensor | None) -> Tensor:
        if self.centred:
            return functional.layer_norm(
                x_MD, (self.num_features,), self.offset + weight_D, bias_D, EPS
            )
        scale_M1 = (x_MD**2).mean(-1, keepdim=True).add(EPS).rsqrt()
        normal_MD = x_MD * scale_M1 * (self.offset + weight_D)
        return normal_MD if bias_D is None else normal_MD + bias_D


# 7 features are 4 + 3 over two ranks and 3 + 3 + 1 over three.
CASES = [
    Case(),
    Case(offset=1.0),
    Case(centred=True, bias=True),
    Case(centred=True, offset=1.0, bias=True),
    Case(num_features=7),
    Case(num_features=7, centred=True, bias=True),
]


def make_norm(case: Case, weight_D: Tensor, bias_D: Tensor | None, **axes: Any) -> Any:
    norm: Any = nn.Module()
    norm.weight = nn.Parameter(weight_D.clone())
    norm.bias = None if bias_D is None else nn.Parameter(bias_D.clone())
    Norm4D.convert(norm, case.formula, **axes)
    return norm


def differences(pairs: list[tuple[Any, Any]]) -> float:
    found = []
    for one, other in pairs:
        assert one.shape == other.shape
        found.append(float((one - other).detach().abs().max()))
    return max(found)


def run_cases(degree: int, cases: list[Case]) -> list[float]:
    axis = build_mesh(MeshShape(y=degree), "cpu").axis("y")
    return [run_case(case, axis) for case in cases]


def restate_case(case: Case, *shape: int) -> tuple[Tensor, ...]:
    """Draw input, gradient of the output, weight and bias; run the whole norm.

    Returns:
        Output, input, gradient of the output, weight, and the bias if there is one.
    """
    x_MD = (draw(0, *shape, case.num_features) + 0.5).requires_grad_()
    weight_D = draw(1, case.num_features).requires_grad_()
    bias = (draw(2, case.num_features).requires_grad_(),) if case.bias else ()
    grad_MD = draw(3, *shape, case.num_features)
    expected_MD = case.restate(x_MD, weight_D, bias[0] if bias else None)
    expected_MD.backward(grad_MD)
    return expected_MD, x_MD, grad_MD, weight_D, *bias


def run_case(case: Case, axis: Any) -> float:
    """On a rank: the largest difference of output and gradients from the whole norm's."""
    expected_MD, x_MD, grad_MD, weight_D, *bias = restate_case(case, 2, 3)
    parts = [piece(each.detach(), 0, axis) for each in (weight_D, *bias)]
    norm = make_norm(case, parts[0], parts[1] if bias else None, feature_axis=axis)
    local_MD = piece(x_MD.detach(), -1, axis).requires_grad_()
    output_MD = norm(local_MD)
    output_MD.backward(piece(grad_MD, -1, axis))
    pairs = [(output_MD, piece(expected_MD, -1, axis)), (local_MD.grad, piece(x_MD.grad, -1, axis))]
    for ours, theirs in zip(norm.parameters(), (weight_D, *bias), strict=True):
        pairs.append((ours.grad, piece(theirs.grad, 0, axis)))
    return differences(pairs)


@pytest.mark.parametrize("degree", [2, 3])
def test_a_norm_over_sharded_features_equals_the_whole(ranks: RankPool, degree: int) -> None:
    for found in ranks(run_cases, degree, degree, CASES):
        for case, difference in zip(CASES, found, strict=True):
            assert difference <= EXACT["atol"], (case, difference)


def run_heads(cases: list[Case]) -> list[float]:
    """On a rank of (y=2, x=2): each rank along x has two of four heads, y has copies."""
    mesh: Mesh4D = build_mesh(MeshShape(y=2, x=2), "cpu")
    axis = mesh.axis("x")
    found = []
    for case in cases:
        _, x_MHD, grad_MHD, weight_D, *bias = restate_case(case, 3, 4)
        whole = [each.detach() for each in (weight_D, *bias)]
        norm = make_norm(case, whole[0], whole[1] if bias else None, gradient_axis=axis)
        local_MHD = piece(x_MHD.detach(), 1, axis).requires_grad_()
        norm(local_MHD).backward(piece(grad_MHD, 1, axis))
        pairs = [(local_MHD.grad, piece(x_MHD.grad, 1, axis))]
        for ours, theirs in zip(norm.parameters(), (weight_D, *bias), strict=True):
            pairs.append((ours.grad, theirs.grad))
        found.append(differences(pairs))
    return found


def test_gradients_of_a_norm_of_heads_are_summed_over_the_ranks_that_have_heads(
    ranks: RankPool,
) -> None:
    cases = [Case(num_features=8), Case(num_features=8, centred=True, bias=True)]
    for found in ranks(run_heads, 4, cases):
        assert max(found) <= EXACT["atol"]


RMS, RMS_1P = (False, 0.0), (False, 1.0)
LAYER, LAYER_1P = (True, 0.0), (True, 1.0)
MEASURED: list[tuple[Callable[[], nn.Module], tuple[bool, float], float]] = [
    (lambda: LlamaRMSNorm(8, eps=1e-5), RMS, 1e-5),
    (lambda: MistralRMSNorm(8, eps=1e-6), RMS, 1e-6),
    (lambda: Qwen2RMSNorm(8), RMS, 1e-6),
    (lambda: Qwen3RMSNorm(8), RMS, 1e-6),
    (lambda: GemmaRMSNorm(8, eps=1e-6), RMS_1P, 1e-6),
    (lambda: Gemma2RMSNorm(8), RMS_1P, 1e-6),
    (lambda: nn.RMSNorm(8, eps=1e-3), RMS, 1e-3),
    # GPT-2, OPT and others.
    (lambda: nn.LayerNorm(8), LAYER, 1e-5),
    (lambda: nn.LayerNorm(8, bias=False), LAYER, 1e-5),
    (lambda: CohereLayerNorm(8), LAYER, 1e-5),
    (lambda: NemotronLayerNorm1P(8), LAYER_1P, 1e-5),
]


@pytest.mark.parametrize(("build", "kind", "eps"), MEASURED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norms_of_families_are_measured(
    build: Callable[[], nn.Module], kind: tuple[bool, float], eps: float, device: str
) -> None:
    with torch.device(device):
        norm = build()
    centred, offset = kind
    expected = NormFormula(centred=centred, offset=offset, eps=eps, num_features=8)
    before = {name: (p.device, p.dtype, p.shape) for name, p in norm.named_parameters()}
    assert measure_norm(norm) == expected
    assert measure_norm(norm.bfloat16()) == expected
    after = {name: (p.device, torch.float32, p.shape) for name, p in norm.named_parameters()}
    assert after == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("build", "kind", "eps"), MEASURED)
def test_a_measured_norm_rounds_as_the_family_does(
    build: Callable[[], nn.Module], kind: tuple[bool, float], eps: float, dtype: torch.dtype
) -> None:
    x_MD = (draw(0, 5, 8) * 3).to(dtype)
    norm = build().to(dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(draw(seed, 8))
    expected_MD = norm(x_MD)
    is_torch_rms = isinstance(norm, nn.RMSNorm)
    Norm4D.convert(norm, measure_norm(norm))
    found_MD = norm(x_MD)
    assert found_MD.dtype == dtype
    if kind in (RMS, RMS_1P) and not is_torch_rms:
        assert torch.equal(found_MD, expected_MD)
    else:
        # Torch's own RMS norm rounds once at the end, ours before the weight; layer norms compute
        # the variance in other orders: four roundings.
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found_MD, expected_MD, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("centred", "offset"), [(False, 0.0), (False, 1.0), (True, 0.0), (True, 1.0)]
)
def test_a_rank_with_all_features_runs_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, centred: bool, offset: float, dtype: torch.dtype, degree: int
) -> None:
    """On CUDA it is fused only if input and weight have one dtype."""
    calls = []
    name = "layer_norm" if centred else "rms_norm"
    plain = getattr(functional, name)

    def spy(x_MD: Tensor, shape: Any, weight_D: Tensor | None, *rest: Any) -> Tensor:
        assert weight_D is None or weight_D.dtype == x_MD.dtype
        calls.append(tuple(shape))
        result: Tensor = plain(x_MD, shape, weight_D, *rest)
        return result

    monkeypatch.setattr(functional, name, spy)
    # Stands for a sum over ranks that all have zeros.
    monkeypatch.setattr("memguard.parallel.norm.sum_for_each", lambda tensor, axis: tensor)
    case = Case(centred=centred, offset=offset, num_features=8)
    axis = Axis(name="y", degree=degree)
    make_norm(case, draw(1, 8).to(dtype), None, feature_axis=axis)(draw(0, 3, 8).to(dtype))
    assert calls == ([(8,)] if degree == 1 else [])


@pytest.mark.parametrize(("centred", "offset"), [(False, 0.0), (False, 1.0), (True, 0.0)])
def test_statistics_over_sharded_features_are_wide(
    monkeypatch: pytest.MonkeyPatch, centred: bool, offset: float
) -> None:
    # The other rank has zeros.
    monkeypatch.setattr("memguard.parallel.norm.sum_for_each", lambda tensor, axis: tensor)
    case = Case(centred=centred, offset=offset, num_features=1024)
    x_MD, weight_D = draw(0, 9, 512).bfloat16(), draw(1, 512).bfloat16()
    axis = Axis(name="y", degree=2)
    found_MD = make_norm(case, weight_D, None, feature_axis=axis)(x_MD)
    zeros_MD = torch.zeros_like(x_MD)
    whole = make_norm(case, torch.cat([weight_D, weight_D]), None)
    expected_MD = whole(torch.cat([x_MD, zeros_MD], -1))[:, :512]
    if centred:
        # Torch's layer norm rounds once, ours before the weight.
        torch.testing.assert_close(found_MD, expected_MD, rtol=2**-7, atol=2**-7)
    else:
        # fp32 sums in another order: the nearest bf16 is another one now and then.
        assert (found_MD != expected_MD).double().mean() < 0.01


class EpsOutside(nn.Module):
    """Adds eps to the root instead of under it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x_MD: Tensor) -> Tensor:
        return self.weight * x_MD / (x_MD.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class ExponentialWeight(nn.RMSNorm):
    """At weights of zero it is a norm with weights around zero, and nowhere else."""

    def forward(self, x_MD: Tensor) -> Tensor:
        return functional.rms_norm(x_MD, (8,), self.weight.exp(), self.eps)


class LengthOne(EpsOutside):
    """Divides by the length, not by the root of the mean."""

    def forward(self, x_MD: Tensor) -> Tensor:
        return self.weight * functional.normalize(x_MD, dim=-1)


@pytest.mark.parametrize(
    "norm",
    [EpsOutside(), ExponentialWeight(8, eps=1e-6), LengthOne(), nn.BatchNorm1d(8, affine=True)],
    ids=lambda norm: type(norm).__name__,
)
def test_what_is_neither_is_refused(norm: nn.Module) -> None:
    with pytest.raises(ModelError, match="is neither an RMS norm nor a layer norm"):
        measure_norm(norm)


@pytest.mark.parametrize(
    "norm",
    [nn.Linear(8, 8), nn.RMSNorm(8), nn.LayerNorm(8, elementwise_affine=False), nn.Identity()],
    ids=repr,
)
def test_what_cannot_be_measured_is_refused(norm: nn.Module) -> None:
    with pytest.raises(ModelError, match=f"norm {type(norm).__name__} has no 'eps' or no vector"):
        measure_norm(norm)
