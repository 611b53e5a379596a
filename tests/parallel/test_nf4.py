"""Weights in NF4: against the definition of the format, on the CPU and on a GPU."""

import pytest
import torch
from fake_mesh import Allocations, observe
from torch import nn

from memguard.parallel import nf4
from memguard.parallel.linear import Linear4D
from memguard.parallel.mesh import Axis
from memguard.parallel.nf4 import Nf4Linear, Nf4Weight, dequantise_nf4, quantise_nf4

# The 16 values of NormalFloat, arXiv 2305.14314, appendix E.
VALUES = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def round_to_nf4(weight_NK: torch.Tensor) -> torch.Tensor:
    """Return the nearest of the 16 values times the largest of each 64, in float64."""
    flat = weight_NK.double().flatten()
    padded = nn.functional.pad(flat, (0, -len(flat) % 64)).reshape(-1, 64)
    scale = padded.abs().amax(1, keepdim=True)
    nearest = ((padded / scale)[..., None] - VALUES.double()).abs().argmin(-1)
    return (VALUES.double()[nearest] * scale).flatten()[: len(flat)].reshape(weight_NK.shape)


# Rows shorter than a block, rows that end within one, and a shorter last block.
@pytest.mark.parametrize("shape", [(48, 32), (10, 160), (6, 70), (128, 64)])
def test_each_weight_is_the_nearest_value_times_its_blocks_scale(shape: tuple[int, int]) -> None:
    weight_NK = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed, scales = quantise_nf4(weight_NK)
    assert packed.dtype == torch.uint8
    num_blocks = -(-weight_NK.numel() // 64)
    assert (packed.shape, scales.shape) == ((num_blocks, 32), (num_blocks,))
    expected = round_to_nf4(weight_NK).float()
    # One rounding in fp32.
    torch.testing.assert_close(dequantise_nf4(packed, scales, shape), expected, rtol=1e-6, atol=0)


def test_weights_are_quantised_in_parts_from_any_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK = torch.randn(10, 160, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = quantise_nf4(weight_NK.float())
    monkeypatch.setattr(nf4, "_PART", 3 * 64)
    for ours, expected in zip(quantise_nf4(weight_NK), whole, strict=True):
        assert torch.equal(ours, expected)


def make_layer(device: str) -> Linear4D:
    linear = nn.Linear(96, 80, device=device)
    weight = torch.randn(80, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        linear.bias.copy_(torch.linspace(-1, 1, 80))
    layer = Linear4D.convert(linear, in_axis=Axis(name="y"), out_axis=Axis(name="x"))
    layer.use_nf4()
    layer.fill_nf4(weight)
    return layer


def test_a_layer_computes_with_the_dequantised_weight() -> None:
    layer = make_layer("cpu")
    input_MK = torch.randn(2, 7, 96, generator=torch.Generator().manual_seed(2))
    input_MK.requires_grad_()
    output = layer(input_MK)
    weight = torch.randn(80, 96, generator=torch.Generator().manual_seed(1))
    dense = round_to_nf4(weight)
    expected = input_MK.detach().double() @ dense.T + layer.bias.detach().double()
    # fp32 sums of 96 products.
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-4)
    output.sum().backward()
    gradient = dense.sum(0).expand(input_MK.shape)
    torch.testing.assert_close(input_MK.grad.double(), gradient, rtol=0, atol=1e-4)
    assert layer.weight.grad is None
    assert layer.device.type == "cpu"


def test_a_plain_model_gets_the_same_layer() -> None:
    linear = nn.Linear(96, 80)
    weight = linear.weight.detach().clone()
    input_MK = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    expected = input_MK.double() @ round_to_nf4(weight).T + linear.bias.double()
    output = Nf4Linear(linear)(input_MK)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(48, 32), (6, 70), (7, 33)])
def test_parts_of_whole_blocks_are_quantised_like_the_whole(shape: tuple[int, int]) -> None:
    """The last block of 7 x 33 weights has an odd number of them."""
    weight_NK = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = quantise_nf4(weight_NK)
    parts = [quantise_nf4(part) for part in weight_NK.flatten().split(2 * 64)]
    for expected, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(pieces), expected)


def draw_blocks(num_weights: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed weights and scales; every block has all 16 codes, in another order."""
    generator = torch.Generator().manual_seed(4)
    num_blocks = -(-num_weights // 64)
    codes = (torch.arange(64) + torch.arange(num_blocks)[:, None]) % 16
    packed = (codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8)
    # Mantissas of all kinds. Smaller numbers than these are zero on some CPUs.
    exponents = torch.randint(-30, 30, (num_blocks,), generator=generator)
    scales = (torch.rand(num_blocks, generator=generator) + 0.5) * 10.0**exponents
    scales[: num_blocks // 8] = 0
    return packed.to(device), scales.to(device)


def check_rounding(num_weights: int, device: str = "cpu") -> None:
    packed, scales = draw_blocks(num_weights, device)
    shape = (1, num_weights)
    single = dequantise_nf4(packed, scales, shape)
    assert single.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        written = dequantise_nf4(packed, scales, shape, dtype)
        assert written.dtype == dtype
        # The product in fp32, rounded once to the nearest: the same bits.
        assert torch.equal(written, single.to(dtype)), dtype


@pytest.mark.parametrize("num_weights", [1, 63, 64, 65, 7 * 33, 64 * 4096, 64 * 4096 + 31])
def test_bf16_is_fp32_rounded_once(num_weights: int) -> None:
    check_rounding(num_weights)


def test_no_weight_in_fp32_is_made_for_bf16() -> None:
    packed, scales = draw_blocks(64 * 100)
    memory = Allocations()
    with observe(memory):
        Nf4Weight(packed, scales, (80, 80)).dequantise(torch.bfloat16)
    # Read in 4.5 bits a weight, written once in two bytes: 2.6 bytes instead of 10.6.
    assert memory.peak_bytes == 2 * 64 * 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.filterwarnings("default")
def test_bf16_is_fp32_rounded_once_on_a_gpu() -> None:
    for num_weights in (65, 64 * 4096):
        check_rounding(num_weights, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.filterwarnings("default")
def test_a_gpu_has_the_weights_of_the_cpu() -> None:
    weight_NK = torch.randn(256, 192, generator=torch.Generator().manual_seed(3))
    there = quantise_nf4(weight_NK.cuda())
    here = quantise_nf4(weight_NK)
    assert torch.equal(there[0].cpu(), here[0])
    assert torch.equal(there[1].cpu(), here[1])
    dense = dequantise_nf4(*there, (256, 192)).cpu()
    torch.testing.assert_close(dense, dequantise_nf4(*here, (256, 192)), rtol=1e-6, atol=0)
    layer, input_MK = make_layer("cuda"), torch.randn(3, 96)
    # Matrix products on a GPU may use TF32.
    torch.testing.assert_close(
        layer(input_MK.cuda()).cpu(), make_layer("cpu")(input_MK), rtol=1e-2, atol=5e-2
    )
    assert layer.device.type == "cuda"
