"""Two settings on the same documents and secrets: tables of paired tests and what they mean."""

from memguard.records import Comparison, PairedCanaries, PairedCounts, PairedResult
from memguard.report.formatting import (
    CI,
    PERCENT,
    clean_name,
    format_count,
    format_difference,
    format_p,
    format_points,
)
from memguard.report.page import Cell, Row, Table, make_headings, show_estimate, show_missing
from memguard.report.seed_means import name_dose

_NAME_LIMIT = 24


def build_paired(comparison: Comparison) -> Table | None:
    """Build the table, open at the first seed's most repetitions; None without pairs."""
    results = comparison.paired
    if not results:
        return None
    highest = max(result.num_repetitions for result in results)
    seeds = len({result.seed for result in results}) > 1
    first, seed = clean_name(results[0].against, _NAME_LIMIT), results[0].seed
    shown = [r for r in results if r.num_repetitions == highest and r.seed == seed]
    others = sorted(
        (result for result in results if result not in shown),
        key=lambda result: -result.num_repetitions,
    )
    return Table(
        caption=f"Paired with '{first}', same documents",
        columns=make_headings(
            ("Setting", "documents"),
            (f"Only '{first}'", "verbatim"),
            ("Only this one", "verbatim"),
            ("p", "verbatim"),
            (f"Only '{first}'", "near-verbatim"),
            ("Only this one", "near-verbatim"),
            ("p", "near-verbatim"),
            ("Token accuracy", f"teacher-forced, difference ({CI})"),
        ),
        rows=tuple(_build_row(result, seeds) for result in shown),
        more_rows=tuple(_build_row(result, seeds) for result in others),
        more_label=f"Show the other {'seeds and ' if seeds else ''}numbers of repetitions",
        notes=(*_write_notes(first, comparison), *_tell_removed(comparison)),
    )


def build_paired_canaries(comparison: Comparison) -> Table | None:
    """Build the same for random secrets, the first seed open; None without any."""
    results = comparison.paired_canaries
    if not results:
        return None
    seeds = len({result.seed for result in results}) > 1
    first, seed = clean_name(results[0].against, _NAME_LIMIT), results[0].seed
    return Table(
        caption=f"Paired with '{first}', same secrets",
        columns=make_headings(
            ("Setting", "trained secrets"),
            (f"Only '{first}'", "recited whole"),
            ("Only this one", "recited whole"),
            ("p", "recited whole"),
            ("Exposure", f"difference in bits ({CI})"),
        ),
        rows=tuple(_build_canary_row(r, seeds) for r in results if r.seed == seed),
        more_rows=tuple(_build_canary_row(r, seeds) for r in results if r.seed != seed),
        more_label="Show the other seeds",
        notes=(
            "Each trained secret is ranked among the references of its own run: a setting that "
            "makes all secrets less likely, trained or not, has not lowered their exposure.",
        ),
    )


def _build_canary_row(result: PairedCanaries, seeds: bool) -> Row:
    name = clean_name(result.setting)
    return Row(
        head=Cell(
            text=f"{name}, seed {result.seed}" if seeds else name,
            detail=format_count(result.num_canaries),
            kind="text",
        ),
        cells=(
            *_show_counts(result.verbatim),
            show_estimate(format_difference(result.exposure_bits_difference, 2)),
        ),
    )


def _build_row(result: PairedResult, seeds: bool) -> Row:
    name = clean_name(result.setting)
    documents = f"{format_count(result.num_documents)} {name_dose(str(result.num_repetitions))}"
    return Row(
        head=Cell(
            text=f"{name}, seed {result.seed}" if seeds else name, detail=documents, kind="text"
        ),
        cells=(
            *_show_counts(result.verbatim),
            *_show_counts(result.near_verbatim),
            show_estimate(format_points(result.token_accuracy_difference)),
        ),
    )


def _show_counts(counts: PairedCounts | None) -> tuple[Cell, ...]:
    if counts is None:
        return (show_missing("not generated"),) * 3
    return (
        Cell(text=format_count(counts.num_only_against)),
        Cell(text=format_count(counts.num_only_setting)),
        Cell(text=format_p(counts.p_holm)),
    )


def _write_notes(first: str, comparison: Comparison) -> tuple[str, ...]:
    near = [one for one in comparison.paired if one.near_verbatim is not None]
    num_tests = len(comparison.paired) + len(near) + len(comparison.paired_canaries)
    return (
        f"Only '{first}' and only this one: the documents that just one of the two "
        "settings extracts; documents that both or neither extract do not tell them apart.",
        "p is the probability of a split at least as uneven if a coin decided, for each of these "
        "documents, which setting extracts it (McNemar's exact test, two-sided). Holm's "
        f"correction has raised it for the {format_count(num_tests)} tests of this page: all "
        f"of them together have a chance of at most 5{PERCENT} to give a p below 0.05 where "
        "there is no difference.",
        "A large p means that these documents do not tell the two settings apart, not that the "
        f"settings are alike. The 95{PERCENT} intervals are not corrected: each stands for itself.",
    )


def _tell_removed(comparison: Comparison) -> tuple[str, ...]:
    removed = comparison.num_removed
    if not removed:
        return ()
    documents = "document was" if removed == 1 else "documents were"
    return (
        f"{format_count(removed)} {documents} removed as copies in one run or another. They are "
        "left out of these tests and of risk against utility, in all runs of that seed.",
    )
