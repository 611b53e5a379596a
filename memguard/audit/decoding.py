"""Continues prompts token by token: greedily, or by numbers that each document owns.

    prompt         prefix, the true tokens up to the first divergence, the model's own choice there
    continuation   num_new tokens after it, EOS like any other: nothing stops early

What stands before the first divergence is known from the teacher-forced pass, so near-verbatim
measures need only what comes after it, of documents that diverge. A fixed number of tokens is
compared with a text of that length; the published goldfish evaluation calls `generate`, which
would end at EOS. Where the model finds back to the text, decoding does not take it as a draft
again.

One loop serves one process and meshes: prompts run once, their keys and values are kept (see
`parallel/growing_rows.py`), each step runs one token a row and the LM head, in fp32, on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.audit.probabilistic import SamplingScheme
from memguard.audit.rounds import Outcome, Progress, Result, Run, Work, run_rounds
from memguard.parallel.growing_rows import GrowingRows
from memguard.parallel.truncation import Truncation
from memguard.parallel.vocab import VocabLayer
from memguard.runtime import Runtime
from memguard.seeds import derive_generator

Choice = tuple[Tensor, Tensor]
"""Tokens [R] and, for each, a log-probability that is finite where the logits are."""
Choose = Callable[[Tensor, Sequence[int], int], Choice]
"""Takes last hidden states [R, D/y], which rows these are, and the number of the step, from 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """A prompt to continue."""

    prompt_ids: NDArray[np.integer]
    """[P], at least one token."""
    num_new: int
    """Tokens to add; 0 is answered without the model."""
    document: str = ""
    """Whose numbers sampling draws."""


class Decoder:
    """Continues prompts with a vocabulary layer, longest first, in batches of limited size.

    On a mesh every rank calls it with the same requests and gets all continuations.
    """

    def __init__(
        self, vocab: VocabLayer, batch_tokens: int, runtime: Runtime | None = None
    ) -> None:
        """Take a model.

        Args:
            vocab: the model as hidden states plus head; put into evaluation mode while decoding.
            batch_tokens: tokens whose keys and values are held at a time, padding included; one
                request always goes.
            runtime: this rank; None for one process.
        """
        self.vocab = vocab
        self._batch_tokens = batch_tokens
        self._runtime = runtime or Runtime(device=vocab.device)

    def run(
        self, works: Sequence[Work], run: Run[Result], on_progress: Progress | None = None
    ) -> list[Result]:
        """Return what ``run`` makes of the works, in their order; see `rounds.run_rounds`."""
        return run_rounds(self.vocab, self._runtime, self._batch_tokens, works, run, on_progress)

    def continue_greedily(
        self, requests: Sequence[Request], on_progress: Progress | None = None
    ) -> list[NDArray[np.int32]]:
        """Return the most likely ``[num_new]`` tokens of each request, lowest ids where some tie.

        Raises:
            ModelError: see `rounds.run_rounds`.
        """

        def choose(hidden_RD: Tensor, _rows: Sequence[int], _step: int) -> Choice:
            best = self.vocab.best_tokens(hidden_RD, 1)
            return best.ids_NK[:, 0], best.logprob_NK[:, 0]

        found = self._decode(requests, 1, lambda _: choose, on_progress)
        return [tokens_1S[0] for tokens_1S in found]

    def sample(
        self,
        requests: Sequence[Request],
        scheme: SamplingScheme,
        num_samples: int,
        seed: int,
        on_progress: Progress | None = None,
    ) -> list[NDArray[np.int32]]:
        """Return ``[num_samples, num_new]`` drawn tokens of each request.

        Seed, document and sample own the numbers, whatever else is in a batch: each token is where
        the distribution function, over ids in their order, passes a uniform number of its own. Of
        more samples the first are the same.

        Raises:
            ModelError: see `rounds.run_rounds`.
        """
        assert num_samples >= 1, "at least one sample"
        truncation = Truncation(
            temperature=scheme.temperature, top_k=scheme.top_k, top_p=scheme.top_p
        )

        def prepare(rows: Sequence[tuple[int, int]]) -> Choose:
            uniform = [_draw_uniform(requests[index], sample, seed) for index, sample in rows]

            def choose(hidden_RD: Tensor, rows: Sequence[int], step: int) -> Choice:
                numbers = [uniform[row][step] for row in rows]
                uniform_R = torch.tensor(numbers, dtype=torch.float64, device=hidden_RD.device)
                drawn = self.vocab.draw_tokens(hidden_RD, uniform_R, truncation)
                return drawn.ids_N, drawn.logprob_N

            return choose

        return self._decode(requests, num_samples, prepare, on_progress)

    def _decode(
        self,
        requests: Sequence[Request],
        num_samples: int,
        prepare: Callable[[Sequence[tuple[int, int]]], Choose],
        on_progress: Progress | None,
    ) -> list[NDArray[np.int32]]:
        """Return ``[num_samples, num_new]`` tokens of each request."""
        asked = [
            (index, sample)
            for index, request in enumerate(requests)
            for sample in range(num_samples if request.num_new else 0)
        ]
        works = [
            Work(prompt_ids=requests[index].prompt_ids, num_new=requests[index].num_new)
            for index, _ in asked
        ]

        def run(batch: Sequence[int], num_steps: int, cached: bool) -> Outcome[NDArray[np.int32]]:
            rows = [asked[index] for index in batch]
            # Samples of one document share its prompt.
            distinct = list(dict.fromkeys(index for index, _ in rows))
            return _grow(
                GrowingRows(self.vocab, is_cached=cached, room=num_steps),
                [requests[index].prompt_ids for index in distinct],
                copies=[distinct.index(index) for index, _ in rows],
                sizes=[works[index].num_new for index in batch],
                num_steps=num_steps,
                choose=prepare(rows),
            )

        found = self.run(works, run, on_progress)
        tokens = dict(zip(asked, found, strict=True))
        none = np.zeros(0, dtype=np.int32)
        return [
            np.stack([tokens.get((index, sample), none) for sample in range(num_samples)])
            for index in range(len(requests))
        ]


def _grow(
    growing: GrowingRows,
    prompts: Sequence[NDArray[np.integer]],
    *,
    copies: Sequence[int],
    sizes: Sequence[int],
    num_steps: int,
    choose: Choose,
) -> Outcome[NDArray[np.int32]]:
    """Return the new tokens of R rows.

    Args:
        growing: new.
        prompts: of all rows, each once.
        copies: ``[R]`` the prompt of each row.
        sizes: ``[R]`` tokens to add to each; at most ``num_steps``.
        num_steps: how often to run the model.
        choose: the next tokens.
    """
    rows = list(range(len(sizes)))
    first = torch.tensor(copies, dtype=torch.int64)
    tokens_R, logprob_R = growing.start(
        prompts, lambda hidden_PD: choose(hidden_PD[first.to(hidden_PD.device)], rows, 0)
    )
    growing.take(np.array(copies, dtype=np.int64))
    steps = [(rows, tokens_R)]
    is_finite = [logprob_R.isfinite().all()]
    for step in range(1, num_steps):
        going = [place for place, row in enumerate(rows) if sizes[row] > step]
        rows = [rows[place] for place in going]
        growing.take(np.array(going, dtype=np.int64))
        tokens_R = tokens_R[torch.tensor(going, dtype=torch.int64, device=tokens_R.device)]
        read = _choose_for(choose, rows, step)
        tokens_R, logprob_R = growing.append(tokens_R, read)
        steps.append((rows, tokens_R))
        is_finite.append(logprob_R.isfinite().all())
    found = [np.zeros(size, dtype=np.int32) for size in sizes]
    for step, (rows, tokens_R) in enumerate(steps):
        for row, token in zip(rows, tokens_R.tolist(), strict=True):
            found[row][step] = token
    return Outcome(results=found, is_finite=bool(torch.stack(is_finite).all()))


def _choose_for(choose: Choose, rows: Sequence[int], step: int) -> Callable[[Tensor], Choice]:
    return lambda hidden_RD: choose(hidden_RD, rows, step)


def _draw_uniform(request: Request, sample: int, seed: int) -> NDArray[np.float64]:
    """Return the numbers in [0, 1) that decide one sample's tokens."""
    purpose = f"sampling\0{request.document}"
    return derive_generator(seed, purpose, sample).random(request.num_new)
