"""What a process says when it ends with an error, and to whom.

alone, or rank 0 of torchrun   standard error
rank k of torchrun             standard error, "[rank k] " in front; nothing where it only
                               follows another rank, which has spoken
a rank of `--nproc`            a file: its launcher says one line for all ranks
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

WORDS_FILE = "MEMGUARD_LAST_WORDS"
"""Environment variable: where a rank of `--nproc` leaves its last words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWords:
    """How a process ended and what it says about it."""

    code: int
    """Exit code."""
    kind: str
    """Class of the error."""
    text: str
    """One line; of a wrong configuration one for each problem."""
    traceback: str = ""
    """Shown above the text where the mistake is memguard's."""
    follows: bool = False
    """It ended only because another rank had."""
    agreed: bool = False
    """All ranks end in this way, each in its own time."""
    at_s: float = field(default_factory=time.monotonic)
    """When; the clock is the machine's (seconds)."""

    def say(self, prefix: str = "") -> None:
        """Write it to standard error."""
        shown = f"{self.traceback}{prefix}{self.text}"
        print(shown, file=sys.stderr, flush=True)


def is_started_by_nproc() -> bool:
    """Whether this process is one of those that `--nproc` has started."""
    return bool(os.environ.get(WORDS_FILE))


def own_rank() -> int:
    """Return this process's rank, known before torch is loaded; 0 where there are no others."""
    return int(os.environ.get("RANK") or 0) if "LOCAL_RANK" in os.environ else 0


def tell(words: LastWords) -> None:
    """Say the last words where they belong."""
    file = os.environ.get(WORDS_FILE)
    if file:
        try:
            # Renamed: the launcher may look at any time.
            Path(f"{file}.new").write_text(json.dumps(asdict(words)), encoding="utf-8")
            os.replace(f"{file}.new", file)
            return
        except OSError:  # no space left, where that may be what the words are about
            pass
    rank = own_rank()
    if rank == 0:
        words.say()
    elif not words.follows:
        words.say(f"[rank {rank}] ")


def read_last_words(file: Path) -> LastWords | None:
    """Return what a rank has left; None where it ended without a word."""
    try:
        return LastWords(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
