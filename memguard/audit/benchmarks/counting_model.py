"""lm-eval's `HFLM` without a model: counts the forwards and tokens of a task.

It builds the same requests and groups them by the same code as `harness_model`, and answers with
zeros, so that its number of forwards is the one of the evaluation.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from memguard.audit.batching import BatchResult
from memguard.audit.benchmarks.harness_model import Answer, HarnessModel
from memguard.audit.benchmarks.isolation import Streams
from memguard.runtime import Runtime


class CountingModel(HarnessModel):
    """Stands for the model of one task."""

    def __init__(
        self, tokenizer: Any, config: Any, *, task: str, max_tokens: int | None, streams: Streams
    ) -> None:
        """Prepare the counts; made inside `isolated`.

        Args:
            tokenizer: of the model.
            config: the model's transformers configuration.
            task: name of the task in messages.
            max_tokens: number of positions of the model; None: what its configuration says.
            streams: the output of the process.
        """
        device = torch.device("cpu")
        lm: Any = SimpleNamespace(
            model=SimpleNamespace(config=config), device=device, has_peers=False
        )
        super().__init__(
            lm,
            tokenizer,
            task=task,
            decoder=_no_decoder,
            max_tokens=max_tokens,
            batch_tokens=None,
            runtime=Runtime(device=device),
            streams=streams,
        )
        self._batching: Any = _AllAtOnce()
        self.num_tokens = 0
        """Of the rows that run, prompts included."""
        self.num_new = 0
        """Most tokens that a prompt is continued by."""

    def _score_batch(
        self, rows: Sequence[Sequence[int]], continuations_B: Sequence[Sequence[Sequence[int]]]
    ) -> BatchResult[list[Answer]]:
        self.num_tokens += sum(map(len, rows))
        zeros = [[(0.0, False) for _ in continuations] for continuations in continuations_B]
        return BatchResult(results=zeros, num_bad=0, num_tokens=0)

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: list[str],
        *,
        attention_mask: Tensor,
        **_arguments: Any,
    ) -> Tensor:
        num_rows, longest = context.shape
        num_new = max_length - longest
        self.num_forwards += num_rows
        self.num_tokens += int(attention_mask.sum())
        self.num_decoded_tokens += num_rows * num_new
        self.num_new = max(self.num_new, num_new)
        return context


class _AllAtOnce:
    """Stands for `Batching`: one batch of all jobs."""

    def run(self, jobs: Sequence[Any], run_batch: Any, _on_progress: object) -> list[Any]:
        results: list[Any] = run_batch(range(len(jobs)), 0).results
        return results


def _no_decoder() -> Any:
    raise AssertionError("nothing is generated")
