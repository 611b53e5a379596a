"""Trains a tiny Llama with transformers' Trainer and memguard's collator and loss.

python trainer_program.py RESULT.json MICRO_BATCH ACCUMULATION LOSS
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tokenizers
import torch
import transformers
from torch import distributed

from memguard.config import OptimConfig
from memguard.integrations.transformers import GoldfishCollator, MitigatedLoss, goldfish_loss_func

USUAL: dict[str, Any] = {
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
"""Arguments of every trainer."""
VOCAB, NUM_TOKENS, NUM_ROWS, NUM_STEPS = 64, 20, 8, 3
GOLDFISH = {"k": 3, "context_width": 4}
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.0, max_grad_norm=1.0)
# transformers renamed the argument after 5.16.
RECOMPUTE = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in transformers.TrainingArguments.__dataclass_fields__
)
LOSSES: dict[str, Callable[..., Any] | None] = {
    "model": None,
    "function": goldfish_loss_func,
    "focal": MitigatedLoss([{"name": "focal", "gamma": 1.5}]),
}


def build_tokenizer() -> Any:
    """A word for each id; 0 is padding, 1 ends a text."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{id}": id for id in range(2, VOCAB)}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>"
    )


def build_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def draw_texts() -> list[list[int]]:
    """Rows of all steps, some shorter than others."""
    draw = np.random.default_rng(0)
    sizes = NUM_TOKENS - draw.integers(0, 6, NUM_STEPS * NUM_ROWS)
    return [[*draw.integers(2, VOCAB, size - 1).tolist(), 1] for size in sizes]


def draw_words(seed: int, size: int = 8, words: int = 30) -> list[str]:
    """Texts of as many random words."""
    draw = np.random.default_rng(seed)
    return [" ".join(f"w{id}" for id in draw.integers(2, VOCAB, words)) for _ in range(size)]


def act_as_rank() -> None:
    """Set what torchrun leaves in the environment of a rank."""
    rank, size = (str(each()) for each in (distributed.get_rank, distributed.get_world_size))
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)


def train(output: Path, micro_batch: int, accumulation: int, loss: str) -> list[float]:
    """Return the loss that the Trainer tells of each step."""
    arguments = transformers.TrainingArguments(**set_up(output, micro_batch, accumulation))
    trainer = transformers.Trainer(
        model=build_model(),
        args=arguments,
        train_dataset=[{"input_ids": text} for text in draw_texts()],
        data_collator=GoldfishCollator(build_tokenizer(), **GOLDFISH),
        compute_loss_func=LOSSES[loss],
    )
    return run(trainer)


def train_by_trl(output: Path, micro_batch: int, accumulation: int, loss: str) -> list[float]:
    """Return the loss that TRL's SFTTrainer tells of each step."""
    import trl

    tokenizer = build_tokenizer()
    arguments = trl.SFTConfig(
        **set_up(output, micro_batch, accumulation),
        # Tokens go to our collator as they are.
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        bf16=False,
        **{RECOMPUTE: False},
    )
    trainer = trl.SFTTrainer(
        model=build_model(),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"input_ids": text} for text in draw_texts()]),
        data_collator=GoldfishCollator(tokenizer, **GOLDFISH),
        compute_loss_func=LOSSES[loss],
        processing_class=tokenizer,
    )
    return run(trainer)


def set_up(output: Path, micro_batch: int, accumulation: int) -> dict[str, Any]:
    """Return the arguments of both: memguard's optimizer, rows in their order."""
    return USUAL | {
        "output_dir": str(output),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "max_steps": NUM_STEPS,
        "learning_rate": OPTIM.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": OPTIM.betas[0],
        "adam_beta2": OPTIM.betas[1],
        "adam_epsilon": OPTIM.eps,
        "weight_decay": 0.0,
        "max_grad_norm": OPTIM.max_grad_norm or 0.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
    }


def run(trainer: transformers.Trainer) -> list[float]:
    """Train, and return the losses."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    result, micro_batch, accumulation, loss = sys.argv[1:]
    losses = train(Path(result).parent, int(micro_batch), int(accumulation), loss)
    rank = 0
    if distributed.is_initialized():
        rank = distributed.get_rank()
        distributed.barrier()
        distributed.destroy_process_group()
    if rank == 0:
        Path(result).write_text(json.dumps(losses))
