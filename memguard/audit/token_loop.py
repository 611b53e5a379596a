"""The loop over the new tokens of a batch, and what has been generated in it.

    step          0 1 2 ... 15 | 16 ... 31 | 32 ...   the device runs; its tokens stay there
    read                       ^           ^          the tokens since the last read, in one copy
    is_done                    ^           ^          of each of them, in order
    agreed                     ^           ^          over all ranks: does any text go on?

A read waits for the device, and an agreement for all ranks. Between them rows run on whose text has
ended; tokens after its end are dropped. Where nothing is waited for (one process on the CPU) or a
step costs more than a wait (weights gathered for each token), every step is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.audit.batching import BatchResult
from memguard.model.kv_cache import GrowingRows, send
from memguard.runtime import Runtime


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choice:
    """The next tokens of R rows."""

    token_R: Tensor
    logprob_R: Tensor
    """Finite if the logits are finite."""
    gap_R: Tensor | None = None
    """Logit of the chosen token minus that of the next best; None with sampling."""


Choose = Callable[[Tensor, Sequence[int], int], Choice]
"""Takes last hidden states [R, D/y], the indices of their rows, and the step number, from 0."""
IsDone = Callable[[int, int, int], bool]
"""Takes a request's index, the step number from 0 and the token chosen in it; returns whether the
tokens after it are not needed. Steps of a request come in order, perhaps after later tokens were
chosen; they restart at 0 if a batch did not fit into memory."""

# Removing rows copies all keys and values, so finished rows stay until the share of others is this.
_LIVE_SHARE = 0.75


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Continuation:
    """The generated tokens of one request."""

    token_ids: NDArray[np.int32]
    """[num_new], or fewer if the rest was not needed."""
    min_gap: float
    """Smallest gap between a chosen and the next best token (logits); NaN with sampling or if no
    token was generated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLoop:
    """The loop over new tokens of R rows."""

    sizes: Sequence[int]
    """[R] tokens to add to each row, at least one and at most ``num_steps``."""
    num_steps: int
    """Maximum number of steps over all ranks."""
    choose: Choose
    is_done: IsDone | None
    """Takes the index of a row; None generates all tokens."""
    read_every: int
    """Steps from one read to the next, where texts may end early; the same on every rank."""
    runtime: Runtime

    def run(
        self,
        growing: GrowingRows,
        begin: Callable[[Callable[[Tensor], Choice]], Choice],
        *,
        copies: Sequence[int],
    ) -> BatchResult[Continuation]:
        """Return the new tokens of rows, which ``begin`` starts or resumes.

        ``copies`` ``[R]`` are the indices of their prompts.
        """
        rows = list(range(len(self.sizes)))
        prompt_of_R = np.array(copies, dtype=np.int64)
        choice = begin(
            lambda hidden_PD: self.choose(hidden_PD[send(prompt_of_R, hidden_PD.device)], rows, 0)
        )
        growing.take(prompt_of_R)
        texts = _Texts(self.sizes, self.num_steps, self.is_done)
        texts.add(rows, choice)
        for step in range(1, self.num_steps):
            if self._reads_before(step):
                texts.read()
                if not self.runtime.agree_any(texts.is_going_on(step)):
                    break
            going = texts.select(rows, step)
            if len(going) < len(rows):
                rows = [rows[index] for index in going]
                going_R = np.array(going, dtype=np.int64)
                growing.take(going_R)
                token_R = choice.token_R[send(going_R, choice.token_R.device)]
            else:
                token_R = choice.token_R
            choice = growing.append(token_R, _choose_for(self.choose, rows, step))
            texts.add(rows, choice)
        texts.read()
        return BatchResult(
            results=texts.collect(), num_bad=texts.num_bad, num_tokens=texts.num_tokens
        )

    def _reads_before(self, step: int) -> bool:
        # The last few steps cost less than waiting to find out whether they are needed.
        is_worth_it = self.num_steps - step >= self.read_every // 4
        return self.is_done is not None and step % self.read_every == 0 and is_worth_it


def _choose_for(choose: Choose, rows: Sequence[int], step: int) -> Callable[[Tensor], Choice]:
    return lambda hidden_RD: choose(hidden_RD, rows, step)


class _Texts:
    """The new tokens of R rows: those of the last steps on the device, the others read."""

    def __init__(self, sizes: Sequence[int], num_steps: int, is_done: IsDone | None) -> None:
        self.num_bad = 0
        """Number of tokens that were read and whose logits are not finite."""
        self.num_tokens = 0
        """Number of tokens, also of those that rows have after the end of their text."""
        self._sizes, self._is_done = sizes, is_done
        self._lengths = list(sizes)
        """[R] tokens of each text, as far as it is known."""
        self._ids_RS = np.zeros((len(sizes), num_steps), dtype=np.int32)
        self._gap_RS = np.full((len(sizes), num_steps), np.nan)
        self._num_read = 0
        """Number of steps that were read."""
        self._unread: list[tuple[Sequence[int], Choice]] = []

    def add(self, rows: Sequence[int], choice: Choice) -> None:
        """Add the tokens of the next step, of these rows; they stay on the device."""
        self._unread.append((rows, choice))
        self.num_tokens += len(rows)

    def read(self) -> None:
        """Read all tokens from the device at once, and find the texts that end with one of them."""
        if not self._unread:
            return
        first = 0
        values_3N = _copy_to_cpu([choice for _, choice in self._unread])
        for rows, _ in self._unread:
            step = self._num_read
            ids_R, gap_R, is_finite_R = values_3N[:, first : first + len(rows)]
            self._ids_RS[rows, step], self._gap_RS[rows, step] = ids_R, gap_R
            self.num_bad += len(rows) - int(is_finite_R.sum())
            if self._is_done is not None:
                for row, token in zip(rows, ids_R.astype(int).tolist(), strict=True):
                    if self._lengths[row] > step and self._is_done(row, step, token):
                        self._lengths[row] = step + 1
            first += len(rows)
            self._num_read += 1
        self._unread = []

    def is_going_on(self, step: int) -> bool:
        """Return whether a text is known to need a token in this step."""
        return any(length > step for length in self._lengths)

    def select(self, rows: Sequence[int], step: int) -> list[int]:
        """Return the indices of the rows that get a token in this step."""
        going = [index for index, row in enumerate(rows) if self._sizes[row] > step]
        live = [index for index in going if self._lengths[rows[index]] > step]
        return live if len(live) <= _LIVE_SHARE * len(going) else going

    def collect(self) -> list[Continuation]:
        """Return the texts; tokens after their ends are dropped."""
        return [
            Continuation(
                token_ids=self._ids_RS[row, :length].copy(),
                min_gap=float(self._gap_RS[row, :length].min()),
            )
            for row, length in enumerate(self._lengths)
        ]


def _copy_to_cpu(choices: Sequence[Choice]) -> NDArray[np.float64]:
    """Return tokens, gaps and whether logits are finite, ``[3, N]``, of all choices in one copy."""
    ids_N = torch.cat([choice.token_R for choice in choices])
    logprob_N = torch.cat([choice.logprob_R for choice in choices])
    gaps = [
        torch.full_like(choice.logprob_R, torch.nan) if choice.gap_R is None else choice.gap_R
        for choice in choices
    ]
    # float64 holds every id exactly.
    columns = [ids_N.double(), torch.cat(gaps).double(), logprob_N.isfinite().double()]
    values: NDArray[np.float64] = torch.stack(columns).cpu().numpy()
    return values
