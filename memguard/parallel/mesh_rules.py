"""Rules for the degrees of axes, and what is said about broken ones; no torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memguard.config import AxisName


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A condition that the product of some degrees must satisfy."""

    axes: tuple[AxisName, ...]
    text: str
    """The predicate of a sentence about the axes."""
    holds: Callable[[int], bool]


def must_divide(axes: tuple[AxisName, ...], size: int, what: str) -> Rule:
    """Return the rule that the product of the axes' degrees divides a size."""
    return Rule(axes=axes, text=f"must divide {what}", holds=lambda degree: size % degree == 0)


def allows(rules: list[Rule], axes: tuple[AxisName, ...], degree: int) -> bool:
    """Return whether the rules for exactly these axes hold for the product of their degrees."""
    return all(rule.holds(degree) for rule in rules if rule.axes == axes)


def find_broken(
    degrees: Mapping[AxisName, int], rules: list[Rule], *, rest: AxisName | None = None
) -> list[str]:
    """Describe each broken rule: the condition and the given degrees.

    Args:
        degrees: degree of each axis; rules for axes that are missing here are not checked.
        rules: the result of `build_rules`.
        rest: the axis whose degree was -1 and has been computed.
    """
    problems = []
    for rule in rules:
        given = {axis: degrees[axis] for axis in rule.axes if axis in degrees}
        if len(given) == len(rule.axes) and not rule.holds(math.prod(given.values())):
            origin = f" ('parallel.{rest}' is -1, the rest of the ranks)" if rest in given else ""
            problems.append(
                f"{format_axes(given)} {rule.text}; got {format_product(given)}{origin}"
            )
    return problems


def format_axes(degrees: Mapping[AxisName, int]) -> str:
    """Format axes as setting names: ``'parallel.data' × 'parallel.z'``."""
    return " × ".join(f"'parallel.{axis}'" for axis in degrees)


def format_product(degrees: Mapping[AxisName, int]) -> str:
    """Format degrees with their product: ``3 × 2 = 6``."""
    factors = " × ".join(map(str, degrees.values()))
    return factors if len(degrees) == 1 else f"{factors} = {math.prod(degrees.values())}"
