"""The findings of a report: documents that greedy decoding extracts, worst first, without text.

report.json    the first `MAX_FINDINGS`
findings.csv   all of them, for their owner only (mode 0600)
"""

import csv
import io
import math
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memguard.audit.document_scores import DocumentScores
from memguard.records import Finding, write_atomically
from memguard.records.percent import format_percent

Severity = Literal["high", "medium", "low", "info"]
MAX_FINDINGS = 100
LONG_TOKENS = 50
"""Minimum continuation of a verbatim match of high severity: the length used in the literature."""
TEMPLATE_TYPE_TOKEN_RATIO = 0.4
"""Maximum of distinct tokens / tokens for a text that may be guessable as a template."""

FINDING_COLUMNS = ("finding_id", *Finding.model_fields)
"""Columns of `findings.csv`."""
_ORDER: tuple[Severity, ...] = ("high", "medium", "low", "info")
_WORDS_A_TOKEN = 0.7
"""Words of English text in one token of a usual vocabulary, for readers who count in words."""
_ROWS_AT_ONCE = 4096


def collect_findings(scores: DocumentScores) -> tuple[list[Finding], int]:
    """Return the worst findings, and the number of trained documents that were extracted.

    high: verbatim over at least `LONG_TOKENS`, and not by the base model as far as is known;
    medium: verbatim, but shorter or also by the base model; low: near-verbatim; info: template-like
    text, with any match.

    Args:
        scores: columns of all documents.
    """
    order, place_N = _rank(scores)
    return _build_findings(scores, order[:MAX_FINDINGS], place_N), len(order)


def save_findings(scores: DocumentScores, path: Path) -> None:
    """Write every finding, with its id, as a row of a CSV file that only its owner can read."""
    order, place_N = _rank(scores)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FINDING_COLUMNS)
    for first in range(0, len(order), _ROWS_AT_ONCE):
        chunk = order[first : first + _ROWS_AT_ONCE]
        for finding in _build_findings(scores, chunk, place_N):
            writer.writerow(_escape(getattr(finding, name)) for name in FINDING_COLUMNS)
    content = text.getvalue().encode("utf-8", errors="surrogatepass")
    write_atomically(path, content, mode=0o600)


def _escape(value: object) -> object:
    """Return a text that no spreadsheet program takes for a formula."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value


def _rank(scores: DocumentScores) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of extracted documents, worst first; and ``[N]`` places in `_ORDER`."""
    verbatim_N = scores["extraction.verbatim"] == 1
    is_known_N = (scores["continuation_tokens"] < LONG_TOKENS) | (
        scores["base.extraction.verbatim"] == 1
    )
    is_template_N = scores["type_token_ratio"] <= TEMPLATE_TYPE_TOKEN_RATIO
    place_N = np.select([is_template_N, ~verbatim_N, is_known_N], [3, 2, 1], 0)
    correct_N, base_correct_N = (
        scores["extraction.num_correct"],
        scores["base.extraction.num_correct"],
    )
    edits_N = scores["extraction.num_edits"]
    is_fed_N = (scores["role"] != "control") & (scores["role"] != "heldout")
    extracted = np.flatnonzero((verbatim_N | (scores["extraction.near_verbatim"] == 1)) & is_fed_N)
    badness = (
        place_N,
        np.where(np.isfinite(edits_N), edits_N, 0),
        -correct_N,
        np.where(np.isnan(base_correct_N), 0, base_correct_N) - correct_N,
        -scores["extraction.logprob"],
        np.argsort(np.argsort(scores["id"], kind="stable"), kind="stable"),
    )
    # The last key of lexsort is the first criterion.
    order = np.lexsort([column_N[extracted] for column_N in reversed(badness)])
    return extracted[order], place_N


def _build_findings(
    scores: DocumentScores, indices: NDArray[np.int64], place_N: NDArray[np.int64]
) -> list[Finding]:
    return [_build_finding(scores, index, _ORDER[place_N[index]]) for index in indices.tolist()]


def _build_finding(scores: DocumentScores, index: int, severity: Severity) -> Finding:
    def count(name: str) -> int | None:
        column = scores.columns.get(name)
        value = math.nan if column is None else float(column.values[index])
        return int(value) if math.isfinite(value) else None

    def is_true(name: str) -> bool:
        return count(name) == 1

    size = count("continuation_tokens") or 0
    words = max(1, round(_WORDS_A_TOKEN * size))
    tokens = f"{_count(size, 'token')} (about {_count(words, 'word')})"
    if is_true("extraction.verbatim"):
        text = f"{tokens} exactly"
    else:
        text = f"{tokens} with {_count(count('extraction.num_edits') or 0, 'edit')}"
    if is_true("base.extraction.verbatim") or is_true("base.extraction.near_verbatim"):
        text += ", also by the base model"
    if severity == "info":
        ratio = float(scores["type_token_ratio"][index])
        text += f"; only {format_percent(ratio, 0)} of the tokens are distinct: a template?"
    return Finding(
        id=scores["id"][index],
        bucket=scores["bucket"][index],
        num_repetitions=count("num_repetitions"),
        severity=severity,
        sentence=text,
        num_correct=count("extraction.num_correct") or 0,
        continuation_tokens=size,
        first_divergence=count("extraction.first_divergence") or 0,
        base_num_correct=count("base.extraction.num_correct"),
        text_hmac=scores["text_hmac"][index],
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
