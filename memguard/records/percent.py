"""Shares as percentages, in the sentences of records and of the terminal: ``12.5 %``.

The space is a plain one, so that any encoding has it; what wraps a sentence keeps it together
(`runtime.console.wrap_words`). Pages have a format of their own, `pages.formatting.percent`.
"""


def format_percent(share: float, decimals: int = 1) -> str:
    """Format a share as ``95.0 %``, never rounded to 0 or 100 unless it is exactly that.

    Args:
        share: from 0 to 1.
        decimals: digits after the point.
    """
    least = 10.0**-decimals
    if 0 < 100 * share < least / 2:
        return f"<{least:.{decimals}f} %"
    if 100 - least / 2 <= 100 * share < 100:
        return f"{100 - least:.{decimals}f} %"
    return f"{100 * share:.{decimals}f} %"
