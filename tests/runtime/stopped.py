"""`memguard` of which one rank stops itself: `python stopped.py launch WHERE RANK ARGUMENTS...`.

In a step that is the third one, and once, not after a restart. WHERE `slow` makes each rank sleep
there instead, `data` one rank that waits for its rows, `late` one in the preparation; `never` stops
none.
"""

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from memguard.runtime.children import own_rank

NUM_RANKS = "STOPPED_RANKS"
RESTARTS = "STOPPED_RESTARTS"
SLEEPS_S = {"slow": 20.0, "late": 40.0, "data": 60.0}
DONE = Path("stopped")
PLACES = {
    "forward": ("memguard.train.step", "TrainStep._sum_loss"),
    "backward": ("memguard.train.step", "TrainStep._backward"),
    "slow": ("memguard.train.step", "TrainStep._backward"),
    "data": ("memguard.train.prefetch", "Prefetcher.take"),
    "save": ("memguard.train.checkpoint", "_sum_part"),
    "late": ("memguard.workflows.training.data", "_prepare_and_check"),
    "prepare": ("memguard.workflows.training.data", "_prepare_and_check"),
}


def stop(*_: Any, **__: Any) -> None:
    # Also rank 1's is shown: it shares the launcher's file descriptor, not its log.
    with open(f"/proc/{os.getppid()}/fd/2", "a") as launcher:
        launcher.write(f"rank {own_rank()} stops\n")
    DONE.touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def run(where: str, rank: str, *arguments: str) -> None:
    sys.argv[1:] = arguments
    if where != "never" and (own_rank() == int(rank) or where == "slow"):
        module, names = PLACES[where]
        *owners, name = names.split(".")
        owner = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        before, num_calls = getattr(owner, name), 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            is_now = num_calls == 3 or not owners
            if where == "data" and num_calls == 2:
                time.sleep(8)  # The watch looks at a process after five seconds for the first time.
            if is_now and where in SLEEPS_S:
                time.sleep(SLEEPS_S[where])
            elif is_now and not DONE.exists():
                stop()
            return before(*args, **kwargs)

        setattr(owner, name, call)
    from memguard.cli import main

    main()


def launch(*arguments: str) -> None:
    from memguard.workflows.common import launch

    num_ranks, restarts = int(os.environ[NUM_RANKS]), int(os.environ[RESTARTS])
    command = [sys.executable, __file__, *arguments]
    allowed = (Path("runs", "run"), restarts) if restarts else None
    sys.exit(launch.launch(command, num_ranks, restarts=allowed))


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(*sys.argv[2:])
    run(*sys.argv[1:])
