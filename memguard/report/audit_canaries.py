"""The section "Canaries": extraction, exposure and guesses of random secrets.

The figure shows how many canaries reach how many bits of exposure, and how many would by chance.
"""

import math

from memguard.records import AuditReport, CanaryScore, CanaryScores
from memguard.report import formatting as fmt
from memguard.report.audit_probes import explain_absence
from memguard.report.page import Cell, Fact, Figure, Line, LineChart, Point, Section, Table
from memguard.report.tables import Column, count_columns, make_table

_MOST_BITS = 16
_LOW_BOUND, _HIGH_EXPOSURE_BITS, _CHANCE_BITS = 0.25, 2.0, 1.0
"""A bound of at most this share of its ceiling contradicts a median exposure of 2 bits and more; a
bound above 0 contradicts one of 1 bit, which untrained secrets have."""
_HAIR = 1e-9
"""Rounding error of the log2 of a rank: an integer result deviates by less than this."""


def build_exposure(scores: CanaryScores) -> Figure | None:
    """Build the figure; None without exposures, or with fewer than two references."""
    bits = [canary.exposure_bits for canary in scores.canaries if canary.was_trained]
    exposures = [value for value in bits if value is not None]
    if not exposures or scores.num_ranked_references < 2:
        return None
    steps = _list_steps(math.log2(scores.num_ranked_references))
    reached = [sum(value >= step - _HAIR for value in exposures) for step in steps]
    by_chance = [_compute_chance(step, scores.num_ranked_references) for step in steps]
    points = tuple(
        Point(x=place, y=100 * count / len(exposures)) for place, count in enumerate(reached)
    )
    expected = tuple(Point(x=place, y=100 * share) for place, share in enumerate(by_chance))
    table = _build_exposure_table(steps, reached, by_chance, len(exposures))
    values = "; ".join(f"{row.head.text} bits: {row.cells[0].text}" for row in table.rows)
    return Figure(
        key="exposure",
        title="Exposure",
        chart=LineChart(
            description=f"Line chart of trained secrets by exposure. At least {values}.",
            ticks=tuple(_write_step(step) for step in steps),
            lines=(
                Line(label="Trained secrets", style="0", points=points),
                Line(label="If nothing were learned", style="base", points=expected),
            ),
            y_label="secrets (%)",
            control_at=None,
            x_label="exposure of at least (bits)",
        ),
        caption="Share of the trained secrets with at least this exposure, and the share expected "
        "of secrets that were not trained. The last position is not to scale: it holds the secrets "
        f"likelier than all references. {len(exposures):,} secrets, "
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
    rows = zip(steps, reached, by_chance, strict=True)
    return make_table("Chart data", columns, rows, compact=True)


def _list_steps(ceiling: float) -> list[float]:
    """Return 0, 1, 2, ... bits and last the exposure of a secret likelier than all references."""
    whole = [float(bits) for bits in range(min(int(ceiling + _HAIR), _MOST_BITS) + 1)]
    return whole if abs(whole[-1] - ceiling) < 0.05 else [*whole, ceiling]


def _write_step(bits: float) -> str:
    return f"{bits:.0f}" if bits == int(bits) else fmt.number(bits, 1)


def _compute_chance(bits: float, num_references: int) -> float:
    """Return the probability that an untrained secret, whose rank is uniform, reaches ``bits``."""
    ranks = num_references + 1
    return min(int(num_references / 2**bits + _HAIR), ranks) / ranks


_MOST_ASSUMPTIONS = 20
_SHOWN_CANARIES, _MOST_CANARIES = 5, 200


def build_canaries(report: AuditReport) -> Section:
    """Build the section; without canaries it states what remains unknown."""
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
        points_title="Assumptions behind the epsilon bound" if scores.assumptions else "",
        points=tuple(fmt.clean_text(text) for text in scores.assumptions[:_MOST_ASSUMPTIONS]),
    )


_MEANING = (
    "Trained secrets and references were drawn from the same distribution and split at random, so "
    "only training can make them differ. What the model knows about the trained ones beyond the "
    "references it learned here, and it can learn a person's number in the same way."
)


def write_canaries(scores: CanaryScores) -> str:
    """Summarise in one sentence: canaries, extraction, exposure and the epsilon bound."""
    number = scores.num_trained + scores.num_references
    often = "" if scores.num_repetitions is None else f" ({fmt.times(scores.num_repetitions)})"
    extracted, reference = scores.verbatim, scores.reference_verbatim
    text = (
        f"{fmt.of(scores.num_trained, number)} canaries were randomly selected for training{often}:"
        f" {fmt.of(extracted.num_matched, extracted.num_documents)} are fully extracted, and of "
        f"the references {fmt.of(reference.num_matched, reference.num_documents)}"
    )
    if scores.median_exposure_bits is not None and scores.max_exposure_bits is not None:
        text += (
            f"; median exposure is {fmt.bits(scores.median_exposure_bits)}, the highest "
            f"{fmt.bits(scores.max_exposure_bits)}, and the highest that "
            f"{scores.num_ranked_references:,} references can show {fmt.bits(find_ceiling(scores))}"
        )
    bound = f"{_write_bound(scores)}{_compare_with_exposure(scores)}"
    return f"{text}.{_write_unranked(scores)}{bound}"


def _write_unranked(scores: CanaryScores) -> str:
    """Report how many secrets have another length and are not ranked; "" if none."""
    count = scores.num_trained + scores.num_references - scores.num_ranked
    if not count:
        return ""
    have = "secret has" if count == 1 else "secrets have"
    return (
        f" {fmt.count(count)} {have} another length in tokens than most, so that their NLL cannot "
        "be compared: they are neither ranked nor guessed."
    )


def _write_bound(scores: CanaryScores) -> str:
    epsilon = scores.epsilon_lower_bound
    if epsilon is None:
        return ""
    has_base = any(canary.base_nll is not None for canary in scores.canaries)
    how = "NLL of each secret" + (", adjusted for the base model's," if has_base else "")
    guesses = (
        f" We guessed from the {how} whether {scores.num_guesses:,} of {scores.num_ranked:,} "
        f"canaries were trained; {scores.num_right:,} guesses were right"
    )
    if epsilon == 0:
        return f"{guesses}, which gives no lower bound on epsilon above 0{_write_ceiling(scores)}."
    return (
        f"{guesses}: for one canary with all its repetitions, epsilon of the training algorithm "
        f"with these settings is at least {fmt.number(epsilon, 2)}{_write_ceiling(scores)} at "
        f"delta {scores.delta:g}, with 95{fmt.PERCENT} confidence."
    )


def _compare_with_exposure(scores: CanaryScores) -> str:
    """Say which of bound and exposure shows more where they seem to contradict; "" elsewhere."""
    epsilon, ceiling, bits = (
        scores.epsilon_lower_bound,
        scores.epsilon_ceiling,
        scores.median_exposure_bits,
    )
    if epsilon is None or ceiling is None or bits is None:
        return ""
    if epsilon <= _LOW_BOUND * ceiling and bits >= _HIGH_EXPOSURE_BITS:
        return (
            " The exposure shows more than this bound: half of the trained secrets reach "
            f"{fmt.bits(bits)}, and of untrained ones at most one in {2**bits:.0f} would. Do not "
            "read the bound as little memorization."
        )
    if epsilon > 0 and bits <= _CHANCE_BITS:
        return (
            " This bound shows more than the exposure, which is that of untrained secrets: the "
            "guesses take into account how likely each secret was for the base model, the exposure "
            "does not. Do not read the exposure as no memorization."
        )
    return ""


def _write_ceiling(scores: CanaryScores) -> str:
    ceiling = scores.epsilon_ceiling
    return (
        ""
        if ceiling is None
        else f" (this random split could show at most {fmt.number(ceiling, 2)})"
    )


def find_ceiling(scores: CanaryScores) -> float | None:
    """Return the highest exposure by rank that is possible; None without references."""
    return math.log2(scores.num_ranked_references) if scores.num_ranked_references else None


def _list_facts(scores: CanaryScores) -> tuple[Fact, ...]:
    repetitions = scores.num_repetitions
    return (
        Fact(
            "Trained and references",
            f"{scores.num_trained:,} and {scores.num_references:,}",
            detail="Each trained "
            + ("not equally often." if repetitions is None else f"{fmt.times(repetitions)}."),
        ),
        Fact(
            "Fully extracted",
            fmt.rate(scores.verbatim),
            detail=f"References: {fmt.rate(scores.reference_verbatim)}.",
        ),
        Fact(
            "Exposure, median and maximum",
            _write_pair(scores.median_exposure_bits, scores.max_exposure_bits),
            detail=f"By rank among the references, at most {fmt.bits(find_ceiling(scores))}; "
            "about 1 bit if nothing was learned.",
        ),
        Fact(
            "Exposure, extrapolated",
            _write_pair(
                scores.median_exposure_extrapolated_bits, scores.max_exposure_extrapolated_bits
            ),
            detail="Less precise: from a distribution fitted to the references.",
        ),
        _describe_coverage(scores),
        _describe_bound(scores),
    )


def _write_pair(median: float | None, highest: float | None) -> str:
    if median is None or highest is None:
        return f"{fmt.NOT_AVAILABLE}: too few references, or all equal"
    return f"{fmt.bits(median)} and {fmt.bits(highest)}"


def _describe_coverage(scores: CanaryScores) -> Fact:
    """Report the share of the secrets' tokens with loss; dropped labels teach nothing."""
    term = "Tokens that received loss"
    if scores.loss_coverage is None:
        return Fact(term, f"{fmt.NOT_AVAILABLE}: not recorded")
    without = scores.num_without_loss
    detail = "" if without is None else f" {fmt.count(without)} secrets received no loss."
    return Fact(
        term,
        fmt.percent(scores.loss_coverage),
        detail=f"Share of the trained secrets' tokens that received loss at least once.{detail}",
    )


def _describe_bound(scores: CanaryScores) -> Fact:
    term = "Epsilon, lower bound"
    if scores.epsilon_lower_bound is None:
        return Fact(term, f"{fmt.NOT_AVAILABLE}: no guesses were made")
    guesses = fmt.of(scores.num_right, scores.num_guesses)
    empty = "" if scores.epsilon_lower_bound else " 0 is no evidence of privacy."
    return Fact(
        term,
        f"{fmt.number(scores.epsilon_lower_bound, 2)}{_write_ceiling(scores)} at delta "
        f"{scores.delta:g}",
        detail="For the training algorithm with these settings and one canary with all its "
        f"repetitions. Right guesses: {guesses}, for {scores.num_ranked:,} canaries; "
        f"95{fmt.PERCENT} confidence.{empty}",
    )


def _list_canaries(scores: CanaryScores) -> Table:
    """List the trained secrets, highest exposure first."""
    trained = sorted(
        (canary for canary in scores.canaries if canary.was_trained),
        key=lambda canary: (-(canary.exposure_bits or 0.0), canary.nll),
    )
    columns: tuple[Column[CanaryScore], ...] = (
        Column("Canary", lambda c: fmt.clean_name(c.id)),
        Column(("Fully", "extracted"), lambda c: "yes" if c.verbatim else "no"),
        Column(("Exposure", "by rank"), lambda c: fmt.bits(c.exposure_bits)),
        Column(("Exposure", "extrapolated"), lambda c: fmt.bits(c.exposure_extrapolated_bits)),
        Column(
            ("NLL", "of the secret, nats"),
            lambda c: Cell(
                fmt.number(c.nll, 2),
                detail="" if c.base_nll is None else f"base {fmt.number(c.base_nll, 2)}",
            ),
        ),
        Column(("Trained", "times"), lambda c: fmt.count(c.num_repetitions)),
        Column(
            ("Received loss", "tokens"),
            lambda c: (
                fmt.NOT_AVAILABLE
                if c.num_loss_tokens is None
                else fmt.of(c.num_loss_tokens, c.num_secret_tokens)
            ),
        ),
    )
    return make_table(
        "Trained secrets, highest exposure first",
        columns,
        trained[:_MOST_CANARIES],
        shown=_SHOWN_CANARIES,
        compact=True,
    )


def _explain_none(report: AuditReport) -> str:
    reason = explain_absence(report, "canaries", "does not measure canaries")
    return (
        f"{reason} Without canaries there is no measurement on texts that exist nowhere else, and "
        "no lower bound on the privacy loss."
    )
