"""Trainings of every kind of model that the callback audits, on tiny models.

    KINDS["fsdp2_lora"]   how a model is adapted, compiled, quantised or distributed
    Training              one run: its trainer, steps, precision and settings
    open_trainer(...)     its Trainer or SFTTrainer, in one process or as a rank of a group
    call(ranks, ...)      runs a function on as many processes as a kind has

Documents are cycles of six words, which a model learns in a few steps.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import trainer_program as program
import transformers
from ranks import RankPool

NUM_DOCUMENTS, NUM_WORDS, NUM_CYCLES = 6, 6, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How a model is trained; a plain model on one process by default."""

    name: str
    adapter: Literal["", "lora", "dora"] = ""
    compiled: Literal["", "in place", "module", "by argument"] = ""
    """By `model.compile()`, as what `torch.compile(model)` returns, or by the Trainer."""
    sharding: Literal["", "ddp", "fsdp2"] = ""
    is_4bit: bool = False

    @property
    def num_processes(self) -> int:
        """Processes that train it."""
        return 2 if self.sharding else 1


_ALL = (
    Kind(name="plain"),
    Kind(name="lora", adapter="lora"),
    Kind(name="dora", adapter="dora"),
    Kind(name="compiled", compiled="in place"),
    Kind(name="compiled_module", compiled="module"),
    Kind(name="compiled_by_trainer", compiled="by argument"),
    Kind(name="ddp", sharding="ddp"),
    Kind(name="ddp_lora", sharding="ddp", adapter="lora"),
    Kind(name="fsdp2", sharding="fsdp2"),
    Kind(name="fsdp2_lora", sharding="fsdp2", adapter="lora"),
    Kind(name="nf4_lora", adapter="lora", is_4bit=True),
)
KINDS = {kind.name: kind for kind in _ALL}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """One run of a trainer."""

    kind: str
    base: Path
    """Folder of the model before training, see `save_base`."""
    output: Path
    """Folder of its checkpoints."""
    by: Literal["transformers", "trl"] = "transformers"
    steps: int = 6
    batch: int = 3
    """Rows of a process in a micro-batch."""
    learning_rate: float = 2e-2
    precision: Literal["fp32", "bf16", "autocast"] = "fp32"
    """Of the weights; "autocast": fp32 weights, computed in bf16."""
    dropout: float = 0.0
    """Of the adapter."""
    checkpointing: bool = False
    accumulation: int = 1
    evaluates: bool = False
    """Evaluate and save every 2 steps, and load the best checkpoint at the end."""
    saves_at: int | None = None
    """Save a checkpoint every this many steps."""
    resumes: Path | None = None
    """Checkpoint to go on from."""


def draw_documents(seed: int) -> list[str]:
    """Return cycles of words; a seed's words follow each other in no other seed's order."""
    draw = np.random.default_rng(seed)
    cycles = [
        draw.permutation(np.arange(2, program.VOCAB))[:NUM_WORDS] for _ in range(NUM_DOCUMENTS)
    ]
    return [" ".join(f"w{id}" for id in cycle.tolist() * NUM_CYCLES) for cycle in cycles]


def members() -> list[str]:
    """Return the texts that are trained."""
    return draw_documents(1)


def nonmembers() -> list[str]:
    """Return the texts that are not."""
    return draw_documents(2)


def save_base(folder: Path) -> Path:
    """Write the model before training, whose shapes bitsandbytes takes on a CPU."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=program.VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    program.build_tokenizer().save_pretrained(folder)
    return folder


def call(
    ranks: RankPool, kind: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[Any]:
    """Call a function on the processes of a kind, and return its results in order of ranks."""
    number = KINDS[kind].num_processes
    if number == 1:
        return [function(*args, **kwargs)]
    return ranks(_call_on_a_rank, number, function, args, kwargs)


def _call_on_a_rank(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    program.act_as_rank()
    warnings.simplefilter("ignore")
    return function(*args, **kwargs)


def load_tokenizer(base: Path) -> Any:
    """Return the tokenizer of a model, with a padding token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def open_trainer(training: Training, callbacks: Sequence[Any] = ()) -> Any:
    """Return the trainer of a run; the same run has the same numbers every time."""
    kind = KINDS[training.kind]
    transformers.set_seed(0)
    with _as_fsdp() if kind.sharding == "fsdp2" else nullcontext():
        if training.by == "trl":
            return _open_trl(kind, training, callbacks)
        tokenizer = load_tokenizer(training.base)
        model = load_model(kind, training)
        if kind.adapter:
            model = _adapt(model, kind, training)
        return transformers.Trainer(
            model=_compile(model, kind),
            args=transformers.TrainingArguments(**_set_up(kind, training)),
            train_dataset=_tokenize(members(), training),
            eval_dataset=_tokenize(nonmembers(), training) if training.evaluates else None,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )


def _open_trl(kind: Kind, training: Training, callbacks: Sequence[Any]) -> Any:
    import trl
    from datasets import Dataset

    rows = [Dataset.from_list(_tokenize(texts, training)) for texts in (members(), nonmembers())]
    return trl.SFTTrainer(
        model=_compile(load_model(kind, training), kind),
        args=trl.SFTConfig(
            **_set_up(kind, training), dataset_kwargs={"skip_prepare_dataset": True}
        ),
        train_dataset=rows[0],
        eval_dataset=rows[1] if training.evaluates else None,
        processing_class=load_tokenizer(training.base),
        peft_config=_describe_adapter(kind, training) if kind.adapter else None,
        callbacks=list(callbacks),
    )


def _set_up(kind: Kind, training: Training) -> dict[str, Any]:
    settings: dict[str, Any] = program.USUAL | {
        "output_dir": str(training.output),
        "per_device_train_batch_size": training.batch,
        "gradient_accumulation_steps": training.accumulation,
        "max_steps": training.steps,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "bf16": training.precision == "autocast",
        program.RECOMPUTE: training.checkpointing,
    }
    if kind.compiled == "module":
        # The Trainer reads them from the forward's signature, and this one has none.
        settings |= {"remove_unused_columns": False, "label_names": ["labels"]}
    if kind.compiled == "by argument":
        settings |= {"torch_compile": True, "torch_compile_backend": "eager"}
    if training.evaluates:
        settings |= {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
        }
    if training.evaluates or training.saves_at:
        settings |= {"save_strategy": "steps", "save_steps": training.saves_at or 2}
    if kind.sharding == "fsdp2":
        sharded = {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
        # Transformers advises against its own checkpointing there.
        sharded["activation_checkpointing"] = settings.pop(program.RECOMPUTE)
        settings |= {program.RECOMPUTE: False, "fsdp": True, "fsdp_config": sharded}
    return settings


@contextmanager
def _as_fsdp() -> Iterator[None]:
    """Let Accelerate shard on a CPU, where it trains as DDP without a word.

    It shards on its kinds of GPUs; the state is made as for one of them.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("fsdp_plugin") is not None and not self._shared_state:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **kwargs)

    with mock.patch.object(AcceleratorState, "__init__", initialise):
        yield


def load_model(kind: Kind, training: Training) -> Any:
    """Return the model before training, without an adapter."""
    dtype = DTYPES[training.precision]
    quantised = {}
    if kind.is_4bit:
        quantised["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    return transformers.AutoModelForCausalLM.from_pretrained(
        training.base, dtype=dtype, **quantised
    )


def _describe_adapter(kind: Kind, training: Training) -> Any:
    import peft

    return peft.LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=training.dropout,
        target_modules="all-linear",
        use_dora=kind.adapter == "dora",
        task_type="CAUSAL_LM",
    )


def _adapt(model: Any, kind: Kind, training: Training) -> Any:
    import peft

    if training.checkpointing:
        model.enable_input_require_grads()
    return peft.get_peft_model(model, _describe_adapter(kind, training))


def _compile(model: Any, kind: Kind) -> Any:
    if kind.compiled == "in place":
        model.compile(backend="eager")
    return torch.compile(model, backend="eager") if kind.compiled == "module" else model


def _tokenize(texts: Sequence[str], training: Training) -> list[dict[str, Any]]:
    rows = load_tokenizer(training.base)(list(texts)).input_ids
    return [{"input_ids": row, "labels": row} for row in rows]
