"""What a model says of each scored token.

    input_ids_BT [B, T]   B passages without their last token, right-padded to the longest, T
    hidden_ND    [N, D]   last hidden states of the rows before scored tokens: first those whose
                          choice is wanted, of all passages in turn, then the others
    labels_N     [N]      the tokens that follow them

Padding stands behind everything that is read, where a causal model cannot look; so no attention
mask is needed, and what a document scores does not depend on the others in its batch (but for the
last bits: other shapes sum in another order).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.audit.passages import Asked, Passage, TokenResult
from memguard.errors import ModelError
from memguard.model.causal_lm import VocabLayer
from memguard.model.token_scores import TokenScores
from memguard.model.truncation import Truncation
from memguard.runtime import Runtime

# Of the memory that is free after a first window; the rest is for what is cut unluckily.
_MEMORY_SHARE = 0.8
_MOST_CPU_TOKENS, _MOST_GPU_TOKENS = 16_384, 1 << 20

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of passages done and of all passages."""


class Scorer(Protocol):
    """A model that can be asked; the audit knows no more of it."""

    def score(
        self,
        passages: Sequence[Passage],
        asked: Asked = Asked(),  # noqa: B008 - frozen
        on_progress: Progress | None = None,
    ) -> list[TokenResult]:
        """Return one result for each passage, in their order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tokens:
    """N tokens of a batch: the rows before them, and where each passage's begin."""

    rows_N: NDArray[np.int64]
    columns_N: NDArray[np.int64]
    labels_N: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, spans: "Sequence[tuple[Passage, int, int]]") -> "_Tokens":
        """Take the tokens first .. last of each passage."""
        none = np.zeros(0, dtype=np.int64)
        sizes = [last - first for _, first, last in spans]
        columns = [np.arange(first - 1, last - 1) for _, first, last in spans]
        labels = [passage.input_ids[first:last] for passage, first, last in spans]
        return cls(
            rows_N=np.repeat(np.arange(len(spans)), sizes),
            columns_N=np.concatenate([*columns, none]),
            labels_N=np.concatenate([*labels, none]).astype(np.int64),
            ends=np.cumsum([0, *sizes]),
        )

    def slice(self, number: int) -> slice:
        """Return which of the N are the passage's."""
        return slice(int(self.ends[number]), int(self.ends[number + 1]))


def _to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.float().cpu().numpy()
    return array


class ModelScorer:
    """Scores passages with a vocabulary layer, longest first, in batches of limited size.

    On a mesh every rank calls it with the same passages and gets all results. The ranks that split
    a batch in training take a batch each here; the sizes of all are known to every rank, so nobody
    waits for a forward that another does not run.
    """

    def __init__(
        self, vocab: VocabLayer, batch_tokens: int | None = None, runtime: Runtime | None = None
    ) -> None:
        """Take a model.

        Args:
            vocab: the model as hidden states plus head; put into evaluation mode while scoring.
            batch_tokens: tokens of one forward pass, padding included; one passage always goes.
                None: on a GPU what fits, measured on the first passage; elsewhere 16,384.
            runtime: this rank; None for one process.
        """
        assert batch_tokens is None or batch_tokens >= 1, "a batch needs a token"
        self._vocab = vocab
        is_gpu = vocab.device.type == "cuda"
        self._batch_tokens = batch_tokens or (_MOST_GPU_TOKENS if is_gpu else _MOST_CPU_TOKENS)
        self._budget = self._batch_tokens
        # Found once: the longest passages come first, and later calls have no longer ones.
        self._is_measured = not is_gpu or (batch_tokens is not None and vocab.mesh is None)
        self._runtime = runtime or Runtime(device=vocab.device)

    def score(
        self,
        passages: Sequence[Passage],
        asked: Asked = Asked(),  # noqa: B008 - frozen
        on_progress: Progress | None = None,
    ) -> list[TokenResult]:
        """Return one result for each passage, in their order.

        On one process a batch that does not fit into GPU memory is halved, and so are all that
        follow. On a mesh a rank that ran out of memory would leave the others waiting: there the
        size is agreed on after one measured passage.

        Raises:
            ModelError: a token outside the vocabulary, a passage longer than the model has
                positions for, one that does not fit into memory alone, or logits that are not
                finite.
        """
        self._check(passages)
        mine: dict[int, TokenResult] = {}
        # Longest first: what does not fit into memory shows at once, not after an hour.
        waiting = sorted(range(len(passages)), key=lambda i: -len(passages[i].input_ids))
        model: Any = self._vocab.model
        training = model.training
        model.eval()
        if self._vocab.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._vocab.device)
        try:
            while waiting:
                taken = self._take_round(waiting, passages)
                (batch,) = self._vocab.deal(taken)
                scored = self._score_batch([passages[index] for index in batch or ()], asked)
                longest = len(passages[waiting[0]].input_ids)
                if scored is None:
                    self._halve(len(taken[0]), longest)
                    continue
                if not self._is_measured:
                    self._budget, self._is_measured = self._agree_on_budget(longest), True
                self._check_finite(scored)
                mine.update(zip(batch or (), scored, strict=True))
                waiting = waiting[sum(map(len, taken)) :]
                if on_progress is not None:
                    on_progress(len(passages) - len(waiting), len(passages))
        finally:
            model.train(training)
        everyone = {}
        for part in self._runtime.gather_objects(mine):
            everyone.update(part)
        return [everyone[index] for index in range(len(passages))]

    def _take_round(self, waiting: Sequence[int], passages: Sequence[Passage]) -> list[list[int]]:
        """Return the next batches, at most one for each rank that splits the batch."""
        budget = self._budget if self._is_measured else 1
        taken: list[list[int]] = []
        first = 0
        while first < len(waiting) and len(taken) < self._vocab.num_batch_ways:
            size = max(1, budget // len(passages[waiting[first]].input_ids))
            taken.append(list(waiting[first : first + size]))
            first += size
        return taken

    # Not inference_mode: buffers that a model renews in its forward would become inference tensors
    # and break a training that goes on afterwards.
    @torch.no_grad()
    def _score_batch(self, passages: Sequence[Passage], asked: Asked) -> list[TokenResult] | None:
        """Return the results of one pass, or None where memory ran out.

        Without passages it runs a row of two tokens, whose weights the other ranks help gather.
        """
        length = max((len(passage.input_ids) - 1 for passage in passages), default=2)
        padded = np.zeros((max(len(passages), 1), max(length, 1)), dtype=np.int64)
        for row, passage in enumerate(passages):
            padded[row, : len(passage.input_ids) - 1] = passage.input_ids[:-1]
        chosen = _Tokens.of([(p, p.first_choice, len(p.input_ids)) for p in passages])
        others = _Tokens.of([(p, p.first_label, p.first_choice) for p in passages])
        truncations = [Truncation(**scheme.model_dump()) for scheme in asked.schemes]
        try:
            first, rest = self._forward(padded, chosen, others, asked, truncations)
            assert first.argmax_N is not None, "choices were asked for"
            assert first.margin_N is not None, "choices were asked for"
            logprob = _to_numpy(first.logprob_N)
            argmax = first.argmax_N.cpu().numpy().astype(np.int32)
            margin = _to_numpy(first.margin_N)
            sampled = None if first.truncated_SN is None else _to_numpy(first.truncated_SN)
            columns = {
                name: (
                    _to_numpy(getattr(rest, f"{name}_N")),
                    _to_numpy(getattr(first, f"{name}_N")),
                )
                for name in sorted(asked.needs)
            }
            columns["logprob"] = _to_numpy(rest.logprob_N), logprob
        except torch.OutOfMemoryError:
            if self._vocab.mesh is not None:
                raise
            return None
        correct = argmax == chosen.labels_N
        results = []
        for number in range(len(passages)):
            one, other = chosen.slice(number), others.slice(number)
            whole = {
                name: np.concatenate([before[other], after[one]])
                for name, (before, after) in columns.items()
            }
            results.append(
                TokenResult(
                    argmax=argmax[one],
                    correct=correct[one],
                    margin=margin[one],
                    sampled=None if sampled is None else sampled[:, one],
                    **whole,
                )
            )
        return results

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
        chosen: "_Tokens",
        others: "_Tokens",
        asked: Asked,
        truncations: Sequence[Truncation],
    ) -> tuple[TokenScores, TokenScores]:
        """Return the scores of tokens with their choices, and of the others."""
        device = self._vocab.device

        def place(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(device)

        def work() -> tuple[TokenScores, TokenScores]:
            hidden_BTD = self._vocab.hidden_states(place(input_ids_BT))

            def score(tokens: _Tokens, **wanted: Any) -> TokenScores:
                hidden_ND = hidden_BTD[place(tokens.rows_N), place(tokens.columns_N)]
                labels_N = place(tokens.labels_N)
                return self._vocab.token_scores(hidden_ND, labels_N, asked.needs, **wanted)

            return score(chosen, truncations=truncations), score(others, choices=False)

        return self._vocab(work)

    def _agree_on_budget(self, longest: int) -> int:
        """Return how many tokens fit on every rank, after one passage of ``longest`` did."""
        device = self._vocab.device
        if device.type != "cuda":
            return self._batch_tokens
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        used = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        fits = int(_MEMORY_SHARE * (free + cached) / max(used, 1) * longest)
        smallest = -self._runtime.agree_max(-max(fits, longest))
        return min(self._batch_tokens, smallest)

    def _halve(self, num_passages: int, longest: int) -> None:
        """Take a smaller budget (tokens) after a batch did not fit."""
        if num_passages == 1:
            raise ModelError(
                f"one document of {longest} tokens does not fit into GPU memory beside the model. "
                "Set 'audit.prefix_tokens' to shorten it, or 'audit.dtype' to bf16."
            )
        torch.cuda.empty_cache()
        self._budget = num_passages // 2 * longest
        logger.warning("out of GPU memory: going on with %d tokens a batch", self._budget)

    def _check(self, passages: Sequence[Passage]) -> None:
        if not passages:
            return
        largest = max(int(passage.input_ids.max()) for passage in passages)
        smallest = min(int(passage.input_ids.min()) for passage in passages)
        size = self._vocab.vocab_size
        if largest >= size or smallest < 0:
            raise ModelError(
                f"the documents hold token {largest if largest >= size else smallest}, but the "
                f"model has {size} (0 to {size - 1}): a tokenizer that does not fit the model. "
                "Use the one the model was trained with."
            )
        # The last token is only ever a label.
        longest = max(len(passage.input_ids) for passage in passages) - 1
        config = self._vocab.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if isinstance(limit, int) and 0 < limit < longest:
            raise ModelError(
                f"a document has {longest + 1} tokens in one window, but the model's "
                f"'max_position_embeddings' is {limit}. Set 'audit.prefix_tokens' to shorten it."
            )
