"""Documents of which a test says how many tokens a model has right, and what an audit says then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from audit_examples import build_suite
from probe_examples import make_evidence
from record_examples import make_document

from memguard.audit.cache import ScoreMatrix
from memguard.audit.document_scores import DocumentScores, build_scores
from memguard.audit.metrics import Evidence
from memguard.audit.probe import Summary
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.probes.window_scores import MAIN
from memguard.audit.requests import Measured
from memguard.audit.suite import Suite
from memguard.audit.summary import summarise
from memguard.audit.verdict import ControlKind
from memguard.audit.warnings import Tally
from memguard.audit.windows import Window
from memguard.records import AuditResults, BucketRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A document of ``size`` tokens after a prefix, and how many a model has right, in front."""

    id: str
    num_correct: int
    bucket: str = "trained"
    role: Any = "trained"
    num_repetitions: int | None = 4
    num_copies: int | None = None
    size: int = 50
    base: int | None = None
    """Tokens that the base model has right."""
    near: bool | None = None
    """Whether the greedy text is near-verbatim; None: it follows from the right tokens."""
    ratio: float = 1.0
    """Distinct tokens of the text."""
    argmax_ratio: float = 0.8
    text_hmac: str | None = None
    hangs: bool = False
    """Whether a near-tie decides."""


def make(name: str, num_correct: int = 0, **fields: Any) -> Made:
    return Made(id=name, num_correct=num_correct, **fields)


def make_bucket(name: str, correct: Sequence[int], **fields: Any) -> list[Made]:
    """Return a document for each number of right tokens."""
    return [make(f"{name}-{n:03}", count, bucket=name, **fields) for n, count in enumerate(correct)]


def make_control(correct: Sequence[int], **fields: Any) -> list[Made]:
    return make_bucket("x0", correct, role="control", num_repetitions=0, **fields)


def build_evidence(
    made: Sequence[Made],
    buckets: Sequence[BucketRow] | None = None,
    *,
    tally: Tally = "complete",
    generated: str = "model base",
    counts: Mapping[str, int] | None = None,
    base_loss: float = 2.0,
) -> Evidence:
    """Return what the extraction probe measures on these documents.

    Args:
        made: the documents.
        buckets: the buckets; None takes those of the documents, in their order.
        tally: state of the counts of repetitions.
        generated: models that generate text.
        counts: of the generated texts.
        base_loss: of the base model (nats a token); the model's is 1.
    """
    windows = [_cut(each) for each in made]

    def measure(correct: Sequence[int], near: Sequence[bool | None], model: str) -> Measured:
        rows = [
            [
                right,
                right,
                float(right == each.size),
                right,
                -(1.0 if model == "model" else base_loss) * each.size,
                1.0,
                each.hangs,
                each.argmax_ratio,
                1.0,
            ]
            for each, right in zip(made, correct, strict=True)
        ]
        edits = [each.size - right for each, right in zip(made, correct, strict=True)]
        matched = [
            number <= each.size // 10 if known is None else known
            for each, number, known in zip(made, edits, near, strict=True)
        ]
        detail: Any = NotGenerated(reason="the weights are offloaded")
        if model in generated:
            detail = NearVerbatim(
                matched_N=np.array(matched, dtype=bool),
                num_edits_N=np.where(matched, edits, np.inf),
                min_gap_N=np.ones(len(made)),
                **dict.fromkeys(_COUNTS, 0) | {"num_generated": len(made), **(counts or {})},
            )
        table = np.array(rows, dtype=np.float64).reshape(-1, len(MAIN))
        return Measured(columns=ScoreMatrix(names=MAIN, rows=table), detail=detail)

    base = None
    if any(each.base is not None for each in made):
        rights = [each.base or 0 for each in made]
        base = {"extraction": measure(rights, [None] * len(made), "base")}
    evidence = make_evidence(
        windows,
        {"extraction": measure([m.num_correct for m in made], [m.near for m in made], "model")},
        base,
        buckets=buckets,
        dose_response=tally == "complete",
    )
    return evidence


_COUNTS = (
    "num_verbatim",
    "num_generated",
    "num_below_floor",
    "num_checked",
    "num_matched_below_floor",
)
EXTRACTION = build_suite(ExtractionProbe())


def build_columns(made: Sequence[Made], **fields: Any) -> DocumentScores:
    """Return the columns of records.parquet of these documents."""
    evidence = build_evidence(made, **fields)
    return build_scores(
        evidence.inputs.windows, {"extraction": ExtractionProbe().tabulate(evidence)}
    )


def summarise_made(
    made: Sequence[Made],
    buckets: Sequence[BucketRow] | None = None,
    *,
    tally: Tally = "complete",
    control: ControlKind = "drawn",
    others: Mapping[str, Summary] | None = None,
    suite: Suite = EXTRACTION,
    **fields: Any,
) -> AuditResults:
    """Return the report of made-up documents.

    Args:
        made: the documents.
        buckets: see `build_evidence`.
        tally: state of the counts of repetitions.
        control: who chose it, and whether it is another kind of text.
        others: what other probes of the suite add.
        suite: of the audit.
        **fields: of `build_evidence`.
    """
    evidence = build_evidence(made, buckets, tally=tally, **fields)
    summaries = {"extraction": suite.extraction.tabulate(evidence), **(others or {})}
    return summarise(
        evidence,
        summaries,
        build_scores(evidence.inputs.windows, summaries),
        suite=suite,
        tally=tally,
        cut=None,
        control=control,
    )


def _cut(made: Made) -> Window:
    prefix = 128 - made.size
    document = make_document(
        np.arange(128) % max(1, round(made.ratio * made.size)),
        name=made.id,
        bucket=made.bucket,
        role=made.role,
        num_repetitions=made.num_repetitions,
        num_copies=made.num_copies,
        text_hmac=made.text_hmac,
    )
    return Window(document=document, start=0, prefix_tokens=prefix, continuation_tokens=made.size)
