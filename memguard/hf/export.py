"""Writes a model as a Hugging Face folder that appears under its name only when complete.

    export_model    of a model on one process: save_pretrained restores the original names
    export_stored   the same files of tensors that are read, as those of a checkpoint: whole tensor
                    [N, K] -> its form in the original files, which `StoredForm` knows -> file

Models on a mesh are not gathered: the run's checkpoint has every tensor. Each rank reads and writes
the files that are its turn, and holds no more than the tensors that are stored together. After
every round all ranks agree that it is written, so a full disk on one rank stops all of them.

`StoredForm` finds names, shapes and order of the stored tensors by a run of transformers'
`revert_weight_conversion` on tensors without storage. Tensors that are reverted together form a
group, which the same function reverts when its tensors are there:

    module tensors   --transformers' rules, reverted-->   stored tensors
    gate_up_proj [E, 2I, H]                               E tensors w1 [I, H], E tensors w3 [I, H]
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

from memguard.errors import ModelError
from memguard.hf.from_config import describe_model
from memguard.hf.load import count_parameters
from memguard.hf.safetensors import FileWriter, StoredTensor, WeightsFile, build_index, plan_files
from memguard.records.record import atomic_folder
from memguard.runtime import Runtime


class StoredForm:
    """What `save_pretrained` would store for a model."""

    def __init__(self, model: Any, *, dtype: torch.dtype) -> None:
        """Find the stored tensors of the unsharded model, on any device, without reading any.

        Its attribute `_weight_conversions` has the rules that its checkpoint went through; without
        it, those of its family are used.

        Raises:
            ModelError: a tensor is stored with others, in a way that is not known.
        """
        self._model = model
        if getattr(model, "_weight_conversions", None) is None:
            # As transformers does for a model that was not loaded.
            rules = get_model_conversion_mapping(model, add_legacy=False)
            model._weight_conversions = [r for r in rules if not isinstance(r, PrefixChange)]
            if not model._weight_conversions:
                model._weight_conversions = None
        saved = _list_saved(model)
        state = {
            name: torch.empty_like(tensor, device="meta", dtype=written_dtype(tensor, dtype))
            for name, tensor in model.state_dict().items()
            if name in saved
        }
        stored: dict[str, Tensor] = revert_weight_conversion(model, dict(state))
        self.tensors: tuple[StoredTensor, ...] = tuple(
            StoredTensor(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
            for name, tensor in stored.items()
        )
        """The stored tensors, in transformers' order."""
        groups = self._find_groups(state)
        self.group_of: Mapping[str, tuple[str, ...]] = {
            name: group for group, shapes in groups for name in shapes
        }
        """Names in the model of the tensors that are stored together, by each name in the files."""
        found = {name: shape for _, shapes in groups for name, shape in shapes.items()}
        if found != {tensor.name: tensor.shape for tensor in self.tensors}:
            raise ModelError(
                f"{type(model).__name__} cannot be exported from a checkpoint: transformers stores "
                "some of its tensors in a way that is not known here. Train it on one process"
            )

    def _find_groups(
        self, state: dict[str, Tensor]
    ) -> list[tuple[tuple[str, ...], dict[str, tuple[int, ...]]]]:
        """Return the groups, as names in the model, and the shapes of their stored tensors."""
        reverted = [rule.reverse_transform() for rule in (self._model._weight_conversions or ())]
        converters = [rule for rule in reverted[::-1] if isinstance(rule, WeightConverter)]
        together: dict[tuple[bool, str], list[str]] = {}
        for name in state:
            # Tensors that are stored together have the same first name.
            together.setdefault(_find_first(name, converters), []).append(name)
        groups = []
        for names in together.values():
            stored = self.revert({name: state[name] for name in names})
            shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
            groups.append((tuple(names), shapes))
        return groups

    def list_groups(self, file: WeightsFile) -> Iterator[tuple[str, ...]]:
        """Return the groups of a file; one at the border of two is read for each of them."""
        return iter({self.group_of[stored.name]: None for stored in file.tensors})

    def revert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored tensors that all tensors of a group become."""
        reverted: dict[str, Tensor] = revert_weight_conversion(self._model, tensors)
        return reverted


def _list_saved(model: Any) -> set[str]:
    """Return the names of a model's tensors that are saved, tied parameters once."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ignored = set(model._keys_to_ignore_on_save or ())
    ignored |= {
        name
        for name, other in model.all_tied_weights_keys.items()
        if name in parameters and parameters[name] is parameters.get(other)
    }
    return set(model.state_dict()) - ignored


def written_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is stored: ``dtype``, or its own if it is not floating."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def _find_first(name: str, converters: Sequence[WeightConverter]) -> tuple[bool, str]:
    """Return whether one of the converters applies to a tensor, and its name after the first."""
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return True, renamed
    return False, name


def find_stored_form(model: Any, *, dtype: torch.dtype) -> StoredForm:
    """Return what one process would store of a model on a mesh."""
    outline = describe_model(model.config, name=type(model).__name__)
    outline._weight_conversions = getattr(model, "_weight_conversions", None)
    return StoredForm(outline, dtype=dtype)


def export_model(
    model: Any, tokenizer: Any, folder: Path, *, dtype: torch.dtype, card: str
) -> None:
    """Write a Hugging Face folder: weights, configuration, tokenizer and README.md (``card``).

    The files are written to a temporary folder, which is renamed when it is complete and replaces
    one of that name. The model's weights are cast to ``dtype`` when written.
    """
    with atomic_folder(folder) as temporary:
        # Cloning a tied weight once per name would untie it: transformers drops duplicate names
        # only if their tensors share storage.
        cast: dict[int, Tensor] = {}
        state = {}
        for name, tensor in model.state_dict().items():
            source = tensor.detach()
            if source.data_ptr() not in cast or source.numel() == 0:
                cast[source.data_ptr()] = source.to("cpu", written_dtype(source, dtype))
            state[name] = cast[source.data_ptr()].view(source.shape)
        kept_dtype = model.config.dtype
        try:
            model.save_pretrained(temporary, state_dict=state)
        finally:
            # save_pretrained overwrites it with the module's dtype.
            model.config.dtype = kept_dtype
        write_surroundings(model, tokenizer, temporary, dtype=dtype, card=card)


def export_stored(
    model: Any,
    read: Callable[[str, torch.dtype], Tensor],
    tokenizer: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    card: str,
    runtime: Runtime | None = None,
    max_file_bytes: int = 4 << 30,
) -> None:
    """Write the same folder from whole tensors; every rank calls this with the same arguments.

    The storage of ``model``, if it has any, is not read: ``read`` returns a tensor by its name in
    the model, on the CPU. ``folder`` is on a file system shared by all ranks.

    Raises:
        OSError: this rank could not write a file.
        OtherRankFailed: another rank failed.
    """
    runtime = runtime or Runtime()
    with ExitStack() as stack:
        temporary = runtime.from_main(lambda: stack.enter_context(atomic_folder(folder)))
        with runtime.contain():
            form = find_stored_form(model, dtype=dtype)
            files = plan_files(form.tensors, max_file_bytes)
        for first in range(0, len(files), runtime.world_size):
            with runtime.contain():
                for file in files[first + runtime.rank :][:1]:
                    _write_file(form, file, temporary, lambda name: read(name, dtype))

        def finish() -> None:
            if len(files) > 1:
                index = build_index(files, num_parameters=count_parameters(model))
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (temporary / "model.safetensors.index.json").write_text(text, encoding="utf-8")
            if model.can_generate():
                model.generation_config.save_pretrained(temporary)
            write_surroundings(model, tokenizer, temporary, dtype=dtype, card=card)
            stack.close()

        runtime.only_on_main(finish)


def _write_file(
    form: StoredForm, file: WeightsFile, temporary: Path, read: Callable[[str], Tensor]
) -> None:
    """Write one file, group by group."""
    names = {stored.name for stored in file.tensors}
    with FileWriter(temporary, file) as output:
        for group in form.list_groups(file):
            stored = form.revert({name: read(name) for name in group})
            for name in names.intersection(stored):
                output.write(name, stored[name])
            # Frees its memory before the next group is read.
            del stored


def write_surroundings(
    model: Any, tokenizer: Any, temporary: Path, *, dtype: torch.dtype, card: str
) -> None:
    """Write configuration, tokenizer and README.md."""
    config = copy.deepcopy(model.config)
    # from_pretrained reads the dtype from the configuration.
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    temporary.chmod(0o755)
