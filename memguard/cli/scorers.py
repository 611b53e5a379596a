"""A scorer that loads its model when asked and frees it after."""

import gc
from collections.abc import Sequence

import torch

from memguard.audit.extraction import TokenResult, Window
from memguard.audit.scoring import ModelScorer, Progress
from memguard.cli.start import Workplace
from memguard.config import AuditConfig
from memguard.parallel.assemble import Sharding, count_sharded_parameters
from memguard.parallel.vocab import VocabLayer
from memguard.parallel.vocab_checks import build_vocab_layer
from memguard.parallel.weights import count_parameters, load_model, load_sharded

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LoadedWhenAsked:
    """A scorer that loads its model when asked and frees it after: one in memory at a time."""

    def __init__(
        self,
        *,
        path: str,
        revision: str | None,
        settings: AuditConfig,
        attn: str | None,
        workplace: Workplace,
    ) -> None:
        self._path, self._revision, self._attn = path, revision, attn
        self._settings, self._workplace = settings, workplace
        self.num_parameters = 0

    def score(
        self, windows: Sequence[Window], on_progress: Progress | None = None
    ) -> list[TokenResult]:
        """Load the model, score all windows, free the model."""
        gc.collect()  # A model that was trained before lies in reference cycles.
        scorer = ModelScorer(self._load(), self._settings.batch_tokens, self._workplace.runtime)
        results = scorer.score(windows, on_progress)
        del scorer
        gc.collect()
        return results

    def _load(self) -> VocabLayer:
        dtype, runtime = _DTYPES[self._settings.dtype], self._workplace.runtime
        if self._workplace.mesh is not None:
            sharding = Sharding(mesh=self._workplace.mesh, device=runtime.device, dtype=dtype)
            layer = load_sharded(self._path, sharding, revision=self._revision, attn=self._attn)
            self.num_parameters = count_sharded_parameters(layer)
            return layer.vocab
        model = load_model(
            self._path, revision=self._revision, dtype=dtype, attn_implementation=self._attn
        )
        self.num_parameters = count_parameters(model)
        return build_vocab_layer(model.to(runtime.device))
