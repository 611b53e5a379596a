"""Loads a model as it may be shipped: with its adapter unmerged, or quantised.

    adapter    base + adapter, by peft: Y = X W^T + s (X A^T) B^T; of an adapter that was trained on
               a base in NF4, the layers of the training
    merged     W + s B A, rounded once to the stored precision
    int8       merged, then torchao: 8-bit weights with a scale per output feature
    nf4        merged, then bitsandbytes: 4-bit weights with a scale per 64 of them

The weights of all linear layers but the head are quantised; arithmetic stays in the audit's dtype.
A model without an adapter is quantised directly, one layer at a time on the device. The libraries
are those of the extra `quant`.
"""

import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch

from memguard.hf.assembly import Assembly
from memguard.hf.checkpoint import get_folder
from memguard.hf.load import load_assembled, load_model
from memguard.hf.merged_weights import attach_adapter, open_merged
from memguard.hf.stored_model import find_quantization
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.nf4 import Nf4Linear, list_quantised
from memguard.records import VARIANT_LIBRARIES, VariantName

_FORMS: dict[VariantName, str] = {
    "model": "the model's own weights",
    "adapter": "base model and adapter, not merged",
    "merged": "adapter merged into the base",
    "int8": "8-bit weights",
    "nf4": "4-bit weights",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantForm:
    """How one variant is made of a model."""

    name: VariantName
    stored: torch.dtype
    """Precision to which the weights are rounded, before they are quantised if they are."""
    dtype: torch.dtype
    """Of the arithmetic, and of the weights in memory that are not quantised."""

    @property
    def loaded(self) -> torch.dtype:
        """The dtype in which weights are loaded: the less precise one."""
        return min(self.stored, self.dtype, key=lambda kind: kind.itemsize)

    def is_audited(self, path: str, *, base: str | None = None) -> bool:
        """Return whether this is the model that an audit of the path loads: its scores are cached.

        Args:
            path: folder or hub id.
            base: folder or hub id of an adapter's base; None locates it.
        """
        names = ("model", "merged") if find_quantization(path, base=base) is None else ("adapter",)
        return self.name in names and self.loaded == self.dtype

    def describe(self) -> str:
        """Return how the weights were made, with the library that quantised them."""
        made = f"{_FORMS[self.name]}, from {_name(self.loaded)}"
        library = VARIANT_LIBRARIES.get(self.name)
        if library is None:
            return made
        return f"{made} by {library} {importlib.metadata.version(library)}"

    def load(
        self,
        path: str,
        device: torch.device,
        *,
        revision: str | None = None,
        base: str | None = None,
        attn: str | None,
    ) -> CausalLM:
        """Load the variant of a model onto a device.

        Args:
            path: folder or hub id; a folder with an adapter for `adapter` and `merged`.
            device: of the model.
            revision: of a hub id.
            base: folder or hub id of an adapter's base; None locates it.
            attn: attention implementation; None uses transformers' default.

        Raises:
            ModelError: see `load_model`.
        """
        if self.name == "adapter":
            return self._load_adapted(path, device, base, attn)
        model = load_model(
            path, revision=revision, dtype=self.loaded, attn_implementation=attn, base=base
        )
        model = model.to(self.dtype)
        if self.name == "int8":
            _quantise_int8(model, device)
        elif self.name == "nf4":
            _quantise_nf4(model, device)
        return build_causal_lm(model.to(device))

    def _load_adapted(
        self, path: str, device: torch.device, base: str | None, attn: str | None
    ) -> CausalLM:
        """Load the base, and attach the adapter without merging it."""
        if (quantization := find_quantization(path, base=base)) is not None:
            assembly = Assembly(
                mesh=None,
                device=device,
                dtype=self.loaded,
                quantization=quantization,
                is_trained=False,
            )
            lm = load_assembled(path, assembly, attn=attn, base=base)
            if self.loaded == self.dtype:
                return lm
            lm.attention.restore(lm.model)
            return build_causal_lm(lm.model.to(self.dtype))
        # The checks of a merge: the base is the adapter's, and its layers are linear.
        source, base_folder = open_merged(get_folder(path, None), base=base)
        model = load_model(str(base_folder), dtype=self.loaded, attn_implementation=attn)
        model = model.to(self.dtype)
        attach_adapter(model, source)
        # peft has replaced the layers of the model itself.
        return build_causal_lm(model.eval().to(device))


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def _quantise_int8(model: Any, device: torch.device) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    chosen = set(list_quantised(model).values())
    quantize_(
        model, Int8WeightOnlyConfig(), filter_fn=lambda module, _: module in chosen, device=device
    )


def _quantise_nf4(model: Any, device: torch.device) -> None:
    for name in list(list_quantised(model)):
        # Nothing else refers to the dense layer, which is freed before the next one is moved.
        model.set_submodule(name, Nf4Linear(model.get_submodule(name).to(device)))
