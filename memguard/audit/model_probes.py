"""Run the probes of a suite on one model; cached results are not measured again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memguard.audit import attacks, generation, near_verbatim
from memguard.audit.cache import (
    CacheSlot,
    ScoreMatrix,
    collect_scores,
    compute_fingerprint,
    compute_key,
)
from memguard.audit.canaries import SECRET, AuditCanary
from memguard.audit.context import AuditContext, AuditedModel, Stage
from memguard.audit.document_scores import ModelResults
from memguard.audit.extraction import AuditDocument, Window
from memguard.audit.generation import measure_edits
from memguard.audit.membership_scores import (
    MEMBERSHIP_SCORES,
    choose_shots,
    plan_lowercase,
    plan_plain,
    plan_recall,
)
from memguard.audit.near_verbatim import NearVerbatim, NotGenerated, find_near_verbatim
from memguard.audit.passages import Passage
from memguard.audit.selection import choose_sample
from memguard.audit.suite import (
    AttackProbe,
    CanaryProbe,
    GenerationProbe,
    MembershipProbe,
    Suite,
)
from memguard.audit.teacher_forcing import TeacherForcedScores


class _Obstacle(Exception):
    """Reason why nothing is generated; the same on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProbes:
    """Runs the probes of a suite on one model and frees it when the `with` block ends."""

    model: AuditedModel
    suite: Suite
    tiny_margin: float
    """Margin in logits, see `TINY_MARGINS`."""
    seed: int
    context: AuditContext

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.free()

    def measure(
        self,
        teacher_forced: TeacherForcedScores,
        windows: Sequence[Window],
        canaries: Sequence[AuditCanary],
        *,
        is_base: bool = False,
    ) -> ModelResults:
        """Run the probes that are run on the model and on its base model."""
        stages = ("model", "near-verbatim", "generating")
        if is_base:
            stages = ("base model", "base model: near-verbatim", "base model: generating")
        numbers = self.measure_documents(teacher_forced, windows, stages[0])
        return ModelResults(
            teacher_forced=numbers,
            canaries=self.measure_canaries(canaries),
            near_verbatim=self.measure_near_verbatim(numbers, windows, stages[1]),
            written=self.measure_writing(numbers, windows, stages[2]),
        )

    def measure_documents(
        self, teacher_forced: TeacherForcedScores, windows: Sequence[Window], stage: Stage | None
    ) -> ScoreMatrix:
        """Return the results of one pass over each document."""

        def measure(indices: Sequence[int]) -> ArrayLike:
            chosen = [windows[index] for index in indices]
            passages = [passage for window in chosen for passage in teacher_forced.plan(window)]
            return teacher_forced.measure(
                chosen, self.model.scorer().score(passages, teacher_forced.requested)
            )

        return self._collect(
            {"kind": "one pass", **teacher_forced.parameters},
            teacher_forced.names,
            [_key(window.document) for window in windows],
            [len(window.document.input_ids) for window in windows],
            measure,
            stage,
        )

    def measure_canaries(self, canaries: Sequence[AuditCanary]) -> ScoreMatrix | None:
        """Return the results for each secret after its prompt; None without secrets or probe."""
        if self.suite.find(CanaryProbe) is None or not canaries:
            return None
        windows = [SECRET.window(canary.document) for canary in canaries]
        secrets = [window for window in windows if window is not None]
        assert len(secrets) == len(windows), "a canary has a prompt and a secret"
        teacher_forced = TeacherForcedScores(extraction=SECRET, tiny_margin=self.tiny_margin)
        return self.measure_documents(teacher_forced, secrets, None)

    def measure_own_passes(
        self, windows: Sequence[Window], *, has_reference: bool
    ) -> dict[str, NDArray[np.float64]]:
        """Return mean log-probabilities of a token in the additional passes and the plain one."""
        names, limit = list_own_passes(self.suite), self.model.max_tokens
        means: dict[str, NDArray[np.float64]] = {}
        codec, membership = self.context.codec, self.suite.find(MembershipProbe)
        if "lowercase" in names and codec is not None:
            plans = [plan_lowercase(window, codec, max_tokens=limit) for window in windows]
            means["lowercase"] = self.measure_means(plans, "lower case")
        if "recall" in names and membership is not None:
            shots = choose_shots(windows, count=membership.recall_documents, seed=self.seed)
            before = [windows[index] for index in shots]
            plans = [
                None if index in set(shots) else plan_recall(window, before, max_tokens=limit)
                for index, window in enumerate(windows)
            ]
            means["recall"] = self.measure_means(plans, "recall")
        if means or (has_reference and "reference" in names):
            plain = [plan_plain(window, max_tokens=limit) for window in windows]
            means["plain"] = self.measure_means(plain, "plain")
        return means

    def measure_means(self, plans: Sequence[Passage | None], stage: Stage) -> NDArray[np.float64]:
        """Return the mean log-probability of the scored tokens of each passage, or NaN."""
        where = [index for index, plan in enumerate(plans) if plan is not None]
        passages = [plan for plan in plans if plan is not None]

        def measure(indices: Sequence[int]) -> ArrayLike:
            results = self.model.scorer().score([passages[index] for index in indices])
            return [float(result.logprob.mean(dtype=np.float64)) for result in results]

        numbers = self._collect(
            {"kind": "mean log-probability", "version": 1},
            ("mean_logprob",),
            [compute_key(plan.input_ids, np.array([plan.first_label])) for plan in passages],
            [len(plan.input_ids) for plan in passages],
            measure,
            stage,
        )
        return _spread(numbers, where, len(plans))["mean_logprob"]

    def measure_losses(
        self, texts: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]], stage: Stage
    ) -> ScoreMatrix:
        """Return the sum of losses of each text (nats), and the number of tokens with loss.

        Args:
            texts: token ids and which of them have loss; the first one never has.
            stage: name of the measurement.
        """

        def measure(indices: Sequence[int]) -> ArrayLike:
            passages = [
                Passage(input_ids=ids, first_label=1, first_choice=len(ids))
                for ids, _ in (texts[index] for index in indices)
            ]
            results = self.model.scorer().score(passages)
            rows = []
            for index, result in zip(indices, results, strict=True):
                supervised = texts[index][1][1:]
                logprob = result.logprob[supervised].astype(np.float64)
                rows.append([-float(logprob.sum()), float(supervised.sum())])
            return rows

        return self._collect(
            {"kind": "loss of a text", "version": 1},
            ("nll", "num_tokens"),
            [compute_key(ids, supervised) for ids, supervised in texts],
            [len(ids) for ids, _ in texts],
            measure,
            stage,
        )

    def measure_near_verbatim(
        self, teacher_forced: ScoreMatrix, windows: Sequence[Window], stage: Stage
    ) -> NearVerbatim | NotGenerated:
        """Return the documents that greedy decoding extracts within a few edits, or why not."""
        probe = self.suite.extraction

        def measure(chosen: Sequence[int]) -> ArrayLike:
            decoder, progress = self.model.decoder(), self._at(stage)
            obstacle = decoder.find_obstacle()
            if obstacle is not None:
                raise _Obstacle(obstacle)
            return measure_edits(probe, decoder, windows, teacher_forced, chosen, progress).rows

        parameters = {"kind": "near-verbatim", "version": 1, "max_edit_share": probe.max_edit_share}
        generate = partial(self._collect_windows, parameters, near_verbatim.NAMES, windows, measure)
        try:
            return find_near_verbatim(probe, windows, teacher_forced, generate, seed=self.seed)
        except _Obstacle as obstacle:
            return NotGenerated(reason=str(obstacle))

    def measure_writing(
        self, teacher_forced: ScoreMatrix, windows: Sequence[Window], stage: Stage
    ) -> ScoreMatrix | None:
        """Return the overlap of generated and true text of a sample; NaN for other documents."""
        probe = self.suite.find(GenerationProbe)
        if probe is None:
            return None

        def measure(chosen: Sequence[int]) -> ArrayLike:
            return generation.generate_continuations(
                probe,
                self.suite.extraction,
                self.model.decoder(),
                [windows[index] for index in chosen],
                ScoreMatrix(names=teacher_forced.names, rows=teacher_forced.rows[list(chosen)]),
                seed=self.seed,
                progress=lambda how: self._at(f"{stage} {how}"),
            )

        sample = choose_sample(
            windows, probe.max_documents_per_bucket, seed=self.seed, purpose="written on"
        )
        sampled = self._collect_windows(
            {
                "kind": "written",
                "version": probe.VERSION,
                "seed": self.seed,
                "probe": probe.model_dump(mode="json"),
                "max_edit_share": self.suite.extraction.max_edit_share,
            },
            generation.name_numbers(probe),
            windows,
            measure,
            sample,
        )
        return _spread(sampled, sample, len(windows))

    def measure_attacks(self, windows: Sequence[Window]) -> ScoreMatrix | None:
        """Return the results of the attacks on a sample of each bucket; NaN for other documents."""
        probe, goldfish = self.suite.find(AttackProbe), self.context.goldfish
        if probe is None:
            return None

        def measure(chosen: Sequence[int]) -> ArrayLike:
            return attacks.attack(
                probe,
                self.model.decoder(),
                self.model.scorer(),
                [windows[index] for index in chosen],
                goldfish,
                seed=self.seed,
                progress=lambda how: self._at(f"attack by {how}"),
            )

        mask = None
        if goldfish is not None:
            mask = [goldfish.config.model_dump(mode="json"), goldfish.special_ids]
        sample = choose_sample(
            windows, probe.max_documents_per_bucket, seed=self.seed, purpose="attacked"
        )
        attacked = self._collect_windows(
            {
                "kind": "attacked",
                "seed": self.seed,
                "mask": mask,
                "probe": {"version": probe.VERSION, **probe.model_dump(mode="json")},
            },
            attacks.name_numbers(goldfish),
            windows,
            measure,
            sample,
            key=lambda window: _key_of_window(window, window.document.dose),
        )
        return _spread(attacked, sample, len(windows))

    def _collect_windows(
        self,
        parameters: Mapping[str, object],
        names: tuple[str, ...],
        windows: Sequence[Window],
        measure: Callable[[Sequence[int]], ArrayLike],
        chosen: Sequence[int],
        *,
        key: Callable[[Window], bytes] | None = None,
    ) -> ScoreMatrix:
        """Return a row for each chosen window; `measure` takes indices of windows."""
        return self._collect(
            parameters,
            names,
            [(key or _key_of_window)(windows[index]) for index in chosen],
            [len(windows[index].input_ids) for index in chosen],
            lambda places: measure([chosen[place] for place in places]),
        )

    def _collect(
        self,
        parameters: Mapping[str, object],
        names: tuple[str, ...],
        keys: Sequence[bytes],
        sizes: Sequence[int],
        measure: Callable[[Sequence[int]], ArrayLike],
        stage: Stage | None = None,
    ) -> ScoreMatrix:
        """Return a row for each key, from the cache or measured; see `collect_scores`."""
        identity, slot = self.model.identity, CacheSlot(cache=None, fingerprint=None)
        if identity is not None:
            fingerprint = compute_fingerprint({"model": identity, **parameters})
            slot = CacheSlot(cache=self.context.cache, fingerprint=fingerprint)
        progress = None if stage is None else self._at(stage)
        peers = self.context.peers
        return collect_scores(
            names, keys, sizes, measure, slot=slot, peers=peers, on_progress=progress
        )

    def _at(self, stage: Stage) -> Callable[[int, int], None] | None:
        show = self.context.on_progress
        return None if show is None else lambda done, total: show(stage, done, total)


def list_own_passes(suite: Suite) -> list[str]:
    """Return the membership scores that need an additional pass."""
    membership = suite.find(MembershipProbe)
    scores = () if membership is None else membership.scores
    return [name for name in scores if MEMBERSHIP_SCORES[name].own_pass is not None]


def _spread(numbers: ScoreMatrix, chosen: Sequence[int], count: int) -> ScoreMatrix:
    """Return a row for each of ``count`` documents, NaN for those that were not chosen."""
    rows = np.full((count, len(numbers.names)), np.nan)
    rows[chosen] = numbers.rows
    return ScoreMatrix(names=numbers.names, rows=rows)


def _key(document: AuditDocument, *more: NDArray[np.int64]) -> bytes:
    form = np.frombuffer(document.format.encode(), dtype=np.uint8)
    whole: list[NDArray[Any]] = []
    if document.whole_ids is not None:
        whole = [document.whole_ids, np.array([document.first_position])]
    return compute_key(document.input_ids, document.supervised, form, *more, *whole)


def _key_of_window(window: Window, *more: int) -> bytes:
    span = [window.start, window.prefix_tokens, window.document.first_position]
    return _key(window.document, np.array([*span, *more]))
