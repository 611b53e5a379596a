"""Flash attention 3 is used where it is installed and agrees with 2, on all ranks or on none.

No GPU and no package: torch's interface is replaced, flash attention 2 is the reference of varlen
attention on the CPU, and flash attention 3 is the same with an error that each test chooses.
"""

import contextlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import rich.console
import torch
from ranks import RankPool
from tiny_families import build
from torch import Tensor
from torch import distributed as dist
from varlen_reference import reference_varlen

from memguard.parallel import flash_attention_3 as module
from memguard.parallel.attention import attend_varlen, prepare_attention
from memguard.parallel.flash_attention_3 import MAX_DIFFERENCE, PACKAGE, flash_attention_3
from memguard.runtime import Console, Runtime

pytestmark = pytest.mark.slow

Change = Callable[[Tensor], Tensor]


class Interface:
    """torch's functions that activate an implementation."""

    def __init__(self, change: Change, active: str | None = None) -> None:
        self.active, self.change = active, change

    def attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        output, _ = attend_varlen(*args, **kwargs)
        return (self.change(output) if self.active == "FA3" else output), None

    def activate_flash_attention_impl(self, name: str) -> None:
        self.active = name

    def restore_flash_attention_impl(self) -> None:
        self.active = None

    def current_flash_attention_impl(self) -> str | None:
        return self.active


@contextlib.contextmanager
def stand_in(
    change: Change = torch.clone,
    *,
    is_installed: bool = True,
    capability: tuple[int, int] = (9, 0),
    active: str | None = None,
) -> Iterator[Interface]:
    interface = Interface(change, active)
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return is_installed or None if name == PACKAGE else find_spec(name, package)

    with contextlib.ExitStack() as stack:
        for name in module._INTERFACE:
            replaced = getattr(interface, name)
            stack.enter_context(mock.patch.object(torch.nn.attention, name, replaced, create=True))
        stack.enter_context(mock.patch.object(importlib.util, "find_spec", find))
        stack.enter_context(
            mock.patch.object(torch.cuda, "get_device_capability", return_value=capability)
        )
        stack.enter_context(mock.patch.object(module, "attend_varlen", interface.attend))
        stack.enter_context(reference_varlen())
        yield interface


@pytest.fixture(autouse=True)
def tensors_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    put_tensors_on_the_cpu(monkeypatch)


def put_tensors_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    attend, cpu = module._attend_documents, torch.device("cpu")
    patch.setattr(module, "_attend_documents", lambda model, kind, _: attend(model, kind, cpu))


GPU = torch.device("cuda")


def use(
    interface: Interface,
    family: str = "llama",
    *,
    enabled: bool = True,
    runtime: Runtime = Runtime(device=GPU),  # noqa: B008  frozen
) -> tuple[str | None, str]:
    """Return which implementation is active inside the block, and what is printed."""
    model = build(family)
    attention = prepare_attention(model, "cuda")
    text = io.StringIO()
    console = Console(out=rich.console.Console(file=text, width=400), quiet=False)
    with flash_attention_3(model, attention, runtime, console, enabled=enabled):
        active = interface.active
    return active, text.getvalue()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_where_both_agree_it_is_used_inside_the_block(family: str) -> None:
    """With shared key heads, with a window, and with neither."""

    def round_elsewhere(tensor: Tensor) -> Tensor:
        # One spacing of bf16 in every second number, as kernels that sum in another order.
        return torch.where(torch.arange(tensor.shape[-1]) % 2 == 0, tensor * (1 + 2**-7), tensor)

    with stand_in(round_elsewhere) as interface:
        active, said = use(interface, family)
        assert (active, interface.active) == ("FA3", None)
    assert said.startswith("attention: flash attention 3, which agrees with 2")


def ignore_documents(tensor: Tensor) -> Tensor:
    # The first tokens of the second document see the first one: what a kernel without its ends has.
    mixed = tensor.clone()
    mixed[:, 300:310] = tensor[:, 299:300]
    return mixed


def break_backward(tensor: Tensor) -> Tensor:
    return tensor.detach() + 0 * tensor  # The values are right, their gradients are 0.


def fail(_: Tensor) -> Tensor:
    raise RuntimeError("CUDA error: no kernel image\nof this GPU")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (ignore_documents, "its output differs from that of flash attention 2 by"),
        (lambda t: t * (1 + 3 * MAX_DIFFERENCE), "its output differs"),
        (
            break_backward,
            "its gradient of queries differs from that of flash attention 2 by 100.0 %",
        ),
        (lambda t: t * torch.nan, "its output differs from that of flash attention 2 by nan"),
        (fail, "RuntimeError: CUDA error: no kernel image"),
    ],
    ids=["documents", "scale", "backward", "nan", "error"],
)
def test_where_they_differ_flash_attention_2_stays(change: Change, reason: str) -> None:
    with stand_in(change) as interface:
        active, said = use(interface)
        assert (active, interface.active) == (None, None)
    assert said.startswith("attention: flash attention 2, as 3 fails: ")
    assert reason in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_installed": False}, ""),
        ({"capability": (8, 0)}, "it needs compute capability 9.0, and this GPU has 8.0"),
        ({"capability": (10, 0)}, "it needs compute capability 9.0, and this GPU has 10.0"),
        ({"active": "FA4"}, "this program has activated FA4"),
    ],
)
def test_without_what_it_needs_nothing_is_activated(changes: dict[str, Any], reason: str) -> None:
    with stand_in(fail, **changes) as interface:
        active, said = use(interface)
        assert active == interface.active == changes.get("active")
    assert reason in said
    assert bool(said) == bool(reason)


def test_it_is_not_tried_for_other_kernels_devices_or_runs() -> None:
    with stand_in(fail) as interface:
        assert use(interface, enabled=False) == (None, "")
        assert use(interface, runtime=Runtime()) == (None, "")
        assert use(interface, "gemma2") == (None, "")


def test_a_torch_without_the_interface_keeps_flash_attention_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stand_in() as interface:
        monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
        _, said = use(interface)
    assert f"torch {torch.__version__} cannot activate it" in said


def use_on_ranks(failing_rank: int | None) -> tuple[str | None, str | None, str]:
    """On a rank: what is active inside the block and after it, and what is printed."""
    rank = dist.get_rank()
    is_installed = rank != failing_rank
    runtime = Runtime(device=GPU, rank=rank, world_size=dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch, stand_in(is_installed=is_installed) as interface:
        put_tensors_on_the_cpu(patch)
        active, said = use(interface, runtime=runtime)
        return active, interface.active, said


def test_all_ranks_use_it_or_none(ranks: RankPool) -> None:
    assert [found[:2] for found in ranks(use_on_ranks, 2, None)] == [("FA3", None)] * 2
    for active, after, said in ranks(use_on_ranks, 2, 1):
        assert (active, after) == (None, None)
        assert f"3 fails on rank 1: the module {PACKAGE} is not installed" in said
