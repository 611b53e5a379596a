"""Tables of paired tests: two settings on the same documents and on the same secrets."""

from collections.abc import Callable, Collection, Sequence

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, Content, make_table, show_missing, show_name, show_row
from memguard.pages.page import Cell, Table
from memguard.records import MIN_FOR_MEANS, SECRETS, Comparison, ResultRow, TestRow
from memguard.report.seed_means import list_doses, name_dose, name_first

_NAME_LIMIT = 24


def build_paired(comparison: Comparison) -> Table | None:
    """Build the table of documents; None without pairs.

    Visible are the rows of the first seed at the highest number of repetitions.
    """
    doses = {f"(trained {dose} times)": dose for dose in list_doses(comparison)}
    rows = _list_paired(comparison, "extraction", "token_accuracy", doses)
    metric = comparison.tables.find_metric("extraction", "token_accuracy")
    seeds = len({row.seed for row in rows}) > 1

    def name(row: ResultRow) -> Cell:
        documents = f"{fmt.count(row.num_documents)} {name_dose(doses[row.bucket])}"
        return show_name(_name_setting(row, seeds), documents)

    columns = (
        Column(("Setting", "documents"), name),
        *_list_counts(comparison, "verbatim", "verbatim"),
        *_list_counts(comparison, "near-verbatim", "near_verbatim"),
        Column(
            ("Token accuracy", f"teacher-forced, difference ({fmt.CI})"),
            lambda row: show_row(row, metric, unit="share") if row.is_known else fmt.MISSING,
        ),
    )
    others = f"{'seeds and ' if seeds else ''}numbers of repetitions"
    notes = (*_write_notes(comparison), *_describe_removed(comparison))
    return _build(comparison, "documents", columns, rows, others, notes, lambda r: doses[r.bucket])


def build_paired_canaries(comparison: Comparison) -> Table | None:
    """Build the table of random secrets, the first seed visible; None without any."""
    rows = _list_paired(comparison, "canaries", "exposure_bits", [SECRETS])
    seeds = len({row.seed for row in rows}) > 1

    def show_bits(row: ResultRow) -> Content:
        bits = fmt.difference(row, 2)
        is_few = row.ci is not None and row.num_documents < MIN_FOR_MEANS
        return Cell(bits.value, detail=bits.interval, note="few documents" if is_few else "")

    columns = (
        Column(
            ("Setting", "trained secrets"),
            lambda row: show_name(_name_setting(row, seeds), fmt.count(row.num_documents)),
        ),
        *_list_counts(comparison, "fully extracted", "verbatim"),
        Column(("Exposure", f"difference in bits ({fmt.CI})"), show_bits),
    )
    note = (
        "Each trained secret is ranked among the references of its own run: a setting that "
        "makes all secrets less likely, trained or not, does not lower their exposure."
    )
    return _build(comparison, "secrets", columns, rows, "seeds", (note,), lambda row: 0)


def _list_paired(
    comparison: Comparison, probe: str, metric: str, buckets: Collection[str]
) -> list[ResultRow]:
    """Return the differences from the first setting."""
    against = f"setting:{comparison.runs[0].setting}"
    rows = comparison.tables.select(probe, metric, against=against)
    return [row for row in rows if row.bucket in buckets]


def _build(
    comparison: Comparison,
    what: str,
    columns: Sequence[Column[ResultRow]],
    rows: Sequence[ResultRow],
    others: str,
    notes: Sequence[str],
    rank: Callable[[ResultRow], int],
) -> Table | None:
    """Build a table; visible are the first seed's rows of the highest rank."""
    if not rows:
        return None
    first = (rows[0].seed, max(map(rank, rows)))
    shown = [row for row in rows if (row.seed, rank(row)) == first]
    rest = sorted((row for row in rows if row not in shown), key=rank, reverse=True)
    return make_table(
        f"Paired with '{name_first(comparison, _NAME_LIMIT)}', same {what}",
        columns,
        [*shown, *rest],
        shown=len(shown),
        more_label=f"Show the other {others}",
        notes=notes,
    )


def _name_setting(row: ResultRow, seeds: bool) -> str:
    name = fmt.clean_name(row.setting or "")
    return f"{name}, seed {row.seed}" if seeds else name


def _list_counts(comparison: Comparison, words: str, metric: str) -> list[Column[ResultRow]]:
    """Return the columns of one test: what only one of the settings extracts, and the p-value."""
    tests = {
        (test.setting, test.seed, test.probe, test.bucket): test
        for test in comparison.tables.tests
        if (test.test, test.metric) == ("mcnemar", metric)
    }

    def column(heading: str, write: Callable[[TestRow], str]) -> Column[ResultRow]:
        def show(row: ResultRow) -> Content:
            test = tests.get((row.setting, row.seed, row.probe, row.bucket))
            return show_missing("not generated") if test is None else write(test)

        return Column((heading, words), show)

    first = name_first(comparison, _NAME_LIMIT)
    return [
        column(f"Extracted only under '{first}'", lambda test: fmt.count(test.num_only_against)),
        column("Extracted only under this setting", lambda test: fmt.count(test.num_only_here)),
        column("p", lambda test: fmt.MISSING if test.p_holm is None else fmt.p(test.p_holm)),
    ]


def _write_notes(comparison: Comparison) -> tuple[str, ...]:
    return (
        "The counts are of documents that exactly one of the two settings extracts; documents that "
        "both or neither extract carry no information about the difference.",
        "p is the probability of a split at least as uneven if each of these documents were "
        "equally likely to be extracted by either setting (McNemar's exact test, two-sided). "
        f"Holm's correction is applied over the {fmt.count(len(comparison.tables.tests))} tests of "
        "this page: if there is no difference, the probability that any of them gives a p below "
        f"0.05 is at most 5{fmt.PERCENT}.",
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
