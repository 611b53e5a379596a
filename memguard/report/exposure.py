"""How many canaries reach how many bits of exposure, beside what chance would do."""

import math

from memguard.records import CanaryScores
from memguard.report.cells import make_headings
from memguard.report.formatting import format_number, format_of, format_percent
from memguard.report.page import Cell, Figure, Line, LineChart, Point, Row, Table

_MOST_BITS = 16
# log2 of a rank is rarely whole; what is meant to be is off by a hair.
_HAIR = 1e-9


def build_exposure(scores: CanaryScores) -> Figure | None:
    """Build the figure; None without an exposure, or without references to rank among."""
    bits = [one.exposure_bits for one in scores.canaries if one.was_trained]
    known = [one for one in bits if one is not None]
    if not known or scores.num_ranked_references < 2:
        return None
    steps = _list_steps(math.log2(scores.num_ranked_references))
    reached = [sum(one >= step - _HAIR for one in known) for step in steps]
    by_chance = [_compute_chance(step, scores.num_ranked_references) for step in steps]
    points = tuple(
        Point(x=place, y=100 * count / len(known)) for place, count in enumerate(reached)
    )
    expected = tuple(Point(x=place, y=100 * share) for place, share in enumerate(by_chance))
    rows = tuple(
        Row(
            head=Cell(text=_write_step(step), kind="text"),
            cells=(
                Cell(text=format_of(count, len(known))),
                Cell(text=format_percent(count / len(known))),
                Cell(text=format_percent(share)),
            ),
        )
        for step, count, share in zip(steps, reached, by_chance, strict=True)
    )
    told = "; ".join(f"{row.head.text} bits: {row.cells[0].text}" for row in rows)
    return Figure(
        key="exposure",
        title="Exposure",
        chart=LineChart(
            description=f"Line chart of trained secrets by exposure. At least {told}.",
            ticks=tuple(_write_step(step) for step in steps),
            lines=(
                Line(label="Trained secrets", style="0", points=points),
                Line(label="If nothing were learned", style="base", points=expected),
            ),
            y_label="secrets (%)",
            control_at=None,
            x_label="exposure of at least (bits)",
        ),
        caption="Trained secrets that reach so many bits, and how many would that were never "
        f"trained. Last: likelier than all references. {len(known):,} secrets among "
        f"{scores.num_ranked_references:,} references.",
        table=Table(
            caption="The same numbers",
            columns=make_headings(
                ("Exposure", "bits, at least"),
                "Trained secrets",
                ("Share", "of them"),
                ("By chance", "if nothing were learned"),
            ),
            rows=rows,
            compact=True,
        ),
    )


def _list_steps(ceiling: float) -> list[float]:
    """Return whole bits, and last what only a secret likelier than all references has."""
    whole = [float(bits) for bits in range(min(int(ceiling + _HAIR), _MOST_BITS) + 1)]
    return whole if abs(whole[-1] - ceiling) < 0.05 else [*whole, ceiling]


def _write_step(bits: float) -> str:
    return f"{bits:.0f}" if bits == int(bits) else format_number(bits, 1)


def _compute_chance(bits: float, num_references: int) -> float:
    """Return how likely an untrained secret reaches so many bits: its rank is any, alike often."""
    ranks = num_references + 1
    return min(int(num_references / 2**bits + _HAIR), ranks) / ranks
