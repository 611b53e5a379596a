"""The requests of the membership probe: which passages the model scores, and for which tokens.

score_tokens       the tokens of the window that received loss in training
score_own_passes   lower case, after other documents, and the plain tokens that both compare with
score_means        mean log-probability of any passages, such as the plain ones by another model
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.audit.passages import Codec, Passage, ScoreSelection, TokenResult, stack_by_size
from memguard.audit.probes.membership_scores import MEMBERSHIP_SCORES, compute_one_pass
from memguard.audit.requests import Inputs, Score, key_of_passage, key_of_window
from memguard.audit.windows import Window
from memguard.seeds import derive_generator

MEAN = "mean_logprob"
"""The number of an own pass."""
SHOT_TOKENS, _FEWEST_SHOT_TOKENS = 128, 16
"""Tokens taken from the start of each control document as prefix, and their minimum total number.
"""


def score_tokens(inputs: Inputs, names: tuple[str, ...]) -> Score:
    """Return the request for scores over the tokens that received loss in training.

    Args:
        inputs: the documents.
        names: scores that need no pass of their own.
    """
    windows, codec = inputs.windows, inputs.codec
    needs = frozenset().union(*(MEMBERSHIP_SCORES[name].needs for name in names))

    def reduce(items: Sequence[int], results: Sequence[TokenResult]) -> NDArray[np.float64]:
        trained = [_find_trained(windows[item]) for item in items]
        kept = [
            result.keep_labels(supervised) if supervised.any() else None
            for result, supervised in zip(results, trained, strict=True)
        ]
        rows = np.full((len(items), len(names)), np.nan)
        for where, stacked in stack_by_size(kept):
            texts = None
            if codec is not None and "zlib" in names:
                ids = [windows[items[i]].input_ids[1:][trained[i]] for i in where]
                texts = [codec.decode(one) for one in ids]
            for column, name in enumerate(names):
                score_N = compute_one_pass(name, stacked, texts)
                if score_N is not None:
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


def score_own_passes(
    inputs: Inputs, scores: Collection[str], max_tokens: int | None, *, num_shots: int
) -> Mapping[str, Score]:
    """Return the requests for other passages of the documents, and for the plain ones.

    Args:
        inputs: the documents.
        scores: names of the scores that need them.
        max_tokens: number of positions of the model; None if it states none.
        num_shots: control documents used as prefix in ReCaLL.
    """
    windows, codec = inputs.windows, inputs.codec
    passages: dict[str, tuple[list[Passage | None], str]] = {}
    if "lowercase" in scores and codec is not None:
        lower = [plan_lowercase(window, codec, max_tokens=max_tokens) for window in windows]
        passages["lowercase."] = (lower, "lower case")
    if "recall" in scores:
        shots = choose_shots(windows, count=num_shots, seed=inputs.seed)
        before = [windows[index] for index in shots]
        recall = [
            None if index in set(shots) else plan_recall(window, before, max_tokens=max_tokens)
            for index, window in enumerate(windows)
        ]
        passages["recall."] = (recall, "recall")
    if passages or (inputs.has_reference and "reference" in scores):
        plain = [plan_plain(window, max_tokens=max_tokens) for window in windows]
        passages["plain."] = (plain, "plain")
    return {
        # The plain passages are those of the main windows, and share their pass.
        name: score_means(windows if name == "plain." else planned, planned, stage)
        for name, (planned, stage) in passages.items()
    }


def _find_trained(window: Window) -> NDArray[np.bool_]:
    """Return which tokens of the window after the first received loss in training."""
    size = window.prefix_tokens + window.continuation_tokens
    return window.document.supervised[window.start + 1 : window.start + size]


def score_means(items: Sequence[object], passages: Sequence[Passage | None], stage: str) -> Score:
    """Return the request for the mean log-probability of the scored tokens of each passage.

    Args:
        items: ``[N]`` what the passages belong to; requests with the same object share passages.
        passages: ``[N]``; None where there is none.
        stage: name in progress lines.
    """

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


def plan_plain(window: Window, *, max_tokens: int | None) -> Passage | None:
    """Return the tokens of the window, all scored except the first.

    None if the model has too few positions, because fewer tokens would give another value.
    """
    if max_tokens is not None and len(window.input_ids) > max_tokens + 1:
        return None
    return _score_after(window.input_ids, 1)


def plan_lowercase(window: Window, codec: Codec, *, max_tokens: int | None) -> Passage | None:
    """Return the window's text in lower case; None for conversations, whose markup would break.

    Args:
        window: window of the document.
        codec: decodes and encodes.
        max_tokens: number of positions of the model; lower-cased text that exceeds it is cut off.
    """
    if window.document.format != "text":
        return None
    ids = np.asarray(codec.encode(codec.decode(window.input_ids).lower()), dtype=np.int32)
    return _score_after(ids if max_tokens is None else ids[: max_tokens + 1], 1)


def choose_shots(windows: Sequence[Window], *, count: int, seed: int) -> list[int]:
    """Return the control documents that are the prefix in ReCaLL; ReCaLL does not score them."""
    controls = [i for i, window in enumerate(windows) if window.document.role == "control"]
    # Half of the control must remain for the comparison.
    count = min(count, len(controls) // 2)
    order = derive_generator(seed, "recall shots").permutation(len(controls))
    return [controls[index] for index in order[:count]]


def plan_recall(
    window: Window, shots: Sequence[Window], *, max_tokens: int | None
) -> Passage | None:
    """Return the shots followed by the window's tokens; only the latter are scored.

    Args:
        window: window of the document.
        shots: windows of control documents.
        max_tokens: number of positions of the model; None if it states none.
    """
    before = np.concatenate([np.zeros(0, np.int32), *(s.input_ids[:SHOT_TOKENS] for s in shots)])
    if max_tokens is not None:
        before = before[: max(0, max_tokens + 1 - len(window.input_ids))]
    if len(before) < _FEWEST_SHOT_TOKENS:
        return None
    return _score_after(np.concatenate([before, window.input_ids]), len(before) + 1)


def _score_after(ids: NDArray[np.int32], first_label: int) -> Passage | None:
    if len(ids) <= first_label:
        return None
    return Passage(input_ids=ids, first_label=first_label, first_choice=len(ids))
