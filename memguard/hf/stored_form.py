"""The tensors of a folder that transformers would save for a model, and what each is made of.

    module tensors   --transformers' rules, reverted-->   stored tensors
    gate_up_proj [E, 2I, H]                               E tensors w1 [I, H], E tensors w3 [I, H]

Tensors that are reverted together form a group. Names, shapes and order come from a run of
`revert_weight_conversion` on tensors without storage; each group is then reverted by the same
function when its tensors are there, so that a rank never holds more than one group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    revert_weight_conversion,
)

from memguard.errors import ModelError
from memguard.hf.safetensors import StoredTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """Tensors of a model that are stored together."""

    modules: tuple[str, ...]
    """Names in the model."""
    stored: tuple[str, ...]
    """Names in the files."""


class StoredForm:
    """What `save_pretrained` would store for a model."""

    def __init__(self, model: Any, *, dtype: torch.dtype) -> None:
        """Find the stored tensors, without reading any.

        Args:
            model: the unsharded model, on any device. Its attribute `_weight_conversions` has the
                rules that its checkpoint went through; without it, those of its family are used.
            dtype: of the stored floating-point weights.

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
        self.group_of: Mapping[str, StoredGroup] = {
            name: group for group, shapes in groups for name in shapes
        }
        """Group of each stored tensor, by its name in the files."""
        found = {name: shape for _, shapes in groups for name, shape in shapes.items()}
        if found != {tensor.name: tensor.shape for tensor in self.tensors}:
            raise ModelError(
                f"{type(model).__name__} cannot be exported from a mesh: this version of "
                "transformers stores some of its tensors in a way that memguard does not know. "
                "It can be exported on one process"
            )

    def _find_groups(
        self, state: dict[str, Tensor]
    ) -> list[tuple[StoredGroup, dict[str, tuple[int, ...]]]]:
        """Return the groups and the shapes of their stored tensors."""
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
            groups.append((StoredGroup(modules=tuple(names), stored=tuple(stored)), shapes))
        return groups

    def revert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored tensors that a group's tensors become.

        Args:
            tensors: all tensors of the group, by their names in the model.
        """
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
