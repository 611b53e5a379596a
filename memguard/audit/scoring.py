"""What a model says of each continuation token.

    input_ids_BT [B, T]   B windows without their last token, right-padded to the longest, T
    hidden_ND    [N, D]   last hidden states of rows P-1 .. P+S-2 of each window, in turn
    labels_N     [N]      the continuation tokens

Padding stands behind everything that is read, where a causal model cannot look; so no attention
mask is needed, and what a document scores does not depend on the others in its batch (but for the
last bits: other shapes sum in another order).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from memguard.audit.extraction import TokenResult, Window
from memguard.errors import ModelError
from memguard.parallel.token_scores import TokenScores
from memguard.parallel.vocab import VocabLayer
from memguard.runtime import Runtime

# Of the memory that is free after a first window; the rest is for what is cut unluckily.
_MEMORY_SHARE = 0.8

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of windows done and of all windows."""


class Scorer(Protocol):
    """A model that can be asked; the audit knows no more of it."""

    def score(
        self, windows: Sequence[Window], on_progress: Progress | None = None
    ) -> list[TokenResult]:
        """Return one result for each window, in their order."""
        ...


class ModelScorer:
    """Scores windows with a vocabulary layer, longest first, in batches of limited size.

    On a mesh every rank calls it with the same windows and gets all results. The ranks that split
    a batch in training take a batch each here; the sizes of all are known to every rank, so nobody
    waits for a forward that another does not run.
    """

    def __init__(
        self, vocab: VocabLayer, batch_tokens: int, runtime: Runtime | None = None
    ) -> None:
        """Take a model.

        Args:
            vocab: the model as hidden states plus head; put into evaluation mode while scoring.
            batch_tokens: tokens of one forward pass, padding included; one window always goes.
            runtime: this rank; None for one process.
        """
        assert batch_tokens >= 1, "a batch needs a token"
        self._vocab = vocab
        self._batch_tokens = batch_tokens
        self._runtime = runtime or Runtime(device=vocab.device)

    def score(
        self, windows: Sequence[Window], on_progress: Progress | None = None
    ) -> list[TokenResult]:
        """Return one result for each window, in their order.

        On one process a batch that does not fit into GPU memory is halved, and so are all that
        follow. On a mesh a rank that ran out of memory would leave the others waiting: there the
        size is agreed on after one measured window.

        Raises:
            ModelError: a token outside the vocabulary, a window longer than the model has
                positions for, one that does not fit into memory alone, or logits that are not
                finite.
        """
        self._check(windows)
        mine: dict[int, TokenResult] = {}
        # Longest first: what does not fit into memory shows at once, not after an hour.
        waiting = sorted(range(len(windows)), key=lambda i: -len(windows[i].input_ids))
        budget = self._batch_tokens
        is_measured = self._vocab.mesh is None
        model: Any = self._vocab.model
        training = model.training
        model.eval()
        if self._vocab.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._vocab.device)
        try:
            while waiting:
                taken = self._take_round(waiting, windows, budget if is_measured else 1)
                (batch,) = self._vocab.deal(taken)
                scored = self._score_batch([windows[index] for index in batch or ()])
                longest = len(windows[waiting[0]].input_ids)
                if scored is None:
                    budget = self._halve(len(taken[0]), longest)
                    continue
                if not is_measured:
                    budget, is_measured = self._agree_on_budget(longest), True
                self._check_finite(scored)
                mine.update(zip(batch or (), scored, strict=True))
                waiting = waiting[sum(map(len, taken)) :]
                if on_progress is not None:
                    on_progress(len(windows) - len(waiting), len(windows))
        finally:
            model.train(training)
        everyone = {}
        for part in self._runtime.gather_objects(mine):
            everyone.update(part)
        return [everyone[index] for index in range(len(windows))]

    def _take_round(
        self, waiting: Sequence[int], windows: Sequence[Window], budget: int
    ) -> list[list[int]]:
        """Return the next batches, at most one for each rank that splits the batch."""
        taken: list[list[int]] = []
        first = 0
        while first < len(waiting) and len(taken) < self._vocab.num_batch_ways:
            size = max(1, budget // len(windows[waiting[first]].input_ids))
            taken.append(list(waiting[first : first + size]))
            first += size
        return taken

    # Not inference_mode: buffers that a model renews in its forward would become inference tensors
    # and break a training that goes on afterwards.
    @torch.no_grad()
    def _score_batch(self, windows: Sequence[Window]) -> list[TokenResult] | None:
        """Return the results of one pass, or None where memory ran out.

        Without windows it runs a row of two tokens, whose weights the other ranks help gather.
        """
        length = max((len(window.input_ids) - 1 for window in windows), default=2)
        padded = np.zeros((max(len(windows), 1), max(length, 1)), dtype=np.int64)
        for row, window in enumerate(windows):
            padded[row, : len(window.input_ids) - 1] = window.input_ids[:-1]
        sizes = [window.continuation_tokens for window in windows]
        rows = np.repeat(np.arange(len(windows)), sizes)
        columns = [w.prefix_tokens - 1 + np.arange(w.continuation_tokens) for w in windows]
        labels = [window.continuation_ids for window in windows]
        none = [np.zeros(0, dtype=np.int64)]
        try:
            scores = self._forward(
                padded, rows, np.concatenate(columns or none), np.concatenate(labels or none)
            )
            logprob = scores.logprob_N.float().cpu().numpy()
            argmax = scores.argmax_N.cpu().numpy().astype(np.int32)
            margin = scores.margin_N.float().cpu().numpy()
        except torch.OutOfMemoryError:
            if self._vocab.mesh is not None:
                raise
            return None
        if not windows:
            return []
        correct = argmax == np.concatenate(labels)
        cuts = np.cumsum(sizes)[:-1]
        columns_of = (np.split(array, cuts) for array in (argmax, correct, logprob, margin))
        return [
            TokenResult(argmax=a, correct=c, logprob=p, margin=m)
            for a, c, p, m in zip(*columns_of, strict=True)
        ]

    def _check_finite(self, scored: Sequence[TokenResult]) -> None:
        """Refuse damaged numbers on all ranks at once, or some would wait for the others."""
        counts = [
            sum(int((~np.isfinite(each.logprob)).sum()) for each in scored),
            sum(len(each.logprob) for each in scored),
        ]
        copies = self._runtime.world_size // self._vocab.num_batch_ways
        num_bad, num_tokens = (int(n) // copies for n in self._runtime.agree_sum(counts))
        if num_bad:
            raise ModelError(
                f"the model's logits are not finite for {num_bad} of {num_tokens} tokens: its "
                "weights are damaged or its dtype is too narrow. Try 'audit.dtype' fp32."
            )

    def _forward(
        self,
        input_ids_BT: NDArray[np.int64],
        rows_N: NDArray[np.int64],
        columns_N: NDArray[np.int64],
        labels_N: NDArray[np.integer],
    ) -> TokenScores:
        """Return the scores of labels that follow the tokens at (row, column)."""
        device = self._vocab.device

        def work() -> TokenScores:
            hidden_BTD = self._vocab.hidden_states(torch.from_numpy(input_ids_BT).to(device))
            hidden_ND = hidden_BTD[
                torch.from_numpy(rows_N.astype(np.int64)).to(device),
                torch.from_numpy(columns_N).to(device),
            ]
            labels = torch.from_numpy(labels_N.astype(np.int64)).to(device)
            return self._vocab.token_scores(hidden_ND, labels)

        return self._vocab(work)

    def _agree_on_budget(self, longest: int) -> int:
        """Return how many tokens fit on every rank, after one window of ``longest`` did."""
        device = self._vocab.device
        if device.type != "cuda":
            return self._batch_tokens
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        used = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        fits = int(_MEMORY_SHARE * (free + cached) / max(used, 1) * longest)
        smallest = -self._runtime.agree_max(-max(fits, longest))
        return min(self._batch_tokens, smallest)

    def _halve(self, num_windows: int, longest: int) -> int:
        """Return a smaller budget (tokens) after a batch did not fit."""
        if num_windows == 1:
            raise ModelError(
                f"one document of {longest} tokens does not fit into GPU memory beside the model. "
                "Set 'audit.prefix_tokens' to shorten it, or 'audit.dtype' to bf16."
            )
        torch.cuda.empty_cache()
        budget = num_windows // 2 * longest
        logger.warning("out of GPU memory: going on with %d tokens a batch", budget)
        return budget

    def _check(self, windows: Sequence[Window]) -> None:
        if not windows:
            return
        largest = max(int(window.input_ids.max()) for window in windows)
        smallest = min(int(window.input_ids.min()) for window in windows)
        size = self._vocab.vocab_size
        if largest >= size or smallest < 0:
            raise ModelError(
                f"the documents hold token {largest if largest >= size else smallest}, but the "
                f"model has {size} (0 to {size - 1}): a tokenizer that does not fit the model. "
                "Use the one the model was trained with."
            )
        # The last token is only ever a label.
        longest = max(len(window.input_ids) for window in windows) - 1
        config = self._vocab.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if isinstance(limit, int) and 0 < limit < longest:
            raise ModelError(
                f"a document has {longest + 1} tokens in one window, but the model's "
                f"'max_position_embeddings' is {limit}. Set 'audit.prefix_tokens' to shorten it."
            )
