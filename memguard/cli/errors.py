"""Every error as one line and the right exit code."""

import errno
import io
import os
import re
import signal
import sys
import traceback
import warnings
from typing import NoReturn

import typer

from memguard.cli.signals import SignalReceived, raise_on_signals
from memguard.errors import (
    MAX_PATH,
    ConfigError,
    Interrupted,
    MemguardError,
    OtherRankFailed,
    shorten,
)
from memguard.workflows.launch import LastWords, own_rank, tell

_INTERRUPTED = 130
_GO_ON = "interrupted; run the same command again to go on"
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_PLACE = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# safetensors, torch and numpy pass a full disk on as their own errors, and only in words.
_FULL_IN_WORDS = re.compile(
    r"No space left on device|Disk quota exceeded|\d+ requested and \d+ written"
)
_LOST_PEER_KINDS = ("DistBackendError", "DistNetworkError", "DistStoreError")
# typer carries its own copy of click from 0.20 on, and names only this child of its usage errors.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def run_app() -> NoReturn:
    """Run the command line and exit with the code that says how it ended.

    0 done, 1 internal, 2 usage or configuration, 3 data or model, 130/143 interrupted.
    """
    warnings.showwarning = _show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As for standard error: a terminal without dashes must not end a command.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        raise_on_signals()
        from memguard.cli.app import app

        code = app(standalone_mode=False)
        if code == _INTERRUPTED:
            # typer returns this for a Ctrl-C, without a word.
            raise KeyboardInterrupt
    except typer.Exit as stop:
        code = stop.exit_code
    except (KeyboardInterrupt, typer.Abort) as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end(_explain(error))
    except (Exception, SignalReceived) as error:
        _end(_explain(error))
    sys.stdout.flush()
    sys.exit(code if isinstance(code, int) else 0)


def _end(words: LastWords) -> NoReturn:
    tell(words)
    sys.stdout.flush()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        # Taking a group down whose other ranks are gone may wait for them, or abort.
        os._exit(words.code)
    sys.exit(words.code)


def _explain(error: BaseException) -> LastWords:
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return _words(error, _INTERRUPTED, _GO_ON)
    if isinstance(error, SignalReceived):
        return _words(error, 128 + error.number, _GO_ON)
    if isinstance(error, _UsageError):
        # str() leaves out which argument it is.
        return _words(error, 2, getattr(error, "format_message", error.__str__)())
    if isinstance(error, ConfigError):
        # Each problem starts with its place, file:line:column, where editors look for it.
        return LastWords(code=error.exit_code, kind=type(error).__name__, text=str(error))
    if isinstance(error, MemguardError):
        return _words(error, error.exit_code, str(error))
    if isinstance(error, OSError) and error.filename is not None:
        path = shorten(str(error.filename), MAX_PATH)
        if error.errno in _NOT_ALLOWED:
            line = (
                f"'{path}' cannot be written or read ({os.strerror(error.errno)}): "
                "choose another folder ('output_dir', --out), or change its permissions"
            )
            return _words(error, 2, line)
        if error.errno in _NO_PLACE:
            line = (
                f"'{path}' cannot be made or read ({os.strerror(error.errno)}): choose "
                "another folder ('output_dir', --out)"
            )
            return _words(error, 2, line)
    return _explain_failure(error)


def _explain_failure(error: BaseException) -> LastWords:
    """Tell what the machine could not give apart from what memguard did wrong."""
    if getattr(error, "errno", None) in _FULL or _FULL_IN_WORDS.search(str(error)):
        line = (
            "the disk is full; what was saved before is whole. Free some space and run the same "
            "command again"
        )
        return _words(error, 1, line)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        line = (
            "out of memory: lower 'train.micro_batch_size', 'data.seq_len' or "
            "'audit.batch_tokens', or set 'train.activation_checkpointing' to full, and run again"
        )
        return _words(error, 1, line)
    if _is_lost_peer(error):
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        # gloo begins with a line of its source and ends with advice.
        said = re.sub(r"^\[\S+\] ", "", said).split(". ")[0][:160]
        line = f"the connection to another rank broke ({said}); it says why, or was killed"
        return _words(error, 1, line)
    line = "this is a mistake in memguard; the lines above say where"
    return _words(error, 1, line, "".join(traceback.format_exception(error)))


def _is_lost_peer(error: BaseException) -> bool:
    """Tell what a rank sees whose peer has ended from mistakes of its own."""
    if type(error).__name__ in _LOST_PEER_KINDS:
        return True
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)


def _words(error: BaseException, code: int, line: str, shown_above: str = "") -> LastWords:
    return LastWords(
        code=code,
        kind=type(error).__name__,
        text=f"memguard: {line}",
        traceback=shown_above,
        follows=isinstance(error, OtherRankFailed) or _is_lost_peer(error),
        # All ranks have agreed to stop after the same step.
        agreed=isinstance(error, Interrupted),
    )


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    if own_rank() == 0:
        print(f"memguard: warning: {message}", file=sys.stderr)
