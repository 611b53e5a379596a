"""The command line: arguments in, text and exit codes out. No torch; every command is a workflow.

    app.py            the commands and their arguments
    options.py        arguments, options and status lines that several commands have
    errors.py         prints every error as one line and sets the exit code
    signals.py        raises an exception on Ctrl-C and SIGTERM
    screens.py        prints a plan and a dry run
    verify_screen.py  prints the result of `memguard verify`

Commands import what they need when they run, so a wrong setting is refused before torch is loaded.
"""

from memguard.cli.errors import run_app


def main() -> None:
    """Run the command line; never returns."""
    run_app()


__all__ = ["main"]
