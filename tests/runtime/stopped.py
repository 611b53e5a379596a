"""`memguard` of which one rank stops itself: `python stopped.py launch WHERE RANK ARGUMENTS...`."""

import importlib
import os
import signal
import sys
from typing import Any

from memguard.runtime.children import own_rank

PLACES = {
    "save": ("memguard.train.checkpoint", "_sum_part"),
    "prepare": ("memguard.workflows.training.train", "_prepare"),
}


def stop(*_: Any, **__: Any) -> None:
    # Also rank 1's is shown: it shares the launcher's file descriptor, not its log.
    with open(f"/proc/{os.getppid()}/fd/2", "a") as launcher:
        launcher.write(f"rank {own_rank()} stops\n")
    os.kill(os.getpid(), signal.SIGSTOP)


def run(where: str, rank: str, *arguments: str) -> None:
    sys.argv[1:] = arguments
    if own_rank() == int(rank):
        module, function = PLACES[where]
        setattr(importlib.import_module(module), function, stop)
    from memguard.cli import main

    main()


def launch(*arguments: str) -> None:
    from memguard.workflows.common import launch

    sys.exit(launch.launch([sys.executable, __file__, *arguments], 2))


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(*sys.argv[2:])
    run(*sys.argv[1:])
