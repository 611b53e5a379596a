"""Where a run runs and how it speaks: device, peak memory, rank-0 console."""

import importlib.metadata
import logging
import os
import platform
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import rich.console
import rich.progress
import torch
from rich.table import Column

_LINE_EVERY_S = 10.0

Advance = Callable[[int, str], None]
"""(units done since the last call, detail to show)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """This process among its peers."""

    device: torch.device
    rank: int = 0
    world_size: int = 1


def detect_runtime() -> Runtime:
    """Return this process's device: the first CUDA GPU, else the CPU."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return Runtime(device=device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory used so far: of the GPU, or resident of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def default_cache_dir() -> Path:
    """Return where downloaded or derived inputs are kept between runs."""
    named = os.environ.get("MEMGUARD_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memguard"


def quiet_libraries() -> None:
    """Silence progress bars and advice of the libraries: the console is ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    # torch's checkpoint writer notes that it runs without a process group, which is meant.
    warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load)")


@dataclass(frozen=True, slots=True)
class Console:
    """Speaks on standard error, on rank 0 only: a live line on a terminal, log lines elsewhere."""

    out: rich.console.Console = field(
        default_factory=lambda: rich.console.Console(stderr=True, highlight=False)
    )
    quiet: bool = False

    @property
    def live(self) -> bool:
        """True where a line can be drawn again and again."""
        return self.out.is_terminal and not self.out.is_dumb_terminal and not self.quiet

    def info(self, text: str) -> None:
        """Say what is being done."""
        if not self.quiet:
            self.out.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Say what the user should know although the run goes on."""
        self.out.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, what: str, total: int, unit: str) -> Iterator[Advance]:
        """Show progress of a long step: a bar on a terminal, a line every ten seconds elsewhere.

        Args:
            what: e.g. ``"audit"``.
            total: units of the whole.
            unit: e.g. ``"documents"``.
        """
        if self.live:
            columns = (
                rich.progress.TextColumn("{task.description}"),
                # The first to give way where the terminal is narrow.
                rich.progress.BarColumn(bar_width=None, table_column=Column(max_width=24)),
                rich.progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
                rich.progress.TextColumn("{task.fields[detail]}", markup=False),
                rich.progress.TimeRemainingColumn(compact=True),
            )
            with rich.progress.Progress(*columns, console=self.out) as bar:
                task = bar.add_task(what, total=total, detail=unit)
                yield lambda done, detail: bar.update(task, advance=done, detail=detail or unit)
            return
        state = _LineState(what=what, total=total, unit=unit, say=self.info)
        yield state.advance
        if state.lines_said:
            state.say_line("done")


@dataclass(slots=True)
class _LineState:
    """Progress as occasional lines, for logs and pipes."""

    what: str
    total: int
    unit: str
    say: Callable[[str], None]
    done: int = 0
    lines_said: int = 0
    last_s: float = field(default_factory=lambda: time.monotonic())
    start_s: float = field(default_factory=lambda: time.monotonic())

    def advance(self, done: int, detail: str) -> None:
        self.done += done
        if time.monotonic() - self.last_s >= _LINE_EVERY_S:
            self.say_line(detail)

    def say_line(self, detail: str) -> None:
        self.last_s = time.monotonic()
        self.lines_said += 1
        rate = self.done / max(self.last_s - self.start_s, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        eta = f", {format_duration(left)} left" if 0 < left < 1e7 else ""
        note = f" ({detail})" if detail else ""
        self.say(f"{self.what}: {self.done:,} of {self.total:,} {self.unit}{eta}{note}")


def format_duration(seconds: float) -> str:
    """Write seconds as ``45 s``, ``3:05 min`` or ``2:03 h``."""
    whole = max(0, round(seconds))
    if whole < 90:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 90:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return versions and hardware, for the records of a run."""
    packages = ("memguard", "torch", "transformers", "datasets", "numpy", "scipy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        **versions,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "gpu": gpu,
    }
