"""Reads and checks a peft folder, without torch.

    adapter_config.json          base model, rank, alpha, rsLoRA, DoRA
    adapter_model.safetensors    base_model.model.{layer}.lora_A.weight [R, K], .lora_B.weight
                                 [N, R], DoRA: .lora_magnitude_vector [N]

The base may have been quantised in training (QLoRA): the metadata of adapter_model.safetensors then
has `base_quantization`, which other programs ignore.

The tensors of the file, not `target_modules`, decide which layers have an adapter. Layers of other
kinds than nn.Linear are refused by `merged_weights`, which knows the modules of the base.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from packaging.version import Version

from memguard.errors import ModelError, list_first
from memguard.hf.adapter_config import AdapterConfig, find_base, read_config
from memguard.hf.checkpoint_files import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    PLAIN_DTYPES,
    SEPARATE_ADAPTER,
    SINGLE,
    StoredShape,
    check_folder,
    cut,
    point_to_adapter,
    quote,
    read_header,
    read_headers,
    read_metadata,
)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
QUANTIZATION = "base_quantization"
"""Name in the metadata of the file."""
_PREFIX = "base_model.model."
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
_BASE_LAYER = ".base_layer.weight"
"""peft copies the base weights of an adapted head into the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedLayer:
    """The adapter of one linear layer."""

    module: str
    """Name of the layer in the model."""
    r: int
    num_in: int
    num_out: int
    scale: float
    """Factor of B A."""
    has_base_weight: bool
    """The file also has a copy of the base weight."""

    def find_name(self, part: Literal["A", "B", "magnitude", "base weight"]) -> str:
        """Return the stored name of A [R, K], B [N, R], DoRA's magnitude [N], or W [N, K]."""
        leaves = {"A": _A, "B": _B, "magnitude": _MAGNITUDE, "base weight": _BASE_LAYER}
        return f"{_PREFIX}{self.module}{leaves[part]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFolder:
    """A checked peft folder."""

    folder: Path
    base: str
    """Folder or hub id of the base model."""
    revision: str | None
    """Of a hub id."""
    config: AdapterConfig
    layers: tuple[AdaptedLayer, ...]
    base_quantization: Literal["nf4"] | None = None
    """Form in which the base's linear layers were trained on; None: as stored."""

    def describe(self) -> str:
        """Return kind, rank and alpha, as in ``LoRA, r=8, alpha=16, rsLoRA``."""
        config = self.config
        kind = "DoRA" if config.use_dora else "LoRA"
        scaling = ", rsLoRA" if config.use_rslora else ""
        base = "" if self.base_quantization is None else f", base in {self.base_quantization}"
        return f"{kind}, r={config.r}, alpha={config.alpha:g}{scaling}{base}"

    def match_layers(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, AdaptedLayer]:
        """Return the adapted layers by the name of their weight; ``shapes`` are the base's.

        Raises:
            ModelError: the base lacks one of the layers, or it has another shape.
        """
        matched, wrong = {}, []
        for layer in self.layers:
            name, wanted = f"{layer.module}.weight", (layer.num_out, layer.num_in)
            if name not in shapes and layer.has_base_weight:
                # peft stores such copies of heads and embeddings only.
                raise shares_embedding(self, layer.module)
            if name not in shapes:
                wrong.append(f"no {cut(name)}")
            elif shapes[name] != wanted:
                wrong.append(f"{cut(name)} {list(shapes[name])} instead of {list(wanted)}")
            else:
                matched[name] = layer
        if wrong:
            raise ModelError(
                f"adapter '{self.folder}' does not match its base model '{self.base}', which has "
                f"{list_first(wrong, 3)}: it belongs to another model. Correct "
                f"'base_model_name_or_path' in {ADAPTER_CONFIG}"
            )
        return matched


def shares_embedding(adapter: AdapterFolder, module: str) -> ModelError:
    """Return the error for an adapted head whose weight is also the embedding's."""
    return ModelError(
        f"adapter '{adapter.folder}': layer {quote(module)} shares its weight with the embedding "
        "(tie_word_embeddings), so that it cannot be merged without changing both. Train an "
        "adapter that leaves this layer out"
    )


def is_adapter(path: str | Path) -> bool:
    """Return whether a path is a local folder with an adapter and no weights of its own."""
    folder = Path(path)
    has_weights = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    return (folder / ADAPTER_CONFIG).is_file() and not has_weights


def explain_no_adapter(folder: Path) -> str:
    """Return why a folder is not that of an adapter, and the way out if there is one."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return f"it has no {ADAPTER_CONFIG}{point_to_adapter(folder)}"
    return f"it has weights of its own. {SEPARATE_ADAPTER}"


def check_model(path: str, *, base: str | None = None) -> None:
    """Refuse a folder that has neither a checkpoint nor an adapter that can be read.

    A possible hub id is accepted. If an adapter's base is a local folder, it is checked too, and
    that it matches the adapter. See `check_folder` and `read_adapter` for the errors.
    """
    if not is_adapter(path):
        check_folder(path)
        return
    adapter = read_adapter(path, base=base)
    if Path(adapter.base).is_dir():
        check_folder(adapter.base)
        headers = read_headers(Path(adapter.base), name=adapter.base)
        stored = {name: item.shape for _, all in headers for name, item in all.items()}
        adapter.match_layers(_name_layers(adapter, stored))


def _name_layers(
    adapter: AdapterFolder, stored: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adapted weights by their names in the model, as far as known.

    Older checkpoints have other names, which only transformers knows: where some of the adapter's
    layers have the names of stored ones, the others are checked when the base is opened.
    """
    stored_leaves = {name.removesuffix(".weight").rpartition(".")[2] for name in stored}
    leaves = {layer.module.rpartition(".")[2] for layer in adapter.layers}
    may_be_renamed = not stored_leaves.isdisjoint(leaves)
    shapes = {}
    for layer in adapter.layers:
        name = f"{layer.module}.weight"
        # Checkpoints of a base model alone lack the prefix, such as `model`.
        shape = stored.get(name, stored.get(name.partition(".")[2]))
        if shape is None and may_be_renamed and not layer.has_base_weight:
            shape = (layer.num_out, layer.num_in)
        if shape is not None:
            shapes[name] = shape
    return shapes


def find_config(path: str | Path, *, base: str | None = None) -> Path:
    """Return the path of a local model's config.json, or of its base's: it need not exist.

    Raises:
        ModelError: the adapter cannot be read.
    """
    return Path(read_adapter(path, base=base).base if is_adapter(path) else path) / CONFIG


def read_adapter(path: str | Path, *, base: str | None = None) -> AdapterFolder:
    """Read the configuration and the header of an adapter, and locate its base.

    ``base`` is the base's folder or hub id; None locates the one in the adapter's configuration.

    Raises:
        ModelError: the adapter is damaged, of an unsupported kind, or its base is missing.
    """
    folder, name = Path(path), str(path)
    config = read_config(folder, name)
    return AdapterFolder(
        folder=folder,
        base=find_base(folder, config.base, name, named=base),
        revision=config.revision if base is None else None,
        config=config,
        layers=_list_layers(_read_tensors(folder, name), config, name),
        base_quantization=_read_quantization(folder, name),
    )


def _read_quantization(folder: Path, name: str) -> Literal["nf4"] | None:
    value = read_metadata(folder / ADAPTER_WEIGHTS).get(QUANTIZATION)
    if value not in (None, "nf4"):
        raise ModelError(
            f"model '{name}': {ADAPTER_WEIGHTS}: '{QUANTIZATION}' must be nf4; got {quote(value)}"
        )
    return "nf4" if value == "nf4" else None


def _read_tensors(folder: Path, name: str) -> dict[str, StoredShape]:
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        pickled = any(folder.glob("adapter_model.bin")) or any(folder.glob("adapter_model.pt*"))
        why = "only a pickled file, which is never read" if pickled else "no such file"
        raise ModelError(
            f"model '{name}' must store its adapter in {ADAPTER_WEIGHTS}; it has {why}. Save it "
            "again with save_pretrained in an environment you trust"
        )
    tensors = read_header(path, name=name)
    for key, stored in tensors.items():
        if stored.dtype not in PLAIN_DTYPES:
            raise ModelError(
                f"model '{name}' cannot be loaded: {quote(key)} is stored as "
                f"{quote(stored.dtype)}; an adapter must be F64, F32, F16 or BF16"
            )
    return tensors


def _list_layers(
    tensors: Mapping[str, StoredShape], config: AdapterConfig, name: str
) -> tuple[AdaptedLayer, ...]:
    """Return the layers of an adapter's tensors."""
    leaves = (_A, _B, _MAGNITUDE, _BASE_LAYER)
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    wrong = "" if tensors else f"{ADAPTER_WEIGHTS} has no tensors"
    for key, stored in tensors.items():
        leaf = next((leaf for leaf in leaves if key.endswith(leaf)), "")
        if not leaf or not key.startswith(_PREFIX):
            wrong = (
                f"{quote(key)} is not the adapter of a linear layer (lora_A, lora_B, "
                "lora_magnitude_vector). Merge the adapter with peft"
            )
            break
        module = key.removeprefix(_PREFIX).removesuffix(leaf)
        parts.setdefault(module, {})[leaf] = stored.shape
    problems = (_find_wrong(config, *part) for part in parts.items())
    if wrong := wrong or next(filter(None, problems), ""):
        raise ModelError(f"model '{name}' cannot be loaded: {wrong}")
    return tuple(
        AdaptedLayer(
            module=module,
            r=shapes[_A][0],
            num_in=shapes[_A][1],
            num_out=shapes[_B][0],
            scale=config.alpha / (math.sqrt(shapes[_A][0]) if config.use_rslora else shapes[_A][0]),
            has_base_weight=_BASE_LAYER in shapes,
        )
        for module, shapes in parts.items()
    )


def _find_wrong(config: AdapterConfig, module: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return what is wrong with the shapes of a layer's tensors; "" if nothing is."""
    r = None if config.has_rank_pattern else config.r
    a, b = shapes.get(_A, ()), shapes.get(_B, ())
    wanted = {_A, _B, _MAGNITUDE} if config.use_dora else {_A, _B}
    is_complete = wanted == shapes.keys() - {_BASE_LAYER} and len(a) == len(b) == 2
    if not is_complete or a[0] != b[1] or a[0] < 1 or r not in (None, a[0]):
        shown = ", ".join(f"{leaf[1:]} {list(shape)}" for leaf, shape in shapes.items())
        magnitude = ", and lora_magnitude_vector [N]" if config.use_dora else ""
        rank = "that of rank_pattern" if r is None else r
        return (
            f"layer {quote(module)} must have lora_A [r, K] and lora_B [N, r]{magnitude}, with r = "
            f"{rank}; it has {shown}"
        )
    others = {_MAGNITUDE: (b[0],), _BASE_LAYER: (b[0], a[1])}
    if any(shapes.get(leaf, shape) != shape for leaf, shape in others.items()):
        return f"the tensors of layer {quote(module)} have different numbers of rows or columns"
    return ""


def refuse_nf4_over_z(z: int) -> str | None:
    """Return why this torch does not split weights in NF4 over ``z`` ranks; None if it does."""
    installed = version("torch")
    if z == 1 or Version(installed) >= Version("2.13"):
        return None
    return (
        f"torch {installed} trains what FSDP2 splits, and weights in nf4 cannot be: use one "
        "process for each copy, the axis data, or install torch 2.13"
    )
