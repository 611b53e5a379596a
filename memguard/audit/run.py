"""One audit: documents in, report and scores out; one model is in memory at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from memguard.audit import attacks, generation
from memguard.audit.canaries import AuditCanary, score_canaries
from memguard.audit.context import AuditContext, AuditedModel
from memguard.audit.document_scores import DocumentScores, build_scores
from memguard.audit.extraction import AuditDocument, Window
from memguard.audit.membership_scores import MEMBERSHIP_SCORES, Codec, compare_passes, plan_plain
from memguard.audit.model_probes import ModelProbes, list_own_passes
from memguard.audit.parts import WhichWindow, find_cut
from memguard.audit.selection import select_windows
from memguard.audit.suite import (
    AttackProbe,
    CanaryProbe,
    GenerationProbe,
    GridProbe,
    MaskConsistencyProbe,
    MembershipProbe,
    SamplingProbe,
    Suite,
)
from memguard.audit.summary import Evidence, summarise
from memguard.audit.teacher_forcing import TeacherForcedScores
from memguard.audit.warnings import Tally
from memguard.records import AuditResults, MaskChange


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOutcome:
    """Results of an audit; the caller adds identities, method and environment."""

    summary: AuditResults
    scores: DocumentScores
    """In the order of the documents."""
    text_hmacs: Sequence[str | None]
    """Keyed hashes of their texts."""


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
    is_other_kind: bool = False,
    window: WhichWindow = "last",
    min_documents: int = 5,
    max_documents_per_bucket: int | None = None,
    context: AuditContext | None = None,
) -> AuditOutcome:
    """Run the probes of a suite and summarise their results.

    The documents are checked before a model is loaded. Models are loaded one after the other, so
    that only one is in memory at a time.

    Args:
        documents: trained, control and, optionally, background documents.
        model: the audited model.
        base: the model before training; None leaves its columns null.
        reference: another model with the same vocabulary, for membership scores.
        canaries: random secrets, in an order that does not depend on whether they were trained.
        suite: the probes, with their final settings.
        tally: state of the counts of repetitions.
        tiny_margin: margin (logits) below which a result may change, see `TINY_MARGINS`.
        seed: seed of the sample of each bucket and of all other random choices.
        is_other_kind: whether the control was given and is another kind of text.
        window: which part of long documents was chosen, for the report.
        min_documents: minimum number of trained documents that are long enough (documents).
        max_documents_per_bucket: size of each bucket's sample; None takes all.
        context: tokenizer, cache, ranks, progress.

    Raises:
        DataError: too few trained documents are long enough, or an id is duplicated.
        ModelError: tokenizer or length do not fit the model, or its logits are not finite.
    """
    context = context or AuditContext()
    selection = select_windows(
        documents,
        suite.extraction,
        seed=seed,
        min_documents=min_documents,
        max_documents_per_bucket=max_documents_per_bucket,
    )
    windows = selection.windows
    teacher_forced = plan_one_pass(suite, tiny_margin=tiny_margin, codec=context.codec)
    probe = partial(ModelProbes, suite=suite, tiny_margin=tiny_margin, seed=seed, context=context)
    with probe(model=model) as probes:
        ours = probes.measure(teacher_forced, windows, canaries)
        own = probes.measure_own_passes(windows, has_reference=reference is not None)
        attacked = probes.measure_attacks(windows)
    theirs = None
    if base is not None:
        with probe(model=base) as probes:
            theirs = probes.measure(teacher_forced, windows, canaries, is_base=True)
    if reference is not None and "reference" in list_own_passes(suite):
        with probe(model=reference) as probes:
            plans = [plan_plain(window, max_tokens=reference.max_tokens) for window in windows]
            own["reference"] = probes.measure_means(plans, "reference model")
    plain = own.pop("plain", None)
    mask_changes, num_mask_texts = _compare_masks(windows, suite, context)
    scores = build_scores(windows, teacher_forced, ours, theirs)
    canary_scores, written, attack_rows = None, [], []
    if (canary_probe := suite.find(CanaryProbe)) is not None and ours.canaries is not None:
        canary_scores = score_canaries(
            canaries, canary_probe, ours.canaries, theirs.canaries if theirs else None
        )
    if (generation_probe := suite.find(GenerationProbe)) is not None and ours.written is not None:
        written = generation.tabulate(
            generation_probe,
            ours.written,
            theirs.written if theirs else None,
            suite.extraction.continuation_tokens,
        )
    if (attack_probe := suite.find(AttackProbe)) is not None and attacked is not None:
        attack_rows = attacks.tabulate(
            attack_probe,
            windows,
            attacked,
            selection.buckets,
            context.goldfish,
            num_tightened=context.num_tightened,
        )
    summary = summarise(
        Evidence(
            windows=windows,
            outlines=selection.buckets,
            teacher_forced=teacher_forced,
            model=ours,
            base=theirs,
            scores=scores,
            own_membership={} if plain is None else compare_passes(plain, own),
            canaries=canary_scores,
            mask_changes=mask_changes,
            num_mask_texts=num_mask_texts,
            why_not={**_explain_canaries(canaries), **context.why_not},
            written=written,
            attacks=attack_rows,
            attacked_N=None if attacked is None else attacks.find_extracted(attacked),
            is_other_kind=is_other_kind,
            cut=find_cut(documents, windows, window=window),
        ),
        suite=suite,
        tiny_margin=tiny_margin,
        tally=tally,
        seed=seed,
    )
    return AuditOutcome(
        summary=summary,
        scores=scores,
        text_hmacs=[window.document.text_hmac for window in windows],
    )


def plan_one_pass(suite: Suite, *, tiny_margin: float, codec: Codec | None) -> TeacherForcedScores:
    """Return the plan of the single pass over each document."""
    membership, sampling = suite.find(MembershipProbe), suite.find(SamplingProbe)
    grid = suite.find(GridProbe)
    names = () if membership is None else membership.scores
    return TeacherForcedScores(
        extraction=suite.extraction,
        tiny_margin=tiny_margin,
        schemes=() if sampling is None else sampling.schemes,
        cells=() if grid is None else grid.cells,
        membership=tuple(name for name in names if MEMBERSHIP_SCORES[name].own_pass is None),
        decode=None if codec is None else codec.decode,
    )


def _explain_canaries(canaries: Sequence[AuditCanary]) -> dict[str, str]:
    """Return the reason for missing scores: both trained ones and references are needed."""
    if not canaries:
        return {"canaries": "no canaries were given"}
    trained = "all" if canaries[0].was_trained else "none"
    return {"canaries": f"{trained} of the {len(canaries)} canaries were selected for training"}


def _compare_masks(
    windows: Sequence[Window], suite: Suite, context: AuditContext
) -> tuple[list[MaskChange], int]:
    """Return the changes of the mask in copies, and the number of texts that were compared."""
    probe = suite.find(MaskConsistencyProbe)
    if probe is None or context.compare_masks is None or context.codec is None:
        return [], 0
    decode = context.codec.decode
    trained = [
        window.document
        for window in windows
        if window.document.role == "trained" and window.document.format == "text"
    ]
    texts = [decode(document.input_ids) for document in trained[: probe.max_passages]]
    clusters: dict[int, list[AuditDocument]] = {}
    for document in trained:
        if document.cluster is not None:
            clusters.setdefault(document.cluster, []).append(document)
    pairs = [(copies[0], copies[1]) for copies in clusters.values() if len(copies) > 1]
    copies = [
        (decode(one.input_ids), decode(other.input_ids))
        for one, other in pairs[: probe.max_passages]
    ]
    if not texts:
        return [], 0
    return context.compare_masks(texts, copies), len(texts)
