"""The command line: arguments in, text and exit codes out. No torch; every command is a workflow.

    app.py      the commands and their arguments
    errors.py   every error as one line and the right exit code
    screens.py  a plan and a dry run, printed

Commands import what they need when they run, so a wrong setting is refused before torch is loaded.
"""

from memguard.cli.errors import run_app


def main() -> None:
    """Run the command line; never returns."""
    run_app()


__all__ = ["main"]
