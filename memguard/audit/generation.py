"""Generated continuations, and their overlap with the true text.

    greedy    the true tokens up to the first divergence d, then S - d greedily decoded tokens
    nucleus   S sampled tokens after the prefix

Verbatim documents need no decoding step. The numbers describe the whole continuation of S tokens;
for near-verbatim matches, generation of a text stops when it has too many edits.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.audit.batching import Progress
from memguard.audit.cache import ScoreMatrix
from memguard.audit.decoding import Decoder, Request
from memguard.audit.extraction import ExtractionProbe, Window
from memguard.audit.near_verbatim import NAMES, EditDistance
from memguard.audit.overlap import APPROXIMATE_BLEU, compute_overlap
from memguard.audit.suite import GenerationProbe
from memguard.audit.tables import ProbeTable

_METRICS = (
    "rouge_l",
    "longest_copied_run",
    "edit_distance",
    "near_verbatim",
    "bleu_above_0.75",
    "type_token_ratio",
)


def name_numbers(probe: GenerationProbe) -> tuple[str, ...]:
    """Return the names of the numbers that `generate_continuations` returns."""
    return tuple(f"{decoding}.{name}" for decoding in _list_decodings(probe) for name in _METRICS)


def generate_continuations(
    probe: GenerationProbe,
    extraction: ExtractionProbe,
    decoder: Decoder,
    windows: Sequence[Window],
    teacher_forced: ScoreMatrix,
    *,
    seed: int,
    progress: Callable[[str], Progress | None],
) -> list[list[float]]:
    """Return the numbers of each document, in the order of `name_numbers`.

    Args:
        probe: settings.
        extraction: defines the edits that a near-verbatim text may have.
        decoder: decoder of the model.
        windows: ``[N]``.
        teacher_forced: ``[N]`` numbers of the same model's teacher-forced pass.
        seed: seed of the samples.
        progress: returns, for a decoding method, the callback for documents done and in total.
    """
    written = [_write_greedily(decoder, windows, teacher_forced, progress("greedily"))]
    if probe.nucleus is not None:
        requests = [Request.of(window) for window in windows]
        drawn = decoder.sample(requests, probe.nucleus, 1, seed, progress("by sampling"))
        written.append([tokens_1S[0] for tokens_1S in drawn])
    return [
        [
            number
            for texts in written
            for number in _compare(
                window,
                texts[index],
                extraction.num_edits_allowed(window.continuation_tokens),
            )
        ]
        for index, window in enumerate(windows)
    ]


def generate_edits(
    probe: ExtractionProbe,
    decoder: Decoder,
    windows: Sequence[Window],
    first_divergence: Sequence[int],
    on_progress: Progress | None = None,
) -> list[list[float]]:
    """Return `near_verbatim.NAMES` of each document, generated from its first divergence on.

    Args:
        probe: defines the maximum number of edits.
        decoder: decoder of the model.
        windows: windows to continue.
        first_divergence: number of true tokens with which the same model's greedy text begins.
        on_progress: called with the documents done and all documents.
    """
    starts = list(zip(windows, first_divergence, strict=True))
    requests = [Request.of(window, kept) for window, kept in starts]
    truths = [window.continuation_ids[kept:] for window, kept in starts]
    limits = [probe.num_edits_allowed(window.continuation_tokens) for window in windows]
    trackers: dict[int, EditDistance] = {}

    def is_done(index: int, step: int, token: int) -> bool:
        if step == 0:
            trackers[index] = EditDistance(truths[index])
        trackers[index].append(token)
        return trackers[index].lower_bound > limits[index]

    continued = decoder.continue_greedily(requests, on_progress, is_done=is_done)
    rows = []
    for truth, limit, continuation in zip(truths, limits, continued, strict=True):
        # Recomputed from the tokens, because this rank has no trackers for other ranks' documents.
        distance = EditDistance(truth)
        for token in continuation.token_ids.tolist():
            distance.append(token)
        num_edits = distance.lower_bound
        rows.append([np.inf if num_edits > limit else num_edits, continuation.min_gap])
    return rows


def measure_edits(
    probe: ExtractionProbe,
    decoder: Decoder,
    windows: Sequence[Window],
    teacher_forced: ScoreMatrix,
    indices: Sequence[int],
    on_progress: Progress | None = None,
) -> ScoreMatrix:
    """Return `near_verbatim.NAMES` of the documents with these indices; see `generate_edits`.

    ``windows`` and the teacher-forced numbers ``teacher_forced`` cover all documents.
    """
    edits = generate_edits(
        probe,
        decoder,
        [windows[index] for index in indices],
        teacher_forced["first_divergence"][list(indices)].astype(int).tolist(),
        on_progress,
    )
    return ScoreMatrix(names=NAMES, rows=np.array(edits, dtype=np.float64).reshape(-1, len(NAMES)))


def tabulate(
    probe: GenerationProbe,
    model: ScoreMatrix,
    base: ScoreMatrix | None,
    continuation_tokens: int,
) -> list[ProbeTable]:
    """Return a table for each decoding method.

    Args:
        probe: settings.
        model: ``[N]`` numbers of all documents, NaN if nothing was generated.
        base: the same numbers of the model before training.
        continuation_tokens: tokens of a true continuation.
    """
    return [
        ProbeTable(
            probe=probe.name,
            version=probe.VERSION,
            parameters={"decoding": label},
            continuation_tokens=continuation_tokens,
            model={name: model[f"{decoding}.{name}"] for name in _METRICS},
            base=None if base is None else {name: base[f"{decoding}.{name}"] for name in _METRICS},
        )
        for decoding, label in _list_decodings(probe).items()
    ]


def _list_decodings(probe: GenerationProbe) -> dict[str, str]:
    """Return the decoding methods and their labels."""
    nucleus = {} if probe.nucleus is None else {"nucleus": probe.nucleus.label}
    return {"greedy": "greedy", **nucleus}


def _write_greedily(
    decoder: Decoder,
    windows: Sequence[Window],
    teacher_forced: ScoreMatrix,
    on_progress: Progress | None,
) -> list[NDArray[np.int32]]:
    texts: list[NDArray[np.int32]] = [window.continuation_ids for window in windows]
    diverging, requests = [], []
    for index, window in enumerate(windows):
        kept = int(teacher_forced["first_divergence"][index])
        if kept < window.continuation_tokens:
            diverging.append(index)
            requests.append(Request.of(window, kept))
    added = decoder.continue_greedily(requests, on_progress)
    for index, request, continuation in zip(diverging, requests, added, strict=True):
        whole = np.concatenate([request.prompt_ids, continuation.token_ids]).astype(np.int32)
        texts[index] = whole[windows[index].prefix_tokens :]
    return texts


def _compare(window: Window, written: NDArray[np.int32], num_allowed: int) -> list[float]:
    """Return the numbers of `_METRICS`."""
    overlap = compute_overlap(window.continuation_ids, written)
    num_edits = round(overlap.edit_distance * window.continuation_tokens)
    ratio = overlap.type_token_ratio
    assert ratio is not None, "a continuation has tokens"
    return [
        overlap.rouge_l,
        float(overlap.longest_run_tokens),
        overlap.edit_distance,
        float(num_edits <= num_allowed),
        float(overlap.bleu > APPROXIMATE_BLEU),
        ratio,
    ]
