"""Every error as one line and the right exit code."""

import errno
import os
import sys
import traceback
import warnings
from typing import NoReturn

import typer

from memguard.errors import ConfigError, MemguardError

_INTERRUPTED = 130
# typer carries its own copy of click from 0.20 on, and names only this child of its usage errors.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def run_app() -> NoReturn:
    """Run the command line and exit with the code that says how it ended.

    0 pass, 1 internal, 2 usage or configuration, 3 data or model, 10 gate failed, 11 inconclusive,
    12 partial, 130/143 interrupted.
    """
    from memguard.cli.app import app

    warnings.showwarning = _show_warning
    try:
        code = app(standalone_mode=False)
    except typer.Exit as stop:
        code = stop.exit_code
    except _UsageError as error:
        _say(str(error))
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted; run the same command again to go on")
        code = _INTERRUPTED
    except ConfigError as error:
        # Each problem starts with its place, file:line:column, where editors look for it.
        print(error, file=sys.stderr)
        code = error.exit_code
    except MemguardError as error:
        _say(str(error))
        code = error.exit_code
    except OSError as error:
        code = _explain_os_error(error)
    except Exception:
        traceback.print_exc()
        _say("this is a mistake in memguard; the lines above say where")
        code = 1
    sys.stdout.flush()
    sys.exit(code if isinstance(code, int) else 0)


def _explain_os_error(error: OSError) -> int:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        _say(
            f"'{error.filename}' cannot be written or read ({os.strerror(error.errno)}): choose "
            "another 'output_dir', or change its permissions"
        )
        return 2
    if error.errno == errno.ENOSPC or "No space left" in str(error):
        _say(
            "the disk is full; what was saved before is whole. Free some space and run the same "
            "command again"
        )
        return 1
    if error.errno == errno.EPIPE:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    traceback.print_exc()
    _say(str(error))
    return 1


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    _say(f"warning: {message}")


def _say(line: str) -> None:
    print(f"memguard: {line}", file=sys.stderr)
