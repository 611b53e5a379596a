"""The command line: arguments in, text and exit codes out. No torch; every command is a workflow.

    app.py            the commands and their arguments
    errors.py         every error as one line and the right exit code
    signals.py        Ctrl-C and SIGTERM, as an exception
    screens.py        a plan and a dry run, printed
    verify_screen.py  what of a run is damaged, printed

Commands import what they need when they run, so a wrong setting is refused before torch is loaded.
"""

from memguard.cli.errors import run_app


def main() -> None:
    """Run the command line; never returns."""
    run_app()


__all__ = ["main"]
