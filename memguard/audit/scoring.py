"""Score the tokens of passages with a model.

    input_ids_BT [B, T]   B passages without their last token, right-padded to the longest, T
    hidden_ND    [N, D]   last hidden states at the positions before scored tokens: those with
                          choices of all passages in turn, or the others
    labels_N     [N]      the tokens that follow them

Padding is at the end of a row, which a causal model does not attend to. Therefore no attention mask
is needed, and a document's scores do not depend on the others in its batch (except for the last
bits, because other shapes change the order of summation).
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.audit.batching import Batching, BatchResult, Job
from memguard.audit.following import LEAST_CHECKED, Follower
from memguard.audit.passages import Passage, ScoreSelection, TokenResult
from memguard.audit.windows import TINY_MARGINS
from memguard.errors import is_out_of_memory
from memguard.model.causal_lm import CausalLM
from memguard.model.kv_cache import NO_CACHE, build_row_cache, send
from memguard.model.token_scores import TokenScores
from memguard.runtime import Runtime


class Scorer(Protocol):
    """Interface of a model for the probes."""

    def score(
        self,
        passages: Sequence[Passage],
        requested: ScoreSelection = ScoreSelection(),  # noqa: B008 - frozen
        *,
        follower: Follower | None = None,
    ) -> list[TokenResult]:
        """Return one result for each passage, in their order; ``follower`` may keep its rows."""
        ...


class _Tokens:
    """N tokens of a batch: positions of their predictions, labels, and limits of the passages."""

    def __init__(self, spans: Sequence[tuple[Passage, int, int]]) -> None:
        """Select the tokens first .. last of each passage."""
        none = np.zeros(0, dtype=np.int64)
        sizes = [last - first for _, first, last in spans]
        columns = [np.arange(first - 1, last - 1) for _, first, last in spans]
        labels = [passage.input_ids[first:last] for passage, first, last in spans]
        self.rows_N = np.repeat(np.arange(len(spans)), sizes)
        self.columns_N = np.concatenate([*columns, none])
        self.labels_N = np.concatenate([*labels, none]).astype(np.int64)
        ends = np.cumsum([0, *sizes]).tolist()
        self.slices = [slice(*limits) for limits in pairwise(ends)]
        """Which of the N tokens belong to each passage."""


def _to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.float().cpu().numpy()
    return array


class ModelScorer:
    """Scores passages with a model; on a mesh every rank calls it and gets all results.

    Ranks that share a batch in training score different batches here.
    """

    def __init__(
        self, lm: CausalLM, batch_tokens: int | None = None, runtime: Runtime | None = None
    ) -> None:
        """Create a scorer.

        Args:
            lm: the model as hidden states plus head; in evaluation mode during scoring.
            batch_tokens: tokens per forward pass, including padding; at least one passage is run.
                None: on a GPU as many as fit, measured on the first passage; otherwise 8,192.
            runtime: this rank; None for one process.
        """
        self._lm = lm
        self._batching = Batching.of_forwards(lm, batch_tokens, runtime)
        is_wide = lm.compute_dtype.itemsize >= torch.float32.itemsize
        self._rank_margin = TINY_MARGINS["fp32" if is_wide else "bf16"]

    def score(
        self,
        passages: Sequence[Passage],
        requested: ScoreSelection = ScoreSelection(),  # noqa: B008 - frozen
        *,
        follower: Follower | None = None,
    ) -> list[TokenResult]:
        """Return one result for each passage, in their order.

        Raises:
            ModelError: see `Batching.run`.
        """

        def run(batch: Sequence[int], _: int) -> BatchResult[TokenResult]:
            rows = [passages[index] for index in batch]
            if follower is not None and follower.is_on is not False:
                cache = build_row_cache(0)
                try:
                    result, ids_BT, hidden_BTD = self._score_batch(rows, requested, cache)
                    if follower.add(batch, result.results, ids_BT, hidden_BTD, cache):
                        return result
                except (*NO_CACHE, RuntimeError, MemoryError) as error:
                    is_expected = isinstance(error, NO_CACHE) and not follower.is_on
                    if is_out_of_memory(error):
                        is_expected = not self._lm.has_peers
                    if not is_expected:
                        raise
                follower.drop()
                cache.layers.clear()  # The next pass needs its memory.
            return self._score_batch(rows, requested)[0]

        return self._batching.run([Job(input_ids=passage.input_ids) for passage in passages], run)

    # Not inference_mode: buffers that a model replaces in its forward pass would become inference
    # tensors and break training that continues afterwards.
    @torch.no_grad()
    def _score_batch(
        self, passages: Sequence[Passage], requested: ScoreSelection, cache: Any = None
    ) -> tuple[BatchResult[TokenResult], NDArray[np.int64], Tensor]:
        """Return the results of one pass, its padded rows and its hidden states.

        Without passages it runs a row of some tokens, because all ranks must take part in gathering
        the weights.
        """
        length = max((len(passage.input_ids) - 1 for passage in passages), default=2)
        shape = (max(len(passages), 1), max(length, LEAST_CHECKED))
        padded = np.zeros(shape, dtype=np.int64)
        for row, passage in enumerate(passages):
            padded[row, : len(passage.input_ids) - 1] = passage.input_ids[:-1]
        chosen = _Tokens([(p, p.first_choice, len(p.input_ids)) for p in passages])
        others = _Tokens([(p, p.first_label, p.first_choice) for p in passages])

        place = partial(send, device=self._lm.device)

        def work() -> tuple[TokenScores, TokenScores, Tensor]:
            hidden_BTD = self._lm.hidden_states(place(padded), cache=cache)

            def score(tokens: _Tokens, **wanted: Any) -> TokenScores:
                hidden_ND = hidden_BTD[place(tokens.rows_N), place(tokens.columns_N)]
                labels_N = place(tokens.labels_N)
                wanted |= {"needs": requested.needs, "rank_margin": self._rank_margin}
                return self._lm.token_scores(hidden_ND, labels_N, **wanted)

            first = score(chosen, schemes=requested.schemes)
            return first, score(others, choices=False), hidden_BTD

        first, rest, hidden_BTD = self._lm(work)
        assert first.argmax_N is not None, "choices were requested"
        assert first.margin_N is not None, "choices were requested"
        argmax = first.argmax_N.cpu().numpy().astype(np.int32)
        margin = _to_numpy(first.margin_N)
        sampled = None if first.sampled_SN is None else _to_numpy(first.sampled_SN)
        columns = {
            name: (_to_numpy(getattr(rest, f"{name}_N")), _to_numpy(getattr(first, f"{name}_N")))
            for name in ("logprob", *sorted(requested.needs))
        }
        correct = argmax == chosen.labels_N
        results = []
        for with_choice, without in zip(chosen.slices, others.slices, strict=True):
            whole = {
                name: np.concatenate([before[without], after[with_choice]])
                for name, (before, after) in columns.items()
            }
            results.append(
                TokenResult(
                    argmax=argmax[with_choice],
                    correct=correct[with_choice],
                    margin=margin[with_choice],
                    sampled=None if sampled is None else sampled[:, with_choice],
                    **whole,
                )
            )
        result = BatchResult(
            results=results,
            num_bad=sum(int((~np.isfinite(logprobs)).sum()) for logprobs in columns["logprob"]),
            num_tokens=sum(map(len, columns["logprob"])),
        )
        return result, padded, hidden_BTD
