"""Runs lm-eval without changing this process: its random numbers, logs, output and environment.

Inside the block the random generators have the seeds that lm-eval's own command sets, its progress
bars and messages are not shown, its warnings are not raised, and downloads are refused unless they
are allowed. At the end of the block everything is as before.
"""

import logging
import math
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import numpy as np

PYTHON_SEED, OTHER_SEED = 0, 1234
"""The seeds of lm-eval's command; the second one also draws the solved examples of a prompt."""

_OFFLINE = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_DATASETS_OFFLINE"),
    ("evaluate.config", "HF_EVALUATE_OFFLINE"),
)
"""What the libraries read before each request; the variables of the environment are read once."""
_LOCAL_READERS = frozenset({"json", "csv", "parquet", "text", "arrow"})
"""Values of a task's 'dataset_path' that read local files."""
_LOGGERS = ("lm_eval", "datasets", "evaluate", "huggingface_hub", "transformers", "filelock")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Streams:
    """The output of this process, which is not shown inside the block."""

    out: TextIO
    err: TextIO

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show output again, for messages of our own."""
        with redirect_stdout(self.out), redirect_stderr(self.err):
            yield


@contextmanager
def isolated(*, allow_download: bool) -> Iterator[Streams]:
    """Run lm-eval's code in a block after which this process is as before."""
    with ExitStack() as stack:
        streams = Streams(out=sys.stdout, err=sys.stderr)
        stack.callback(_restore_environment, dict(os.environ))
        # Deprecations of other packages are no news for the user of this one.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(redirect_stderr(StringIO()))
        for name in ("lm_eval.tasks", "datasets", "evaluate"):
            import_module(name)
        import torch

        from memguard.model.evaluation import keep_random_states

        stack.enter_context(keep_random_states())
        for name in _LOGGERS:
            library = logging.getLogger(name)
            stack.callback(library.setLevel, library.level)
            library.setLevel(logging.CRITICAL)
        if not allow_download:
            places = [(import_module(module), name, True) for module, name in _OFFLINE]
            stack.enter_context(_replaced(places))
        random.seed(PYTHON_SEED)
        np.random.seed(OTHER_SEED)  # noqa: NPY002 - the generator that code of tasks draws from
        torch.manual_seed(OTHER_SEED)
        yield streams


@contextmanager
def _replaced(places: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes of modules other values until the block ends."""
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, value in places:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _restore_environment(before: Mapping[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@contextmanager
def private_cache(reader: str | None) -> Iterator[None]:
    """Read a task's local files into memory, through a folder that ends with the block.

    Their text may be private, and datasets would leave a copy of it in the user's cache.
    """
    if reader not in _LOCAL_READERS:
        yield
        return
    from datasets import config as settings

    with TemporaryDirectory(prefix="memguard-task-") as folder:
        own = (("HF_DATASETS_CACHE", Path(folder)), ("IN_MEMORY_MAX_SIZE", math.inf))
        with _replaced([(settings, name, value) for name, value in own]):
            yield


def is_network_error(error: BaseException) -> bool:
    """Return whether the cause is that something could not be downloaded."""
    seen: BaseException | None = error
    while seen is not None:
        module = type(seen).__module__.partition(".")[0]
        if isinstance(seen, ConnectionError) or module in ("httpx", "httpx2", "requests"):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
