"""An adapter and its base model as one source of merged weights.

    LoRA   W' = W + s B A
    DoRA   W' = m / ||W + s B A|| * (W + s B A)        the norm is over K, of whole rows

    W [N, K]   A [R, K]   B [N, R]   m [N]   s = alpha / R (rsLoRA: alpha / sqrt R)

W is as stored or, if the adapter was trained on it, as dequantised from NF4 (`nf4_base`).

A mesh reads rectangles of W', one process and the export read it whole. The arithmetic is float64,
in blocks of rows, and the result is rounded once to float32: it does not depend on how a tensor is
cut, and no more than a block is held beside the factors and the result.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch import distributed as dist

from memguard.errors import ModelError, RecordError, require_library
from memguard.hf.adapter_files import (
    ADAPTER_WEIGHTS,
    AdaptedLayer,
    AdapterFolder,
    read_adapter,
    shares_embedding,
)
from memguard.hf.checkpoint import explained, get_base_folder, load_config
from memguard.hf.checkpoint_files import quote
from memguard.hf.from_config import describe_model
from memguard.hf.identity import check_base, load_base_sums
from memguard.hf.nf4_base import Nf4Base
from memguard.hf.safetensors import FolderWeights, WeightSource
from memguard.hf.stored_names import ModuleNames
from memguard.parallel.layout import ShardSlice
from memguard.parallel.linear import Linear4D, to_local
from memguard.parallel.lora import LoraSpec
from memguard.runtime import Runtime
from memguard.runtime.shared_sums import sum_ahead

_BLOCK_ELEMENTS = 1 << 22
"""Elements of W' computed at a time (32 MiB in float64)."""


class MergedWeights:
    """The tensors of a base model, with an adapter merged into the adapted ones."""

    def __init__(self, base: WeightSource, adapter: AdapterFolder) -> None:
        """Match the adapter's layers with the base's tensors; nothing is read."""
        self.adapter = adapter
        self.layers: Mapping[str, AdaptedLayer] = adapter.match_layers(base.shapes)
        """The adapted layers, by the name of their weight."""
        self.base = base
        """The weights without the adapter."""
        self.origin, self.shapes = base.origin, base.shapes

    @property
    def spec(self) -> LoraSpec:
        """The adapter as it was trained by memguard, whose layers have one rank."""
        config = self.adapter.config
        return LoraSpec(
            r=config.r,
            alpha=config.alpha,
            target_modules=tuple(layer.module for layer in self.layers.values()),
            use_rslora=config.use_rslora,
            use_dora=config.use_dora,
        )

    def read(self, name: str, rectangle: ShardSlice) -> Tensor:
        """Return a rectangle of a tensor: merged in at least float32, others as stored."""
        layer = self.layers.get(name)
        if layer is None or not rectangle.num_elements:
            return self.base.read(name, rectangle)
        a, b, magnitude = self.read_factors(layer)
        columns = slice(rectangle.start[1], rectangle.start[1] + rectangle.shape[1])
        # DoRA's norm needs whole rows.
        read = slice(0, layer.num_in) if self.adapter.config.use_dora else columns
        result = torch.empty(0)
        for rows in _cut_rows(rectangle, read.stop - read.start):
            weight = self.base.read(name, _as_slice(rows, read))
            merged = weight.double()
            merged += layer.scale * (b[rows].double() @ a[:, read].double())
            if magnitude is not None:
                merged *= (magnitude[rows].double() / merged.norm(dim=1))[:, None]
                merged = merged[:, columns]
            if rows.start == rectangle.start[0]:
                dtype = torch.promote_types(weight.dtype, torch.float32)
                result = torch.empty(rectangle.shape, dtype=dtype)
            first = rows.start - rectangle.start[0]
            result[first : first + len(merged)] = merged
        return result

    def check_copies(self) -> None:
        """Refuse an adapter whose file has base weights that differ from those of its base."""
        for name, layer in self.layers.items():
            if not layer.has_base_weight:
                continue
            with safe_open(self.adapter.folder / ADAPTER_WEIGHTS, framework="pt") as file:
                copy = file.get_slice(layer.find_name("base weight"))
                for rows in _cut_rows(ShardSlice.whole(copy.get_shape()), layer.num_in):
                    stored = self.base.read(name, _as_slice(rows, slice(0, layer.num_in)))
                    if not torch.equal(copy[rows].float(), stored.float()):
                        raise ModelError(
                            f"adapter '{self.adapter.folder}': its copy of the base weights of "
                            f"{quote(layer.module)} differs from those of '{self.adapter.base}': "
                            "the base was changed, or resized for more tokens. Use the base that "
                            "the adapter was trained on, or merge it with peft"
                        )

    def read_factors(self, layer: AdaptedLayer) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return A ``[R, K]``, B ``[N, R]`` and DoRA's magnitude ``[N]``, as stored."""
        with safe_open(self.adapter.folder / ADAPTER_WEIGHTS, framework="pt") as file:
            a, b = (file.get_tensor(layer.find_name(part)) for part in ("A", "B"))
            use_dora = self.adapter.config.use_dora
            return a, b, file.get_tensor(layer.find_name("magnitude")) if use_dora else None


def open_merged(folder: Path, *, base: str | None = None) -> tuple[MergedWeights, Path]:
    """Return the merged weights of an adapter, and the folder of its base.

    A base on the hub is downloaded. If the base's hash is known, it is read and compared; in a
    process group rank 0 does so, and all ranks wait for it.

    Raises:
        ModelError: the adapter or its base cannot be read, or they do not match.
    """
    adapter = read_adapter(folder, base=base)
    # The library does not take every header, such as one of overlapping tensors.
    wrong = f"{ADAPTER_WEIGHTS} is not a complete safetensors file"
    with (
        explained(f"model '{adapter.folder}' cannot be loaded: {wrong}"),
        safe_open(adapter.folder / ADAPTER_WEIGHTS, framework="pt"),
    ):
        pass
    base_folder = get_base_folder(adapter)
    _check_base_once(folder, base_folder)
    name = f"adapter '{adapter.folder}': its base model '{adapter.base}'"
    model = describe_model(load_config(str(base_folder)), name=name)
    weights: WeightSource = ModuleNames(FolderWeights(base_folder), model)
    if adapter.base_quantization is not None:
        trained = f"adapter '{folder}' was trained on a base in {adapter.base_quantization}, which"
        require_library("bitsandbytes", trained, error=ModelError)
        weights = Nf4Base(weights, model)
    source = MergedWeights(weights, adapter)
    _check_modules(source, model)
    source.check_copies()
    return source, base_folder


def _check_base_once(folder: Path, base_folder: Path) -> None:
    """Check the base's hash, of which each rank reads its share; all raise the same error."""
    runtime = Runtime()
    if dist.is_initialized():
        runtime = Runtime(rank=dist.get_rank(), world_size=dist.get_world_size())

    def list_files() -> list[Path]:
        try:
            return [base_folder / name for name in load_base_sums(folder)]
        except RecordError:  # Raised by the check.
            return []

    read = sum_ahead(list_files, runtime)

    def find_problem() -> str | None:
        try:
            check_base(folder, base_folder, read=read)
        except (ModelError, RecordError) as error:
            return str(error)
        return None

    problem = runtime.from_main(find_problem)
    if problem is not None:
        raise ModelError(problem)


@torch.no_grad()
def merge_into(model: nn.Module, source: MergedWeights) -> None:
    """Replace the adapted weights of a base model by the merged ones, in the model's dtype.

    If the adapter was trained on quantised weights, the others become the dequantised ones.
    """
    restore_base(model, source)
    for name, layer in source.layers.items():
        weight: Any = model.get_submodule(layer.module).weight
        weight.copy_(source.read(name, ShardSlice.whole(weight.shape)))


@torch.no_grad()
def restore_base(model: nn.Module, source: MergedWeights) -> None:
    """Give a base model, as loaded, the weights on which the adapter was trained."""
    if isinstance(source.base, Nf4Base):
        for stored, module in source.base.layers.items():
            weight: Any = model.get_submodule(module).weight
            weight.copy_(source.base.read(stored, ShardSlice.whole(weight.shape)))


@torch.no_grad()
def fill_factors(model: nn.Module, source: MergedWeights) -> None:
    """Read the factors of an adapter into a model that was built with its `spec`.

    Raises:
        ModelError: the files lack the factors of a layer, or they have other shapes.
    """
    for name, module in model.named_modules():
        if not isinstance(module, Linear4D) or module.lora_scale is None:
            continue
        layer = source.layers.get(f"{name}.weight")
        if layer is None or layer.r != source.adapter.config.r:
            raise ModelError(
                f"adapter '{source.adapter.folder}': layer '{name}' must have factors of rank "
                f"{source.adapter.config.r}, as the other layers; got "
                f"{'none' if layer is None else layer.r}. Train the adapter again"
            )
        a, b, magnitude = source.read_factors(layer)
        to_local(module.lora_A.weight).copy_(a)
        to_local(module.lora_B.weight).copy_(b)
        if magnitude is not None:
            to_local(module.lora_magnitude_vector.weight).copy_(magnitude)


def attach_adapter(model: nn.Module, source: MergedWeights) -> Any:
    """Attach an adapter to its base model by peft, without merging it; see `restore_base`.

    peft is given the checked layers, ranks and scale. It would not take every value of the other
    fields of adapter_config.json, such as `target_modules`, and would run regular expressions of
    the file. The adapted layers of ``model`` are replaced.
    """
    import peft  # Takes seconds to import.

    adapter = source.adapter
    others: dict[int, list[str]] = {}
    for layer in adapter.layers:
        if layer.r != adapter.config.r:
            others.setdefault(layer.r, []).append(re.escape(layer.module))
    alpha: Any = adapter.config.alpha
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.config.r,
        lora_alpha=alpha,
        use_rslora=adapter.config.use_rslora,
        use_dora=adapter.config.use_dora,
        # Whole names. Where one is also the end of another layer's name, peft gives that layer an
        # adapter too, whose B is zero.
        target_modules=[layer.module for layer in adapter.layers],
        rank_pattern={rf"\A(?:{'|'.join(names)})": r for r, names in others.items()},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About tied weights, which were checked.
        return peft.PeftModel.from_pretrained(model, str(adapter.folder), config=config).eval()


def _check_modules(source: MergedWeights, model: Any) -> None:
    """Refuse layers that are not nn.Linear, round their weights, or share the embedding's."""
    adapter = source.adapter
    wrong = ""
    if getattr(model.config, "quantization_config", None) is not None:
        wrong = (
            f"the layers of its base model '{adapter.base}' round their weights "
            "('quantization_config' in its config.json), in which a merged adapter would be lost: "
            "it cannot be read"
        )
    modules: dict[str, Any] = dict(model.named_modules())
    embedding: Any = model.get_input_embeddings()
    for layer in () if wrong else adapter.layers:
        module = modules.get(layer.module)
        if not isinstance(module, nn.Linear):
            kind = "no such layer" if module is None else f"a {type(module).__name__}"
            wrong = (
                f"layer {quote(layer.module)} must be a linear layer (nn.Linear); its base model "
                f"'{adapter.base}' has {kind} there. Merge the adapter with peft"
            )
            break
        if module.weight is embedding.weight:
            raise shares_embedding(adapter, layer.module)
    if wrong:
        raise ModelError(f"adapter '{adapter.folder}': {wrong}")


def _cut_rows(rectangle: ShardSlice, num_columns: int) -> Iterator[slice]:
    """Yield the rows of a rectangle in blocks of at most `_BLOCK_ELEMENTS` elements."""
    first, last = rectangle.start[0], rectangle.start[0] + rectangle.shape[0]
    step = max(1, _BLOCK_ELEMENTS // num_columns)
    for row in range(first, last, step):
        yield slice(row, min(row + step, last))


def _as_slice(rows: slice, columns: slice) -> ShardSlice:
    return ShardSlice(
        start=(rows.start, columns.start),
        shape=(rows.stop - rows.start, columns.stop - columns.start),
    )
