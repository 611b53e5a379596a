"""All errors that a user can cause, with their exit codes.

    MemguardError            1  internal
    ├── ConfigError          2  a setting is wrong; nothing was read yet
    ├── DataError            3  documents missing, empty or unusable
    ├── ModelError           3  checkpoint missing or incompatible
    ├── RecordError          3  a run or report cannot be read, or cannot be compared
    │   ├── VersionError     3  another version of memguard wrote it
    │   └── UnreadableError  3  only another user can read it
    ├── OutOfMemory          1  memory ran out in training
    │   └── StepTooLarge     1  in a step, and settings that need less are left
    ├── Diverged             4  the loss or the gradient norm of a step is not finite
    ├── Interrupted    130/143  stopped by a signal after saving; run again to resume
    └── OtherRankFailed      *  another rank ended with that code; its message gives the reason

Messages are one line: the field in quotes, the rule, the value found, the way out.
"""

import os
import re
import signal
import sys
import traceback
import unicodedata
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_MOST = 80
_CONTROL_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
MAX_PATH = 200
"""Characters of a path that messages keep."""

DISTRIBUTION = "memguard-llm"
"""Name of memguard for pip; `memguard` is another project there."""
OPTIONAL = {
    "bitsandbytes": "bitsandbytes>=0.50",
    "evaluate": "evaluate>=0.4.1",
    "lm_eval": "lm-eval>=0.4.13",
    "matplotlib": "matplotlib>=3.9",
    "opacus": "opacus>=1.6",
    "rensa": "rensa>=0.5",
    "tensorboard": "tensorboard>=2.20",
    "torchao": "torchao>=0.18",
    "trackio": "trackio>=0.43",
    "wandb": "wandb>=0.31",
}
"""What pip installs of each optional library, by its name in Python; as in pyproject.toml."""


def shorten(text: str, most: int = _MOST) -> str:
    """Return a value or path for a message, with the middle of a long one left out.

    Args:
        text: text of one line.
        most: largest number of characters of the result.
    """
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail - 3]}...{text[-tail:]}"


def list_first(parts: Sequence[str], most: int, *, join: str = ", ") -> str:
    """Return the first of some names or clauses, and how many more there are."""
    more = f" and {len(parts) - most:,} more" if len(parts) > most else ""
    return f"{join.join(parts[:most])}{more}"


def plural(number: int, what: str) -> str:
    """Return a number of things: ``1 file``, ``2,300 files``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def spell_controls(text: str) -> str:
    """Return a text with control characters spelled out, which could change a terminal or a page.

    Line ends and tabs become spaces.
    """
    return text if text.isprintable() else "".join(map(_spell, text))


def _spell(character: str) -> str:
    if character in "\n\r\t":
        return " "
    code = ord(character)
    noncharacter = code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
    if noncharacter or unicodedata.category(character) in _CONTROL_CATEGORIES:
        return f"[U+{code:04X}]"
    return character


def escape_name(name: str) -> str:
    """Return a name in which what is not UTF-8 is written in ASCII."""
    return name.encode("utf-8", "backslashreplace").decode()


class ForeignError(Exception):
    """A fault that memguard sees in code of others; its text is memguard's own."""


def describe_foreign(error: BaseException) -> str:
    """Return class and place of an error of code that memguard did not write.

    Its message is left out, because it may quote a document: ``ValueError at my_probe.py:12``. With
    MEMGUARD_DEBUG=1 the traceback is printed, with the message.
    """
    if isinstance(error, ForeignError | MemguardError):
        return str(error)
    if os.environ.get("MEMGUARD_DEBUG") == "1":
        traceback.print_exception(error, file=sys.__stderr__)
    kind = shorten(escape_name(type(error).__name__), 60)
    if isinstance(error, OSError) and isinstance(error.errno, int):
        kind += f" ({os.strerror(error.errno)})"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return kind
    return f"{kind} at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"


def is_foreign(error: BaseException) -> bool:
    """Return whether code of others raised an error, and no signal: `sys.exit` is one, too."""
    if isinstance(error, KeyboardInterrupt):
        # The command line raises another exception for a Ctrl-C.
        return signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return isinstance(error, Exception | SystemExit)


_NO_MEMORY = re.compile(
    r"out of memory|DefaultCPUAllocator|_ALLOC(ATION)?_FAILED|Failed to CUDA (host )?(alloc|calloc)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, of a GPU or of this machine.

    torch's allocator     OutOfMemoryError; on a CPU a RuntimeError with the allocator's name
    CUDA, HIP, Triton     AcceleratorError, RuntimeError: "CUDA error: out of memory"
    cuBLAS, cuDNN         RuntimeError: "CUBLAS_STATUS_ALLOC_FAILED"
    NCCL                  DistBackendError: "Cuda failure 2 'out of memory'", "Failed to CUDA alloc"
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that another rank has ended, not that this one failed."""
    if is_out_of_memory(error):
        return False
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)


class MemguardError(Exception):
    """Base class of all errors that memguard raises."""

    exit_code = 1


class ConfigError(MemguardError):
    """A setting is wrong. Contains every problem found, one line each."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(MemguardError):
    """Documents are missing, empty or unusable. The message never quotes their text."""

    exit_code = 3


class ModelError(MemguardError):
    """A checkpoint or tokenizer is missing or incompatible."""

    exit_code = 3


class RecordError(MemguardError):
    """A run folder or report cannot be read, or does not belong with the others."""

    exit_code = 3


class VersionError(RecordError):
    """A file of a run has fields that only another version of memguard knows."""


class UnreadableError(RecordError):
    """This user may not read a file of a run: private ones can be read by their owner only."""


class OutOfMemory(MemguardError):
    """Memory ran out in training; the message names what helps on the run's mesh."""


class StepTooLarge(OutOfMemory):
    """Memory ran out in a step, and the run may start again with settings that need less."""

    def __init__(self, message: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.settings = dict(settings or {})
        """Of `train`."""


class Diverged(MemguardError):
    """The loss or the gradient norm of a step is not finite; the run has ended."""

    exit_code = 4

    def __init__(self, step: int, message: str, *, is_own: bool = False) -> None:
        super().__init__(f"training diverged at step {step}: {message}")
        self.step, self.what, self.is_own = step, message, is_own
        """`is_own`: whether the loss of this rank's own rows is not finite."""


class Interrupted(MemguardError):
    """A signal stopped the run after its state was saved."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class OtherRankFailed(MemguardError):
    """This rank ends because another rank failed, whose message gives the reason."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"rank {rank} failed; see its message above")
        self.exit_code = exit_code


def check_name(path: str | os.PathLike[str], setting: str, error: type[MemguardError]) -> None:
    """Raise an error if a path is not UTF-8 or has a NUL: reports and manifests name it.

    Args:
        path: as the user gave it, or found in a folder.
        setting: setting or option that it belongs to.
        error: the kind of error.
    """
    name = escape_name(os.fspath(path))
    if "\0" in name:
        raise error(f"'{setting}' must not hold a NUL character; got {shorten(repr(name))}")
    if name != os.fspath(path):
        raise error(
            f"'{setting}': the name '{shorten(name, MAX_PATH)}' is not UTF-8, so that no report "
            "can hold it: rename the file or folder"
        )


def advise_install(library: str) -> str:
    """Return the command that installs an optional library, by its name in Python."""
    return f"pip install '{OPTIONAL[library]}'"


def require_library(
    library: str,
    user: str,
    *,
    or_else: str = "",
    error: type[MemguardError] = ConfigError,
    by_import: bool = False,
) -> None:
    """Raise an error if an optional library is not installed.

    Args:
        library: its name in Python, of `OPTIONAL`.
        user: what needs it, the subject of the message.
        or_else: another way out.
        error: the kind of error.
        by_import: whether to import it, which takes seconds and finds a broken installation.
    """
    message = f"{user} needs {library}: {advise_install(library)}{or_else}"
    if find_spec(library) is None:
        raise error(message)
    try:
        if by_import:
            import_module(library)
    except ImportError as reason:
        raise error(f"{message} (its import fails: {reason})") from reason
