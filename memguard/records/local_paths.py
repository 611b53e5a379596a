"""Shortens the absolute paths in records, which are handed to other people."""

import re
from pathlib import PurePath

# An absolute path as an argument, a setting's value or a list entry; it may contain spaces.
_ABSOLUTE = re.compile(r"(?:^|(?<=[=\[,'\"]))\s*/[^,'\"\[\]{}]*")


def shorten_paths(text: str) -> str:
    """Return an argument or a value in which absolute paths are shortened to their last two parts.

    Args:
        text: as the user wrote it.
    """
    return _ABSOLUTE.sub(lambda match: shorten_path(match[0].strip()), text)


def shorten_path(path: str) -> str:
    """Return the last two parts of an absolute path; relative paths do not change."""
    parts = PurePath(path).parts
    return "/".join(parts[1:][-2:]) if PurePath(path).is_absolute() else path
