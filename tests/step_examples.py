"""Batches as the loader builds them, and steps of training without a run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memguard.config import MitigationConfig, OptimConfig, TrainConfig
from memguard.data.loader import Batch
from memguard.mitigation import build_mitigations
from memguard.model.causal_lm import CausalLM
from memguard.records import IGNORE_LABEL
from memguard.runtime import Runtime
from memguard.train.step import TrainStep

CPU = torch.device("cpu")


def make_batch(input_ids: Any, labels: Any = None, **fields: Any) -> Batch:
    """Return rows of one document each, all of which receives loss where no labels are given."""
    if labels is None:
        labels = input_ids.copy()
        labels[:, 0] = IGNORE_LABEL
    num_labels = int((labels != IGNORE_LABEL).sum())
    values: dict[str, Any] = {
        "position_ids": np.tile(np.arange(input_ids.shape[1]), (len(input_ids), 1)),
        "document_ids": np.zeros_like(input_ids),
        "num_supervised": num_labels,
        "num_kept": num_labels,
    }
    return Batch(input_ids=input_ids, labels=labels, **{**values, **fields})


def make_step(
    lm: CausalLM,
    mitigations: Sequence[MitigationConfig] = (),
    *,
    optim: OptimConfig | None = None,
    device: torch.device = CPU,
    seed: int = 0,
    row_clipping: Any = None,
    **train: Any,
) -> TrainStep:
    """Return a step that does not clip gradients, of all rows at once; ``train`` has settings."""
    return TrainStep(
        lm=lm,
        mitigations=build_mitigations(mitigations, special_ids=[]),
        train=TrainConfig.model_validate({"micro_batch_size": None, **train}),
        optim=optim or OptimConfig(max_grad_norm=None),
        seed=seed,
        runtime=Runtime(device=device),
        row_clipping=row_clipping,
    )
