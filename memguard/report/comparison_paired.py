"""Tables of paired tests: two settings on the same documents and on the same secrets."""

from collections.abc import Callable
from typing import TypeVar

from memguard.records import Comparison, PairedCanaries, PairedCounts, PairedResult
from memguard.report import formatting as fmt
from memguard.report.page import Cell, Table
from memguard.report.seed_means import name_dose
from memguard.report.tables import Column, Content, make_table, show_missing, show_name

_NAME_LIMIT = 24

Result = TypeVar("Result", bound=PairedResult | PairedCanaries)


def build_paired(comparison: Comparison) -> Table | None:
    """Build the table of documents; None without pairs.

    Visible are the rows of the first seed at the highest number of repetitions.
    """
    results = comparison.paired
    if not results:
        return None
    highest = max(result.num_repetitions for result in results)
    seeds = len({result.seed for result in results}) > 1
    first, seed = fmt.clean_name(results[0].against, _NAME_LIMIT), results[0].seed
    shown = [r for r in results if r.num_repetitions == highest and r.seed == seed]
    others = sorted(
        (result for result in results if result not in shown), key=lambda r: -r.num_repetitions
    )

    def name(result: PairedResult) -> Cell:
        documents = f"{fmt.count(result.num_documents)} {name_dose(str(result.num_repetitions))}"
        return show_name(_name_setting(result, seeds), documents)

    columns: tuple[Column[PairedResult], ...] = (
        Column(("Setting", "documents"), name),
        *_list_counts(first, "verbatim", lambda r: r.verbatim),
        *_list_counts(first, "near-verbatim", lambda r: r.near_verbatim),
        Column(
            ("Token accuracy", f"teacher-forced, difference ({fmt.CI})"),
            lambda r: fmt.points(r.token_accuracy_difference),
        ),
    )
    return make_table(
        f"Paired with '{first}', same documents",
        columns,
        [*shown, *others],
        shown=len(shown),
        more_label=f"Show the other {'seeds and ' if seeds else ''}numbers of repetitions",
        notes=(*_write_notes(first, comparison), *_describe_removed(comparison)),
    )


def _name_setting(result: PairedResult | PairedCanaries, seeds: bool) -> str:
    name = fmt.clean_name(result.setting)
    return f"{name}, seed {result.seed}" if seeds else name


def build_paired_canaries(comparison: Comparison) -> Table | None:
    """Build the table of random secrets, the first seed visible; None without any."""
    results = comparison.paired_canaries
    if not results:
        return None
    seeds = len({result.seed for result in results}) > 1
    first, seed = fmt.clean_name(results[0].against, _NAME_LIMIT), results[0].seed
    columns: tuple[Column[PairedCanaries], ...] = (
        Column(
            ("Setting", "trained secrets"),
            lambda r: show_name(_name_setting(r, seeds), fmt.count(r.num_canaries)),
        ),
        *_list_counts(first, "fully extracted", lambda r: r.verbatim),
        Column(
            ("Exposure", f"difference in bits ({fmt.CI})"),
            lambda r: fmt.difference(r.exposure_bits_difference, 2),
        ),
    )
    return make_table(
        f"Paired with '{first}', same secrets",
        columns,
        sorted(results, key=lambda r: r.seed != seed),
        shown=sum(r.seed == seed for r in results),
        more_label="Show the other seeds",
        notes=(
            "Each trained secret is ranked among the references of its own run: a setting that "
            "makes all secrets less likely, trained or not, does not lower their exposure.",
        ),
    )


def _list_counts(
    first: str, metric: str, select: Callable[[Result], PairedCounts | None]
) -> list[Column[Result]]:
    """Return the columns of one test: what only one of the settings extracts, and the p-value."""

    def column(heading: str, write: Callable[[PairedCounts], str]) -> Column[Result]:
        def show(result: Result) -> Content:
            counts = select(result)
            return show_missing("not generated") if counts is None else write(counts)

        return Column((heading, metric), show)

    return [
        column(f"Extracted only under '{first}'", lambda c: fmt.count(c.num_only_against)),
        column("Extracted only under this setting", lambda c: fmt.count(c.num_only_setting)),
        column("p", lambda counts: fmt.p(counts.p_holm)),
    ]


def _write_notes(first: str, comparison: Comparison) -> tuple[str, ...]:
    near = [result for result in comparison.paired if result.near_verbatim is not None]
    num_tests = len(comparison.paired) + len(near) + len(comparison.paired_canaries)
    return (
        "The counts are of documents that exactly one of the two settings extracts; documents that "
        "both or neither extract carry no information about the difference.",
        "p is the probability of a split at least as uneven if each of these documents were "
        "equally likely to be extracted by either setting (McNemar's exact test, two-sided). "
        f"Holm's correction is applied over the {fmt.count(num_tests)} tests of this page: if "
        "there is no difference, the probability that any of them gives a p below 0.05 is at most "
        f"5{fmt.PERCENT}.",
        "A large p means that these documents do not show a difference between the settings, not "
        f"that the settings are equal. The 95{fmt.PERCENT} intervals are not corrected for "
        "multiple comparisons.",
    )


def _describe_removed(comparison: Comparison) -> tuple[str, ...]:
    removed = comparison.num_removed
    if not removed:
        return ()
    documents = "document was" if removed == 1 else "documents were"
    return (
        f"{fmt.count(removed)} {documents} removed as copies in some run. They are excluded from "
        "these tests and from the risk-utility trade-off, in all runs of that seed.",
    )
