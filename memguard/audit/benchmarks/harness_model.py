"""lm-eval's `HFLM` over a model that is loaded already: only the calls of the model are replaced.

    lm-eval   prompts, their tokens with BOS, windows of long texts, truncation, cut at stop strings
    here      [(context, continuation)] tokens -> sum of log-probabilities, whether all are greedy
              [prompt] tokens                  -> the most likely tokens after it, up to a stop

HFLM makes the logits of all tokens of a batch, which of a vocabulary of 128k are a gigabyte a row;
here only those of the continuations are made, in chunks, with the head in fp32. Requests that run
the same tokens, such as the options A to D of a question, share a forward.

Every rank of a mesh has all requests and gets all answers, while the batches are dealt among them.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor

from memguard.audit.batching import Batching, BatchResult, Job, Progress
from memguard.audit.benchmarks.isolation import Streams
from memguard.audit.decoding import Decoder
from memguard.audit.requests import CannotGenerate, Prompt
from memguard.errors import ConfigError
from memguard.model.causal_lm import CausalLM
from memguard.model.kv_cache import send
from memguard.runtime import Runtime

Answer = tuple[float, bool]
"""Sum of the log-probabilities of a continuation (nats), and whether each token is the argmax."""
_ALL = 1 << 30
"""Requests that HFLM hands over at a time; batches are made here."""
_TAIL_TOKENS = 8
"""Tokens decoded after each new one to find a stop string, besides those of the string."""
_CHANGES_CHOICE = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_eos_token_id": None,
}
"""Settings of a model's generation_config.json with which `generate` does not take the most likely
token, and their values without effect."""

logger = logging.getLogger(__name__)


class HarnessModel(HFLM):  # type: ignore[misc]
    """The model of one task; counts what the task costs."""

    def __init__(
        self,
        lm: CausalLM,
        tokenizer: Any,
        *,
        task: str,
        decoder: Callable[[], Decoder],
        max_tokens: int | None,
        batch_tokens: int | None,
        runtime: Runtime,
        streams: Streams,
        on_progress: Progress | None = None,
    ) -> None:
        """Prepare a model for lm-eval; made inside `isolated`.

        The tokenizer stays as it is. Without ``max_tokens`` the model has the positions of its
        configuration, by lm-eval's rule. ``streams`` are shown while the model runs.
        """
        config = copy.deepcopy(lm.model.config)
        # The model is quantized already; HFLM would look for the library that does it.
        config.__dict__.pop("quantization_config", None)
        # No module: HFLM would change its mode and tie its weights, which may be sharded.
        stand_in = SimpleNamespace(config=config, device=lm.device)
        # HFLM gives it a token for padding.
        own_tokenizer = copy.deepcopy(tokenizer)
        super().__init__(pretrained=stand_in, tokenizer=own_tokenizer, batch_size=_ALL)
        if max_tokens is not None:
            self._max_length = min(self.max_length, max_tokens)
        self.num_forwards = 0
        """Rows that ran in forwards."""
        self.num_decoded_tokens = 0
        self.truncated: set[int] = set()
        """Items whose prompt was cut, by index."""
        self._lm, self._task, self._runtime = lm, task, runtime
        self._decoder, self._streams, self._on_progress = decoder, streams, on_progress
        self._batching = Batching.of_forwards(lm, batch_tokens, runtime)
        self._items: list[int] = []

    # -- log-likelihoods ---------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Answer]:
        """Return lm-eval's answers; see `_loglikelihood_tokens`."""
        self._items = [request.doc_id for request in requests]
        try:
            answers: list[Answer] = super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._items = []
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return lm-eval's sums over the windows of long texts."""
        if not any(self.tok_encode(request.args[0]) for request in requests):
            return [0.0] * len(requests)
        sums: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=True)
        return sums

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = True,
        override_bs: int | None = None,
    ) -> list[Answer]:
        """Return the answers to pairs of context and continuation, cut on the left as HFLM does."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ConfigError(
                    f"the task '{self._task}' has an empty context, or an answer of "
                    f"{len(continuation)} tokens where the model reads 1 to {self.max_length}. "
                    "Remove that item"
                )
            whole = (*context, *continuation)
            if len(whole) > self.max_length + 1 and self._items:
                self.truncated.add(self._items[index])
            groups.setdefault(whole[-(self.max_length + 1) :][:-1], []).append(index)
        inputs = list(groups)
        # A job ends with a token that is scored and not run; the largest one is checked for all.
        lasts = [max(requests[index][2][-1] for index in groups[ids]) for ids in inputs]
        jobs = [
            Job(input_ids=np.array([*ids, last], dtype=np.int64))
            for ids, last in zip(inputs, lasts, strict=True)
        ]

        def run(batch: Sequence[int], _: int) -> BatchResult[list[Answer]]:
            rows = [inputs[place] for place in batch]
            continuations_B = [[requests[index][2] for index in groups[ids]] for ids in rows]
            return self._score_batch(rows, continuations_B)

        with self._streams.shown():
            answered = self._batching.run(jobs, run, self._on_progress)
        self.num_forwards += len(jobs)
        answers: dict[int, Answer] = {}
        for ids, of_continuations in zip(inputs, answered, strict=True):
            answers.update(zip(groups[ids], of_continuations, strict=True))
        return [answers[index] for index in range(len(requests))]

    # Not inference_mode: see `ModelScorer`.
    @torch.no_grad()
    def _score_batch(
        self, rows: Sequence[Sequence[int]], continuations_B: Sequence[Sequence[Sequence[int]]]
    ) -> BatchResult[list[Answer]]:
        """Return the answers of one forward, for ``[B]`` rows and the continuations of each.

        Without rows it runs one of two tokens, since all ranks must take part in gathering weights.
        """
        longest = max(map(len, rows), default=2)
        padded = np.zeros((max(len(rows), 1), longest), dtype=np.int64)
        for place, ids in enumerate(rows):
            padded[place, : len(ids)] = ids
        spans = [
            (place, len(ids), continuation)
            for place, (ids, continuations) in enumerate(zip(rows, continuations_B, strict=True))
            for continuation in continuations
        ]
        none = np.zeros(0, dtype=np.int64)
        sizes = [len(continuation) for _, _, continuation in spans]
        rows_N = np.repeat([place for place, _, _ in spans], sizes).astype(np.int64)
        columns_N = np.concatenate([none, *(np.arange(n - len(c), n) for _, n, c in spans)])
        labels_N = np.concatenate([none, *(np.array(c, dtype=np.int64) for _, _, c in spans)])

        to_device = partial(send, device=self._lm.device)

        def work() -> Any:
            hidden_BTD = self._lm.hidden_states(to_device(padded))
            hidden_ND = hidden_BTD[to_device(rows_N), to_device(columns_N)]
            return self._lm.token_scores(hidden_ND, to_device(labels_N))

        scores = self._lm(work)
        logprob_N = scores.logprob_N.float().cpu().numpy()
        is_best_N = scores.argmax_N.cpu().numpy() == labels_N
        ends = np.cumsum([0, *sizes])
        flat = [
            (float(logprob_N[a:b].sum(dtype=np.float64)), bool(is_best_N[a:b].all()))
            for a, b in pairwise(ends)
        ]
        firsts = np.cumsum([0, *map(len, continuations_B)])
        return BatchResult(
            results=[flat[a:b] for a, b in pairwise(firsts)],
            num_bad=int((~np.isfinite(logprob_N)).sum()),
            num_tokens=len(logprob_N),
        )

    # -- generation --------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return lm-eval's texts; see `_model_generate`.

        Raises:
            ConfigError: a text would be as long as the model's context, or a prompt is empty.
        """
        for request in requests:
            prompt, arguments = request.args[:2]
            num_new = normalize_gen_kwargs(arguments, self.max_gen_toks)["max_gen_toks"]
            room = self.max_length - num_new
            size = len(self.tok_encode(prompt))
            if room <= 0 or not size:
                raise ConfigError(
                    f"the task '{self._task}' has a prompt of {size} tokens and generates "
                    f"{num_new}, but the model has {self.max_length} positions. Remove the item, "
                    "or lower 'max_gen_toks' in 'generation_kwargs'"
                )
            if size > room:
                self.truncated.add(request.doc_id)
        texts: list[str] = super().generate_until(requests, disable_tqdm=True)
        return texts

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: list[str],
        *,
        attention_mask: Tensor,
        **_arguments: Any,
    ) -> Tensor:
        """Return prompts and the most likely tokens after them, ``[N, T + num_new]``.

        A text ends with the token with which it contains a stop string, or with an end-of-text
        token; what is after it is padding. HFLM cuts the strings.
        """
        self._warn_of_settings()
        ids_NT = context.cpu().numpy()
        is_prompt_NT = attention_mask.cpu().numpy().astype(bool)
        num_new = max_length - ids_NT.shape[1]
        prompts = [
            Prompt(input_ids=ids_T[is_prompt_T], num_new=num_new)
            for ids_T, is_prompt_T in zip(ids_NT, is_prompt_NT, strict=True)
        ]
        with self._streams.shown():
            decoder = self._decoder()
            obstacle = decoder.find_obstacle()
            if obstacle is not None:
                raise CannotGenerate(obstacle)
            continued = decoder.continue_greedily(
                prompts, self._on_progress, is_done=self._find_end(stop), suppress_ends=False
            )
        self.num_forwards += len(prompts)
        self.num_decoded_tokens += sum(len(text.token_ids) for text in continued)
        whole = np.full((len(prompts), max_length), self.tokenizer.pad_token_id, dtype=np.int64)
        whole[:, : ids_NT.shape[1]] = ids_NT
        for row, text in zip(whole, continued, strict=True):
            row[ids_NT.shape[1] :][: len(text.token_ids)] = text.token_ids
        return torch.from_numpy(whole)

    def _warn_of_settings(self) -> None:
        settings = getattr(self._lm.model, "generation_config", None)
        names = [
            name
            for name, unused in _CHANGES_CHOICE.items()
            if getattr(settings, name, None) not in (None, unused)
        ]
        if names and self._runtime.is_main:
            logger.warning(
                "the task '%s' generates the most likely tokens: %s of the model's "
                "generation_config.json is not used, which 'generate' would use",
                self._task,
                ", ".join(names),
            )

    def _find_end(self, stop: Sequence[str]) -> Callable[[int, int, int], bool]:
        """Return a function that says whether a text ends, given its index, a step and a token."""
        ends = {*self._lm.end_token_ids, self.tokenizer.eos_token_id}
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        stops = [(text, len(encode(text)) + _TAIL_TOKENS) for text in stop if text]
        written: dict[int, list[int]] = {}

        def is_done(index: int, step: int, token: int) -> bool:
            ids = written.setdefault(index, [])
            # A batch that did not fit into memory starts again.
            del ids[step:]
            ids.append(token)
            return token in ends or any(
                # The begin of a tail may be decoded differently from the same tokens in the text.
                text in self._decode(ids[-size:]) and text in self._decode(ids)
                for text, size in stops
            )

        return is_done

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text
