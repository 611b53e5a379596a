"""The command line: the only place that sees everything and joins it.

    app.py       the commands and their arguments
    errors.py    every error as one line and the right exit code
    training.py  a run: prepare, train, export, audit
    auditing.py  an audit of a run, or of any checkpoint
    sweeping.py  a sweep: each setting as a child process, then the comparison

Commands import what they need when they run: a wrong setting is told before torch is loaded.
"""

from memguard.cli.errors import run_app


def main() -> None:
    """Run the command line; never returns."""
    run_app()


__all__ = ["main"]
