"""The only place where a folder becomes a module, and back.

Weights are read from safetensors only and remote code is never run, whoever made the folder.
"""

import difflib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from memguard.errors import ModelError

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
    try:
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
    except Exception as error:  # A broken folder raises anything, SafetensorError included.
        raise ModelError(
            f"model '{path}' cannot be loaded as a causal language model: {_one_line(error)}"
        ) from error
    wrong = [f"missing {key}" for key in sorted(info["missing_keys"])]
    wrong += [
        f"{key} {list(stored)} instead of {list(wanted)}"
        for key, stored, wanted in sorted(info["mismatched_keys"])
    ]
    if wrong:
        shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise ModelError(
            f"model '{path}': {len(wrong)} weights are not in its files as its configuration "
            f"has them ({shown}); they would be random. Is it a causal language model, wholly "
            "copied?"
        )
    return model.eval()


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
    ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    fields = {**ids, **config, "vocab_size": vocab_size}
    try:
        resolved = transformers.AutoConfig.for_model(**fields)
        _refuse_misspelt(config, resolved)
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


def export_model(
    model: Any, tokenizer: Any, folder: Path, *, dtype: torch.dtype, card: str
) -> None:
    """Write a Hugging Face folder: weights, configuration, tokenizer and README.md.

    The folder appears under its name only when it is complete (written aside, then renamed).

    Args:
        model: the trained module; its weights are cast to ``dtype`` on the way.
        tokenizer: saved beside it, so that the folder loads alone.
        folder: where; an older one of that name is replaced.
        dtype: of the written floating-point weights.
        card: text of README.md.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        # Cloning a tied weight per name would untie it: transformers drops the names that share
        # storage only where they still do.
        cast: dict[int, torch.Tensor] = {}
        state = {}
        for name, tensor in model.state_dict().items():
            source = tensor.detach()
            if source.data_ptr() not in cast or source.numel() == 0:
                cast[source.data_ptr()] = (
                    source.to("cpu", dtype) if source.is_floating_point() else source.cpu()
                )
            state[name] = cast[source.data_ptr()].view(source.shape)
        kept_dtype = model.config.dtype
        try:
            model.save_pretrained(aside, state_dict=state)
            # It has written the module's dtype, and the loader takes what stands there.
            model.config.dtype = dtype
            model.config.save_pretrained(aside)
        finally:
            model.config.dtype = kept_dtype
        tokenizer.save_pretrained(aside)
        (aside / "README.md").write_text(card, encoding="utf-8")
        aside.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


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
    _check_folder(path)
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
    except Exception as error:  # Each family checks its fields in its own way.
        if Path(path).exists():
            raise ModelError(f"'{path}' has no usable configuration: {_one_line(error)}") from error
        raise ModelError(
            f"model '{path}' is neither a folder here nor got from the hub: {_one_line(error)}"
        ) from error
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
