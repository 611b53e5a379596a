"""Setup of a run: process group and mesh, then a checkpoint or random weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from memguard.config import ParallelConfig, RunConfig
from memguard.data.documents import Document, document_text
from memguard.data.tokenization import train_bpe
from memguard.errors import ConfigError
from memguard.hf.adapter_export import make_peft_config
from memguard.hf.assembly import Assembly, assemble_loaded, find_sizes
from memguard.hf.checkpoint import find_positions, get_folder, load_config, load_tokenizer
from memguard.hf.config_fields import check_positions
from memguard.hf.export_rehearsal import rehearse_adapter, rehearse_export
from memguard.hf.from_config import build_scratch_model, describe_model, make_scratch_config
from memguard.hf.identity import list_model_files, sum_model
from memguard.hf.load import load_assembled, load_model, shard_scratch_model
from memguard.model.causal_lm import CausalLM
from memguard.parallel.lora import LoraSpec, find_targets
from memguard.parallel.mesh import Mesh4D, build_mesh
from memguard.parallel.mesh_shape import resolve_mesh
from memguard.parallel.model_sizes import NF4_BASE, ModelSizes, Sizes
from memguard.records.sealed import FileSum
from memguard.runtime import Console, Runtime, detect_runtime, set_allocator_defaults, start_runtime
from memguard.runtime.shared_sums import sum_ahead
from memguard.seeds import derive_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedContext:
    """This process and the mesh it is part of."""

    runtime: Runtime
    mesh: Mesh4D | None
    """None for a single process, which uses plain modules."""


@contextmanager
def open_distributed(
    parallel: ParallelConfig, sizes: Sizes | None, *, batch_size: int | None = None
) -> Iterator[DistributedContext]:
    """Check the mesh, then start the process group."""
    set_allocator_defaults()
    world_size = detect_runtime().world_size
    if world_size == 1:
        sizes = batch_size = None
    shape = resolve_mesh(parallel, world_size, sizes, batch_size=batch_size)
    timeout = timedelta(minutes=parallel.timeout_minutes)
    with start_runtime(timeout) as runtime:
        mesh = build_mesh(shape, runtime.device.type, timeout=timeout) if world_size > 1 else None
        if mesh is not None and runtime.device.type == "cuda":
            mesh.connect(runtime.device)
        yield DistributedContext(runtime=runtime, mesh=mesh)


def read_sizes(config: RunConfig, known: Sizes | None) -> Sizes | None:
    """Return the sizes of a run's model; None for a single process, which does not need them."""
    if detect_runtime().world_size == 1:
        return None
    if config.adapter is not None and config.adapter.quantization is not None:
        return NF4_BASE
    sizes = known or find_sizes(read_model_config(config))
    return sizes.for_optimizer(config.optim.name) if isinstance(sizes, ModelSizes) else sizes


def read_model_config(config: RunConfig, tokenizer: Any = None) -> Any:
    """Return the transformers configuration of a run's model."""
    scratch = config.model.scratch
    if scratch is None:
        return load_config(_path(config), revision=config.model.revision)
    if tokenizer is None and scratch.tokenizer is not None:
        tokenizer = load_tokenizer(scratch.tokenizer)
    vocab_size = scratch.vocab_size if tokenizer is None else len(tokenizer)
    return make_scratch_config(scratch.config, vocab_size=vocab_size, tokenizer=tokenizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedModel:
    """A model with its weights in place."""

    lm: CausalLM
    adapter: LoraSpec | None = None
    """Its adapters; None if its weights are trained."""
    base_files: Mapping[str, FileSum] = field(default_factory=dict)
    """The base's files before training; empty if all weights are trained."""

    def rehearse_export(self, config: RunConfig, tokenizer: Any) -> str | None:
        """Try all of the export but the weights, on rank 0; return what was repaired."""
        model = self.lm.model
        if self.adapter is not None:
            make = partial(make_peft_config, model, self.adapter, base=_path(config))
            rehearse_adapter(partial(make, revision=config.model.revision), tokenizer)
            return None
        dtype, is_sharded = choose_export_dtype(config), self.lm.mesh is not None
        return rehearse_export(model, tokenizer, dtype=dtype, is_sharded=is_sharded)


def choose_export_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype of a run's exported weights."""
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32


def check_layers(config: RunConfig) -> None:
    """Check that a run's adapters have layers, on the meta device: before documents are read."""
    adapter = make_lora(config)
    if adapter is None:
        return
    model = describe_model(read_model_config(config), name=f"model '{config.model.path}'")
    find_targets(model, adapter.target_modules)


def load_known_tokenizer(config: RunConfig) -> Any:
    """Return the tokenizer of the checkpoint or of `model.scratch`; None if it must be trained.

    Called before the documents are read, so that errors in the checkpoint are reported in seconds.
    """
    scratch, tokenizer = config.model.scratch, None
    if scratch is not None and scratch.tokenizer is not None:
        tokenizer = load_tokenizer(scratch.tokenizer)
    check_positions(find_positions(read_model_config(config, tokenizer)), config.data.seq_len)
    if scratch is not None:
        return tokenizer
    return load_tokenizer(_path(config), revision=config.model.revision)


def train_tokenizer(config: RunConfig, documents: Sequence[Document], console: Console) -> Any:
    """Train a byte-level BPE tokenizer on the documents, for a model with random weights."""
    scratch = config.model.scratch
    assert scratch is not None, "a checkpoint has its tokenizer"
    if any(document.input_ids is not None for document in documents):
        raise ConfigError(
            "'model.scratch.tokenizer' must name the tokenizer that produced the token ids in "
            "'data.train': a tokenizer trained here would assign other ids"
        )
    console.info(f"tokenizer: training a BPE of {scratch.vocab_size:,} entries")
    texts = (document_text(document) for document in documents)
    return train_bpe(texts, vocab_size=scratch.vocab_size)


def start_model(config: RunConfig, tokenizer: Any, distributed: DistributedContext) -> StartedModel:
    """Load the checkpoint's model, or build one with random weights from the run's seed."""
    model, runtime = config.model, distributed.runtime
    attn = model.attn_implementation
    adapter = make_lora(config)
    assembly = Assembly.for_training(
        config.train,
        mesh=distributed.mesh,
        device=runtime.device,
        adapter=adapter,
        quantization=None if config.adapter is None else config.adapter.quantization,
        reshard_after_forward=config.parallel.reshard_after_forward,
    )
    drawn = None if model.scratch is None else draw_model(config, tokenizer)
    if assembly.mesh is not None and drawn is not None:
        lm = shard_scratch_model(drawn, assembly, attn=attn).lm
    elif assembly.mesh is not None or assembly.quantization is not None:
        # Never the dense model on the device.
        lm = load_assembled(_path(config), assembly, revision=model.revision, attn=attn).lm
    else:
        if drawn is None:
            drawn = load_model(
                _path(config),
                revision=model.revision,
                dtype=assembly.dtype,
                attn_implementation=attn,
            )
        if config.train.weights == "bf16":
            # Random ones too, and those that transformers keeps in fp32, as on a mesh.
            for parameter in drawn.parameters():
                parameter.data = parameter.data.to(assembly.dtype)
        lm = assemble_loaded(drawn.to(runtime.device), assembly)
    is_whole = all(parameter.requires_grad for parameter in lm.model.parameters())
    # The weights that are not trained are in no checkpoint.
    base_files = {} if is_whole or model.path is None else sum_base(config, runtime)
    return StartedModel(lm=lm, adapter=adapter, base_files=base_files)


def draw_model(config: RunConfig, tokenizer: Any) -> Any:
    """Return a model with the random weights that a run without a checkpoint starts from."""
    scratch = config.model.scratch
    assert scratch is not None, "the run starts from a checkpoint"
    return build_scratch_model(
        scratch.config,
        vocab_size=len(tokenizer),
        tokenizer=tokenizer,
        seed=derive_seed(config.seed, "initial weights"),
        attn=config.model.attn_implementation,
    )


def sum_base(config: RunConfig, runtime: Runtime) -> Mapping[str, FileSum]:
    """Hash the files of the model before training, on all ranks."""
    find_folder = partial(get_folder, _path(config), config.model.revision)
    read = sum_ahead(lambda: list_model_files(find_folder()).values(), runtime)
    return runtime.from_main(lambda: sum_model(find_folder(), read=read))


def make_lora(config: RunConfig) -> LoraSpec | None:
    """Return the adapters of a run; None if its weights are trained."""
    adapter = config.adapter
    if adapter is None:
        return None
    chosen = adapter.target_modules
    return LoraSpec(
        r=adapter.r,
        alpha=adapter.lora_alpha,
        target_modules=None if chosen == "all-linear" else tuple(chosen),
        dropout=adapter.lora_dropout,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        init="gaussian" if adapter.init_lora_weights == "gaussian" else "kaiming",
        seed=derive_seed(config.seed, "adapters"),
    )


def _path(config: RunConfig) -> str:
    assert config.model.path is not None, "one of 'path' and 'scratch' is set"
    return config.model.path
