"""Audits the forms in which a model may be shipped, on the documents of its audit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memguard.audit.context import AuditContext
from memguard.audit.extraction import TINY_MARGINS
from memguard.audit.requests import Inputs
from memguard.audit.suite import Suite
from memguard.audit.variants import (
    ComparedVariants,
    HeldoutPiece,
    HeldoutTexts,
    compare_variants,
    measure_variant,
)
from memguard.config import AuditConfig
from memguard.data.corpus import Corpus, load_corpus
from memguard.hf.variants import VariantForm
from memguard.runtime import Console
from memguard.train.heldout import choose_heldout, cut_pieces
from memguard.workflows.audit_inputs import AuditTarget
from memguard.workflows.audit_request import AuditRequest, check_variants
from memguard.workflows.audited_model import DTYPES, LazyModel
from memguard.workflows.setup import DistributedContext


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantPlan:
    """The variants of an audit, and the documents on which their loss is measured."""

    forms: Sequence[VariantForm]
    heldout: HeldoutTexts
    settings: AuditConfig
    distributed: DistributedContext

    def measure(
        self,
        target: AuditTarget,
        weights_sha256: str | None,
        suite: Suite,
        context: AuditContext,
        console: Console,
    ) -> ComparedVariants:
        """Score the variants one after the other; return them, their rows and columns.

        Cached scores are not measured again.

        Args:
            target: of the audit.
            weights_sha256: hash of the audited model; None disables the cache.
            suite: of the audit.
            context: of the audit.
            console: shows which variant is scored.
        """
        assert isinstance(target.model, str), "checked: variants are of a folder or hub id"
        selection = target.select(self.settings)
        inputs = Inputs(
            windows=selection.windows,
            max_edit_share=suite.extraction.max_edit_share,
            seed=target.seed,
            tiny_margin=TINY_MARGINS[self.settings.dtype],
            codec=context.codec,
        )
        results = []
        for form in self.forms:
            console.info(f"audit: variant {form.name}: {form.describe()}")
            model = LazyModel(
                target.model,
                base=target.adapter_base,
                weights_sha256=weights_sha256,
                settings=self.settings,
                attn=target.attn,
                distributed=self.distributed,
                form=None if form.is_audited(target.model, base=target.adapter_base) else form,
            )
            results.append(
                measure_variant(
                    form.name,
                    form.describe(),
                    model,
                    inputs,
                    self.heldout,
                    suite=suite,
                    context=context,
                )
            )
        return compare_variants(results, inputs, selection.buckets, self.heldout, suite=suite)


def plan_variants(
    request: AuditRequest,
    settings: AuditConfig,
    target: AuditTarget,
    distributed: DistributedContext,
) -> VariantPlan | None:
    """Return the variants of a request; None if it has none.

    Weights are rounded to the precision of the run that trained them. The loss is measured on the
    held-out documents of a run, cut as in training; of another model on the audited parts of its
    nonmembers.

    Raises:
        ConfigError: see `check_variants`.
    """
    num_processes = distributed.runtime.world_size
    names = check_variants(request.variants, request.audited, settings, num_processes)
    if not names:
        return None
    run, config = request.run, request.run_config
    if run is not None and config is not None:
        precision = "bf16" if config.train.precision == "bf16" else "fp32"
        heldout = _list_heldout(load_corpus(run), config.data.seq_len)
    else:
        precision = settings.dtype
        heldout = _list_nonmembers(target)
    return VariantPlan(
        forms=[
            VariantForm(name=name, stored=DTYPES[precision], dtype=DTYPES[settings.dtype])
            for name in names
        ],
        heldout=heldout,
        settings=settings,
        distributed=distributed,
    )


def _list_heldout(corpus: Corpus, seq_len: int) -> HeldoutTexts:
    bucket, documents = choose_heldout(corpus)
    pieces = [
        HeldoutPiece(document=index, input_ids=np.asarray(ids), supervised=np.asarray(supervised))
        for index, ids, supervised in cut_pieces(corpus, documents, seq_len)
        if supervised[1:].any()
    ]
    return HeldoutTexts(bucket=bucket, pieces=pieces)


def _list_nonmembers(target: AuditTarget) -> HeldoutTexts:
    pieces = [
        HeldoutPiece(document=index, input_ids=d.input_ids, supervised=d.supervised)
        for index, d in enumerate(target.documents)
        if d.role == "control" and d.supervised[1:].any()
    ]
    return HeldoutTexts(bucket="nonmembers", pieces=pieces)
