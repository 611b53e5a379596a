"""One audit: documents in, report and scores out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memguard.audit.banners import Tally
from memguard.audit.extraction import AuditDocument
from memguard.audit.selection import Selection, select_windows
from memguard.audit.suite import Suite
from memguard.audit.summary import Summary, summarise
from memguard.records import DocumentScore

if TYPE_CHECKING:
    # Brings torch along; planning and summarising need none.
    from memguard.audit.scoring import Progress, Scorer

Stage = Literal["model", "base"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOutcome:
    """What one audit found; identities, method and environment are the caller's to add."""

    summary: Summary
    scores: tuple[DocumentScore, ...]
    """In the order of the documents."""


def run_audit(
    *,
    documents: Sequence[AuditDocument],
    scorer: "Scorer",
    base_scorer: "Scorer | None" = None,
    suite: Suite,
    tally: Tally,
    tiny_margin: float,
    seed: int,
    min_documents: int = 5,
    max_documents_per_bucket: int | None = None,
    on_progress: Callable[[Stage, int, int], None] | None = None,
) -> AuditOutcome:
    """Score the documents and say what that shows.

    The documents are checked before a scorer is asked, and the base model is asked only when the
    fine-tuned one has finished: scorers that load their model when asked, and drop it after, keep
    one model in memory at a time.

    Args:
        documents: trained, control and, if wanted, background documents.
        scorer: the model under audit.
        base_scorer: the model before training; None leaves its columns null.
        suite: the probes, with their final settings.
        tally: state of the counts of repetitions.
        tiny_margin: margin (logits) below which a verdict may flip, see `TINY_MARGINS`.
        seed: decides the sample of each bucket.
        min_documents: trained documents that must be long enough (documents).
        max_documents_per_bucket: size of each bucket's sample; None takes all.
        on_progress: called with the stage, the windows done and all windows.

    Raises:
        DataError: too few trained documents are long enough, or an id given twice.
        ModelError: tokenizer or length do not fit the model, or its logits are not finite.
    """
    selection = select_windows(
        documents,
        suite.extraction,
        seed=seed,
        min_documents=min_documents,
        max_documents_per_bucket=max_documents_per_bucket,
    )
    probe = suite.extraction
    results = scorer.score(selection.windows, _at_stage("model", on_progress))
    bases = (
        [None] * len(results)
        if base_scorer is None
        else base_scorer.score(selection.windows, _at_stage("base", on_progress))
    )
    scores = tuple(
        probe.score_window(window, result, base)
        for window, result, base in zip(selection.windows, results, bases, strict=True)
    )
    summary = summarise(
        scores,
        selection.buckets,
        tiny_margin_ids=frozenset(
            window.document.id
            for window, result in zip(selection.windows, results, strict=True)
            if probe.hangs_on_margin(result, tiny_margin)
        ),
        tiny_margin=tiny_margin,
        tally=tally,
        membership=suite.has_membership,
        text_hmacs=_hmacs(selection),
    )
    return AuditOutcome(summary=summary, scores=scores)


def _at_stage(
    stage: Stage, on_progress: Callable[[Stage, int, int], None] | None
) -> "Progress | None":
    if on_progress is None:
        return None
    return lambda done, total: on_progress(stage, done, total)


def _hmacs(selection: Selection) -> dict[str, str | None]:
    return {window.document.id: window.document.text_hmac for window in selection.windows}
