"""Loads a model in a form in which it may be shipped: merged, or quantised.

    merged    W + s B A, rounded once to the stored precision
    int8      merged, then torchao: 8-bit weights with a scale per output feature
    nf4       merged, then bitsandbytes: 4-bit weights with a scale per 64 of them

The weights of all linear layers but the head are quantised; arithmetic stays in the audit's dtype.
A model without an adapter is quantised directly, one layer at a time on the device. The libraries
are those of the extra `quant`.
"""

import importlib.metadata
from dataclasses import dataclass

import torch

from memguard.hf.load import load_model
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.nf4 import Nf4Linear, list_quantised
from memguard.records import QUANTISING_LIBRARIES, LoadAs

_FORMS: dict[LoadAs, str] = {
    "merged": "adapter merged into the base",
    "int8": "8-bit weights",
    "nf4": "4-bit weights",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedForm:
    """How the loaded weights are made of the stored ones."""

    name: LoadAs
    """Not ``stored``, for which nothing is made."""
    stored: torch.dtype
    """Precision to which the weights are rounded, before they are quantised if they are."""
    dtype: torch.dtype
    """Of the arithmetic, and of the weights in memory that are not quantised."""

    @property
    def loaded(self) -> torch.dtype:
        """The dtype in which weights are loaded: the less precise one."""
        return min(self.stored, self.dtype, key=lambda kind: kind.itemsize)

    def describe(self) -> str:
        """Return how the weights are made, with the library that quantises them."""
        precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.loaded]
        made = f"{_FORMS[self.name]}, from {precision}"
        library = QUANTISING_LIBRARIES.get(self.name)
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
        """Load a model in this form onto a device; see `load_model`."""
        model = load_model(
            path, revision=revision, dtype=self.loaded, attn_implementation=attn, base=base
        )
        if self.name != "merged" or self.loaded != self.dtype:
            # In bf16 this rounds the rotary frequencies too: a merged model keeps those stored.
            model = model.to(self.dtype)
        if self.name == "int8":
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            chosen, how = set(list_quantised(model).values()), Int8WeightOnlyConfig()
            quantize_(model, how, filter_fn=lambda module, _: module in chosen, device=device)
        elif self.name == "nf4":
            for name in list(list_quantised(model)):
                # Nothing else refers to the dense layer: it is freed before the next one is moved.
                model.set_submodule(name, Nf4Linear(model.get_submodule(name).to(device)))
        return build_causal_lm(model.to(device))
