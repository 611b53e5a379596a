"""The command line: arguments in, text and exit codes out. No torch; every command is a workflow.

    app.py            the commands and their arguments
    finished.py       commands on finished runs: export, report, verify, diff, gate, bundle
    doctor.py         `memguard doctor`, and its results
    help.py           groups of options and an example of each command, for --help
    options.py        arguments, options and status lines that several commands have
    errors.py         prints every error as one line and sets the exit code
    plan_screen.py    prints a plan
    dry_run_screen.py prints a dry run
    screens.py        prints the results of `memguard verify`, `diff` and `gate`
    probes.py         lists the probes for `memguard audit --list-probes`

Commands import what they need when they run, so a wrong setting is refused before torch is loaded.
"""

import os
import signal
import sys
import threading
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit; see `run_app` for the exit codes."""
    is_main = threading.current_thread() is threading.main_thread()
    raises = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        # A Ctrl-C during the first imports ends the process without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from memguard.cli.errors import run_app
    from memguard.runtime.environment import quiet_kernel_advice

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    quiet_kernel_advice()
    try:
        run_app()
    except SystemExit as end:
        if "LOCAL_RANK" in os.environ and isinstance(end.code, int):
            # A rank ends without finalizing Python. The threads of gloo outlive their groups; one
            # that frees a tensor meanwhile aborts the process: "terminate called without an active
            # exception". Leaving a group whose other ranks have exited may hang or abort, too.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise


__all__ = ["main"]
