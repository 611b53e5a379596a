"""Flash attention 3 in place of 2 inside torch's `varlen_attn`, for the time of training.

    package   the module flash_attn_interface is installed
    torch     has `activate_flash_attention_impl`; its wrapper of the package is called a prototype
    GPU       compute capability 9.0
    probe     forward and backward of two documents agree with flash attention 2 within bf16

All four must hold on every rank. Without the package nothing is printed; otherwise one line names
the implementation, or the reason for flash attention 2. Other programs may have activated an
implementation for this process, which then stays.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memguard.errors import shorten
from memguard.parallel.attention import Attention, attend_varlen, list_head_sizes
from memguard.records.texts import format_percent
from memguard.runtime import Console, Runtime

PACKAGE = "flash_attn_interface"
_NAME = "FA3"
_CAPABILITY = (9, 0)
MAX_DIFFERENCE = 2**-6
"""Largest difference of a result from that of flash attention 2, by Frobenius norms, as a share.
Two spacings of bf16: each rounds its results, and the weights with which it sums, to half a one."""
_LENGTHS = (300, 212)
"""Of the documents of the probe (tokens): neither is a multiple of the kernels' tiles."""
_NUM_KEY_HEADS = 2
_RESULTS = ("output", "gradient of queries", "gradient of keys", "gradient of values")
_ABSENT = f"the module {PACKAGE} is not installed"
_INTERFACE = (
    "activate_flash_attention_impl",
    "current_flash_attention_impl",
    "restore_flash_attention_impl",
)


@contextmanager
def flash_attention_3(
    model: Any, attention: Attention, runtime: Runtime, console: Console, *, enabled: bool
) -> Iterator[None]:
    """Use flash attention 3 inside the block where it is available, the same on all ranks.

    Every rank must call this. Not ``enabled`` changes nothing: for arithmetic other than bf16, and
    for deterministic runs, whose bits do not depend on an installed package.
    """
    if not enabled or attention.kernel != "varlen" or runtime.device.type != "cuda":
        yield
        return
    problem = _activate(model, attention, runtime.device)
    problems = runtime.gather_objects(problem)
    failed = [rank for rank, text in enumerate(problems) if text is not None]
    if not failed:
        console.info("attention: flash attention 3, which agrees with 2 in a test of this model")
        try:
            yield
        finally:
            _restore()
        return
    if problem is None:
        _restore()
    if any(text != _ABSENT for text in problems):
        where = f" on rank {failed[0]}" if runtime.world_size > 1 else ""
        console.info(f"attention: flash attention 2, as 3 fails{where}: {problems[failed[0]]}")
    yield


def _activate(model: Any, attention: Attention, device: torch.device) -> str | None:
    """Activate flash attention 3 on this rank and return None, or return the reason against it."""
    if importlib.util.find_spec(PACKAGE) is None:
        return _ABSENT
    if not all(hasattr(torch.nn.attention, name) for name in _INTERFACE):
        return f"torch {torch.__version__} cannot activate it"
    active = torch.nn.attention.current_flash_attention_impl()
    if active is not None:
        return f"this program has activated {active}"
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:
        return f"it needs compute capability 9.0, and this GPU has {capability[0]}.{capability[1]}"
    try:
        expected = _attend_documents(model, attention, device)
        torch.nn.attention.activate_flash_attention_impl(_NAME)
        problem = _compare(_attend_documents(model, attention, device), expected)
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        problem = shorten(f"{type(error).__name__}: {line}", 200)
    if problem is not None:
        _restore()
    return problem


def _restore() -> None:
    if torch.nn.attention.current_flash_attention_impl() == _NAME:
        torch.nn.attention.restore_flash_attention_impl()


def _attend_documents(model: Any, attention: Attention, device: torch.device) -> list[Tensor]:
    """Return output and gradients of two documents, for each window and head size of the model."""
    config = model.config.get_text_config()
    num_key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    groups = max(1, config.num_attention_heads // num_key_heads)
    num_heads = _NUM_KEY_HEADS * groups
    ends = torch.tensor([0, _LENGTHS[0], sum(_LENGTHS)], dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    results = []
    for size in sorted(set(list_head_sizes(config))):
        for window in attention.windows:
            heads = (num_heads, _NUM_KEY_HEADS, _NUM_KEY_HEADS)
            inputs = [draw(1, count, sum(_LENGTHS), size).requires_grad_() for count in heads]
            query, key, value = inputs
            output, _ = attend_varlen(
                torch.nn.Identity(),
                query,
                key,
                value,
                None,
                sliding_window=window,
                cu_seq_lens_q=ends,
                max_length_q=max(_LENGTHS),
            )
            gradients = torch.autograd.grad(output, inputs, draw(*output.shape))
            results += [output.detach(), *gradients]
    return results


def _compare(found: list[Tensor], expected: list[Tensor]) -> str | None:
    """Return which result differs from flash attention 2 by more than bf16 rounds; None if none."""
    for number, (result, reference) in enumerate(zip(found, expected, strict=True)):
        wide = reference.double()
        difference = float((result.double() - wide).norm() / wide.norm())
        # Not a number is no agreement.
        if not difference <= MAX_DIFFERENCE:
            what = _RESULTS[number % len(_RESULTS)]
            return (
                f"its {what} differs from that of flash attention 2 by {format_percent(difference)}"
            )
    return None
