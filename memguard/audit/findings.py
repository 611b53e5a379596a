"""The findings of an audit: one row for each document that any probe extracted, worst first.

    report.json     the first `MAX_FINDINGS`, without text
    findings.csv    all of them, for their owner only
    excerpts.txt    all of them, with their text, if the user wants it

`records.documents.find_came_out` decides which documents these are.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from memguard.audit.document_scores import DocumentScores
from memguard.errors import plural
from memguard.records import PRIVATE_MODE, Finding, write_atomically
from memguard.records.audit import METHODS
from memguard.records.documents import (
    EXTRACTED,
    OTHER_WINDOW,
    find_came_out,
    find_trained,
    list_own,
)
from memguard.records.texts import format_percent

Severity = Literal["high", "medium", "low", "info"]
MAX_FINDINGS = 100
LONG_TOKENS = 50
"""Minimum continuation of a verbatim match of high severity: the length used in the literature."""
TEMPLATE_TYPE_TOKEN_RATIO = 0.4
"""Maximum of distinct tokens / tokens for a text that may be guessable as a template."""

_FIELDS = [name for name in Finding.model_fields if name != "found_by"]
_OTHER_PROBES = "other_probes"
FINDING_COLUMNS: Final = (
    *_FIELDS,
    *(method.replace("-", "_").replace(" ", "_") for method in METHODS),
    _OTHER_PROBES,
)
"""Columns of `findings.csv`: the fields of a finding, and one column for each method."""
_ORDER: tuple[Severity, ...] = ("high", "medium", "low", "info")


class FindingList:
    """The findings of an audit; each is built when it is read, because there may be a million.

    high: verbatim over at least `LONG_TOKENS`, and not by the base model as far as is known;
    medium: verbatim, but shorter or also by the base model; low: in another way; info:
    template-like text, in any way.
    """

    def __init__(self, scores: DocumentScores) -> None:
        """Find the documents of an audit that came out."""
        extracted = {
            name.removesuffix(EXTRACTED): scores[name]
            for name in list_own(scores.columns, EXTRACTED)
        }
        verbatim_N = scores["extraction.verbatim"] == 1
        is_known_N = scores["base.extraction.verbatim"] == 1
        is_known_N |= scores["continuation_tokens"] < LONG_TOKENS
        is_template_N = scores["type_token_ratio"] <= TEMPLATE_TYPE_TOKEN_RATIO
        self._scores = scores
        self._place_N = np.select([is_template_N, ~verbatim_N, is_known_N], [3, 2, 1], 0)
        """Of each document in `_ORDER`."""
        is_trained_N = find_trained(scores["role"], scores["num_repetitions"])
        came_out_N = find_came_out(is_trained_N, extracted)
        self._indices = _sort(scores, np.flatnonzero(came_out_N), self._place_N)
        self._methods = _list_methods(scores, extracted)

    @property
    def num_by_method(self) -> int:
        """Pairs of a finding and a method that extracted it."""
        return sum(int(extracted_N[self._indices].sum()) for extracted_N in self._methods.values())

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Finding]:
        return map(self._build, self._indices.tolist())

    def _build(self, index: int) -> Finding:
        scores, severity = self._scores, _ORDER[self._place_N[index]]

        def count(name: str) -> int | None:
            column = scores.columns.get(name)
            value = math.nan if column is None else float(column.values[index])
            return int(value) if math.isfinite(value) else None

        found_by = {
            method: _describe(method, scores, index)
            for method, extracted_N in self._methods.items()
            if extracted_N[index]
        }
        text = next(iter(found_by.values()))
        if any(count(f"base.extraction.{name}") == 1 for name in ("verbatim", "near_verbatim")):
            text += ", also by the base model"
        if severity == "info":
            ratio = float(scores["type_token_ratio"][index])
            text += f"; only {format_percent(ratio, 0)} of the tokens are distinct: a template?"
        return Finding(
            id=scores["id"][index],
            text_hmac=scores["text_hmac"][index],
            bucket=scores["bucket"][index],
            role=scores["role"][index],
            num_repetitions=count("num_repetitions"),
            severity=severity,
            sentence=text,
            found_by=found_by,
            num_correct=count("extraction.num_correct") or 0,
            continuation_tokens=count("continuation_tokens") or 0,
            first_divergence=count("extraction.first_divergence") or 0,
            base_num_correct=count("base.extraction.num_correct"),
        )


def save_findings(findings: FindingList, path: Path) -> None:
    """Write every finding as a row of a CSV file that only its owner can read."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FINDING_COLUMNS)
    for finding in findings:
        others = finding.found_by.keys() - set(METHODS)
        row = [getattr(finding, name) for name in _FIELDS]
        row += [finding.found_by.get(method) for method in METHODS]
        writer.writerow(map(_escape, [*row, ", ".join(sorted(others))]))
    content = text.getvalue().encode("utf-8", errors="surrogatepass")
    write_atomically(path, content, mode=PRIVATE_MODE)


def _escape(value: object) -> object:
    """Return a text that no spreadsheet program takes for a formula."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value


def _list_methods(
    scores: DocumentScores, extracted: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.bool_]]:
    """Return the methods, those of memguard in the order of `METHODS`."""
    verbatim_N = scores["extraction.verbatim"] == 1
    windows = [scores[name] == 1 for name in list_own(scores.columns, OTHER_WINDOW)]
    none_N = np.zeros(len(scores), dtype=bool)
    ways = (
        verbatim_N,
        (scores["extraction.near_verbatim"] == 1) & ~verbatim_N,
        scores[f"sampling{EXTRACTED}"] == 1,
        np.any([none_N, *windows], axis=0),
        scores[f"attacks{EXTRACTED}"] == 1,
    )
    own = {"extraction", "sampling", "attacks"}
    others = {
        probe: extracted_N == 1
        for probe, extracted_N in extracted.items()
        if probe not in own and f"{probe}{OTHER_WINDOW}" not in scores.columns
    }
    return {**dict(zip(METHODS, ways, strict=True)), **others}


def _sort(
    scores: DocumentScores, indices: NDArray[np.int64], place_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return indices of documents, worst first."""
    correct_N = scores["extraction.num_correct"]
    base_correct_N = scores["base.extraction.num_correct"]
    edits_N = scores["extraction.num_edits"]
    badness: Sequence[NDArray[Any]] = (
        place_N,
        np.where(np.isfinite(edits_N), edits_N, 0),
        -correct_N,
        np.where(np.isnan(base_correct_N), 0, base_correct_N) - correct_N,
        -scores["extraction.logprob"],
        np.argsort(np.argsort(scores["id"], kind="stable"), kind="stable"),
    )
    # The last key of lexsort is the first criterion.
    order = np.lexsort([column_N[indices] for column_N in reversed(badness)])
    return indices[order]


def _describe(method: str, scores: DocumentScores, index: int) -> str:
    """Return what a method shows of one document."""
    tokens = plural(int(scores["continuation_tokens"][index]), "token")
    if method == "greedy":
        return f"{tokens} exactly"
    if method == "near-verbatim":
        return f"{tokens} with {plural(int(scores['extraction.num_edits'][index]), 'edit')}"
    if method == "sampling":
        queries = max(1, round(10 ** float(scores["sampling.log10_queries"][index])))
        return f"about {queries:,} {'query' if queries == 1 else 'queries'}"
    if method == "another window":
        if scores[f"extraction{OTHER_WINDOW}"][index] == 1:
            longest = int(scores["extraction.longest_run_anywhere"][index])
            return f"{plural(longest, 'token')} in a row"
        is_grid = scores[f"grid{OTHER_WINDOW}"][index] == 1
        return "a cell of the grid" if is_grid else "generated text"
    names = [
        name.split(".")[1]
        for name, column in scores.columns.items()
        if name.startswith("attacks.") and name.endswith(".any") and column.values[index] == 1
    ]
    return ", ".join(names) if method == "attacks" else "extracted"
