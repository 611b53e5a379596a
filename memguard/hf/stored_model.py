"""A checkpoint that is read tensor by tensor, before its weights are read.

    folder                                                weights that are read, and factors
    a checkpoint                                          its tensors, by the names of the modules
    an adapter                                            its base's, merged with the adapter
    an adapter trained on NF4, in a model in NF4          its base's, as stored; and its factors

A mesh reads rectangles of them, one process whole tensors.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import transformers

from memguard.hf.adapter_files import is_adapter, read_adapter
from memguard.hf.assembly import Assembly
from memguard.hf.checkpoint import explained, get_folder
from memguard.hf.merged_weights import MergedWeights, fill_factors, open_merged
from memguard.hf.meta_build import outline_model
from memguard.hf.nf4_base import Nf4Base, match_layers
from memguard.hf.safetensors import FolderWeights, WeightSource, stores_different
from memguard.hf.stored_names import ModuleNames

NO_MODEL = "model '{}' cannot be loaded as a causal language model"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredModel:
    """A checkpoint, or an adapter with its base."""

    folder: Path
    """Of the checkpoint, or of the adapter's base."""
    config: Any
    """Of transformers."""
    weights: WeightSource
    adapter: MergedWeights | None = None
    """An adapter that is attached to the weights instead of merged into them."""

    def adapt(self, assembly: Assembly) -> Assembly:
        """Return the assembly with the layers and the ranks of the attached adapter."""
        return assembly if self.adapter is None else replace(assembly, adapter=self.adapter.spec)

    def untie(self, model: Any) -> bool:
        """Let tied head and embedding be two weights if the files have two that differ.

        As in transformers, the files take precedence over the configuration.

        Args:
            model: built of the configuration, on the meta device.

        Returns:
            Whether the model must be built again, of the changed configuration.
        """
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        names = {module: name for name, module in model.named_modules()}
        if embedding.weight is not head.weight or not stores_different(
            self.weights, f"{names[embedding]}.weight", f"{names[head]}.weight"
        ):
            return False
        self.config.tie_word_embeddings = False
        return True

    def set_generation(self, model: Any) -> None:
        """Give a model the settings of `generate`, for the export and for the ends of texts."""
        if not model.can_generate():
            return
        read = transformers.GenerationConfig.from_pretrained
        try:
            model.generation_config = read(self.folder)
        except OSError:
            model.generation_config = read(
                self.folder, config_file_name="config.json", _from_model_config=True
            )

    def fill_adapter(self, model: Any) -> None:
        """Read the factors of the attached adapter into a model whose weights are filled."""
        if self.adapter is not None:
            fill_factors(model, self.adapter)


def find_quantization(path: str, *, base: str | None = None) -> Literal["nf4"] | None:
    """Return the form of the base on which an adapter was trained; None if it was not quantised.

    None for other models, and for adapters of other programs, which do not record the form.

    Args:
        path: folder or hub id.
        base: folder or hub id of an adapter's base; None locates it.

    Raises:
        ModelError: the adapter cannot be read.
    """
    return read_adapter(path, base=base).base_quantization if is_adapter(path) else None


def open_stored(
    path: str, assembly: Assembly, *, revision: str | None = None, base: str | None = None
) -> StoredModel:
    """Return a checkpoint before its weights are read; files of a hub id are downloaded.

    Args:
        path: folder or hub id; the folder may have an adapter.
        assembly: if its layers are in NF4, a folder with an adapter has one that was trained so.
        revision: of a hub id.
        base: folder or hub id of an adapter's base; None locates it.

    Raises:
        ModelError: see `load_model`; or the weights cannot be in NF4.
    """
    folder = get_folder(path, revision, base=base)
    merged: MergedWeights | None = None
    if is_adapter(folder):
        merged, folder = open_merged(folder, base=base)
    with explained(NO_MODEL.format(path)):
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        if merged is not None and assembly.quantization is None:
            return StoredModel(folder=folder, config=config, weights=merged)
        if merged is not None:
            assert isinstance(merged.base, Nf4Base), "the adapter was trained on weights in NF4"
            weights: WeightSource = merged.base.stored
        else:
            outline = outline_model(config, name=f"model '{path}'")
            weights = ModuleNames(FolderWeights(folder), outline)
            if assembly.quantization is not None:
                match_layers(weights, outline)
    return StoredModel(folder=folder, config=config, weights=weights, adapter=merged)
