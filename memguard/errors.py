"""Every error a user can cause, with the exit code it ends in.

    MemguardError            1  internal
    ├── ConfigError          2  a setting is wrong; nothing was read yet
    ├── DataError            3  documents missing, empty or unusable
    ├── ModelError           3  checkpoint missing or incompatible
    ├── RecordError          3  a run or report cannot be read, or cannot be compared
    ├── Interrupted    130/143  stopped by a signal after saving; run again to resume
    └── OtherRankFailed      *  another rank has ended with that code, and says why

Messages are one line: the field in quotes, the rule, what was got, the way out.
"""

import signal

_MOST = 80
MAX_PATH = 200
"""Characters of a path that messages keep."""


def shorten(text: str, most: int = _MOST) -> str:
    """Return a value, or a path, for a message: its middle left out where it is long.

    Args:
        text: of one line.
        most: characters that are kept.
    """
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail - 3]}...{text[-tail:]}"


class MemguardError(Exception):
    """Anything memguard raises on purpose."""

    exit_code = 1


class ConfigError(MemguardError):
    """A setting is wrong. Carries every problem found, one line each."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(MemguardError):
    """Documents are missing, empty or unusable. Never quotes their text."""

    exit_code = 3


class ModelError(MemguardError):
    """A checkpoint or tokenizer is missing or incompatible."""

    exit_code = 3


class RecordError(MemguardError):
    """A run folder or report cannot be read, or does not belong with the others."""

    exit_code = 3


class Interrupted(MemguardError):
    """A signal stopped the run after its state was saved."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
        self.signal_name = signal.Signals(signal_number).name


class OtherRankFailed(MemguardError):
    """This rank ends because another one did, which says why."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"rank {rank} has ended with an error, which it has told")
        self.exit_code = exit_code
