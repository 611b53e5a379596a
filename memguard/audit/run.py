"""One audit: documents in, report and scores out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit import attacks, generation, near_verbatim
from memguard.audit.cache import Numbers, Shelf, collect_numbers, compute_fingerprint, compute_key
from memguard.audit.canaries import SECRET, AuditCanary, score_canaries
from memguard.audit.context import AuditedModel, Stage, Workshop
from memguard.audit.document_scores import DocumentScores
from memguard.audit.extraction import AuditDocument, Window
from memguard.audit.membership_scores import (
    MEMBERSHIP_SCORES,
    Codec,
    choose_shots,
    compare_passes,
    plan_lowercase,
    plan_plain,
    plan_recall,
)
from memguard.audit.near_verbatim import (
    NearVerbatim,
    NotGenerated,
    find_near_verbatim,
)
from memguard.audit.parts import WhichWindow, describe_cut
from memguard.audit.passages import Passage
from memguard.audit.selection import Selection, choose_sample, select_windows
from memguard.audit.suite import Suite
from memguard.audit.summary import Evidence, Summary, summarise
from memguard.audit.tables import ProbeTable
from memguard.audit.teacher_forcing import OnePass
from memguard.audit.warnings import Tally
from memguard.records import AttackedBucket, CanaryScores, DocumentScore, MaskChange

# Each kind of question that a model is asked, and its answers as numbers.


class _Obstacle(Exception):
    """Why nothing is generated; the same on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """What a suite asks of one model; what was asked before comes from the cache."""

    model: AuditedModel
    suite: Suite
    tiny_margin: float
    """Logits, see `TINY_MARGINS`."""
    seed: int
    shop: Workshop

    def measure_documents(
        self, one_pass: OnePass, windows: Sequence[Window], stage: Stage
    ) -> Numbers:
        """Return the numbers of one pass over each document."""

        def measure(indices: Sequence[int]) -> NDArray[np.float64]:
            asked = [windows[index] for index in indices]
            passages = [passage for window in asked for passage in one_pass.plan(window)]
            return one_pass.measure(asked, self.model.scorer().score(passages, one_pass.asked))

        return collect_numbers(
            one_pass.names,
            [_key(window.document) for window in windows],
            [len(window.document.input_ids) for window in windows],
            measure,
            shelf=self._shelf({"kind": "one pass", **one_pass.parameters}),
            peers=self.shop.peers,
            on_progress=self._at(stage),
        )

    def measure_canaries(self, canaries: Sequence[AuditCanary]) -> Numbers | None:
        """Return the numbers of each secret after its prompt; None where none are asked for."""
        if self.suite.canaries is None or not canaries:
            return None
        windows = [SECRET.window(canary.document) for canary in canaries]
        known = [window for window in windows if window is not None]
        assert len(known) == len(windows), "a canary has a prompt and a secret"
        one_pass = OnePass(extraction=SECRET, tiny_margin=self.tiny_margin)
        silent = replace(self, shop=replace(self.shop, on_progress=None))
        return silent.measure_documents(one_pass, known, "canaries")

    def measure_own_passes(
        self, windows: Sequence[Window], *, has_reference: bool
    ) -> dict[str, NDArray[np.float64]]:
        """Return mean log-probabilities of a token under passes of their own, and the plain one."""
        asked, limit = list_own_passes(self.suite), self.model.max_tokens
        found: dict[str, NDArray[np.float64]] = {}
        codec, membership = self.shop.codec, self.suite.membership
        if "lowercase" in asked and codec is not None:
            plans = [plan_lowercase(window, codec, max_tokens=limit) for window in windows]
            found["lowercase"] = self.measure_means(plans, "lower case")
        if "recall" in asked and membership is not None:
            shots = choose_shots(windows, count=membership.recall_documents, seed=self.seed)
            before = [windows[index] for index in shots]
            plans = [
                None if index in set(shots) else plan_recall(window, before, max_tokens=limit)
                for index, window in enumerate(windows)
            ]
            found["recall"] = self.measure_means(plans, "recall")
        if found or (has_reference and "reference" in asked):
            plain = [plan_plain(window, max_tokens=limit) for window in windows]
            found["plain"] = self.measure_means(plain, "plain")
        return found

    def measure_means(self, plans: Sequence[Passage | None], stage: Stage) -> NDArray[np.float64]:
        """Return the mean log-probability of the scored tokens of each passage; NaN without one."""
        there = [index for index, plan in enumerate(plans) if plan is not None]
        known = [plan for plan in plans if plan is not None]

        def measure(indices: Sequence[int]) -> list[list[float]]:
            results = self.model.scorer().score([known[index] for index in indices])
            return [[float(result.logprob.mean(dtype=np.float64))] for result in results]

        numbers = collect_numbers(
            ("mean_logprob",),
            [compute_key(plan.input_ids, np.array([plan.first_label])) for plan in known],
            [len(plan.input_ids) for plan in known],
            measure,
            shelf=self._shelf({"kind": "mean log-probability", "version": 1}),
            peers=self.shop.peers,
            on_progress=self._at(stage),
        )
        means = np.full(len(plans), np.nan)
        means[there] = numbers["mean_logprob"]
        return means

    def measure_near_verbatim(
        self, one_pass: Numbers, windows: Sequence[Window], stage: Stage
    ) -> NearVerbatim | NotGenerated:
        """Return which documents greedy decoding gives back within a few edits, or why not."""
        probe = self.suite.extraction

        def generate(indices: Sequence[int]) -> Numbers:
            def measure(places: Sequence[int]) -> list[list[float]]:
                obstacle = self.model.decoder().find_obstacle()
                if obstacle is not None:
                    raise _Obstacle(obstacle)
                chosen = [indices[place] for place in places]
                return generation.generate_edits(
                    probe,
                    self.model.decoder(),
                    [windows[index] for index in chosen],
                    one_pass["first_divergence"][chosen].astype(int).tolist(),
                    self._at(stage),
                )

            return collect_numbers(
                near_verbatim.NAMES,
                [_key_of_window(windows[index]) for index in indices],
                [len(windows[index].input_ids) for index in indices],
                measure,
                shelf=self._shelf(
                    {"kind": "near-verbatim", "version": 1, "max_edit_share": probe.max_edit_share}
                ),
                peers=self.shop.peers,
            )

        try:
            return find_near_verbatim(probe, windows, one_pass, generate, seed=self.seed)
        except _Obstacle as obstacle:
            return NotGenerated(reason=str(obstacle))

    def measure_writing(
        self, one_pass: Numbers, windows: Sequence[Window], stage: Stage
    ) -> Numbers | None:
        """Return how near what the model writes is, of a sample; NaN for the others."""
        probe = self.suite.generation
        if probe is None:
            return None
        chosen = self._choose(windows, probe.max_documents_per_bucket, "written on")

        def measure(indices: Sequence[int]) -> list[list[float]]:
            asked = [chosen[index] for index in indices]
            part = Numbers(names=one_pass.names, rows=one_pass.rows[asked])
            return generation.write_on(
                probe,
                self.suite.extraction,
                self.model.decoder(),
                [windows[index] for index in asked],
                part,
                seed=self.seed,
                progress=lambda how: self._at(f"{stage} {how}"),
            )

        found = collect_numbers(
            generation.name_numbers(probe),
            [_key_of_window(windows[index]) for index in chosen],
            [len(windows[index].input_ids) for index in chosen],
            measure,
            shelf=self._shelf(
                {
                    "kind": "written",
                    "version": probe.VERSION,
                    "seed": self.seed,
                    "probe": probe.model_dump(mode="json"),
                    "max_edit_share": self.suite.extraction.max_edit_share,
                }
            ),
            peers=self.shop.peers,
        )
        return _spread(found, chosen, len(windows))

    def measure_attacks(self, windows: Sequence[Window]) -> Numbers | None:
        """Return what attacks get of a sample of each bucket; NaN for the others."""
        probe, goldfish = self.suite.attacks, self.shop.goldfish
        if probe is None:
            return None
        chosen = self._choose(windows, probe.max_documents_per_bucket, "attacked")

        def measure(indices: Sequence[int]) -> list[list[float]]:
            return attacks.attack(
                probe,
                self.model.decoder(),
                self.model.scorer(),
                [windows[chosen[index]] for index in indices],
                goldfish,
                seed=self.seed,
                progress=lambda how: self._at(f"attack by {how}"),
            )

        known = None
        if goldfish is not None:
            known = [goldfish.config.model_dump(mode="json"), goldfish.special_ids]
        found = collect_numbers(
            attacks.name_numbers(goldfish),
            [_key_of_window(windows[index], windows[index].document.dose) for index in chosen],
            [len(windows[index].input_ids) for index in chosen],
            measure,
            shelf=self._shelf(
                {
                    "kind": "attacked",
                    "seed": self.seed,
                    "mask": known,
                    "probe": {"version": probe.VERSION, **probe.model_dump(mode="json")},
                }
            ),
            peers=self.shop.peers,
        )
        return _spread(found, chosen, len(windows))

    def _choose(self, windows: Sequence[Window], count: int | None, purpose: str) -> list[int]:
        return choose_sample(windows, count, seed=self.seed, purpose=purpose)

    def _shelf(self, parameters: Mapping[str, object]) -> Shelf:
        identity = self.model.identity
        if identity is None:
            return Shelf(cache=None, fingerprint=None)
        fingerprint = compute_fingerprint({"model": identity, **parameters})
        return Shelf(cache=self.shop.cache, fingerprint=fingerprint)

    def _at(self, stage: Stage) -> Callable[[int, int], None] | None:
        show = self.shop.on_progress
        return None if show is None else lambda done, total: show(stage, done, total)


def list_own_passes(suite: Suite) -> list[str]:
    """Return the membership scores that need a pass of their own."""
    scores = () if suite.membership is None else suite.membership.scores
    return [name for name in scores if MEMBERSHIP_SCORES[name].own_pass is not None]


def _spread(found: Numbers, chosen: Sequence[int], count: int) -> Numbers:
    """Return a row for each of ``count`` documents, NaN for those that were not chosen."""
    rows = np.full((count, len(found.names)), np.nan)
    rows[chosen] = found.rows
    return Numbers(names=found.names, rows=rows)


def _key(document: AuditDocument, *more: NDArray[np.int64]) -> bytes:
    form = np.frombuffer(document.format.encode(), dtype=np.uint8)
    whole: list[NDArray[Any]] = []
    if document.whole_ids is not None:
        whole = [document.whole_ids, np.array([document.first_position])]
    return compute_key(document.input_ids, document.supervised, form, *more, *whole)


def _key_of_window(window: Window, *more: int) -> bytes:
    span = [window.start, window.prefix_tokens, window.document.first_position]
    return _key(window.document, np.array([*span, *more]))


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
        attacked = about.measure_attacks(windows)
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
            attacks=_tabulate_attacks(selection, suite, attacked, shop),
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
    return generation.tabulate(suite.generation, ours, theirs)


def _tabulate_attacks(
    selection: Selection, suite: Suite, numbers: Numbers | None, shop: Workshop
) -> list[AttackedBucket]:
    if suite.attacks is None or numbers is None:
        return []
    return attacks.tabulate(
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
