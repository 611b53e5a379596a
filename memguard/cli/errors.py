"""Every error as one line and the right exit code."""

import errno
import io
import os
import signal
import sys
import traceback
import warnings
from typing import NoReturn

import typer

from memguard.errors import ConfigError, MemguardError

_INTERRUPTED = 130
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_PLACE = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# typer carries its own copy of click from 0.20 on, and names only this child of its usage errors.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def run_app() -> NoReturn:
    """Run the command line and exit with the code that says how it ended.

    0 pass, 1 internal, 2 usage or configuration, 3 data or model, 10 gate failed, 11 inconclusive,
    12 partial, 130/143 interrupted.
    """
    warnings.showwarning = _show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As for standard error: a terminal without dashes must not end a command.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from memguard.cli.app import app

        code = app(standalone_mode=False)
        if code == _INTERRUPTED:
            # typer returns this for a Ctrl-C, without a word.
            raise KeyboardInterrupt
    except typer.Exit as stop:
        code = stop.exit_code
    except _UsageError as error:
        # str() leaves out which argument it is.
        _say(getattr(error, "format_message", error.__str__)())
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    except Exception as error:
        code = _explain_failure(error)
    sys.stdout.flush()
    sys.exit(code if isinstance(code, int) else 0)


def _explain_os_error(error: OSError) -> int:
    if error.filename is None:
        return _explain_failure(error)
    if error.errno in _NOT_ALLOWED:
        _say(
            f"'{error.filename}' cannot be written or read ({os.strerror(error.errno)}): choose "
            "another folder ('output_dir', --out), or change its permissions"
        )
        return 2
    if error.errno in _NO_PLACE:
        _say(
            f"'{error.filename}' cannot be made or read ({os.strerror(error.errno)}): choose "
            "another folder ('output_dir', --out)"
        )
        return 2
    return _explain_failure(error)


def _explain_failure(error: Exception) -> int:
    """Tell what the machine could not give apart from what memguard did wrong."""
    # safetensors and torch pass a full disk on as their own errors, and only in words.
    if getattr(error, "errno", None) in _FULL or "No space left on device" in str(error):
        _say(
            "the disk is full; what was saved before is whole. Free some space and run the same "
            "command again"
        )
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        _say(
            "out of memory: lower 'train.micro_batch_size', 'data.seq_len' or "
            "'audit.batch_tokens', or set 'train.activation_checkpointing' to full, and run again"
        )
    else:
        traceback.print_exception(error)
        _say("this is a mistake in memguard; the lines above say where")
    return 1


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    _say(f"warning: {message}")


def _say(line: str) -> None:
    print(f"memguard: {line}", file=sys.stderr)
