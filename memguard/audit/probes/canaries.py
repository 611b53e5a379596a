"""Canaries: likelihood of trained secrets, compared with secrets that were never trained.

The page shows extraction, exposure and guesses. Its figure shows how many canaries reach how many
bits of exposure, and how many would by chance. The single canaries are in `audit/canaries.parquet`
only, because with them a guessed secret could be tested.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from memguard.audit.metrics import Evidence, Metric, rate_metric, share_metric
from memguard.audit.probe import Need, Probe, Summary
from memguard.audit.probes.canary_results import (
    FEWEST_REFERENCES,
    AuditCanary,
    CanaryDetail,
    CanaryResults,
    compute_chance,
    describe_results,
    score_canaries,
)
from memguard.audit.probes.window_scores import score_windows
from memguard.audit.requests import Inputs, Measured, Rounds, View
from memguard.audit.statistics import clopper_pearson
from memguard.audit.windows import SECRET
from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, count_columns, make_table
from memguard.pages.facts import explain_absence
from memguard.pages.page import Fact, Figure, Line, LineChart, Point, Section, Table
from memguard.records import (
    REFERENCE_SECRETS,
    SECRETS,
    AuditReport,
    DetailRow,
    ResultRow,
    fill_count,
    fill_row,
)


class CanaryProbe(Probe):
    """Likelihood of trained secrets, compared with secrets that were never trained."""

    VERSION: ClassVar[int] = 3
    needs: ClassVar[tuple[Need, ...]] = ("canaries",)
    counted: ClassVar[Literal["canaries"]] = "canaries"
    metrics: ClassVar[tuple[Metric, ...]] = (
        rate_metric(
            "verbatim", "Secrets that greedy decoding continues without an error.", "canaries"
        ),
        Metric(
            name="exposure_bits",
            meaning="log2 of the number of references minus log2 of the secret's rank among them.",
            unit="bits",
            statistic="median",
            heading="Exposure, by rank",
        ),
        share_metric(
            "loss_coverage",
            "Share of the trained secrets' tokens that received loss at least once.",
        ),
        rate_metric("without_loss", "Trained secrets of which no token received loss.", "canaries"),
    )

    name: Literal["canaries"] = Field("canaries", description="Which probe.")
    delta: Annotated[float, Field(ge=0, lt=1)] = Field(
        1e-5, description="Delta of the lower bound on epsilon."
    )

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Score each secret after its prompt."""
        if not inputs.canaries:
            return None
        windows = [SECRET.window(canary.document) for canary in inputs.canaries]
        secrets = [window for window in windows if window is not None]
        assert len(secrets) == len(windows), "a canary has a prompt and a secret"
        (numbers,) = yield [score_windows(secrets, inputs.tiny_margin)]
        return Measured(columns=numbers)

    def tabulate(self, evidence: Evidence) -> Summary:
        """Return extraction, exposure and the bound; nothing unless some were left out."""
        canaries = evidence.inputs.canaries
        measured = evidence.trained.get(self.name)
        base = None if evidence.other is None else evidence.other.get(self.name)
        results = None
        if canaries and measured is not None:
            of_base = None if base is None else base.columns
            results = score_canaries(canaries, measured.columns, of_base, delta=self.delta)
        if results is None:
            return Summary(reason=_explain_missing(canaries))
        detail = describe_results(results, has_base=base is not None)
        row = DetailRow(probe=self.name, schema=self.VERSION, value=detail.model_dump(mode="json"))
        return Summary(
            rows=list(self._list_rows(results, detail)),
            metrics=[self.describe_metric(metric) for metric in self.metrics],
            details=[row],
            num_items=len(canaries),
            canaries=results.scores,
        )

    def _list_rows(self, results: CanaryResults, detail: CanaryDetail) -> Iterator[ResultRow]:
        row = self.make_row("verbatim", bucket=SECRETS, num_documents=detail.num_trained)
        for bucket, was_trained in ((SECRETS, True), (REFERENCE_SECRETS, False)):
            found = [s.verbatim for s in results.scores if s.was_trained == was_trained]
            rate = clopper_pearson(sum(found), len(found))
            yield fill_row(replace(row, bucket=bucket), rate, "clopper-pearson")
        bits = results.exposures
        for statistic, value in (
            ("median", float(np.median(bits)) if bits else None),
            ("max", max(bits, default=None)),
        ):
            exposure = self.make_row(
                "exposure_bits",
                bucket=SECRETS,
                statistic=statistic,
                num_documents=detail.num_ranked - detail.num_ranked_references,
                num_other=detail.num_ranked_references,
            )
            yield fill_row(exposure, value, "", why_not=_TOO_FEW_REFERENCES)
        loss_tokens = results.loss_tokens
        without = replace(row, metric="without_loss")
        coverage = replace(row, metric="loss_coverage", statistic="mean")
        if loss_tokens is None:
            yield fill_row(coverage, None, "", why_not=_NOT_RECORDED)
            yield fill_row(without, None, "", why_not=_NOT_RECORDED)
            return
        num_tokens = sum(score.num_secret_tokens for score in results.scores if score.was_trained)
        yield fill_row(coverage, sum(loss_tokens) / num_tokens, "")
        yield fill_count(without, sum(number == 0 for number in loss_tokens))

    @classmethod
    def section(cls, report: AuditReport) -> Section:
        """Return the section "Canaries"; without canaries it states what remains unknown."""
        detail = read_detail(report)
        section = Section(key="canaries", title="Canaries", lead=())
        if detail is None:
            reason = explain_absence(report, "canaries", "does not measure canaries")
            lead = (
                f"{reason} Without canaries there is no measurement on texts that exist nowhere "
                "else, and no lower bound on the privacy loss."
            )
            return replace(section, lead=(lead,))
        return replace(
            section,
            lead=(write_canaries(report), _MEANING),
            facts=_list_facts(report, detail),
            brief=(Fact("Canaries", _write_briefly(report, detail)),),
            figure=build_exposure(detail),
            points_title="Assumptions behind the epsilon bound" if detail.assumptions else "",
            points=tuple(fmt.clean_text(text) for text in detail.assumptions[:_MOST_ASSUMPTIONS]),
        )


def _explain_missing(canaries: Sequence[AuditCanary]) -> str:
    """Return the reason for missing results: both trained ones and references are needed."""
    if not canaries:
        return "no canaries were given"
    trained = sum(canary.was_trained for canary in canaries)
    if 0 < trained < len(canaries):
        return "nothing was measured"
    which = "all" if trained else "none"
    return f"{which} of the {len(canaries)} canaries were selected for training"


_NOT_RECORDED = "not recorded"
_TOO_FEW_REFERENCES = "too few references of the same length"
_LOW_BOUND, _HIGH_EXPOSURE_BITS, _CHANCE_BITS = 0.25, 2.0, 1.0
"""A bound of at most this share of its ceiling contradicts a median exposure of 2 bits and more; a
bound above 0 contradicts one of 1 bit, which untrained secrets have."""
_MOST_ASSUMPTIONS = 20
_MEANING = (
    "Trained secrets and references were drawn from the same distribution and split at random, so "
    "only training can make them differ. What the model knows about the trained ones beyond the "
    "references it learned here, and it can learn a person's number in the same way."
)


def read_detail(report: AuditReport) -> CanaryDetail | None:
    """Return what a report has of its canaries besides rows; None without canaries."""
    value = report.tables.find_detail("canaries")
    return None if value is None else CanaryDetail.model_validate(value)


def _find(report: AuditReport, metric: str, statistic: str, bucket: str = SECRETS) -> ResultRow:
    row = report.tables.find("canaries", metric, bucket, statistic=statistic)
    assert row is not None, f"a report with canaries has their {metric}"
    return row


def _find_exposures(report: AuditReport) -> tuple[float | None, float | None]:
    """Return the median and the highest exposure (bits)."""
    median, highest = (_find(report, "exposure_bits", name).value for name in ("median", "max"))
    return median, highest


def build_exposure(detail: CanaryDetail) -> Figure | None:
    """Build the figure; None without exposures, or with fewer than two references."""
    steps, reached = detail.exposure.bits, detail.exposure.reached
    num_secrets, num_references = detail.exposure.num_secrets, detail.num_ranked_references
    if not steps or not num_secrets or num_references < FEWEST_REFERENCES:
        return None
    by_chance = [compute_chance(step, num_references) for step in steps]
    shares = [count / num_secrets for count in reached]
    points, expected = (
        tuple(Point(x=place, y=100 * share) for place, share in enumerate(line))
        for line in (shares, by_chance)
    )
    table = _build_exposure_table(steps, reached, by_chance, num_secrets)
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
        f"likelier than all references. {num_secrets:,} secrets, {num_references:,} references.",
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


def _write_step(bits: float) -> str:
    return f"{bits:.0f}" if bits == int(bits) else fmt.number(bits, 1)


def write_canaries(report: AuditReport) -> str:
    """Summarise canaries, extraction, exposure and the epsilon bound; "" without canaries."""
    detail = read_detail(report)
    if detail is None:
        return ""
    number = detail.num_trained + detail.num_references
    often = "" if detail.num_repetitions is None else f" ({fmt.times(detail.num_repetitions)})"
    extracted = _find(report, "verbatim", "rate")
    reference = _find(report, "verbatim", "rate", REFERENCE_SECRETS)
    text = (
        f"{fmt.of(detail.num_trained, number)} canaries were randomly selected for training{often}:"
        f" {fmt.counts(extracted)} are fully extracted, and of the references "
        f"{fmt.counts(reference)}"
    )
    median, highest = _find_exposures(report)
    if median is not None and highest is not None:
        text += (
            f"; median exposure is {fmt.bits(median)}, the highest {fmt.bits(highest)}, and the "
            f"highest that {detail.num_ranked_references:,} references can show "
            f"{fmt.bits(find_ceiling(detail))}"
        )
    bound = f"{_write_bound(detail)}{_compare_with_exposure(detail, median)}"
    return f"{text}.{_write_unranked(detail)}{bound}"


def _write_briefly(report: AuditReport, detail: CanaryDetail) -> str:
    """Count extracted secrets and right guesses, for a card."""
    extracted, reference = (
        fmt.counts(_find(report, "verbatim", "rate", bucket))
        for bucket in (SECRETS, REFERENCE_SECRETS)
    )
    text = f"{extracted} planted secrets were extracted, and {reference} that were never trained."
    if detail.epsilon_lower_bound is None:
        return text
    guesses = f"{detail.num_right:,} of {detail.num_guesses:,} guesses about planted secrets"
    return f"{text} {guesses} were right; half would be by chance."


def _write_unranked(detail: CanaryDetail) -> str:
    """Report how many secrets have another length and are not ranked; "" if none."""
    count = detail.num_trained + detail.num_references - detail.num_ranked
    if not count:
        return ""
    have = "secret has" if count == 1 else "secrets have"
    return (
        f" {fmt.count(count)} {have} another length in tokens than most, so that their NLL cannot "
        "be compared: they are neither ranked nor guessed."
    )


def _write_bound(detail: CanaryDetail) -> str:
    epsilon = detail.epsilon_lower_bound
    if epsilon is None:
        return ""
    how = "NLL of each secret" + (", adjusted for the base model's," if detail.has_base else "")
    guesses = (
        f" We guessed from the {how} whether {detail.num_guesses:,} of {detail.num_ranked:,} "
        f"canaries were trained; {detail.num_right:,} guesses were right"
    )
    if epsilon == 0:
        return f"{guesses}, which gives no lower bound on epsilon above 0{_write_ceiling(detail)}."
    return (
        f"{guesses}: for one canary with all its repetitions, epsilon of the training algorithm "
        f"with these settings is at least {fmt.number(epsilon, 2)}{_write_ceiling(detail)} at "
        f"delta {detail.delta:g}, with 95{fmt.PERCENT} confidence."
    )


def _compare_with_exposure(detail: CanaryDetail, bits: float | None) -> str:
    """Say which of bound and exposure shows more where they seem to contradict; "" elsewhere."""
    epsilon, ceiling = detail.epsilon_lower_bound, detail.epsilon_ceiling
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


def _write_ceiling(detail: CanaryDetail) -> str:
    ceiling = detail.epsilon_ceiling
    if ceiling is None:
        return ""
    return f" (this random split could show at most {fmt.number(ceiling, 2)})"


def find_ceiling(detail: CanaryDetail) -> float | None:
    """Return the highest exposure by rank that is possible; None without references."""
    return math.log2(detail.num_ranked_references) if detail.num_ranked_references else None


def _list_facts(report: AuditReport, detail: CanaryDetail) -> tuple[Fact, ...]:
    repetitions, ceiling = detail.num_repetitions, find_ceiling(detail)
    often = "not equally often" if repetitions is None else fmt.times(repetitions)
    references = fmt.rate(_find(report, "verbatim", "rate", REFERENCE_SECRETS))
    median, highest = _find_exposures(report)
    exposure = f"{fmt.NOT_AVAILABLE}: too few references"
    if median is not None and highest is not None:
        exposure = f"{fmt.bits(median)} and {fmt.bits(highest)}"
    ranks = "By rank among the references, of which there are none."
    if ceiling is not None:
        ranks = (
            "By rank among the references: about 1 bit if nothing was learned, and at most "
            f"log2({detail.num_ranked_references:,}) = {fmt.bits(ceiling)}, however well a secret "
            "is known."
        )
    return (
        Fact(
            "Trained and references",
            f"{detail.num_trained:,} and {detail.num_references:,}",
            detail=f"Each trained {often}.",
        ),
        Fact(
            "Fully extracted",
            fmt.rate(_find(report, "verbatim", "rate")),
            detail=f"References: {references}.",
        ),
        Fact("Exposure, median and maximum", exposure, detail=ranks),
        _describe_coverage(report),
        _describe_bound(detail),
    )


def _describe_coverage(report: AuditReport) -> Fact:
    """Report the share of the secrets' tokens with loss; dropped labels teach nothing."""
    term = "Tokens that received loss"
    coverage = _find(report, "loss_coverage", "mean").value
    if coverage is None:
        return Fact(term, f"{fmt.NOT_AVAILABLE}: {_NOT_RECORDED}")
    without = _find(report, "without_loss", "rate").num_matched
    detail = "" if without is None else f" {fmt.count(without)} secrets received no loss."
    return Fact(
        term,
        fmt.percent(coverage),
        detail=f"Share of the trained secrets' tokens that received loss at least once.{detail}",
    )


def _describe_bound(detail: CanaryDetail) -> Fact:
    term = "Epsilon, lower bound"
    if detail.epsilon_lower_bound is None:
        return Fact(term, f"{fmt.NOT_AVAILABLE}: no guesses were made")
    guesses = fmt.of(detail.num_right, detail.num_guesses)
    empty = "" if detail.epsilon_lower_bound else " 0 is no evidence of privacy."
    return Fact(
        term,
        f"{fmt.number(detail.epsilon_lower_bound, 2)}{_write_ceiling(detail)} at delta "
        f"{detail.delta:g}",
        detail="For the training algorithm with these settings and one canary with all its "
        f"repetitions. Right guesses: {guesses}, for {detail.num_ranked:,} canaries; "
        f"95{fmt.PERCENT} confidence.{empty}",
    )
