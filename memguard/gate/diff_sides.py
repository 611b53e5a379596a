"""What a diff reads of each of the two audits: answers, their parts, windows and settings.

    answers    for each document and probe: yes, no, not asked
    parts      the measurements behind an answer: extraction.verbatim, extraction.near_verbatim
    windows    which tokens of each document were audited
    settings   what else a probe's answer depends on

An answer "no" means as much as the parts that were measured: without generated text, near-verbatim
extraction is not among them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memguard.records.answers import EXTRACTED, Answers, load_answers
from memguard.records.audit import AuditReport
from memguard.records.audit_files import SCORES, load_audit_files, load_audit_report

_PARTS = {"extraction": "verbatim|near_verbatim", "attacks": r".+\.any"}
"""Columns whose values decide a probe's answer; of other probes all columns of yes and no."""
_WINDOW_SETTINGS = ("continuation_tokens", "prefix_tokens", "min_prefix_tokens")
"""Settings of the extraction probe that all probes depend on, because they use its windows."""
_WITHOUT_SEED = ("extraction", "sampling")
"""Probes whose answers do not depend on the audit's seed."""
_WINDOWS = ("num_tokens", "prefix_tokens", "continuation_tokens")

Window = tuple[int, ...]
"""Tokens of the document, of its prefix and of its continuation; where it was cut, also the largest
number of tokens used of one document."""


class Asked(NamedTuple):
    """What one document was asked with one probe."""

    window: Window
    parts: frozenset[str]
    """Parts of the answer that were measured."""

    def covers(self, other: "Asked") -> bool:
        """Return whether all that the other one asked was asked, of the same tokens."""
        return self.window == other.window and self.parts >= other.parts


@dataclass(frozen=True, kw_only=True, eq=False)
class DiffSide:
    """One of the two audits: N documents as columns."""

    report: AuditReport
    report_sha256: str
    answers: Answers
    windows_N3: NDArray[np.int64]
    """Tokens of the document, of its prefix and of its continuation."""
    parts: Mapping[str, Mapping[str, NDArray[np.float64]]]
    """By probe and part: ``[N]`` 1, 0, or NaN where it was not measured."""

    @property
    def identity_key(self) -> str | None:
        """Fingerprint of the key of the keyed hashes; None without one."""
        return self.report.data.identity_key

    @cached_property
    def is_trained_N(self) -> NDArray[np.bool_]:
        """Documents that the model was trained on."""
        return self.answers.is_trained_N

    @cached_property
    def asked(self) -> dict[str, list[Asked | None]]:
        """By probe: what each document was asked; None if it was not asked."""
        return {probe: list(self._list_asked(probe)) for probe in self.answers.extracted}

    def _list_asked(self, probe: str) -> Iterator[Asked | None]:
        cut, parts = self.report.cut, self.parts.get(probe, {})
        measured_NP = np.ones((len(self.answers), len(parts)), dtype=bool)
        for place, part_N in enumerate(parts.values()):
            measured_NP[:, place] = ~np.isnan(part_N)
        names: dict[tuple[bool, ...], frozenset[str]] = {}
        for tokens, is_asked, measured in zip(
            self.windows_N3.tolist(),
            (~np.isnan(self.answers.extracted[probe])).tolist(),
            map(tuple, measured_NP.tolist()),
            strict=True,
        ):
            if not is_asked:
                yield None
                continue
            if measured not in names:
                names[measured] = frozenset(compress(parts, measured))
            is_cut = cut is not None and tokens[0] > cut.used_tokens
            window = (*tokens, cut.used_tokens) if cut is not None and is_cut else tuple(tokens)
            yield Asked(window, names[measured])

    def find_yes_parts(self, probe: str, rows: Iterable[int]) -> set[str]:
        """Return the parts of an answer that are yes of one of some documents."""
        parts, listed = self.parts.get(probe, {}), list(rows)
        return {name for name, part_N in parts.items() if (part_N[listed] == 1).any()}

    def find_reason_not_run(self, probe: str) -> str:
        """Return why there is no answer of a probe."""
        runs = [run for run in self.report.probe_runs if run.name == probe]
        if not runs:
            return "its suite does not have it"
        return runs[0].reason_not_run or "it has no yes or no for a document"


def load_side(folder: Path) -> DiffSide:
    """Read an audit folder.

    Raises:
        UnreadableError: only another user can read it.
        RecordError: the audit is incomplete or damaged.
    """
    import pyarrow.parquet

    report = load_audit_report(folder)
    answers = load_answers(folder)
    file = pyarrow.parquet.ParquetFile(folder / SCORES)
    schema = file.schema_arrow
    names = {
        probe: [
            name
            for name in schema.names
            if pyarrow.types.is_boolean(schema.field(name).type) and _is_part(probe, name)
        ]
        for probe in answers.extracted
    }
    needed = [*_WINDOWS, *(name for listed in names.values() for name in listed)]
    table = file.read(needed)
    return DiffSide(
        report=report,
        report_sha256=load_audit_files(folder).report.sha256,
        answers=answers,
        windows_N3=np.stack(
            [np.array(table.column(name).to_pylist(), dtype=np.int64) for name in _WINDOWS], axis=1
        ),
        parts={
            probe: {
                name.removeprefix(f"{probe}."): np.array(
                    table.column(name).to_pylist(), dtype=np.float64
                )
                for name in listed
            }
            for probe, listed in names.items()
        },
    )


def _is_part(probe: str, column: str) -> bool:
    start = f"{probe}."
    if not column.startswith(start) or column == f"{probe}{EXTRACTED}":
        return False
    return re.fullmatch(_PARTS.get(probe, ".*"), column.removeprefix(start)) is not None


def list_differences(old: DiffSide, new: DiffSide, probe: str) -> list[str]:
    """Return the differences of a probe's settings in two audits, one clause each.

    Args:
        old: an audit that ran the probe.
        new: another one that ran it.
        probe: its name.
    """
    return list(_find_differences(old, new, probe))


def _find_differences(old: DiffSide, new: DiffSide, probe: str) -> Iterator[str]:
    before, after = (_find_settings(side, probe) for side in (old, new))
    if probe != "extraction":
        for side, settings in ((old, before), (new, after)):
            windows = _find_settings(side, "extraction")
            settings |= {f"extraction.{name}": windows.get(name) for name in _WINDOW_SETTINGS}
    methods = (old.report.method, new.report.method)
    names = ["dtype", "window", *(() if probe in _WITHOUT_SEED else ("seed",))]
    for settings, method in zip((before, after), methods, strict=True):
        settings |= {name: getattr(method, name) for name in names}
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"'{name}' is {after.get(name)} instead of {before.get(name)}"


def _find_settings(side: DiffSide, probe: str) -> dict[str, Any]:
    """Return version, package and settings of a probe; empty if the suite does not have it."""
    listed = side.report.method.probes
    return next((dict(entry) for entry in listed if entry.get("name") == probe), {})
