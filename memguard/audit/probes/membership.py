"""Membership: scores of trained against control documents, from log-probabilities of tokens.

own pass of the audited model    every token of the window that received loss in training
lowercase, recall, plain         mean log-probability over other passages of the same documents
reference                        the plain one under another model
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from memguard.audit.extraction import Window
from memguard.audit.membership_scores import (
    MEMBERSHIP_SCORES,
    choose_shots,
    compute_loss,
    compute_min_k,
    compute_min_k_plus_plus,
    compute_zlib,
    plan_lowercase,
    plan_plain,
    plan_recall,
)
from memguard.audit.passages import Passage, ScoreSelection, TokenResult, stack_by_size
from memguard.audit.probe import (
    Inputs,
    Measured,
    Model,
    Rounds,
    Score,
    View,
    join,
    key_of_passage,
    key_of_window,
)
from memguard.config.settings import PositiveInt, Settings

Share = Annotated[float, Field(gt=0, lt=1)]
MEAN = "mean_logprob"
"""The number of an own pass."""


class MembershipProbe(Settings):
    """Membership inference: trained against control documents, by token log-probabilities."""

    VERSION: ClassVar[int] = 2
    models: ClassVar[tuple[Model, ...]] = ("trained", "base", "reference")
    after: ClassVar[tuple[str, ...]] = ()

    name: Literal["membership"] = Field("membership", description="Which probe.")
    scores: tuple[str, ...] = Field(
        ("loss", "zlib", "min_k", "min_k_plus_plus"),
        description="Scores; lowercase, recall and reference need an additional pass.",
    )
    fpr: tuple[Share, ...] = Field(
        (0.001, 0.01, 0.1), description="False-positive rates for the true-positive rates."
    )
    recall_documents: PositiveInt = Field(
        4, description="Control documents used as prefix for 'recall' (documents)."
    )

    @field_validator("scores")
    @classmethod
    def _check_scores(cls, scores: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [score for score in scores if score not in MEMBERSHIP_SCORES]
        if unknown:
            raise ValueError(f"must be of {', '.join(MEMBERSHIP_SCORES)}; got {unknown[0]!r}")
        return scores

    @property
    def one_pass(self) -> tuple[str, ...]:
        """The scores that need no pass of their own."""
        return tuple(name for name in self.scores if MEMBERSHIP_SCORES[name].own_pass is None)

    @property
    def own_passes(self) -> tuple[str, ...]:
        """The scores that do: lowercase, reference, recall."""
        return tuple(name for name in self.scores if MEMBERSHIP_SCORES[name].own_pass is not None)

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Measure the scores; columns are named by score, own passes by the passage's name."""
        requests: dict[str, Score] = {}
        if view.model == "reference":
            if "reference" in self.own_passes:
                plain = [plan_plain(w, max_tokens=view.max_tokens) for w in inputs.windows]
                requests["reference."] = _score_means(plain, plain, "reference model")
        else:
            if self.one_pass:
                requests[""] = self._score(inputs)
            if view.model == "trained":
                requests |= self._list_own_passes(inputs, view)
        if not requests:
            return None
        numbers = yield list(requests.values())
        return Measured(columns=join(dict(zip(requests, numbers, strict=True))))

    def _score(self, inputs: Inputs) -> Score:
        """Return the request for the scores over the tokens that received loss in training."""
        windows, codec, names = inputs.windows, inputs.codec, self.one_pass
        needs = frozenset().union(*(MEMBERSHIP_SCORES[name].needs for name in names))

        def reduce(items: Sequence[int], results: Sequence[TokenResult]) -> NDArray[np.float64]:
            trained = [_find_trained(windows[item]) for item in items]
            kept = [
                result.keep_labels(supervised) if supervised.any() else None
                for result, supervised in zip(results, trained, strict=True)
            ]
            rows = np.full((len(items), len(names)), np.nan)
            for where, stacked in stack_by_size(kept):
                loss_N = compute_loss(stacked.logprob)
                for column, name in enumerate(names):
                    if name == "loss":
                        score_N = loss_N
                    elif name == "min_k":
                        score_N = compute_min_k(stacked.logprob)
                    elif name == "min_k_plus_plus":
                        assert stacked.entropy is not None, "entropy was requested"
                        assert stacked.variance_logprob is not None, "the variance was requested"
                        score_N = compute_min_k_plus_plus(
                            stacked.logprob, -stacked.entropy, stacked.variance_logprob
                        )
                    elif codec is None:
                        continue
                    else:
                        ids = [windows[items[i]].input_ids[1:][trained[i]] for i in where]
                        pairs = zip(loss_N, map(codec.decode, ids), strict=True)
                        score_N = np.array(
                            [compute_zlib(float(loss), text) for loss, text in pairs]
                        )
                    rows[where, column] = score_N
            return rows

        return Score(
            items=windows,
            passages=[
                Passage(input_ids=w.input_ids, first_label=1, first_choice=len(w.input_ids))
                for w in windows
            ],
            keys=[key_of_window(window, window.continuation_tokens) for window in windows],
            names=names,
            reduce=reduce,
            parameters={
                "kind": "membership",
                "version": 3,
                "scores": list(names),
                "text": codec is not None,
            },
            selection=ScoreSelection(needs=needs & {"entropy", "variance_logprob"}),
        )

    def _list_own_passes(self, inputs: Inputs, view: View) -> Mapping[str, Score]:
        """Return the requests for other passages of the documents, and for the plain ones."""
        windows, codec, limit = inputs.windows, inputs.codec, view.max_tokens
        passages: dict[str, tuple[list[Passage | None], str]] = {}
        if "lowercase" in self.own_passes and codec is not None:
            lower = [plan_lowercase(window, codec, max_tokens=limit) for window in windows]
            passages["lowercase."] = (lower, "lower case")
        if "recall" in self.own_passes:
            shots = choose_shots(windows, count=self.recall_documents, seed=inputs.seed)
            before = [windows[index] for index in shots]
            recall = [
                None if index in set(shots) else plan_recall(window, before, max_tokens=limit)
                for index, window in enumerate(windows)
            ]
            passages["recall."] = (recall, "recall")
        if passages or (inputs.has_reference and "reference" in self.own_passes):
            plain = [plan_plain(window, max_tokens=limit) for window in windows]
            passages["plain."] = (plain, "plain")
        return {
            # The plain passages are those of the main windows, and share their pass.
            name: _score_means(windows if name == "plain." else planned, planned, stage)
            for name, (planned, stage) in passages.items()
        }


def _find_trained(window: Window) -> NDArray[np.bool_]:
    """Return which tokens of the window after the first received loss in training."""
    size = window.prefix_tokens + window.continuation_tokens
    return window.document.supervised[window.start + 1 : window.start + size]


def _score_means(items: Sequence[object], passages: Sequence[Passage | None], stage: str) -> Score:
    """Return the request for the mean log-probability of the scored tokens of each passage."""

    def reduce(_: Sequence[int], results: Sequence[TokenResult]) -> list[float]:
        return [float(result.logprob.mean(dtype=np.float64)) for result in results]

    return Score(
        items=items,
        passages=passages,
        keys=[b"" if passage is None else key_of_passage(passage) for passage in passages],
        names=(MEAN,),
        reduce=reduce,
        parameters={"kind": "mean log-probability", "version": 1},
        stage=stage,
    )
