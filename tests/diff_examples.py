"""Two audits of made-up documents: for tests of what `memguard diff` says of them.

Made          a document, and what the probes answered
make_side     documents -> an audit that was read
save_audit    documents -> an audit folder with intact hashes
compare_made  two lists of documents -> the result of a diff
"""

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
from bundle_examples import make_report, seal_audit
from gate_audits import open_records
from result_examples import make_tables, rate_row

from memguard import records as r
from memguard.gate.diff import diff_audits
from memguard.gate.diffed import AuditDiff, DiffedDocument, DiffedFinding
from memguard.gate.gaps import Audited

NOT_ASKED = math.nan
PROBES: tuple[dict[str, Any], ...] = (
    {"name": "extraction", "version": 2, "continuation_tokens": 50, "prefix_tokens": None},
    {"name": "attacks", "version": 1, "width": 8, "samples": 8},
    {"name": "membership", "version": 1, "scores": ["loss"]},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A document, and what the probes answered."""

    text: str
    id: str
    bucket: str = "r4"
    role: str = "trained"
    verbatim: float = 0
    near: float = 0
    attacks: Mapping[str, float] = field(default_factory=lambda: {"beam_search": NOT_ASKED})
    """By attack: 1, 0, or NaN where it was not tried."""
    num_tokens: int = 128
    prefix_tokens: int = 78
    continuation_tokens: int = 50
    cluster: int | None = None

    @property
    def extracted(self) -> dict[str, float]:
        """Answers by probe."""
        tried = [answer for answer in self.attacks.values() if not math.isnan(answer)]
        known = [answer for answer in (self.verbatim, self.near) if not math.isnan(answer)]
        return {
            "extraction": max(known, default=NOT_ASKED),
            "attacks": max(tried, default=NOT_ASKED),
        }


def hash_text(text: str, key: str) -> str:
    """Return the keyed hash of a text."""
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def make_diff_report(documents: Sequence[Made], key: str | None, **changes: Any) -> r.AuditReport:
    """Return the report of an audit of these documents; ``changes`` are of report or method."""
    buckets = list(dict.fromkeys((made.bucket, made.role) for made in documents))
    rows = []
    for bucket, _ in buckets:
        here = [made for made in documents if made.bucket == bucket]
        for metric in ("verbatim", "near_verbatim"):
            matched = sum(getattr(made, metric.split("_")[0]) == 1 for made in here)
            rows.append(rate_row("extraction", metric, bucket, matched, len(here)))
    tables = make_tables(
        rows,
        [
            r.BucketRow(
                bucket=bucket,
                role=role,  # type: ignore[arg-type]
                num_documents=sum(made.bucket == bucket for made in documents),
            )
            for bucket, role in buckets
        ],
    )
    report = make_report("4b" * 32, len(documents), run="made", tables=tables)
    method = {"suite": "attacks", "probes": list(PROBES), "continuation_tokens": 50, **changes}
    of_method = {name: method.pop(name) for name in r.Method.model_fields if name in method}
    fingerprint = None if key is None else hashlib.sha256(key.encode()).hexdigest()
    runs = [
        r.ProbeRun(name=str(probe["name"]), version=1, num_documents=40, reason_not_run=None)
        for probe in PROBES
    ]
    update = {
        "data": report.data.model_copy(update={"identity_key": fingerprint}),
        "method": report.method.model_copy(update={"window": "last", **of_method}),
        "probe_runs": runs,
        "environment": {},
    }
    return report.model_copy(update={**update, **method})


def make_side(documents: Sequence[Made], *, key: str | None = "key", **changes: Any) -> Audited:
    """Return an audit of these documents.

    Args:
        documents: of the audit.
        key: of the keyed hashes.
        **changes: of the report or its method.
    """
    return Audited(
        folder=Path("made"),
        report=make_diff_report(documents, key, **changes),
        report_sha256="00" * 32,
        documents=open_records(build_records(documents, key)),
        gaps=(),
    )


def save_audit(
    folder: Path, documents: Sequence[Made], *, key: str | None = "key", **changes: Any
) -> Path:
    """Write an audit folder of these documents, as `make_side` has them."""
    report = make_diff_report(documents, key, **changes)
    return seal_audit(folder, report, build_records(documents, key))


def build_records(documents: Sequence[Made], key: str | None) -> pyarrow.Table:
    """Return the records of an audit of these documents."""
    kinds = {"id": pyarrow.string(), "text_hmac": pyarrow.string(), "cluster": pyarrow.int64()}
    kinds["num_repetitions"] = pyarrow.int64()
    kinds |= {"bucket": pyarrow.string(), "role": pyarrow.string()}
    kinds |= dict.fromkeys(("num_tokens", "prefix_tokens", "continuation_tokens"), pyarrow.int64())
    columns = _list_columns(documents, key)
    # Yes or no, but no part of an answer; and an answer of another model.
    columns["extraction.teacher_forced_90"] = [True for _ in documents]
    columns["base.extraction.verbatim"] = [True for _ in documents]
    columns["base.extraction.extracted"] = [True for _ in documents]
    return pyarrow.table(
        {
            name: pyarrow.array(values, kinds.get(name, pyarrow.bool_()))
            for name, values in columns.items()
        }
    )


def _list_columns(documents: Sequence[Made], key: str | None) -> dict[str, list[Any]]:
    """Return the columns of records.parquet, with None where nothing is known."""
    names = ("id", "bucket", "role", "cluster")
    sizes = ("num_tokens", "prefix_tokens", "continuation_tokens")
    attacks = dict.fromkeys(name for made in documents for name in made.attacks)
    return {
        "text_hmac": [None if key is None else hash_text(made.text, key) for made in documents],
        **{name: [getattr(made, name) for made in documents] for name in (*names, *sizes)},
        "num_repetitions": [0 if made.role == "control" else 4 for made in documents],
        "extraction.verbatim": [_to_bool(made.verbatim) for made in documents],
        "extraction.near_verbatim": [_to_bool(made.near) for made in documents],
        **{
            f"attacks.{name}.any": [
                _to_bool(made.attacks.get(name, NOT_ASKED)) for made in documents
            ]
            for name in attacks
        },
        **{
            f"{probe}.extracted": [_to_bool(made.extracted[probe]) for made in documents]
            for probe in ("extraction", "attacks")
        },
    }


def _to_bool(answer: float) -> bool | None:
    return None if math.isnan(answer) else bool(answer)


def compare_made(old: Sequence[Made], new: Sequence[Made], **changes: Any) -> AuditDiff:
    """Compare two audits; ``changes`` are of the new one."""
    return diff_audits(make_side(old), make_side(new, **changes))


def find_document(diff: AuditDiff, text: str, key: str = "key") -> DiffedDocument:
    (document,) = [one for one in diff.documents if one.text_hmac == hash_text(text, key)]
    return document


def find_finding(
    diff: AuditDiff, text: str, probe: str = "extraction", key: str = "key"
) -> DiffedFinding:
    (finding,) = [one for one in find_document(diff, text, key).probes if one.probe == probe]
    return finding


def make_row(number: int, **fields: Any) -> Made:
    """Return a document whose id is made of its row, as data without ids has it."""
    return Made(text=f"text {number}", id=f"data.jsonl:{number}", **fields)


FOUND = make_row(1, verbatim=1, near=1, attacks={"beam_search": 1})
GONE = make_row(1, attacks={"beam_search": 0})
OTHERS = [make_row(n) for n in range(2, 6)]
