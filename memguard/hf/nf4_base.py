"""The base of an adapter that was trained on NF4 weights (QLoRA).

    stored weight [N, K], in fp32  ->  NF4  ->  dequantised [N, K], in fp32

The numbers depend on the base's files only, not on the precision of a run. Training keeps the NF4
form; the merge, the audit and the comparison of logits read the dequantised one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memguard.errors import ModelError
from memguard.hf.safetensors import FolderWeights, WeightSource
from memguard.parallel.layout import ShardSlice
from memguard.parallel.linear import Linear4D
from memguard.parallel.mesh import Axis
from memguard.parallel.nf4 import dequantise_nf4, list_quantised, quantise_nf4


class Nf4Base:
    """The tensors of a base model, those of its linear layers as dequantised from NF4."""

    def __init__(self, base: WeightSource, model: Any) -> None:
        """Match the layers of the model with the stored tensors; nothing is read.

        Args:
            base: the stored tensors.
            model: of the base's configuration, on any device.

        Raises:
            ModelError: a layer's weight is not stored under its name.
        """
        self.layers: Mapping[str, str] = match_layers(base, model)
        """Names of the quantised layers, by the stored name of their weight."""
        self._base = base
        self._last: tuple[str, Tensor] | None = None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and full shape of every tensor."""
        return self._base.shapes

    def read(self, name: str, rectangle: ShardSlice) -> Tensor:
        """Return a rectangle of a tensor: of a quantised layer in fp32, others as stored."""
        if name not in self.layers:
            return self._base.read(name, rectangle)
        if self._last is None or self._last[0] != name:
            # Readers take a tensor in several rectangles; it is quantised whole.
            weight_NK = _read_whole(self._base, name)
            shape = (weight_NK.shape[0], weight_NK.shape[1])
            self._last = (name, dequantise_nf4(*quantise_nf4(weight_NK), shape))
        return self._last[1][rectangle.slices]


def match_layers(base: WeightSource, model: Any) -> dict[str, str]:
    """Return the names of a model's quantised layers, by the stored name of their weight.

    Raises:
        ModelError: a layer's weight is not stored under its name.
    """
    matched = {}
    for module, layer in list_quantised(model).items():
        # Checkpoints of a base model alone lack the prefix, such as `model`.
        names = (f"{module}.weight", f"{module.partition('.')[2]}.weight")
        stored = next((name for name in names if name in base.shapes), None)
        if stored is None or base.shapes[stored] != tuple(layer.weight.shape):
            raise ModelError(
                f"'adapter.quantization': {type(model).__name__} stores the weight of '{module}' "
                "under another name or in another shape, so that it cannot be quantised: remove "
                "the setting"
            )
        matched[stored] = module
    return matched


def quantise_base(model: Any, folder: Path) -> None:
    """Quantise the linear layers of a plain model, in place and one at a time.

    Args:
        model: loaded from the folder, on the device of the training.
        folder: of the base; its stored weights are quantised, not those rounded to the model's
            dtype.

    Raises:
        ModelError: see `match_layers`.
    """
    base = FolderWeights(folder)
    for stored, module in match_layers(base, model).items():
        layer = Linear4D.convert(
            model.get_submodule(module), in_axis=Axis(name="y"), out_axis=Axis(name="x")
        )
        layer.quantise(_read_whole(base, stored))


def dequantise_base(model: Any, base: Nf4Base) -> None:
    """Replace the weights of a plain model's linear layers by the dequantised ones."""
    with torch.no_grad():
        for stored, module in base.layers.items():
            weight = model.get_submodule(module).weight
            whole = ShardSlice(start=(0, 0), shape=tuple(weight.shape))
            weight.copy_(base.read(stored, whole))


def _read_whole(base: WeightSource, name: str) -> Tensor:
    shape = base.shapes[name]
    return base.read(name, ShardSlice(start=(0,) * len(shape), shape=shape)).float()
