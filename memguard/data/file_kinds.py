"""Checks that documents are regular files: reading a FIFO or a device may never end."""

import stat
from pathlib import Path

from memguard.errors import DataError

_ENDLESS = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def check_file_kind(path: Path, *, shown: str, setting: str) -> None:
    """Reject a FIFO, a socket or a device.

    A path that cannot be examined passes; reading it later reports the reason.

    Raises:
        DataError: names the kind of file.
    """
    try:
        kind = _ENDLESS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):
        return
    if kind is not None:
        raise DataError(
            f"'{setting}': '{shown}' is a {kind}; documents must be in regular files. Write its "
            "content to a file."
        )
