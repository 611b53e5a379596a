"""A scorer that loads its model when asked and frees it after."""

import gc
from collections.abc import Sequence

import torch

from memguard.audit.extraction import TokenResult, Window
from memguard.audit.scoring import ModelScorer, Progress
from memguard.config import AuditConfig
from memguard.parallel.vocab import build_vocab_layer
from memguard.parallel.weights import count_parameters, load_model
from memguard.runtime import detect_runtime

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LoadedWhenAsked:
    """A scorer that loads its model when asked and frees it after: one in memory at a time."""

    def __init__(
        self, *, path: str, revision: str | None, settings: AuditConfig, attn: str | None
    ) -> None:
        self._path, self._revision, self._attn = path, revision, attn
        self._settings = settings
        self.num_parameters = 0

    def score(
        self, windows: Sequence[Window], on_progress: Progress | None = None
    ) -> list[TokenResult]:
        """Load the model, score all windows, free the model."""
        model = load_model(
            self._path,
            revision=self._revision,
            dtype=_DTYPES[self._settings.dtype],
            attn_implementation=self._attn,
        ).to(detect_runtime().device)
        self.num_parameters = count_parameters(model)
        scorer = ModelScorer(build_vocab_layer(model), self._settings.batch_tokens)
        results = scorer.score(windows, on_progress)
        del model, scorer
        gc.collect()
        return results
