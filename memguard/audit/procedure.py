"""One audit: documents in, report and scores out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memguard.audit import attacked, writing
from memguard.audit.banners import Tally
from memguard.audit.cache import RecordCache, compute_fingerprint, compute_key
from memguard.audit.canary_scores import SECRET, AuditCanary, score_canaries
from memguard.audit.decoding import Decoder
from memguard.audit.document_scores import DocumentScores
from memguard.audit.extraction import AuditDocument, Window
from memguard.audit.measures import ProbeTable
from memguard.audit.membership_scores import MEMBERSHIP_SCORES
from memguard.audit.numbers import Alone, Numbers, Peers, Shelf, collect_numbers
from memguard.audit.one_pass import OnePass
from memguard.audit.own_passes import (
    Codec,
    choose_shots,
    compare_passes,
    plan_lowercase,
    plan_plain,
    plan_recall,
)
from memguard.audit.passages import Passage
from memguard.audit.scoring import Scorer
from memguard.audit.selection import Selection, choose_sample, select_windows
from memguard.audit.suite import Suite
from memguard.audit.summary import Evidence, Summary, summarise
from memguard.mitigation import Goldfish
from memguard.records import AttackedBucket, CanaryScores, DocumentScore, MaskChange

Stage = str
"""What is being asked, for people: ``model``, ``base model``, ``canaries``, ..."""
OnProgress = Callable[[Stage, int, int], None]
"""Called with the stage, the documents done and all documents."""


CompareMasks = Callable[[Sequence[str], Sequence[tuple[str, str]]], list[MaskChange]]
"""Given texts and near-duplicate pairs, says what a copy does to the mitigation's mask."""


class AuditedModel(Protocol):
    """A model that is loaded when it is first asked, and freed when it has answered."""

    @property
    def identity(self) -> str | None:
        """Everything its numbers depend on, as one string; None where that is not known."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Positions it has; None where it states none."""
        ...

    def scorer(self) -> Scorer:
        """Return who answers; the same one until it is freed."""
        ...

    def decoder(self) -> Decoder:
        """Return who writes on, likewise."""
        ...

    def free(self) -> None:
        """Give its memory back."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOutcome:
    """What one audit found; identities, method and environment are the caller's to add."""

    summary: Summary
    scores: Sequence[DocumentScore]
    """In the order of the documents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workshop:
    """What an audit works with beside models and documents."""

    codec: Codec | None = None
    """The tokenizer; scores that need the text are missing without it."""
    cache: RecordCache | None = None
    peers: Peers = field(default_factory=Alone)
    on_progress: OnProgress | None = None
    compare_masks: CompareMasks | None = None
    goldfish: Goldfish | None = None
    """That of the training, which an attacker may know; None where it dropped no labels."""
    num_tightened: int = 0
    """Documents of which a risk budget dropped more labels than it, while they were trained."""


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
    try:
        ours = _ask(model, one_pass, windows, shop, "model")
        ours_C = _ask_canaries(model, canaries, suite, tiny_margin, shop)
        own = _ask_own_passes(model, reference is not None, selection, suite, seed, shop)
        ours_W = _ask_to_write(model, ours, windows, suite, seed, shop, "writes on")
        attacks = _attack(model, selection, suite, seed, shop)
    finally:
        model.free()
    theirs = theirs_C = theirs_W = None
    if base is not None:
        try:
            theirs = _ask(base, one_pass, windows, shop, "base model")
            theirs_C = _ask_canaries(base, canaries, suite, tiny_margin, shop)
            theirs_W = _ask_to_write(
                base, theirs, windows, suite, seed, shop, "base model writes on"
            )
        finally:
            base.free()
    if reference is not None and "reference" in _own_scores(suite):
        try:
            limit = reference.max_tokens
            plans = [plan_plain(window, max_tokens=limit) for window in windows]
            own["reference"] = _ask_means(reference, plans, shop, "reference model")
        finally:
            reference.free()
    plain = own.pop("plain", None)
    scores = DocumentScores(windows, one_pass, ours, theirs)
    summary = summarise(
        Evidence(
            windows=windows,
            outlines=selection.buckets,
            one_pass=one_pass,
            model=ours,
            base=theirs,
            scores=scores,
            own_membership={} if plain is None else compare_passes(plain, own),
            canaries=_score_canaries(canaries, suite, ours_C, theirs_C),
            mask_changes=_compare_masks(selection, suite, shop),
            written=_tabulate_written(suite, ours_W, theirs_W),
            attacks=attacks,
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


def _own_scores(suite: Suite) -> list[str]:
    scores = () if suite.membership is None else suite.membership.scores
    return [name for name in scores if MEMBERSHIP_SCORES[name].own_pass is not None]


def _shelf(model: AuditedModel, shop: Workshop, parameters: Mapping[str, object]) -> Shelf:
    identity = model.identity
    if identity is None:
        return Shelf(cache=None, fingerprint=None)
    fingerprint = compute_fingerprint({"model": identity, **parameters})
    return Shelf(cache=shop.cache, fingerprint=fingerprint)


def _at(stage: Stage, shop: Workshop) -> Callable[[int, int], None] | None:
    show = shop.on_progress
    return None if show is None else lambda done, total: show(stage, done, total)


def _ask(
    model: AuditedModel,
    one_pass: OnePass,
    windows: Sequence[Window],
    shop: Workshop,
    stage: Stage,
) -> Numbers:
    """Return the numbers of one pass over each document."""

    def measure(indices: Sequence[int]) -> NDArray[np.float64]:
        asked = [windows[index] for index in indices]
        passages = [passage for window in asked for passage in one_pass.plan(window)]
        return one_pass.measure(asked, model.scorer().score(passages, one_pass.asked))

    return collect_numbers(
        one_pass.names,
        [_key(window.document) for window in windows],
        [len(window.document.input_ids) for window in windows],
        measure,
        shelf=_shelf(model, shop, {"kind": "one pass", **one_pass.parameters}),
        peers=shop.peers,
        on_progress=_at(stage, shop),
    )


def _key(document: AuditDocument, *more: NDArray[np.int64]) -> bytes:
    form = np.frombuffer(document.format.encode(), dtype=np.uint8)
    return compute_key(document.input_ids, document.supervised, form, *more)


def _key_of_window(window: Window, *more: int) -> bytes:
    span = [window.start, window.prefix_tokens, window.document.first_position]
    return _key(window.document, np.array([*span, *more]))


def _ask_canaries(
    model: AuditedModel,
    canaries: Sequence[AuditCanary],
    suite: Suite,
    tiny_margin: float,
    shop: Workshop,
) -> Numbers | None:
    if suite.canaries is None or not canaries:
        return None
    windows = [SECRET.window(canary.document) for canary in canaries]
    known = [window for window in windows if window is not None]
    assert len(known) == len(windows), "a canary has a prompt and a secret"
    one_pass = OnePass(extraction=SECRET, tiny_margin=tiny_margin)
    return _ask(model, one_pass, known, replace(shop, on_progress=None), "canaries")


def _score_canaries(
    canaries: Sequence[AuditCanary], suite: Suite, ours: Numbers | None, theirs: Numbers | None
) -> CanaryScores | None:
    if suite.canaries is None or ours is None:
        return None
    return score_canaries(canaries, suite.canaries, ours, theirs)


def _ask_own_passes(
    model: AuditedModel,
    has_reference: bool,
    selection: Selection,
    suite: Suite,
    seed: int,
    shop: Workshop,
) -> dict[str, NDArray[np.float64]]:
    """Return mean log-probabilities of a token under passes of their own, and the plain one."""
    windows, asked = selection.windows, _own_scores(suite)
    found: dict[str, NDArray[np.float64]] = {}
    codec, membership = shop.codec, suite.membership
    if "lowercase" in asked and codec is not None:
        plans = [plan_lowercase(window, codec, max_tokens=model.max_tokens) for window in windows]
        found["lowercase"] = _ask_means(model, plans, shop, "lower case")
    if "recall" in asked and membership is not None:
        shots = choose_shots(windows, count=membership.recall_documents, seed=seed)
        before = [windows[index] for index in shots]
        plans = [
            None
            if index in set(shots)
            else plan_recall(window, before, max_tokens=model.max_tokens)
            for index, window in enumerate(windows)
        ]
        found["recall"] = _ask_means(model, plans, shop, "recall")
    if found or (has_reference and "reference" in asked):
        plain = [plan_plain(window, max_tokens=model.max_tokens) for window in windows]
        found["plain"] = _ask_means(model, plain, shop, "plain")
    return found


def _ask_means(
    model: AuditedModel, plans: Sequence[Passage | None], shop: Workshop, stage: Stage
) -> NDArray[np.float64]:
    """Return the mean log-probability of the scored tokens of each passage; NaN without one."""
    there = [index for index, plan in enumerate(plans) if plan is not None]
    known = [plan for plan in plans if plan is not None]

    def measure(indices: Sequence[int]) -> list[list[float]]:
        results = model.scorer().score([known[index] for index in indices])
        return [[float(result.logprob.mean(dtype=np.float64))] for result in results]

    keys = [compute_key(plan.input_ids, np.array([plan.first_label])) for plan in known]
    numbers = collect_numbers(
        ("mean_logprob",),
        keys,
        [len(plan.input_ids) for plan in known],
        measure,
        shelf=_shelf(model, shop, {"kind": "mean log-probability", "version": 1}),
        peers=shop.peers,
        on_progress=_at(stage, shop),
    )
    means = np.full(len(plans), np.nan)
    means[there] = numbers["mean_logprob"]
    return means


def _ask_to_write(
    model: AuditedModel,
    one_pass: Numbers,
    windows: Sequence[Window],
    suite: Suite,
    seed: int,
    shop: Workshop,
    stage: Stage,
) -> Numbers | None:
    """Return how near what the model writes is, of a sample; NaN for the others."""
    probe = suite.generation
    if probe is None:
        return None
    names = writing.name_numbers(probe)
    chosen = choose_sample(windows, probe.max_documents_per_bucket, seed=seed, purpose="written on")

    def measure(indices: Sequence[int]) -> list[list[float]]:
        asked = [chosen[index] for index in indices]
        part = Numbers(names=one_pass.names, rows=one_pass.rows[asked])
        return writing.write_on(
            probe,
            model.decoder(),
            [windows[index] for index in asked],
            part,
            seed=seed,
            progress=lambda how: _at(f"{stage} {how}", shop),
        )

    found = collect_numbers(
        names,
        [_key_of_window(windows[index]) for index in chosen],
        [len(windows[index].input_ids) for index in chosen],
        measure,
        shelf=_shelf(
            model, shop, {"kind": "written", "seed": seed, "probe": probe.model_dump(mode="json")}
        ),
        peers=shop.peers,
    )
    rows = np.full((len(windows), len(names)), np.nan)
    rows[chosen] = found.rows
    return Numbers(names=names, rows=rows)


def _tabulate_written(
    suite: Suite, ours: Numbers | None, theirs: Numbers | None
) -> list[ProbeTable]:
    if suite.generation is None or ours is None:
        return []
    return writing.tabulate(suite.generation, ours, theirs)


def _attack(
    model: AuditedModel, selection: Selection, suite: Suite, seed: int, shop: Workshop
) -> list[AttackedBucket]:
    """Return what attacks get of a sample of each bucket."""
    probe, windows, goldfish = suite.attacks, selection.windows, shop.goldfish
    if probe is None:
        return []
    names = attacked.name_numbers(goldfish)
    chosen = choose_sample(windows, probe.max_documents_per_bucket, seed=seed, purpose="attacked")

    def measure(indices: Sequence[int]) -> list[list[float]]:
        return attacked.attack(
            probe,
            model.decoder(),
            model.scorer(),
            [windows[chosen[index]] for index in indices],
            goldfish,
            seed=seed,
            progress=lambda how: _at(f"attack by {how}", shop),
        )

    known = None
    if goldfish is not None:
        known = [goldfish.config.model_dump(mode="json"), goldfish.special_ids]
    found = collect_numbers(
        names,
        [_key_of_window(windows[index], windows[index].document.dose) for index in chosen],
        [len(windows[index].input_ids) for index in chosen],
        measure,
        shelf=_shelf(
            model,
            shop,
            {
                "kind": "attacked",
                "seed": seed,
                "mask": known,
                "probe": {"version": probe.VERSION, **probe.model_dump(mode="json")},
            },
        ),
        peers=shop.peers,
    )
    rows = np.full((len(windows), len(names)), np.nan)
    rows[chosen] = found.rows
    numbers = Numbers(names=names, rows=rows)
    return attacked.tabulate(
        probe, windows, numbers, selection.buckets, goldfish, num_tightened=shop.num_tightened
    )


def _compare_masks(selection: Selection, suite: Suite, shop: Workshop) -> list[MaskChange]:
    probe = suite.mask_consistency
    if probe is None or shop.compare_masks is None or shop.codec is None:
        return []
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
    return shop.compare_masks(texts, copies)
