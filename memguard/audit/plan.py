"""What an audit measures, fixed before a model is loaded and equal on every rank. No torch."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from memguard.audit.probes.canary_results import AuditCanary
from memguard.audit.requests import Inputs
from memguard.audit.selection import Selection, WhichWindow, select_windows
from memguard.audit.statistics.blind import compare_kinds
from memguard.audit.suite import Suite
from memguard.audit.verdict import ControlKind
from memguard.audit.warnings import Tally
from memguard.audit.windows import AuditDocument
from memguard.errors import DataError

if TYPE_CHECKING:
    from memguard.audit.benchmarks.tasks import OpenedTask
    from memguard.audit.context import AuditContext
    from memguard.runtime import Runtime


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class AuditPlan:
    """Documents, windows and probes of an audit. It has token ids: it is never printed."""

    documents: Sequence[AuditDocument]
    """All that may be measured; those outside of the samples are counted."""
    selection: Selection
    suite: Suite
    """The probes, with their final settings."""
    seed: int
    """Of the sample of each bucket and of all other random choices."""
    tiny_margin: float = 0.0
    """Margin (logits) below which a result may change, see `TINY_MARGINS`."""
    canaries: Sequence[AuditCanary] = ()
    """Random secrets, in an order that does not depend on whether they were trained."""
    tally: Tally = "missing"
    """State of the counts of repetitions."""
    window: WhichWindow = "last"
    """Which part of long documents was chosen, for the report."""
    tasks: "Sequence[OpenedTask]" = ()
    """Benchmark tasks."""
    has_given_control: bool = False
    """Whether the user named the control documents. Those that a run draws are of one kind with its
    trained documents."""
    other_kind: str = ""
    """How a control that the user named is another kind of text; empty if it is not."""

    @classmethod
    def of(
        cls,
        documents: Sequence[AuditDocument],
        suite: Suite,
        *,
        seed: int,
        min_documents: int = 5,
        max_documents_per_bucket: int | None = None,
        has_given_control: bool = False,
        **fields: Any,
    ) -> "AuditPlan":
        """Select the windows of documents.

        For the arguments see `select_windows`; ``fields`` are further fields of the plan.

        Raises:
            DataError: see `select_windows`.
        """
        select = partial(
            select_windows, documents, suite.extraction, seed=seed, min_documents=min_documents
        )
        selection, other_kind = select(max_documents_per_bucket=max_documents_per_bucket), ""
        if has_given_control:
            # Of all that could be sampled: the sample depends on the seed.
            is_sample = any(bucket.num_not_sampled for bucket in selection.buckets)
            eligible = select().windows if is_sample else selection.windows
            other_kind = compare_kinds([window.document for window in eligible])
        return cls(
            documents=documents,
            selection=selection,
            suite=suite,
            seed=seed,
            has_given_control=has_given_control,
            other_kind=other_kind,
            **fields,
        )

    @property
    def control(self) -> ControlKind:
        """Who chose the control, and whether it is of the kind of the trained documents."""
        if not self.has_given_control:
            return "drawn"
        return "other-kind" if self.other_kind else "given"

    def inputs(self, context: "AuditContext", *, has_reference: bool = False) -> Inputs:
        """Return what the probes receive."""
        return Inputs(
            windows=self.selection.windows,
            max_edit_share=self.suite.extraction.max_edit_share,
            seed=self.seed,
            tiny_margin=self.tiny_margin,
            canaries=self.canaries,
            codec=context.codec,
            goldfish=context.goldfish,
            has_reference=has_reference,
            compare_masks=context.compare_masks,
        )

    def fingerprint(self) -> str:
        """Return the SHA-256 of documents, windows, probes and tasks; ranks compare it."""
        digest = hashlib.sha256()
        for window in self.selection.windows:
            digest.update(window.document.input_ids.tobytes())
            position = (window.start, window.prefix_tokens, window.continuation_tokens)
            digest.update(json.dumps([window.document.id, position]).encode())
        for canary in self.canaries:
            digest.update(canary.document.input_ids.tobytes())
        settings = [self.suite.describe_probes(), self.seed, self.tally, self.tiny_margin]
        digest.update(json.dumps([*settings, [task.fingerprint for task in self.tasks]]).encode())
        return digest.hexdigest()

    def check_same(self, peers: "Runtime") -> None:
        """Check that every rank has this plan; ranks with different plans would wait forever.

        Raises:
            DataError: names the ranks whose plan differs from that of rank 0.
        """
        prints = peers.gather_objects(self.fingerprint())
        if others := [str(rank) for rank, text in enumerate(prints) if text != prints[0]]:
            raise DataError(
                f"'audit': rank {', '.join(others)} read other documents or settings than rank 0. "
                "Give all ranks the same files and versions"
            )
