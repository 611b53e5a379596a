"""Kernels of one GPU, for what it offers beyond today's training: a step of the GPU check.

A kernel that this card or this torch does not have is a fact, and does not fail the check.
"""

from typing import Any

import torch
from gpu_facts import Place, attempt, fact, read_gb, time_call
from torch import Tensor
from torch.nn import functional

TOKENS, HIDDEN, INNER, VOCAB = 8192, 4096, 14336, 128256
HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
FP8_MAX = 448.0
NF4_BYTES = 0.5 + 1 / 16 + 2
"""Of a weight that is read as NF4, with its block's scale, and written as bf16."""


def kernels(place: Place) -> None:
    """Measure each kernel."""
    sizes = {"tokens": TOKENS, "hidden": HIDDEN, "inner": INNER, "vocab": VOCAB}
    if place.is_dry:
        sizes = {"tokens": 64, "hidden": 64, "inner": 128, "vocab": 256}
    for name, measure in (
        ("fp8 by rows", measure_fp8),
        ("fp32 attention of audits", measure_fp32_attention),
        ("varlen", measure_varlen),
        ("products", measure_products),
        ("sum of the head's gradient", measure_wide_sum),
        ("nf4 to bf16", measure_nf4),
    ):
        attempt(name, measure, name, place, sizes, needed=name == "varlen")


def draw(place: Place, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random numbers on the device."""
    return torch.randn(shape, device=place.device, dtype=dtype)


def error_of(found: Tensor, exact: Tensor) -> float:
    """Return the relative error in the norm of all elements."""
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def measure_fp8(name: str, place: Place, sizes: dict[str, int]) -> None:
    """A product in FP8 with a scale for each row, with and without its quantisation."""
    x = draw(place, sizes["tokens"], sizes["hidden"])
    weight = draw(place, sizes["inner"], sizes["hidden"])

    def quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
        scale = tensor.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / FP8_MAX
        return (tensor / scale).to(torch.float8_e4m3fn), scale

    (x8, x_scale), (weight8, weight_scale) = quantise(x), quantise(weight)

    def multiply() -> Tensor:
        return torch._scaled_mm(
            x8,
            weight8.T,
            scale_a=x_scale,
            scale_b=weight_scale.T,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    bf16_s, fp8_s = time_call(lambda: x @ weight.T), time_call(multiply)
    fact(name, times_bf16=bf16_s / fp8_s, error=error_of(multiply(), x @ weight.T))
    compiled = quantise if place.is_dry else torch.compile(quantise)
    quantise_s = time_call(lambda: (compiled(x), compiled(weight)))
    fact(f"{name}, with quantisation", times_bf16=bf16_s / (fp8_s + quantise_s))


def measure_fp32_attention(name: str, place: Place, sizes: dict[str, int]) -> None:
    """Scaled-dot-product attention in fp32 with grouped heads, and with keys repeated."""
    length = sizes["tokens"] // 2
    queries, keys, values = (
        draw(place, 1, heads, length, HEAD_DIM, dtype=torch.float32)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )

    def repeat(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(HEADS // KEY_HEADS, 1)

    attend = functional.scaled_dot_product_attention
    exact = None
    for words, call in (
        ("keys repeated", lambda: attend(queries, repeat(keys), repeat(values), is_causal=True)),
        ("grouped", lambda: attend(queries, keys, values, is_causal=True, enable_gqa=True)),
    ):
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        before_gb = read_gb("memory_allocated")
        seconds = time_call(call, rounds=3, calls=3)
        peak_gb = read_gb("max_memory_allocated") - before_gb
        exact = call() if exact is None else exact
        fact(
            f"{name}, {length} tokens, {words}",
            ms=1e3 * seconds,
            peak_gb=peak_gb,
            difference=error_of(call(), exact),
        )


def measure_varlen(name: str, place: Place, sizes: dict[str, int]) -> None:
    """Attention of packed rows forward and backward, against each document alone in fp32."""
    from memguard.parallel import attention

    if place.is_dry:
        fact(name, skipped="a kernel of GPUs")
        return
    length = sizes["tokens"] // 4
    ends = torch.arange(0, sizes["tokens"] + 1, length, device=place.device, dtype=torch.int32)
    tensors = [
        draw(place, 1, heads, sizes["tokens"], HEAD_DIM).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    upstream = draw(place, 1, sizes["tokens"], HEADS, HEAD_DIM)

    def ours() -> Tensor:
        output, _ = attention.attend_varlen(
            torch.nn.Identity(), *tensors, None, cu_seq_lens_q=ends, max_length_q=length
        )
        torch.autograd.grad(output, tensors, upstream)
        return output.detach()

    pieces = []
    for begin in range(0, sizes["tokens"], length):
        query, key, value = (each[:, :, begin : begin + length].float() for each in tensors)
        key, value = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (key, value))
        with torch.no_grad():
            pieces.append(
                functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            )
    exact = torch.cat(pieces, 2).transpose(1, 2)
    error = error_of(ours(), exact)
    seconds = time_call(ours)
    flop = 7 * sizes["tokens"] * length * HEAD_DIM * HEADS
    fact(
        f"{name}, 4 documents of {length}",
        ms=1e3 * seconds,
        tflops=flop / seconds / 1e12,
        error=error,
        takes_grouped_heads=attention._HAS_GQA,
        ok=error < 1e-2,
    )
    if not attention._HAS_GQA:
        attempt(
            f"{name} without repeated keys",
            _measure_operator,
            name,
            tensors,
            ends,
            length,
            seconds,
            exact,
            needed=False,
        )


def _measure_operator(
    name: str, tensors: list[Tensor], ends: Tensor, length: int, ours_s: float, exact: Tensor
) -> None:
    """Torch 2.11's function repeats keys; does its operator take fewer key heads?"""

    def native() -> Any:
        rows = [each[0].transpose(0, 1) for each in tensors]
        return torch.ops.torch_attn._varlen_attn(
            *rows, ends, ends, length, length, True, None, [-1, 0]
        )[0]

    with torch.no_grad():
        error = error_of(native(), exact[0])
        fact(
            f"{name}, operator with grouped heads, forward", ms=1e3 * time_call(native), error=error
        )


def measure_products(name: str, place: Place, sizes: dict[str, int]) -> None:
    """One product in bf16, fp32 and TF32."""
    x = draw(place, sizes["tokens"], sizes["hidden"])
    weight = draw(place, sizes["inner"], sizes["hidden"])
    tflop = 2 * sizes["tokens"] * sizes["hidden"] * sizes["inner"] / 1e12
    fact(f"{name}, bf16", tflops=tflop / time_call(lambda: x @ weight.T))
    x, weight = x.float(), weight.float()
    before = torch.get_float32_matmul_precision()
    try:
        for words, precision in (("fp32", "highest"), ("tf32", "high")):
            torch.set_float32_matmul_precision(precision)
            fact(f"{name}, {words}", tflops=tflop / time_call(lambda: x @ weight.T, calls=2))
    finally:
        torch.set_float32_matmul_precision(before)


def measure_wide_sum(name: str, place: Place, sizes: dict[str, int]) -> None:
    """A chunk of the head's gradient added in fp32: two operations, and one with a wide result."""
    gradient, hidden = draw(place, 1024, sizes["vocab"]), draw(place, 1024, sizes["hidden"])
    total = torch.zeros(sizes["vocab"], sizes["hidden"], device=place.device)
    now_s = time_call(lambda: total.add_(gradient.T @ hidden))
    fact(f"{name}, 1,024 tokens", ms=1e3 * now_s)
    fused_s = time_call(
        lambda: torch.addmm(total, gradient.T, hidden, out_dtype=torch.float32, out=total)
    )
    fact(f"{name}, addmm with an fp32 result", times_as_fast=now_s / fused_s)


def measure_nf4(name: str, place: Place, sizes: dict[str, int]) -> None:
    """Weights of a layer read as NF4 and written as bf16."""
    from memguard.parallel.nf4 import dequantise_nf4, quantise_nf4

    shape = (sizes["inner"], sizes["hidden"])
    packed, scales = quantise_nf4(draw(place, *shape, dtype=torch.float32))
    seconds = time_call(lambda: dequantise_nf4(packed, scales, shape, torch.bfloat16))
    fact(name, ms=1e3 * seconds, gb_per_s=shape[0] * shape[1] * NF4_BYTES / seconds / 1e9)
