"""Workload of the benchmarks: random Llamas, packed rows, memguard's step, transformers' Trainer.

All sides of a benchmark use the same rows, AdamW and clipping from this module.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import distributed as dist

from memguard.config import GoldfishConfig, OptimConfig, TrainConfig
from memguard.data.loader import Batch
from memguard.mitigation import build_mitigations
from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.memory import MemoryEstimate
from memguard.planner.step_settings import StepSettings
from memguard.records import IGNORE_LABEL
from memguard.runtime import Runtime
from memguard.seeds import derive_generator
from memguard.train.step import TrainStep

if TYPE_CHECKING:
    from fake_step import SimulatedStep

BETAS, EPS, MAX_GRAD_NORM = (0.9, 0.95), 1e-8, 1.0
# Tolerances of predicted against simulated memory: state is exact arithmetic, a peak is estimated.
STATE_TOLERANCE, PEAK_TOLERANCE = 0.05, 0.15


# -- models ------------------------------------------------------------------------------------


def build_llama(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    max_len: int = 4096,
    is_tied: bool = True,
) -> transformers.LlamaConfig:
    """Return a Llama's configuration; by default with as many key/value heads as query heads."""
    return transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads or num_heads,
        max_position_embeddings=max_len,
        tie_word_embeddings=is_tied,
    )


def draw_model(
    config: Any, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Any:
    """Create a random model directly on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def write_checkpoint(folder: Path, config: Any, *, dtype: torch.dtype = torch.float32) -> str:
    """Create a random model and write it; return its folder."""
    transformers.utils.logging.disable_progress_bar()
    draw_model(config).to(dtype).save_pretrained(folder)
    return str(folder)


# -- rows --------------------------------------------------------------------------------------


def draw_batches(
    vocab_size: int,
    shape: tuple[int, int],
    *,
    document_tokens: tuple[int, int],
    num_batches: int,
    goldfish: bool = False,
    part: int = 0,
) -> list[Batch]:
    """Create packed rows of random tokens, like those of `Loader`.

    Args:
        vocab_size: upper bound of token ids.
        shape: rows and tokens of a batch.
        document_tokens: minimum and maximum tokens of a document.
        num_batches: number of batches.
        goldfish: whether half of the labels are ignored.
        part: seed; different parts have different rows.
    """
    draw = derive_generator(0, "bench batches", part)
    configs = [GoldfishConfig(name="goldfish", k=2)] if goldfish else []
    mitigations = build_mitigations(configs, special_ids=[])
    shortest, longest = document_tokens
    places = np.broadcast_to(np.arange(shape[1]), shape)
    batches = []
    for _ in range(num_batches):
        input_ids = draw.integers(0, vocab_size, shape)
        is_first = np.zeros(shape, dtype=bool)
        is_first[:, 0] = True
        for row in is_first:
            starts = np.cumsum(draw.integers(shortest, longest + 1, 1 + shape[1] // shortest))
            row[starts[starts < shape[1]]] = True
        document_ids = np.cumsum(is_first, axis=1)
        plain = np.where(is_first, IGNORE_LABEL, input_ids)
        labels = mitigations.mask_labels(
            input_ids, plain, document_ids=document_ids, generator=draw
        )
        batch = Batch(
            input_ids=input_ids,
            labels=labels,
            position_ids=places - np.maximum.accumulate(np.where(is_first, places, 0), axis=1),
            document_ids=document_ids,
            num_supervised=int((plain != IGNORE_LABEL).sum()),
            num_kept=int((labels != IGNORE_LABEL).sum()),
        )
        batches.append(batch)
    return batches


def take_rows(batch: Batch, part: int, num_parts: int) -> Batch:
    """Return one rank's rows of a batch."""
    rows = slice(part, None, num_parts)
    return dataclasses.replace(
        batch,
        input_ids=batch.input_ids[rows],
        labels=batch.labels[rows],
        position_ids=batch.position_ids[rows],
        document_ids=batch.document_ids[rows],
        num_supervised=batch.num_supervised // num_parts,
        num_kept=int((batch.labels[rows] != IGNORE_LABEL).sum()),
    )


def as_tensors(batch: Batch, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return the inputs of a transformers model."""
    names = ("input_ids", "labels", "position_ids")
    return {name: torch.from_numpy(getattr(batch, name).copy()).to(device) for name in names}


# -- steps -------------------------------------------------------------------------------------


def build_step(
    lm: Any, train: TrainConfig, *, device: torch.device | str = "cpu", **optim: Any
) -> TrainStep:
    """Return memguard's step on a model, plain or sharded over the ranks of this process group."""
    lm.model.train()
    is_many = dist.is_initialized()
    settings = {"betas": BETAS, "eps": EPS, "max_grad_norm": MAX_GRAD_NORM, "weight_decay": 0.0}
    return TrainStep(
        lm=lm,
        mitigations=build_mitigations([], special_ids=[]),
        train=train,
        optim=OptimConfig.model_validate({**settings, **optim}),
        seed=0,
        runtime=Runtime(
            device=torch.device(device),
            rank=dist.get_rank() if is_many else 0,
            world_size=dist.get_world_size() if is_many else 1,
        ),
    )


def train_by_trainer(
    model: Any,
    batches: Sequence[Batch],
    callback: transformers.TrainerCallback,
    *,
    lr: float,
    num_ranks: int = 1,
    **arguments: Any,
) -> None:
    """Train by `transformers.Trainer` with its defaults; nothing is logged, saved or evaluated.

    Args:
        model: a plain model.
        batches: rows of a step, of all ranks.
        callback: added to the Trainer's own.
        lr: learning rate.
        num_ranks: ranks that share the rows of a step.
        arguments: of `transformers.TrainingArguments`.
    """

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)

    batch_size = len(batches[0].input_ids)
    columns = [as_tensors(batch) for batch in batches]
    rows = [
        {name: tensor[row] for name, tensor in tensors.items()}
        for tensors in columns
        for row in range(batch_size)
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder,
            "per_device_train_batch_size": batch_size // num_ranks,
            "learning_rate": lr,
            "lr_scheduler_type": "constant",
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_epsilon": EPS,
            "weight_decay": 0.0,
            "max_grad_norm": MAX_GRAD_NORM,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        trainer = InOrder(
            model=model,
            args=transformers.TrainingArguments(**settings, **arguments),
            train_dataset=rows,
            data_collator=transformers.default_data_collator,
            callbacks=[callback],
        )
        # This callback would print a summary between the lines of the table.
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


# -- predicted and simulated memory ------------------------------------------------------------


def describe_step(train: TrainConfig, mesh: MeshShape, *, seq_len: int) -> StepSettings:
    """Return a step's settings as the planner's input."""
    num_rows = train.batch_size // mesh.num_batch_ways
    micro_batch = train.count_micro_rows(num_rows)
    return StepSettings(
        num_tokens=micro_batch * seq_len,
        num_labels=micro_batch * (seq_len - 1),
        num_micro_batches=num_rows // micro_batch,
        chunk_tokens=train.nll_chunk_tokens,
        compute_bytes=2 if train.precision == "bf16" else 4,
        checkpointing=train.checkpointing,
    )


def pair_memory(
    simulated: "SimulatedStep", predicted: MemoryEstimate
) -> dict[str, tuple[int, int, float]]:
    """Return simulated and predicted bytes of each kind, and the relative tolerance."""
    return {
        "weights": (simulated.weight_bytes, predicted.peak.weights, STATE_TOLERANCE),
        "gradients": (simulated.gradient_bytes, predicted.gradient_bytes, STATE_TOLERANCE),
        "optimizer": (simulated.optimizer_bytes, predicted.peak.optimizer, STATE_TOLERANCE),
        "peak": (simulated.peak_bytes, predicted.peak.total, PEAK_TOLERANCE),
    }
