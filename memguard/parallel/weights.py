"""The only place where a folder becomes a module: plain, or sharded over a mesh.

Weights are read from safetensors only and remote code is never run, whoever made the folder.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import distributed as dist
from torch import nn

from memguard.errors import MemguardError, ModelError
from memguard.parallel.assemble import (
    ShardedLayer,
    Sharding,
    build_meta_layer,
    check_layer,
    fill_layer,
)
from memguard.parallel.checkpoint_files import check_folder
from memguard.parallel.checkpoint_folder import get_folder, say_in_one_line
from memguard.parallel.mesh_rules import COMPARED_FAMILIES
from memguard.parallel.slices import (
    FolderWeights,
    refuse_weights,
    stores_different,
    warn_unexpected,
)


def load_model(
    path: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    devices: Mapping[str, int | str] | None = None,
    offload_folder: str | None = None,
) -> Any:
    """Load a causal language model from a folder or hub id, in ``dtype``.

    Args:
        path: folder or hub id.
        revision: of a hub id.
        dtype: of the weights.
        attn_implementation: None takes what transformers chooses.
        devices: of each module, see `dispatch.plan_devices`; None puts all on the CPU.
        offload_folder: for weights whose device is ``"disk"`` and that must be written there.

    Raises:
        ModelError: no such folder or id, no safetensors, remote code needed, or weights that do
            not fit the configuration.
    """
    check_folder(path)
    with _told_in_one_line(path):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            revision=revision,
            dtype=dtype,
            attn_implementation=attn_implementation,
            device_map=None if devices is None else dict(devices),
            offload_folder=offload_folder,
            use_safetensors=True,
            trust_remote_code=False,
            # Listed in `info`, and refused below with what does not fit.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    wrong = [f"missing {key}" for key in sorted(info["missing_keys"])]
    wrong += [
        f"{key} {list(stored)} instead of {list(wanted)}"
        for key, stored, wanted in sorted(info["mismatched_keys"])
    ]
    unexpected = sorted(info["unexpected_keys"])
    if wrong:
        refuse_weights(path, [*wrong, *(f"unexpected {key}" for key in unexpected)], len(wrong))
    warn_unexpected(path, unexpected)
    return model.eval()


def load_sharded(
    path: str,
    sharding: Sharding,
    *,
    revision: str | None = None,
    attn: str | None = None,
    check: bool = True,
) -> ShardedLayer:
    """Load a causal language model onto a mesh; each rank reads only what it stores.

    Args:
        path: folder, or hub id whose files are got first.
        sharding: mesh, device and dtypes.
        revision: of a hub id.
        attn: attention implementation; None takes what transformers chooses.
        check: False leaves out the forward of `check_layer`.

    Raises:
        ModelError: as `load_model`, or a family that cannot be sharded.
        ConfigError: a mesh that this model cannot run on.
    """
    check_folder(path)
    with _told_in_one_line(path):
        config = transformers.AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
        source = FolderWeights(folder := get_folder(path, revision))
        layer = build_meta_layer(config, sharding, attn=attn)
        if layer.plan.is_tied and stores_different(source, *_embedding_and_head(layer)):
            # As transformers does: the files are right, not the configuration.
            config.tie_word_embeddings = False
            layer = build_meta_layer(config, sharding, attn=attn)
        with contextlib.suppress(OSError):  # Few checkpoints have one; it is exported again.
            layer.vocab.model.generation_config = transformers.GenerationConfig.from_pretrained(
                folder
            )
    unexpected = fill_layer(layer, source, name=path)
    # On the CPU, whose group waits long: ranks finish reading minutes apart, and the first
    # collective between GPUs would take that for a hang.
    dist.all_reduce(torch.zeros(()))
    if check:
        check_layer(layer)
    if dist.get_rank() == 0:
        warn_unexpected(path, unexpected)
        _warn_uncompared(config.get_text_config().model_type)
    return layer


def _warn_uncompared(family: str) -> None:
    """Say so where a family can be sharded by its plan, but nobody has compared the numbers."""
    if family not in COMPARED_FAMILIES:
        warnings.warn(
            f"family '{family}' is sharded by transformers' plan, but its numbers on a mesh have "
            f"not been compared with one process, as those of {', '.join(COMPARED_FAMILIES)} "
            "have: compare the first losses of a short run",
            stacklevel=3,
        )


@contextlib.contextmanager
def _told_in_one_line(path: str) -> Iterator[None]:
    """Raise as ModelError whatever a broken folder raises in transformers."""
    try:
        yield
    except MemguardError:
        raise
    except Exception as error:
        raise ModelError(
            f"model '{path}' cannot be loaded as a causal language model: {say_in_one_line(error)}"
        ) from error


def _embedding_and_head(layer: ShardedLayer) -> tuple[str, str]:
    """Return the names of the two weights that may be one."""
    model = layer.vocab.model
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {module: name for name, module in model.named_modules() if module in ends}
    return f"{names[ends[0]]}.weight", f"{names[ends[1]]}.weight"


def count_parameters(model: nn.Module) -> int:
    """Return the number of distinct parameters (tied ones once)."""
    return sum(parameter.numel() for parameter in model.parameters())
