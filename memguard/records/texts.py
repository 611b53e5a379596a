"""Texts of records: shares as percentages or counts, and absolute paths, which are shortened."""

import math
import re
from pathlib import PurePath

# An absolute path as an argument, a setting's value or a list entry; it may contain spaces.
_ABSOLUTE = re.compile(r"(?:^|(?<=[=\[,'\"]))\s*/[^,'\"\[\]{}]*")


def format_percent(share: float, decimals: int = 1) -> str:
    """Format a share as ``95.0 %``, never rounded to 0 or 100 unless it is exactly that.

    The space is a plain one, so that any encoding has it; what wraps a sentence keeps it together
    (`runtime.console.wrap_words`). Pages have a format of their own, `pages.formatting.percent`.
    """
    least = 10.0**-decimals
    if 0 < 100 * share < least / 2:
        return f"<{least:.{decimals}f} %"
    if 100 - least / 2 <= 100 * share < 100:
        return f"{100 - least:.{decimals}f} %"
    return f"{100 * share:.{decimals}f} %"


def format_at_most(share: float) -> str:
    """Format an upper limit of a share, rounded up: ``at most 9 in 100``, below it in 1,000."""
    whole = 100 if share >= 0.01 else 1000
    # 0.07 * 100 is slightly above 7 in floating point.
    return f"at most {math.ceil(share * whole - 1e-9):,} in {whole:,}"


def shorten_paths(text: str) -> str:
    """Return an argument or a value in which absolute paths are shortened to their last two parts.

    Records are handed to other people.
    """
    return _ABSOLUTE.sub(lambda path: "/".join(PurePath(path[0].strip()).parts[1:][-2:]), text)
