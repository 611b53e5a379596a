"""Loads the model of a checkpoint: plain, over several devices, or tensor by tensor.

    plain      on the CPU, or with `plan_devices` on GPUs first, then in the CPU's memory, then on
               disk. `accelerate` assigns the blocks (``device_map="auto"``) and moves each block to
               a GPU for its forward pass.
    assembled  tensor by tensor onto the device, over a mesh each rank its own rectangles: of a base
               in NF4 the dense weights are never there together

    folder                                                weights that are read, and factors
    a checkpoint                                          its tensors, by the names of the modules
    an adapter (peft)                                     its base's, merged with the adapter
    an adapter trained on NF4, in a model in NF4          its base's, as stored; and its factors

Weights are read from safetensors only and remote code is never run, regardless of where the folder
comes from.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import infer_auto_device_map
from accelerate.utils import get_max_memory
from torch import distributed as dist
from torch import nn

from memguard.errors import ModelError
from memguard.hf.adapter_files import is_adapter, read_adapter
from memguard.hf.assembly import (
    AssembledModel,
    Assembly,
    build_meta_layer,
    fill_layer,
)
from memguard.hf.checkpoint import explained, get_folder, load_config
from memguard.hf.checkpoint_files import cut
from memguard.hf.from_config import build_on_meta, describe_model
from memguard.hf.merged_weights import MergedWeights, fill_factors, merge_into, open_merged
from memguard.hf.nf4_base import Nf4Base, list_nf4, match_layers
from memguard.hf.safetensors import (
    FolderWeights,
    ModuleWeights,
    WeightSource,
    refuse_weights,
    stores_different,
    warn_unexpected,
)
from memguard.hf.stored_names import ModuleNames
from memguard.model.checks import check_causal_lm
from memguard.parallel.model_sizes import COMPARED_FAMILIES

NO_MODEL = "model '{}' cannot be loaded as a causal language model"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredModel:
    """A checkpoint, or an adapter with its base."""

    folder: Path
    """Of the checkpoint, or of the adapter's base."""
    config: Any
    """Of transformers."""
    weights: WeightSource
    adapter: MergedWeights | None = None
    """An adapter that is attached to the weights instead of merged into them."""

    def untie(self, model: Any) -> bool:
        """Let tied head and embedding of a model be two weights if the files have two that differ.

        As in transformers, the files take precedence over the configuration. Returns whether the
        model must be built again, of the changed configuration.
        """
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        names = {module: name for name, module in model.named_modules()}
        if embedding.weight is not head.weight or not stores_different(
            self.weights, f"{names[embedding]}.weight", f"{names[head]}.weight"
        ):
            return False
        self.config.tie_word_embeddings = False
        return True

    def outline(self, assembly: Assembly, *, attn: str | None = None) -> AssembledModel:
        """Return the model without storage, with its attached adapter and what its export needs."""
        if self.adapter is not None:
            assembly = replace(assembly, adapter=self.adapter.spec)
        layer = build_meta_layer(self.config, assembly, attn=attn)
        if self.untie(layer.lm.model):
            layer = build_meta_layer(self.config, assembly, attn=attn)
        self.prepare_export(layer.lm.model)
        return layer

    def prepare_export(self, model: Any) -> None:
        """Give a model the settings of `generate`, also for the ends of texts, and conversions."""
        if self.weights.origin is not None:
            # The export reverts them, as that of transformers does.
            model._weight_conversions = list(self.weights.origin.conversions)
        if not model.can_generate():
            return
        read = transformers.GenerationConfig.from_pretrained
        try:
            model.generation_config = read(self.folder)
        except OSError:
            model.generation_config = read(
                self.folder, config_file_name="config.json", _from_model_config=True
            )


def find_quantization(path: str, *, base: str | None = None) -> Literal["nf4"] | None:
    """Return the form of the base on which an adapter was trained; None if it was not quantised.

    None for other models, and for adapters of other programs, which do not record the form.

    Raises:
        ModelError: the adapter cannot be read.
    """
    return read_adapter(path, base=base).base_quantization if is_adapter(path) else None


def open_stored(
    path: str, assembly: Assembly, *, revision: str | None = None, base: str | None = None
) -> StoredModel:
    """Return a checkpoint before its weights are read; files of a hub id are downloaded.

    If the assembly's layers are in NF4, a folder with an adapter has one that was trained so. See
    `load_config` for path, revision and base.
    """
    folder = get_folder(path, revision, base=base)
    merged: MergedWeights | None = None
    if is_adapter(folder):
        merged, folder = open_merged(folder, base=base)
    with explained(NO_MODEL.format(path)):
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        if merged is not None and assembly.quantization is None:
            return StoredModel(folder=folder, config=config, weights=merged)
        if merged is not None:
            assert isinstance(merged.base, Nf4Base), "the adapter was trained on weights in NF4"
            weights: WeightSource = merged.base.stored
        else:
            outline = describe_model(config, name=f"model '{path}'")
            weights = ModuleNames(FolderWeights(folder), outline)
            if assembly.quantization is not None:
                match_layers(weights, outline)
    return StoredModel(folder=folder, config=config, weights=weights, adapter=merged)


def load_model(
    path: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    devices: Mapping[str, int | str] | None = None,
    offload_folder: str | None = None,
    base: str | None = None,
) -> Any:
    """Load a causal language model from a folder or hub id, in ``dtype``; see `load_config`.

    The folder may have an adapter. ``devices`` are those of each module, see `plan_devices`; None
    loads all on the CPU. ``offload_folder`` is for weights that are offloaded to ``"disk"``.

    Raises:
        ModelError: there is no such folder or id, it has no safetensors or needs remote code, or
            its weights do not match its configuration.
    """
    folder = get_folder(path, revision, base=base)
    if is_adapter(folder):
        if devices is not None:
            raise ModelError(
                f"model '{folder}' is an adapter, which is not merged over several devices "
                "('audit.device_map'): merge it first with memguard export --merge"
            )
        source, base_folder = open_merged(folder, base=base)
        model = load_model(str(base_folder), dtype=dtype, attn_implementation=attn_implementation)
        with explained(NO_MODEL.format(folder)):
            merge_into(model, source)
        return model
    config = load_config(str(folder))
    with explained(NO_MODEL.format(path)):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            device_map=None if devices is None else dict(devices),
            offload_folder=offload_folder,
            use_safetensors=True,
            trust_remote_code=False,
            # Mismatches are listed in `info` and refused below with the other problems.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    wrong = [f"missing {cut(key)}" for key in sorted(info["missing_keys"])]
    wrong += [
        f"{cut(key)} {list(stored)} instead of {list(wanted)}"
        for key, stored, wanted in sorted(info["mismatched_keys"])
    ]
    unexpected = sorted(info["unexpected_keys"])
    if wrong:
        extra = [f"unexpected {cut(key)}" for key in unexpected]
        refuse_weights(path, [*wrong, *extra], len(wrong))
    warn_unexpected(path, unexpected)
    if devices is None:
        # Files with another head take precedence over the configuration, which an export writes.
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is not None and head.weight is not embedding.weight:
            model.config.tie_word_embeddings = False
    # `from_pretrained` makes all trainable that the family freezes: offsets of routers, tables of
    # positions. They are frozen on meshes too.
    built = describe_model(model.config, name=type(model).__name__)
    for name, parameter in built.named_parameters():
        if not parameter.requires_grad:
            model.get_parameter(name).requires_grad_(False)
    return model.eval()


def load_assembled(
    path: str,
    assembly: Assembly,
    *,
    revision: str | None = None,
    attn: str | None = None,
    check: bool = True,
    base: str | None = None,
) -> AssembledModel:
    """Load a causal language model; each rank reads only what it stores, tensor by tensor.

    Beside what the model stores on the device, one dense tensor at a time is there. See
    `open_stored` for path, assembly, revision and base. ``check`` runs `check_causal_lm`, which
    needs more memory than loading.

    Raises:
        ModelError: as `load_model`; or the model's family cannot be sharded, or its layers cannot
            be in NF4 or have adapters.
        ConfigError: the model cannot run on this mesh, or lacks layers that the adapters name.
    """
    stored = open_stored(path, assembly, revision=revision, base=base)
    with explained(NO_MODEL.format(path)):
        layer = stored.outline(assembly, attn=attn)
    unexpected = fill_layer(layer, stored.weights, name=path)
    if stored.adapter is not None:
        fill_factors(layer.lm.model, stored.adapter)
    if assembly.mesh is not None:
        # On the CPU, whose process group has a long timeout: ranks may finish reading minutes
        # apart, and the first collective between GPUs would time out.
        dist.all_reduce(torch.zeros(()))
    if check:
        check_causal_lm(layer.lm, is_split=layer.is_split)
    if assembly.mesh is None or dist.get_rank() == 0:
        warn_unexpected(path, unexpected)
        family = stored.config.get_text_config().model_type
        if layer.is_split and family not in COMPARED_FAMILIES:
            warnings.warn(
                f"family '{family}' is split by transformers' plan, but its numbers on a mesh have "
                f"not been compared with one process, as those of {', '.join(COMPARED_FAMILIES)} "
                "have: compare the first losses of a short run",
                stacklevel=2,
            )
    return layer


def count_parameters(model: nn.Module) -> int:
    """Return the number of distinct parameters (tied ones once); of weights in NF4, the weights.

    Weights in NF4 are ours, or those of bitsandbytes.
    """
    quantised = list_nf4(model).values()
    blocks = {id(part) for layer in quantised for part in (layer.packed, layer.scales)}
    others = sum(_count(part) for part in model.parameters() if id(part) not in blocks)
    return others + sum(layer.weight.numel() for layer in quantised)


def _count(parameter: nn.Parameter) -> int:
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def plan_devices(
    config: Any, *, dtype: torch.dtype, max_memory: Mapping[str, str] | None = None
) -> dict[str, int | str]:
    """Return the device of each module of a model larger than one device.

    The head stays on the first device: scores read its weight outside the model's forward pass,
    where accelerate's hooks would not move it to a GPU. ``max_memory`` is by device, e.g.
    ``{"0": "70GiB", "cpu": "1TB"}``; None uses the free memory.

    Raises:
        ModelError: the head alone does not fit on the first device.
    """
    # The device map counts tied weights once, as the modules share them.
    model = build_on_meta(config, dtype=dtype)
    wanted = {int(k) if k.isdigit() else k: v for k, v in (max_memory or {}).items()}
    room: dict[int | str, int] = dict(get_max_memory(wanted or None))
    first: int | str = next(iter(room))
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    room[first] -= head.weight.numel() * dtype.itemsize
    if room[first] < 0:
        raise ModelError(
            f"the output embedding alone does not fit into the memory of device '{first}'. Allow "
            "more in 'audit.max_memory', or use several processes (--nproc)."
        )
    places: dict[str, int | str] = infer_auto_device_map(
        model, max_memory=room, no_split_module_classes=list(model._no_split_modules), dtype=dtype
    )
    if "" in places:  # Everything on one device.
        return places
    return {**places, name: first}


def shard_scratch_model(
    model: Any, assembly: Assembly, *, attn: str | None = None
) -> AssembledModel:
    """Shard a model from `build_scratch_model` over a mesh; every rank passes the same weights."""
    layer = build_meta_layer(model.config, assembly, attn=attn)
    fill_layer(layer, ModuleWeights(model), name="model.scratch")
    check_causal_lm(layer.lm, is_split=layer.is_split)
    return layer
