"""What ranks do in `test_cli_launch` in place of a command: `python launched.py NAME FOLDER`."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from memguard.cli import app, main
from memguard.cli.options import print_result
from memguard.errors import ConfigError, Interrupted, ModelError
from memguard.runtime.children import own_rank

RANK = own_rank()
FOLDER = Path(sys.argv[2])


def same_error() -> None:
    raise ConfigError("run.yaml:1:1 'a' is wrong", "run.yaml:2:1 'b' is wrong")


def gather() -> None:
    from memguard.runtime import start_runtime

    with start_runtime() as runtime:
        everyone = runtime.gather_objects((runtime.rank, os.environ["OMP_NUM_THREADS"]))
    print_result(True, everyone, FOLDER)


def raise_beside_a_barrier() -> None:
    from memguard.runtime import start_runtime

    with start_runtime() as runtime:
        if runtime.rank == 1:
            raise ModelError("no layer 7")
        runtime.barrier()


def mistake_beside_a_deaf_rank() -> None:
    if RANK == 1:
        raise ZeroDivisionError
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(60)


def silent(number: int = 1) -> None:
    if number == RANK:
        print("first line\ncannot open libx.so\n", file=sys.stderr)
        sys.stderr.flush()
        os._exit(77)
    time.sleep(60)


def first_is_silent() -> None:
    silent(0)


def one_ends_late() -> None:
    if RANK == 0:
        time.sleep(1)
        (FOLDER / "report").touch()
    raise Interrupted(signal.SIGTERM, "stopped and saved")


def save_when_asked() -> None:
    """As the trainer: a signal asks, rank 0 takes longest to save."""
    requested: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        with (FOLDER / f"signals-{RANK}").open("a") as log:
            log.write(f"{number}\n")
        requested.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    (FOLDER / f"ready-{RANK}").touch()
    while not requested:
        time.sleep(0.01)
    time.sleep(1.5 if RANK == 0 else 0.0)
    (FOLDER / f"saved-{RANK}").touch()
    raise Interrupted(requested[0], "stopped after step 3 and saved")


def sleep() -> None:
    """Nothing to save: a signal ends it as it ends any Python."""
    (FOLDER / f"ready-{RANK}").touch()
    time.sleep(60)


def deaf() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sleep()


WORK: dict[str, Callable[[], None]] = {
    work.__name__: work
    for work in (
        same_error,
        gather,
        raise_beside_a_barrier,
        mistake_beside_a_deaf_rank,
        silent,
        first_is_silent,
        one_ends_late,
        save_when_asked,
        sleep,
        deaf,
    )
}


def launch_as_program() -> None:
    """Be the launcher, with short patience: `python launched.py launch FOLDER NAME`."""
    from memguard.workflows.common import launch

    launch._GRACE_S = 0.3
    launch._LAST_CALL_S = 0.5
    command = [sys.executable, __file__, sys.argv[3], str(FOLDER)]
    sys.exit(launch.launch(command, 2))


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch_as_program()

    def run(**_: object) -> None:
        WORK[sys.argv[1]]()

    app.app = run
    main()
