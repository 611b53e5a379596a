"""What random secrets show: recited, exposed, guessed, and what that rests on.

The figure counts how many canaries reach how many bits of exposure, beside what chance would do.
"""

import math

from memguard.records import AuditReport, CanaryScore, CanaryScores
from memguard.report import formatting as fmt
from memguard.report.audit_probes import explain_absence
from memguard.report.page import Cell, Fact, Figure, Line, LineChart, Point, Section, Table
from memguard.report.tables import Column, count_columns, make_rows, make_table

_MOST_BITS = 16
_HAIR = 1e-9
"""log2 of a rank that should be whole is off by less than this."""


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
    table = _build_exposure_table(steps, reached, by_chance, len(known))
    told = "; ".join(f"{row.head.text} bits: {row.cells[0].text}" for row in table.rows)
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
        table=table,
    )


def _build_exposure_table(
    steps: list[float], reached: list[int], by_chance: list[float], num_secrets: int
) -> Table:
    columns: tuple[Column[tuple[float, int, float]], ...] = (
        Column(("Exposure", "bits, at least"), lambda row: _write_step(row[0])),
        *count_columns(
            "Trained secrets", ("Share", "of them"), lambda row: (row[1], num_secrets), "no secret"
        ),
        Column(("By chance", "if nothing were learned"), lambda row: fmt.percent(row[2])),
    )
    rows = make_rows(columns, zip(steps, reached, by_chance, strict=True))
    return make_table("The same numbers", columns, rows, compact=True)


def _list_steps(ceiling: float) -> list[float]:
    """Return whole bits, and last what only a secret likelier than all references has."""
    whole = [float(bits) for bits in range(min(int(ceiling + _HAIR), _MOST_BITS) + 1)]
    return whole if abs(whole[-1] - ceiling) < 0.05 else [*whole, ceiling]


def _write_step(bits: float) -> str:
    return f"{bits:.0f}" if bits == int(bits) else fmt.number(bits, 1)


def _compute_chance(bits: float, num_references: int) -> float:
    """Return how likely an untrained secret reaches so many bits: its rank is any, alike often."""
    ranks = num_references + 1
    return min(int(num_references / 2**bits + _HAIR), ranks) / ranks


_MOST_ASSUMPTIONS = 20
_SHOWN_CANARIES, _MOST_CANARIES = 5, 200


def build_canaries(report: AuditReport) -> Section:
    """Build the section; without canaries it says what is not known then."""
    scores = report.canaries
    if scores is None:
        return Section(
            key="canaries", title="Canaries", short_title="Canaries", lead=(_explain_none(report),)
        )
    return Section(
        key="canaries",
        title="Canaries",
        short_title="Canaries",
        lead=(write_canaries(scores), _MEANING),
        facts=_list_facts(scores),
        figure=build_exposure(scores),
        tables=(_list_canaries(scores),) if scores.canaries else (),
        points_title="What the bound of epsilon rests on" if scores.assumptions else "",
        points=tuple(fmt.clean_text(one) for one in scores.assumptions[:_MOST_ASSUMPTIONS]),
    )


_MEANING = (
    "Nothing but training tells a trained secret from a reference: both were drawn in the same "
    "way, and a coin decided. What the model knows of the trained ones beyond the references it "
    "learned here, and it can learn a person's number in the same way."
)


def write_canaries(scores: CanaryScores) -> str:
    """Say in one sentence what was inserted, recited and exposed, and what follows."""
    number = scores.num_trained + scores.num_references
    often = "" if scores.num_repetitions is None else f" {_write_times(scores.num_repetitions)}"
    recited, reference = scores.verbatim, scores.reference_verbatim
    text = (
        f"Of {number:,} random secrets a coin chose {scores.num_trained:,} to be trained{often}: "
        f"{fmt.of(recited.num_matched, recited.num_documents)} are recited whole, of the "
        f"references {fmt.of(reference.num_matched, reference.num_documents)}"
    )
    if scores.median_exposure_bits is not None and scores.max_exposure_bits is not None:
        text += (
            f"; exposure is {fmt.bits(scores.median_exposure_bits)} in the median and "
            f"{fmt.bits(scores.max_exposure_bits)} at most, where "
            f"{fmt.bits(find_ceiling(scores))} is all that {scores.num_ranked_references:,} "
            "references can show"
        )
    return f"{text}.{_write_unranked(scores)}{_write_bound(scores)}"


def _write_unranked(scores: CanaryScores) -> str:
    """Say that secrets of other lengths are not compared; nothing where all have one length."""
    count = scores.num_trained + scores.num_references - scores.num_ranked
    if not count:
        return ""
    have = "secret has" if count == 1 else "secrets have"
    return (
        f" {fmt.count(count)} {have} another length in tokens than most, so the nll cannot be "
        "compared: not ranked and not guessed at."
    )


def _write_bound(scores: CanaryScores) -> str:
    epsilon = scores.epsilon_lower_bound
    if epsilon is None:
        return ""
    guesses = (
        f" Of {scores.num_ranked:,} coins {scores.num_guesses:,} are guessed from the model, "
        f"{scores.num_right:,} of them right"
    )
    if epsilon == 0:
        return f"{guesses}, which bounds epsilon by nothing above 0{_write_ceiling(scores)}."
    return (
        f"{guesses}: for one canary with all its repetitions, epsilon of the training algorithm "
        f"with these settings is at least {fmt.number(epsilon, 2)}{_write_ceiling(scores)} at "
        f"delta {scores.delta:g}, with 95{fmt.PERCENT} confidence."
    )


def _write_ceiling(scores: CanaryScores) -> str:
    ceiling = scores.epsilon_ceiling
    return "" if ceiling is None else f" (this draw could show at most {fmt.number(ceiling, 2)})"


def find_ceiling(scores: CanaryScores) -> float | None:
    """Return the most bits that exposure by rank can reach; None without references."""
    return math.log2(scores.num_ranked_references) if scores.num_ranked_references else None


def _write_times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _list_facts(scores: CanaryScores) -> tuple[Fact, ...]:
    repetitions = scores.num_repetitions
    return (
        Fact(
            "Trained, and references",
            f"{scores.num_trained:,} and {scores.num_references:,}",
            detail="Each trained "
            + ("not equally often." if repetitions is None else f"{_write_times(repetitions)}."),
        ),
        Fact(
            "Recited whole",
            fmt.rate(scores.verbatim),
            detail=f"References: {fmt.rate(scores.reference_verbatim)}.",
        ),
        Fact(
            "Exposure, median and highest",
            _write_pair(scores.median_exposure_bits, scores.max_exposure_bits),
            detail=f"By rank among the references, at most {fmt.bits(find_ceiling(scores))}; "
            "about 1 bit where nothing was learned.",
        ),
        Fact(
            "Exposure, extrapolated",
            _write_pair(
                scores.median_exposure_extrapolated_bits, scores.max_exposure_extrapolated_bits
            ),
            detail="Rougher: what a curve fitted to the references says beyond them.",
        ),
        _describe_coverage(scores),
        _describe_bound(scores),
    )


def _write_pair(median: float | None, highest: float | None) -> str:
    if median is None or highest is None:
        return f"{fmt.NOT_AVAILABLE}: too few references, or all alike"
    return f"{fmt.bits(median)} and {fmt.bits(highest)}"


def _describe_coverage(scores: CanaryScores) -> Fact:
    """Say whether the trained secrets were really learned from: a dropped label teaches nothing."""
    term = "Tokens that received loss"
    if scores.loss_coverage is None:
        return Fact(term, f"{fmt.NOT_AVAILABLE}: nobody counted")
    without = scores.num_without_loss
    detail = "" if without is None else f" {fmt.count(without)} secrets received none at all."
    return Fact(
        term,
        fmt.percent(scores.loss_coverage),
        detail=f"Of the trained secrets' tokens, at least once.{detail}",
    )


def _describe_bound(scores: CanaryScores) -> Fact:
    term = "Epsilon, lower bound"
    if scores.epsilon_lower_bound is None:
        return Fact(term, f"{fmt.NOT_AVAILABLE}: no coin was guessed")
    guesses = fmt.of(scores.num_right, scores.num_guesses)
    empty = "" if scores.epsilon_lower_bound else " 0 is no evidence of privacy."
    return Fact(
        term,
        f"{fmt.number(scores.epsilon_lower_bound, 2)}{_write_ceiling(scores)} at delta "
        f"{scores.delta:g}",
        detail="Of the training algorithm with these settings, for one canary with all its "
        f"repetitions. Guesses right: {guesses}, of {scores.num_ranked:,} coins; 95{fmt.PERCENT} "
        f"confidence.{empty}",
    )


def _list_canaries(scores: CanaryScores) -> Table:
    """List the trained secrets, the most exposed first."""
    trained = sorted(
        (one for one in scores.canaries if one.was_trained),
        key=lambda one: (-(one.exposure_bits or 0.0), one.nll),
    )
    columns: tuple[Column[CanaryScore], ...] = (
        Column("Canary", lambda one: fmt.clean_name(one.id)),
        Column(("Recited", "whole"), lambda one: "yes" if one.verbatim else "no"),
        Column(("Exposure", "by rank"), lambda one: fmt.bits(one.exposure_bits)),
        Column(("Exposure", "extrapolated"), lambda one: fmt.bits(one.exposure_extrapolated_bits)),
        Column(
            ("NLL", "of the secret, nats"),
            lambda one: Cell(
                fmt.number(one.nll, 2),
                detail="" if one.base_nll is None else f"base {fmt.number(one.base_nll, 2)}",
            ),
        ),
        Column(("Trained", "times"), lambda one: fmt.count(one.num_repetitions)),
        Column(
            ("Received loss", "tokens"),
            lambda one: (
                fmt.NOT_AVAILABLE
                if one.num_loss_tokens is None
                else fmt.of(one.num_loss_tokens, one.num_secret_tokens)
            ),
        ),
    )
    return make_table(
        "Trained secrets, the most exposed first",
        columns,
        make_rows(columns, trained[:_MOST_CANARIES]),
        shown=_SHOWN_CANARIES,
        compact=True,
    )


def _explain_none(report: AuditReport) -> str:
    why = explain_absence(report, "canaries", "does not ask for canaries")
    return (
        f"{why} Then nothing here says how far training stands out by itself, on texts that exist "
        "nowhere else, and the loss of privacy has no lower bound."
    )
