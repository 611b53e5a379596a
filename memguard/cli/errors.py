"""Prints every error as one line and sets the exit code."""

import errno
import io
import os
import re
import signal
import sys
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import typer

from memguard.errors import (
    MAX_PATH,
    ConfigError,
    Diverged,
    Interrupted,
    MemguardError,
    OtherRankFailed,
    StepTooLarge,
    is_lost_peer,
    is_out_of_memory,
    shorten,
    spell_controls,
)
from memguard.runtime import set_allocator_defaults
from memguard.runtime.children import (
    RUN_FOLDER,
    ExitReport,
    SignalReceived,
    raise_on_signals,
    report_exit,
)
from memguard.runtime.console import Console, wrap_words

_INTERRUPTED = 130
_GO_ON = "interrupted; run the same command again to resume"
_BUG = "this is a bug in memguard; see the traceback above"
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_PLACE = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
_NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)
_FAILING = (errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ENOTCONN, errno.EFBIG)
"""Errors of a disk or a remote file system, and its limits."""
_SYMLINK_LOOP = re.compile("Symlink loop from '(.*)'")
"""What `Path.resolve` says before Python 3.13."""
_TOO_MANY_FILES = os.strerror(errno.EMFILE)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# safetensors, torch and numpy report a full disk as their own errors, only in the message.
_FULL_IN_WORDS = re.compile(
    r"No space left on device|Disk quota exceeded|\d+ requested and \d+ written"
)
_PANIC = "PanicException"
"""A failed check of a library in Rust, such as that of tokenizers; it is no `Exception`."""
# From 0.20 on typer contains its own copy of click, and exports only this subclass of UsageError.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def run_app() -> NoReturn:
    """Run the command line and exit.

    Exit codes: 0 success, 1 internal error, 2 usage or configuration, 3 data or model, 4 diverged,
    130/143 interrupted.
    """
    warnings.showwarning = lambda message, *_, **__: Console().info(f"memguard: warning: {message}")
    # Before torch is imported, and for all ranks that this process starts.
    set_allocator_defaults()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As standard error does: a terminal that cannot encode a character must not end a command.
        sys.stdout.reconfigure(errors="backslashreplace")
    signals: list[SignalReceived] = []
    try:
        signals = raise_on_signals()
        from memguard.cli.app import app
        from memguard.records.record import format_now

        format_now()  # Refuses a wrong SOURCE_DATE_EPOCH, which records would meet at their end.
        code = app(standalone_mode=False)
        if code == _INTERRUPTED:
            # typer returns this code for a Ctrl-C, without a message.
            raise KeyboardInterrupt
    except typer.Exit as stop:
        code = stop.exit_code
    except (KeyboardInterrupt, typer.Abort) as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end(_explain(error))
    except BaseException as error:
        if not isinstance(error, Exception | SignalReceived) and type(error).__name__ != _PANIC:
            raise
        _end(_explain(signals[0] if signals else error))
    sys.stdout.flush()
    sys.exit(code if isinstance(code, int) else 0)


def _end(report: ExitReport) -> NoReturn:
    # Values and paths of the user's may hold what a terminal obeys.
    text = "\n".join(map(spell_controls, report.text.split("\n")))
    report = replace(report, text=text)
    if (width := Console().width) is not None:  # A terminal would cut words.
        report = replace(report, text=wrap_words(report.text, width, indent="  "))
    if folder := os.environ.pop(RUN_FOLDER, ""):
        from memguard.runtime.ended import close_attempt  # Needs pydantic.

        close_attempt(Path(folder), report)
    report_exit(report)
    sys.stdout.flush()
    sys.exit(report.code)


def _explain(error: BaseException) -> ExitReport:
    code, line = _find_message(error)
    # Each problem of settings starts with its place, file:line:column, where editors look for it.
    has_place = isinstance(error, ConfigError) and code == error.exit_code
    return ExitReport(
        code=code,
        kind=type(error).__name__,
        text=line if has_place else f"memguard: {line}",
        traceback="".join(traceback.format_exception(error)) if line is _BUG else "",
        follows=isinstance(error, OtherRankFailed) or is_lost_peer(error),
        # All ranks have agreed to stop after the same step.
        agreed=isinstance(error, Interrupted),
        settings=error.settings if isinstance(error, StepTooLarge) else {},
        step=error.step if isinstance(error, Diverged) else None,
    )


def _find_message(error: BaseException) -> tuple[int, str]:
    """Return exit code and message; `_BUG` for an error that none of memguard's own raises."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return _INTERRUPTED, _GO_ON
    if isinstance(error, SignalReceived):
        return 128 + error.number, _GO_ON
    if isinstance(error, _UsageError):
        # str() does not name the argument.
        return 2, getattr(error, "format_message", error.__str__)()
    # Of its causes, too: an error about a file does not say why it could not be opened.
    if _TOO_MANY_FILES in "".join(traceback.format_exception(error)):
        return 1, (
            "too many files are open at once: raise the limit ('ulimit -n 4096') and run the same "
            "command again"
        )
    if isinstance(error, MemguardError):
        return error.exit_code, str(error)
    words = "".join(traceback.format_exception_only(error))  # `str` of foreign errors can fail.
    if isinstance(error, RuntimeError) and (loop := _SYMLINK_LOOP.search(words)):
        error = OSError(errno.ELOOP, "", loop[1])
    if isinstance(error, OSError):
        path = shorten(str(error.filename), MAX_PATH)
        is_named = error.filename is not None
        if is_named and error.errno in _NOT_ALLOWED:
            return 2, (
                f"'{path}' cannot be written or read ({os.strerror(error.errno)}): choose another "
                "folder ('output_dir', --out), or change its permissions"
            )
        if is_named and error.errno in (*_NO_PLACE, *_NO_NAME):
            return 2, (
                f"'{path}' cannot be created or read ({os.strerror(error.errno)}): correct the "
                "path, or choose another folder ('output_dir', --out)"
            )
        if error.errno in _FAILING:
            name = f"'{path}'" if is_named else "a file"
            return 1, (
                f"{name} cannot be read or written: {error.strerror}. Check the disk or file "
                "system, and run the same command again"
            )
    if getattr(error, "errno", None) in _FULL or _FULL_IN_WORDS.search(words):
        return 1, (
            "the disk is full; files saved before are intact. Free some space and run the same "
            "command again"
        )
    # Training has its own message, which depends on its mesh.
    if is_out_of_memory(error):
        return 1, (
            "out of memory: use a machine with more; an audit needs less with a lower "
            "'audit.batch_tokens', or on several GPUs (--nproc)"
        )
    if is_lost_peer(error):
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        # gloo's message begins with its source line and ends with advice.
        reason = re.sub(r"^\[\S+\] ", "", reason).split(". ")[0][:160]
        return 1, (
            f"the connection to another rank broke ({reason}); see its message, or it was killed"
        )
    return 1, _BUG
