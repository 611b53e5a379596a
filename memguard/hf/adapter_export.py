"""Writes adapters: as a folder that `peft` loads, or merged into their base.

    write_adapter    adapter_model.safetensors: base_model.model.{layer}.lora_A.weight [R, K],
                     .lora_B.weight [N, R], DoRA: .lora_magnitude_vector [N]; fp32.
                     adapter_config.json: peft's LoraConfig, which names the base model.
                     README.md and the tokenizer. All factors are in memory
    write_merged     tensor by tensor: base [N, K], A [R, K], B [N, R] -> merged [N, K] -> file; no
                     more than one tensor and its factors are in memory
    compare_logits   adapter + base, by peft, against the merged folder, by transformers, both in
                     fp32; one model at a time is in memory

Only rounding may separate the two: that of the arithmetic, and that of the merged weights to the
dtype they are written in.
"""

import gc
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from memguard.errors import ModelError
from memguard.hf.adapter_files import QUANTIZATION
from memguard.hf.checkpoint_files import CONFIG, GENERATION, INDEX, read_headers, read_json, shorten
from memguard.hf.load import load_model
from memguard.hf.merged_weights import MergedWeights, attach_adapter, restore_base
from memguard.hf.nf4_base import Nf4Base
from memguard.hf.safetensors import (
    DTYPES,
    FileWriter,
    FolderWeights,
    StoredTensor,
    WeightSource,
    build_index,
    plan_files,
)
from memguard.parallel.layout import ShardSlice
from memguard.parallel.lora import (
    MAGNITUDE,
    LoraSpec,
    find_targets,
    shorten_targets,
)
from memguard.records.record import atomic_folder

_PREFIX = "base_model.model."


def make_peft_config(
    model: Any, spec: LoraSpec, *, base: str, revision: str | None
) -> dict[str, Any]:
    """Return the content of adapter_config.json; a base's folder is written as an absolute path."""
    # peft takes seconds to import, and a run without adapters does not need it.
    from peft import LoraConfig

    alpha: Any = int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha
    config = LoraConfig(
        r=spec.r,
        lora_alpha=alpha,
        target_modules=shorten_targets(model, find_targets(model, spec.target_modules)),
        lora_dropout=spec.dropout,
        use_rslora=spec.use_rslora,
        use_dora=spec.use_dora,
        init_lora_weights="gaussian" if spec.init == "gaussian" else True,
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).exists() else base,
        revision=revision,
    )
    fields: dict[str, Any] = config.to_dict()  # type: ignore[no-untyped-call]
    return {
        # peft keeps names in sets, whose order changes from process to process.
        name: sorted(value) if isinstance(value, set) else value
        for name, value in sorted(fields.items())
    }


def write_adapter(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    tokenizer: Any,
    folder: Path,
    *,
    card: str,
    base_quantization: str | None = None,
) -> None:
    """Write a peft folder; an existing folder of that name is replaced.

    ``tensors`` are on the CPU, by their names in the model; ``config`` is from `make_peft_config`,
    ``card`` the text of README.md; ``base_quantization`` is None if the base was not quantised.
    """
    metadata = {"format": "pt"}
    if base_quantization is not None:
        metadata[QUANTIZATION] = base_quantization
    with atomic_folder(folder) as temporary:
        # peft stores magnitudes without the name of their parameter.
        named = {
            _PREFIX + (name.removesuffix(".weight") if MAGNITUDE in name else name): tensor
            for name, tensor in tensors.items()
        }
        save_file(named, temporary / "adapter_model.safetensors", metadata=metadata)
        text = json.dumps(config, indent=2) + "\n"
        (temporary / "adapter_config.json").write_text(text, encoding="utf-8")
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        temporary.chmod(0o755)


_WRITABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LEAST = 1e-4
# Largest difference of a logit, as a share of the largest logit (at least _LEAST), and mean KL
# (nats).
# For two layers 2e-6 and 6e-13 (fp32), 4e-3 and 8e-7 (fp16), 2e-2 and 5e-5 (bf16) were measured;
# a wrong scale or a layer left out exceeds all of them.
_BOUNDS = {
    torch.float64: (2e-5, 1e-6),
    torch.float32: (2e-5, 1e-6),
    torch.float16: (3e-2, 1e-3),
    torch.bfloat16: (1e-1, 1e-2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenWeights:
    """The weights of a merged model."""

    num_merged: int
    """Tensors with an adapter."""
    num_tensors: int
    num_bytes: int
    dtype: torch.dtype
    """Of the merged tensors; the least precise if they differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitDifference:
    """Difference between two models on the same tokens."""

    num_tokens: int
    largest: float
    """Largest difference of a logit."""
    largest_logit: float
    """Largest absolute value of a logit of the first model."""
    mean_kl: float
    """Mean over tokens of KL(first || second) (nats)."""
    max_kl: float

    def is_within(self, dtype: torch.dtype) -> bool:
        """Return whether rounding weights to ``dtype`` explains the difference; False for NaN."""
        largest, mean_kl = self.find_bounds(dtype)
        return self.largest <= largest and self.mean_kl <= mean_kl

    def find_bounds(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the bounds of the largest difference and of the mean KL (nats)."""
        share, mean_kl = _BOUNDS[dtype]
        return max(_LEAST, share * self.largest_logit), mean_kl


def write_merged(
    source: MergedWeights,
    base_folder: Path,
    out: Path,
    *,
    dtype: torch.dtype | None,
    max_file_bytes: int = 4 << 30,
    on_tensor: Callable[[], object],
) -> WrittenWeights:
    """Write weights and configuration of an adapter's merged model into an empty folder.

    ``source`` is from `open_merged`. Floating-point weights are written in ``dtype``; None keeps
    the base's. ``on_tensor`` is called after each tensor.

    Raises:
        ModelError: the base stores an adapted layer together with others.
        OSError: the folder is not writable, or the disk is full.
    """
    stored = FolderWeights(base_folder)
    changed = _find_changed(source, stored.shapes)
    tensors = [
        StoredTensor(name=name, shape=stored.shape, dtype=_choose(DTYPES[stored.dtype], dtype))
        for _, headers in read_headers(base_folder, name=str(base_folder))
        for name, stored in headers.items()
    ]
    files = plan_files(tensors, max_file_bytes)
    for file in files:
        with FileWriter(out, file) as output:
            for tensor in file.tensors:
                weights: WeightSource = source if tensor.name in changed else stored
                name = changed.get(tensor.name, tensor.name)
                whole = ShardSlice.whole(tensor.shape)
                # No name keeps a tensor while the next is read.
                output.write(tensor.name, weights.read(name, whole).to(tensor.dtype))
                on_tensor()
    if len(files) > 1:
        num_parameters = sum(torch.Size(tensor.shape).numel() for tensor in tensors)
        _write_json(out / INDEX, build_index(files, num_parameters=num_parameters))
    config = read_json(base_folder / CONFIG, name=str(base_folder))
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    _write_json(out / CONFIG, config)
    if (base_folder / GENERATION).is_file():
        shutil.copyfile(base_folder / GENERATION, out / GENERATION)
    merged = {tensor.dtype for tensor in tensors if changed.get(tensor.name) in source.layers}
    return WrittenWeights(
        num_merged=len(source.layers),
        num_tensors=len(tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        dtype=max(merged, key=lambda dtype: torch.finfo(dtype).eps),
    )


def _find_changed(source: MergedWeights, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the names in the model of the tensors that differ from the base's, by stored name."""
    quantised = source.base.layers if isinstance(source.base, Nf4Base) else {}
    changed = {}
    for name in (*source.layers, *quantised):
        stored = (name,) if source.origin is None else source.origin.names[name]
        if len(stored) > 1 or shapes[stored[0]] != source.shapes[name]:
            raise ModelError(
                f"adapter '{source.adapter.folder}': its base stores '{name}' together with other "
                f"weights ({shorten(stored)}), so that it cannot be merged tensor by tensor: merge "
                "it with peft"
            )
        changed[stored[0]] = name
    return changed


def _choose(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return stored if dtype is None or stored not in _WRITABLE else dtype


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def compare_logits(
    source: MergedWeights, base_folder: Path, merged: Path, rows: Sequence[Tensor]
) -> LogitDifference:
    """Compare adapter + base with a merged model in fp32 on the CPU; a row of tokens is [S].

    Raises:
        ModelError: the merged model cannot be loaded.
    """
    base = load_model(str(base_folder))
    restore_base(base, source)
    adapted = attach_adapter(base, source)
    first = list(_compute_logits(adapted, rows))
    del adapted, base
    gc.collect()
    return _measure(first, _compute_logits(load_model(str(merged)), rows))


def _compute_logits(model: Any, rows: Sequence[Tensor]) -> Iterable[Tensor]:
    for row_S in rows:
        with torch.no_grad():
            yield model(input_ids=row_S[None]).logits[0].float()


def _measure(first: Sequence[Tensor], second: Iterable[Tensor]) -> LogitDifference:
    differences, logits, divergences = [], [], []
    for first_SV, second_SV in zip(first, second, strict=True):
        differences.append((first_SV - second_SV).abs().max())
        logits.append(first_SV.abs().max())
        log_p, log_q = first_SV.double().log_softmax(-1), second_SV.double().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
    divergence_N = torch.cat(divergences)
    return LogitDifference(
        num_tokens=len(divergence_N),
        largest=float(torch.stack(differences).max()),
        largest_logit=float(torch.stack(logits).max()),
        mean_kl=float(divergence_N.mean()),
        max_kl=float(divergence_N.max()),
    )


def refuse_difference(difference: LogitDifference, dtype: torch.dtype) -> None:
    """Raise ModelError if a merged model differs by more than rounding; names the bounds."""
    if difference.is_within(dtype):
        return
    largest, mean_kl = difference.find_bounds(dtype)
    name = str(dtype).removeprefix("torch.")
    way_out = "" if dtype == torch.float32 else ": --dtype float32 rounds less"
    raise ModelError(
        f"the merged model differs from adapter and base by more than rounding to {name}: by up to "
        f"{difference.largest:.3g} in a logit (at most {largest:.3g}), KL {difference.mean_kl:.3g} "
        f"nats a token (at most {mean_kl:.3g}). Nothing was written{way_out}"
    )
