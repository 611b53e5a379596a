"""One audit: documents in, report and scores out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from memguard.audit import attacked, writing
from memguard.audit.asking import Questions, list_own_passes
from memguard.audit.banners import Tally
from memguard.audit.canary_scores import AuditCanary, score_canaries
from memguard.audit.document_scores import DocumentScores
from memguard.audit.extraction import AuditDocument
from memguard.audit.measures import ProbeTable
from memguard.audit.membership_scores import MEMBERSHIP_SCORES
from memguard.audit.near_verbatim import NearVerbatim
from memguard.audit.numbers import Numbers
from memguard.audit.one_pass import OnePass
from memguard.audit.own_passes import Codec, compare_passes, plan_plain
from memguard.audit.parts import WhichWindow, describe_cut
from memguard.audit.selection import Selection, select_windows
from memguard.audit.suite import Suite
from memguard.audit.summary import Evidence, Summary, summarise
from memguard.audit.workshop import AuditedModel, Workshop
from memguard.records import AttackedBucket, CanaryScores, DocumentScore, MaskChange


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOutcome:
    """What one audit found; identities, method and environment are the caller's to add."""

    summary: Summary
    scores: Sequence[DocumentScore]
    """In the order of the documents."""


def run_audit(
    *,
    documents: Sequence[AuditDocument],
    model: AuditedModel,
    base: AuditedModel | None = None,
    reference: AuditedModel | None = None,
    canaries: Sequence[AuditCanary] = (),
    suite: Suite,
    tally: Tally,
    tiny_margin: float,
    seed: int,
    window: WhichWindow = "last",
    min_documents: int = 5,
    max_documents_per_bucket: int | None = None,
    workshop: Workshop | None = None,
) -> AuditOutcome:
    """Score the documents and say what that shows.

    The documents are checked before a model is asked, and one model is asked after the other: there
    is one in memory at a time.

    Args:
        documents: trained, control and, if wanted, background documents.
        model: the model under audit.
        base: the model before training; None leaves its columns null.
        reference: another model of the same vocabulary, for membership scores.
        canaries: random secrets, in an order that does not depend on their coins.
        suite: the probes, with their final settings.
        tally: state of the counts of repetitions.
        tiny_margin: margin (logits) below which a verdict may flip, see `TINY_MARGINS`.
        seed: decides the sample of each bucket, and whatever else is drawn.
        window: which part of long documents these hold, for the report.
        min_documents: trained documents that must be long enough (documents).
        max_documents_per_bucket: size of each bucket's sample; None takes all.
        workshop: tokenizer, cache, ranks, progress.

    Raises:
        DataError: too few trained documents are long enough, or an id given twice.
        ModelError: tokenizer or length do not fit the model, or its logits are not finite.
    """
    shop = workshop or Workshop()
    selection = select_windows(
        documents,
        suite.extraction,
        seed=seed,
        min_documents=min_documents,
        max_documents_per_bucket=max_documents_per_bucket,
    )
    windows = selection.windows
    one_pass = plan_one_pass(suite, tiny_margin=tiny_margin, codec=shop.codec)
    ask = partial(Questions, suite=suite, tiny_margin=tiny_margin, seed=seed, shop=shop)
    try:
        about = ask(model=model)
        ours = about.measure_documents(one_pass, windows, "model")
        ours_C = about.measure_canaries(canaries)
        own = about.measure_own_passes(windows, has_reference=reference is not None)
        ours_G = about.measure_near_verbatim(ours, windows, "near-verbatim")
        ours_W = about.measure_writing(ours, windows, "writes on")
        attacks = about.measure_attacks(windows)
    finally:
        model.free()
    theirs = theirs_C = theirs_G = theirs_W = None
    if base is not None:
        try:
            about = ask(model=base)
            theirs = about.measure_documents(one_pass, windows, "base model")
            theirs_C = about.measure_canaries(canaries)
            theirs_G = about.measure_near_verbatim(theirs, windows, "base model, near-verbatim")
            theirs_W = about.measure_writing(theirs, windows, "base model writes on")
        finally:
            base.free()
    if reference is not None and "reference" in list_own_passes(suite):
        try:
            plans = [plan_plain(window, max_tokens=reference.max_tokens) for window in windows]
            own["reference"] = ask(model=reference).measure_means(plans, "reference model")
        finally:
            reference.free()
    plain = own.pop("plain", None)
    mask_changes, num_mask_texts = _compare_masks(selection, suite, shop)
    near = ours_G if isinstance(ours_G, NearVerbatim) else None
    base_near = theirs_G if isinstance(theirs_G, NearVerbatim) else None
    scores = DocumentScores(
        windows, one_pass, ours, theirs, near_verbatim=near, base_near_verbatim=base_near
    )
    summary = summarise(
        Evidence(
            windows=windows,
            outlines=selection.buckets,
            one_pass=one_pass,
            model=ours,
            base=theirs,
            near_verbatim=ours_G,
            base_near_verbatim=theirs_G,
            scores=scores,
            own_membership={} if plain is None else compare_passes(plain, own),
            canaries=_score_canaries(canaries, suite, ours_C, theirs_C),
            mask_changes=mask_changes,
            num_mask_texts=num_mask_texts,
            why_not={**_explain_canaries(canaries), **shop.why_not},
            written=_tabulate_written(suite, ours_W, theirs_W),
            attacks=_tabulate_attacks(selection, suite, attacks, shop),
            cut=describe_cut(documents, windows, window=window),
        ),
        suite=suite,
        tiny_margin=tiny_margin,
        tally=tally,
        seed=seed,
    )
    return AuditOutcome(summary=summary, scores=scores)


def plan_one_pass(suite: Suite, *, tiny_margin: float, codec: Codec | None) -> OnePass:
    """Return what one pass over each document is asked for."""
    membership = suite.membership
    return OnePass(
        extraction=suite.extraction,
        tiny_margin=tiny_margin,
        schemes=() if suite.sampling is None else suite.sampling.schemes,
        cells=() if suite.grid is None else suite.grid.cells,
        membership=()
        if membership is None
        else tuple(name for name in membership.scores if MEMBERSHIP_SCORES[name].own_pass is None),
        decode=None if codec is None else codec.decode,
    )


def _explain_canaries(canaries: Sequence[AuditCanary]) -> dict[str, str]:
    """Say why there would be no score of them: it takes trained ones and references."""
    if not canaries:
        return {"canaries": "no canaries were given"}
    trained = "all" if canaries[0].was_trained else "none"
    return {"canaries": f"the coin chose {trained} of the {len(canaries)} canaries for training"}


def _score_canaries(
    canaries: Sequence[AuditCanary], suite: Suite, ours: Numbers | None, theirs: Numbers | None
) -> CanaryScores | None:
    if suite.canaries is None or ours is None:
        return None
    return score_canaries(canaries, suite.canaries, ours, theirs)


def _tabulate_written(
    suite: Suite, ours: Numbers | None, theirs: Numbers | None
) -> list[ProbeTable]:
    if suite.generation is None or ours is None:
        return []
    return writing.tabulate(suite.generation, ours, theirs)


def _tabulate_attacks(
    selection: Selection, suite: Suite, numbers: Numbers | None, shop: Workshop
) -> list[AttackedBucket]:
    if suite.attacks is None or numbers is None:
        return []
    return attacked.tabulate(
        suite.attacks,
        selection.windows,
        numbers,
        selection.buckets,
        shop.goldfish,
        num_tightened=shop.num_tightened,
    )


def _compare_masks(
    selection: Selection, suite: Suite, shop: Workshop
) -> tuple[list[MaskChange], int]:
    """Return what copies do to the mask, and of how many texts that is known."""
    probe = suite.mask_consistency
    if probe is None or shop.compare_masks is None or shop.codec is None:
        return [], 0
    decode = shop.codec.decode
    trained = [
        window.document
        for window in selection.windows
        if window.document.role == "trained" and window.document.format == "text"
    ]
    texts = [decode(document.input_ids) for document in trained[: probe.max_passages]]
    clusters: dict[int, list[AuditDocument]] = {}
    for document in trained:
        if document.cluster is not None:
            clusters.setdefault(document.cluster, []).append(document)
    pairs = [(each[0], each[1]) for each in clusters.values() if len(each) > 1]
    copies = [
        (decode(one.input_ids), decode(other.input_ids))
        for one, other in pairs[: probe.max_passages]
    ]
    if not texts:
        return [], 0
    return shop.compare_masks(texts, copies), len(texts)
