"""The only place where a folder becomes a module, and back.

Weights are read from safetensors only and remote code is never run, whoever made the folder.
"""

import contextlib
import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
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
from memguard.parallel.slices import (
    FolderWeights,
    ModuleWeights,
    refuse_weights,
    stores_different,
    warn_unexpected,
)

_HASH_BLOCK_BYTES = 1 << 22
_MAX_REASON = 300
"""Characters of another library's message that are passed on; some list every model there is."""


def load_model(
    path: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
) -> Any:
    """Load a causal language model from a folder or hub id, in ``dtype``, on the CPU.

    Raises:
        ModelError: no such folder or id, no safetensors, remote code needed, or weights that do
            not fit the configuration.
    """
    _check_folder(path)
    with _told_in_one_line(path):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            revision=revision,
            dtype=dtype,
            attn_implementation=attn_implementation,
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
    _check_folder(path)
    with _told_in_one_line(path):
        config = transformers.AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
        source = FolderWeights(folder := _get_folder(path, revision))
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
    if check:
        check_layer(layer)
    if dist.get_rank() == 0:
        warn_unexpected(path, unexpected)
    return layer


@contextlib.contextmanager
def _told_in_one_line(path: str) -> Iterator[None]:
    """Raise as ModelError whatever a broken folder raises in transformers."""
    try:
        yield
    except MemguardError:
        raise
    except Exception as error:
        raise ModelError(
            f"model '{path}' cannot be loaded as a causal language model: {_one_line(error)}"
        ) from error


def _embedding_and_head(layer: ShardedLayer) -> tuple[str, str]:
    """Return the names of the two weights that may be one."""
    model = layer.vocab.model
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {module: name for name, module in model.named_modules() if module in ends}
    return f"{names[ends[0]]}.weight", f"{names[ends[1]]}.weight"


def shard_scratch_model(model: Any, sharding: Sharding, *, attn: str | None = None) -> ShardedLayer:
    """Put a model drawn by `build_scratch_model` onto a mesh; every rank has drawn the same."""
    layer = build_meta_layer(model.config, sharding, attn=attn)
    fill_layer(layer, ModuleWeights(model), name="model.scratch")
    check_layer(layer)
    return layer


def load_config(path: str, *, revision: str | None = None) -> Any:
    """Return a checkpoint's configuration.

    Raises:
        ModelError: no such checkpoint, or no configuration transformers knows.
    """
    _check_folder(path)
    try:
        return transformers.AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
    except Exception as error:  # Each family checks its fields in its own way.
        if Path(path).exists():
            raise ModelError(f"'{path}' has no usable configuration: {_one_line(error)}") from error
        raise ModelError(
            f"model '{path}' is neither a folder here nor got from the hub: {_one_line(error)}"
        ) from error


def _get_folder(path: str, revision: str | None) -> Path:
    """Return the folder of a checkpoint; a hub id's files are fetched into the hub's cache."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                path, revision=revision, allow_patterns=["*.safetensors", "*.json"]
            )
        )
    except Exception as error:  # The hub's client raises its own, the network's and the system's.
        raise ModelError(
            f"model '{path}' cannot be got from the hub: {_one_line(error)}"
        ) from error


def build_scratch_model(
    config: Mapping[str, Any], *, vocab_size: int, tokenizer: Any, seed: int, attn: str | None
) -> Any:
    """Draw a model's initial weights from a configuration (fp32, CPU).

    Args:
        config: Hugging Face configuration fields with ``model_type``.
        vocab_size: rows of the embedding (tokens).
        tokenizer: gives the ids of BOS, EOS and padding.
        seed: decides the weights.
        attn: attention implementation; None takes what transformers chooses.

    Raises:
        ModelError: an unknown ``model_type``, a misspelt field or values it does not take.
    """
    resolved = make_scratch_config(config, vocab_size=vocab_size, tokenizer=tokenizer)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(
                resolved, attn_implementation=attn, dtype=torch.float32
            )
    except Exception as error:  # Each family checks its fields in its own way.
        raise ModelError(
            f"'model.scratch.config' does not describe a model: {_one_line(error)}"
        ) from error
    return model.eval()


def make_scratch_config(config: Mapping[str, Any], *, vocab_size: int, tokenizer: Any) -> Any:
    """Return the transformers configuration of a model that starts from nothing.

    Args:
        config: Hugging Face configuration fields with ``model_type``.
        vocab_size: rows of the embedding (tokens).
        tokenizer: gives the ids of BOS, EOS and padding; None where only sizes matter.

    Raises:
        ModelError: an unknown ``model_type``, a misspelt field or values it does not take.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {} if tokenizer is None else {name: getattr(tokenizer, name) for name in names}
    try:
        resolved = transformers.AutoConfig.for_model(**{**ids, **config, "vocab_size": vocab_size})
        _refuse_misspelt(config, resolved)
    except Exception as error:  # Each family checks its fields in its own way.
        raise ModelError(
            f"'model.scratch.config' does not describe a model: {_one_line(error)}"
        ) from error
    return resolved


def load_tokenizer(path: str, *, revision: str | None = None) -> Any:
    """Load a tokenizer from a folder or hub id.

    Raises:
        ModelError: there is none, or it needs remote code.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
    except Exception as error:  # A broken file raises what its parser raises.
        raise ModelError(f"no usable tokenizer in {path}: {_one_line(error)}") from error


def hash_weights(path: str | Path) -> str:
    """Return the SHA-256 over a folder's safetensors files, names and contents, in name order.

    Raises:
        ModelError: the folder has none (a hub id's weights lie in the hub's cache).
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ModelError(f"no safetensors files in {path}")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as content:
            while block := content.read(_HASH_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def count_parameters(model: nn.Module) -> int:
    """Return the number of distinct parameters (tied ones once)."""
    return sum(parameter.numel() for parameter in model.parameters())


def max_positions(path: str, *, revision: str | None = None) -> int | None:
    """Return the most tokens a checkpoint has positions for; None where it does not say.

    Raises:
        ModelError: no such checkpoint, or no configuration transformers knows.
    """
    config = load_config(path, revision=revision)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def check_positions(model: Any, seq_len: int, setting: str) -> None:
    """Refuse rows longer than the model has positions for.

    Raises:
        ModelError: ``seq_len`` (tokens) is above the configuration's ``max_position_embeddings``.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < seq_len:
        raise ModelError(
            f"'{setting}' must be at most {limit}, the model's max_position_embeddings; "
            f"got {seq_len}"
        )


def _check_folder(path: str) -> None:
    folder = Path(path)
    if not folder.exists():
        if path.count("/") > 1 or path.startswith((".", "/", "~")):
            raise ModelError(f"there is no folder '{path}'; correct the path of the model")
        return
    if not folder.is_dir():
        raise ModelError(f"model '{path}' must be a folder with config.json; it is a file")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model '{path}' has no config.json")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"model '{path}': config.json is not JSON") from error
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        why = "only pickled ones, which are never read" if pickled else "none at all"
        raise ModelError(
            f"model '{path}' must hold its weights as safetensors; it has {why}. Convert it "
            "with save_pretrained in an environment you trust."
        )


def _refuse_misspelt(config: Mapping[str, Any], resolved: Any) -> None:
    """Raise ValueError for a field that transformers keeps, but only another spelling of is read.

    Not for every unknown field: published configurations hold leftovers, and some families read
    fields that their configuration class does not list.
    """
    default = type(resolved)()
    known = [*default.to_dict(), *type(default).attribute_map]
    for name in config:
        if hasattr(resolved, name) and not hasattr(default, name):
            near = difflib.get_close_matches(name, known, 1, cutoff=0.85)
            if near:
                raise ValueError(f"'{name}' is not a field of it; did you mean '{near[0]}'?")


def _one_line(error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return "it needs code of its own, and remote code is never run"
    text = " ".join(str(error).split()).rstrip(".:") or type(error).__name__
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + " ..."
