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

from memguard.audit.extraction import TokenResult, Window
from memguard.errors import ModelError
from memguard.parallel.vocab import VocabLayer

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
    """Scores windows with a vocabulary layer, longest first, in batches of limited size."""

    def __init__(self, vocab: VocabLayer, batch_tokens: int) -> None:
        """Take a model.

        Args:
            vocab: the model as hidden states plus head; put into evaluation mode while scoring.
            batch_tokens: tokens of one forward pass, padding included; one window always goes.
        """
        assert batch_tokens >= 1, "a batch needs a token"
        self._vocab = vocab
        self._batch_tokens = batch_tokens

    def score(
        self, windows: Sequence[Window], on_progress: Progress | None = None
    ) -> list[TokenResult]:
        """Return one result for each window, in their order.

        A batch that does not fit into GPU memory is halved, and so are all that follow.

        Raises:
            ModelError: a token outside the vocabulary, a window longer than the model has
                positions for, one that does not fit into memory alone, or logits that are not
                finite.
        """
        self._check(windows)
        results: list[TokenResult | None] = [None] * len(windows)
        # Longest first: what does not fit into memory shows at once, not after an hour.
        waiting = sorted(range(len(windows)), key=lambda i: -len(windows[i].input_ids))
        budget = self._batch_tokens
        model: Any = self._vocab.model
        training = model.training
        model.eval()
        try:
            while waiting:
                longest = len(windows[waiting[0]].input_ids)
                batch = waiting[: max(1, budget // longest)]
                scored = self._score_batch([windows[index] for index in batch])
                if scored is None:
                    budget = self._halve(len(batch), longest)
                    continue
                for index, result in zip(batch, scored, strict=True):
                    results[index] = result
                waiting = waiting[len(batch) :]
                if on_progress is not None:
                    on_progress(len(windows) - len(waiting), len(windows))
        finally:
            model.train(training)
        return [result for result in results if result is not None]

    # Not inference_mode: buffers that a model renews in its forward would become inference tensors
    # and break a training that goes on afterwards.
    @torch.no_grad()
    def _score_batch(self, windows: Sequence[Window]) -> list[TokenResult] | None:
        """Return the results of one pass, or None where memory ran out."""
        length = max(len(window.input_ids) for window in windows) - 1
        padded = np.zeros((len(windows), max(length, 1)), dtype=np.int64)
        for row, window in enumerate(windows):
            padded[row, : len(window.input_ids) - 1] = window.input_ids[:-1]
        sizes = [window.continuation_tokens for window in windows]
        rows = np.repeat(np.arange(len(windows)), sizes)
        columns = np.concatenate(
            [w.prefix_tokens - 1 + np.arange(w.continuation_tokens) for w in windows]
        )
        labels = np.concatenate([window.continuation_ids for window in windows]).astype(np.int64)
        device = self._vocab.device
        try:
            hidden_BTD = self._vocab.hidden_states(torch.from_numpy(padded).to(device))
            hidden_ND = hidden_BTD[
                torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)
            ]
            scores = self._vocab.token_scores(hidden_ND, torch.from_numpy(labels).to(device))
            logprob = scores.logprob_N.float().cpu().numpy()
            argmax = scores.argmax_N.cpu().numpy().astype(np.int32)
            margin = scores.margin_N.float().cpu().numpy()
        except torch.OutOfMemoryError:
            return None
        if not np.isfinite(logprob).all():
            raise ModelError(
                f"the model's logits are not finite for {int((~np.isfinite(logprob)).sum())} of "
                f"{len(logprob)} tokens: its weights are damaged or its dtype is too narrow. "
                "Try 'audit.dtype' fp32."
            )
        correct = argmax == labels
        cuts = np.cumsum(sizes)[:-1]
        columns_of = (np.split(array, cuts) for array in (argmax, correct, logprob, margin))
        return [
            TokenResult(argmax=a, correct=c, logprob=p, margin=m)
            for a, c, p, m in zip(*columns_of, strict=True)
        ]

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
