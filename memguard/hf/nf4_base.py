"""The base of an adapter that was trained on NF4 weights (QLoRA).

    stored weight [N, K], in fp32  ->  NF4  ->  dequantised [N, K], in fp32

The numbers depend on the base's files only, not on the precision or the mesh of a run. Training and
its audit keep the NF4 form, a rank on z the blocks of its part; the merge and the comparison of
logits read the dequantised one. Of each tensor only the rows that have these blocks are read, and
one tensor at a time is dense on the device, where it is quantised.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from memguard.errors import ModelError
from memguard.hf.safetensors import WeightSource
from memguard.parallel.layout import ShardSlice, cut
from memguard.parallel.linear import Linear4D
from memguard.parallel.mesh import Axis
from memguard.parallel.nf4 import BLOCK, count_blocks, dequantise_nf4, list_quantised, quantise_nf4


class Nf4Base:
    """The tensors of a base model, those of its linear layers as dequantised from NF4."""

    def __init__(self, base: WeightSource, model: Any) -> None:
        """Match the layers of a model, on any device, with stored tensors; nothing is read."""
        self.layers: Mapping[str, str] = match_layers(base, model)
        """Names of the quantised layers, by the name of their weight."""
        self.stored = base
        """The tensors before they are quantised."""
        self.origin, self.shapes = base.origin, base.shapes

    def read(self, name: str, rectangle: ShardSlice) -> Tensor:
        """Return a rectangle of a tensor: of a quantised layer in fp32, others as stored."""
        if name not in self.layers:
            return self.stored.read(name, rectangle)
        num_rows, num_columns = rectangle.shape[0], self.shapes[name][1]
        start = rectangle.start[0] * num_columns
        first, last = start // BLOCK, count_blocks(start + num_rows * num_columns)
        weights = read_blocks(self.stored, name, first, last - first)
        dense = dequantise_nf4(*quantise_nf4(weights), tuple(weights.shape))
        rows = dense[start - first * BLOCK :][: num_rows * num_columns]
        return rows.reshape(num_rows, num_columns)[:, rectangle.slices[1]]


def match_layers(base: WeightSource, model: Any) -> dict[str, str]:
    """Return the names of a model's quantised layers, by the name of their weight.

    Raises:
        ModelError: a layer's weight is not stored.
    """
    matched = {}
    for module, layer in list_quantised(model).items():
        name = f"{module}.weight"
        if base.shapes.get(name) != tuple(layer.weight.shape):
            raise ModelError(
                f"'adapter.quantization': {type(model).__name__} stores the weight of '{module}' "
                "under another name or in another shape, so that it cannot be quantised: remove "
                "the setting"
            )
        matched[name] = module
    return matched


def outline_nf4(model: Any) -> None:
    """Let the linear layers of a model store their weights in NF4.

    It is on the meta device, or sharded with y = x = 1, before FSDP2.
    """
    for layer in list_quantised(model).values():
        if not isinstance(layer, Linear4D):
            layer = Linear4D.convert(layer, in_axis=Axis(name="y"), out_axis=Axis(name="x"))
        layer.use_nf4()


def list_nf4(model: Any) -> dict[str, Linear4D]:
    """Return the layers in NF4 by the name that their weights have in files."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, Linear4D) and module.is_quantised
    }


def fill_nf4(layer: Linear4D, source: WeightSource, name: str, z: Axis) -> None:
    """Read and quantise the blocks of a layer that this rank stores; ``z`` cuts the blocks."""
    whole = ShardSlice.whole((count_blocks(layer.weight.numel()),))
    blocks = cut(whole, 0, z.rank, z.degree)
    if blocks.num_elements:
        layer.fill_nf4(read_blocks(source, name, blocks.start[0], blocks.shape[0]))


def read_blocks(base: WeightSource, name: str, first: int, count: int) -> Tensor:
    """Return the weights of some blocks as stored, as one row; only their rows are read.

    The last block of a tensor may be shorter.
    """
    num_rows, num_columns = base.shapes[name]
    start = first * BLOCK
    end = min(start + count * BLOCK, num_rows * num_columns)
    row, last_row = start // num_columns, -(-end // num_columns)
    rows = ShardSlice(start=(row, 0), shape=(last_row - row, num_columns))
    flat = base.read(name, rows).reshape(-1)
    return flat[start - row * num_columns :][: end - start]
