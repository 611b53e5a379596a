"""Attack costs in words: the number of queries until a text is generated."""

from memguard.pages import formatting as fmt
from memguard.records import MIN_FOR_QUANTILES, ResultRow

NEVER = "never"


def write_cost(cost: ResultRow | None) -> str:
    """Format a quantile of the attack cost; "" without documents.

    Args:
        cost: row of the metric `log10_queries` of the probe `sampling`.
    """
    if cost is None or not cost.num_documents:
        return ""
    if cost.num_documents < MIN_FOR_QUANTILES:
        return f"not shown below {MIN_FOR_QUANTILES} documents"
    return NEVER if cost.value is None else fmt.queries(cost.value)


def write_cost_in_queries(cost: ResultRow | None) -> str:
    """Format a quantile of the attack cost with its unit: ``1 query``, ``2,300 queries``."""
    written = write_cost(cost)
    if cost is None or cost.value is None or cost.num_documents < MIN_FOR_QUANTILES:
        return written
    return f"{written}{fmt.NBSP}{'query' if written == '1' else 'queries'}"
