"""Which files can be documents: regular ones. Reading a FIFO or a device may never end."""

import stat
from pathlib import Path

from memguard.errors import DataError

_ENDLESS = (
    (stat.S_ISFIFO, "FIFO"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


def check_file_kind(path: Path, *, shown: str, setting: str) -> None:
    """Refuse a FIFO, a socket or a device; what cannot be looked at passes, reading it says why.

    Raises:
        DataError: with what it is.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    kind = next((name for is_kind, name in _ENDLESS if is_kind(mode)), None)
    if kind is not None:
        raise DataError(
            f"'{setting}': '{shown}' is a {kind}; documents are read from regular files. Write its "
            "content to one."
        )
