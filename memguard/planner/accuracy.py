"""How near estimated speeds are to published training runs, by length of the rows. No torch.

Ratios of estimated to published tokens/s of the runs to which no constant was fitted, as printed by
scripts/bench/published.py. memguard itself has not been measured on a GPU: once figures of one are
committed, the last words of `describe_spread` are no longer true.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RowClass:
    """Published runs with rows of similar lengths."""

    measured: str
    """Lengths of their rows."""
    shortest: int
    longest: int | None
    """Rows for which the spread is printed (tokens); None has no limit."""
    num_runs: int
    """Runs to which no constant was fitted."""
    lowest: float
    """Smallest ratio of estimated to published tokens/s."""
    highest: float

    def has(self, seq_len: int) -> bool:
        """Return whether rows of this length belong to it."""
        return self.shortest <= seq_len and (self.longest is None or seq_len <= self.longest)


ROW_CLASSES = (
    RowClass(
        measured="up to 2,048", shortest=1, longest=2048, num_runs=26, lowest=0.97, highest=1.03
    ),
    RowClass(
        measured="4,096 to 8,192",
        shortest=2049,
        longest=8192,
        num_runs=3,
        lowest=0.96,
        highest=0.99,
    ),
    RowClass(
        measured="16,384 and more",
        shortest=8193,
        longest=None,
        num_runs=6,
        lowest=0.97,
        highest=1.04,
    ),
)
OTHER_LOWEST, OTHER_HIGHEST = 0.85, 0.96
"""Of nine runs of another library, three with tensor parallelism and two on A100s."""


def describe_spread(seq_len: int) -> str:
    """Return how near estimated speeds are to published ones, in one phrase.

    Args:
        seq_len: tokens of a row.
    """
    group = next(each for each in ROW_CLASSES if each.has(seq_len))
    return (
        f"speeds are {group.lowest:.2f} to {group.highest:.2f} of those of {group.num_runs} "
        f"published runs on H100s with rows of {group.measured} tokens, {OTHER_LOWEST:.2f} to "
        f"{OTHER_HIGHEST:.2f} of those of another library, and never measured by us"
    )
