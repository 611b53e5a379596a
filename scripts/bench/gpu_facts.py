"""Facts of the GPU check: a step prints each as a line of JSON when it is known (see gpu.py).

fact("gpu", name="NVIDIA H100", gib=79.2)
fact("plain", off_loss=3e-5, ok=True)               ok: whether a limit holds
attempt("fp8", measure_fp8, needed=False)           a failure is a fact, and the step goes on
"""

import gc
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "FACT: "
"""What precedes a fact in its line; the runner reads all other lines as the log of a step."""


def fact(name: str, /, **values: Any) -> None:
    """Print a fact.

    Args:
        name: of what was measured.
        values: figures and words; ``ok`` says whether the limits of this fact hold, and
            ``failed`` why there are no figures.
    """
    rounded = {key: _round(value) for key, value in values.items()}
    print(MARK + json.dumps({"fact": name, **rounded}), flush=True)


def _round(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What the functions of a step need."""

    is_dry: bool
    """Whether the CPU stands for a GPU, with tiny sizes."""
    work: Path
    """Folder of what a step writes for itself."""
    out: Path
    """Folder of what is kept."""

    @property
    def device(self) -> Any:
        """The device on which is measured."""
        import torch

        return torch.device("cpu") if self.is_dry else torch.device("cuda", 0)

    def has_gpu(self) -> bool:
        """Return whether there is a GPU, or none is needed."""
        if self.is_dry:
            return True
        import torch

        return torch.cuda.is_available()


def attempt(
    name: str, call: Callable[..., object], *arguments: Any, needed: bool = True, **options: Any
) -> bool:
    """Call a part of a step and clean up behind it; return whether it ended.

    Args:
        name: of the fact that says why it failed.
        call: with the arguments and options that follow.
        arguments: of the call.
        needed: whether its failure fails the check.
        options: of the call.
    """
    is_done = True
    try:
        call(*arguments, **options)
    except Exception as error:
        is_done = False
        traceback.print_exc()
        words = " ".join(traceback.format_exception_only(error)[-1].split())
        fact(name, failed=words[:180], **({"ok": False} if needed else {}))
    clean_up()
    return is_done


def clean_up() -> None:
    """Give back memory, and begin peaks and counts of the allocator from zero."""
    import torch

    if "torch._dynamo" in sys.modules:
        # Compiled code keeps the model that it was made for.
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def read_gb(kind: str) -> float:
    """Return `memory_allocated`, `max_memory_reserved` and so on in GB; 0 on a CPU."""
    import torch

    return getattr(torch.cuda, kind)() / 1e9 if torch.cuda.is_initialized() else 0.0


def time_call(call: Callable[[], object], *, rounds: int = 5, calls: int = 10) -> float:
    """Return the seconds of a call on the GPU: median of rounds of calls, after two."""
    import torch

    if not torch.cuda.is_initialized():
        rounds = calls = 1

    def wait() -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(2):
        call()
    seconds = []
    for _ in range(rounds):
        begin_s = wait()
        for _ in range(calls):
            call()
        seconds.append((wait() - begin_s) / calls)
    return statistics.median(seconds)
