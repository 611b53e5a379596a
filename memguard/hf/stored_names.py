"""A checkpoint's tensors under the names and in the layouts of the model's modules.

transformers renames and converts tensors when it loads them: a checkpoint may have other names than
the modules, one tensor per expert where a module has one for all, or lack the prefix of the base
model. `ModuleNames` does the same for rectangles, with transformers' own rules and operations:

    renamed      rectangle of the stored tensor                    -> rectangle
    experts      E tensors w1 [I, H] and E tensors w3 [I, H], stacked -> gate_up_proj [E, 2I, H]
                 rectangles of the experts and of the rows that it has -> rectangle
    converted    stored tensors -> transformers' converter -> tensor -> rectangle

Of other converted tensors one is converted at a time, whole, and kept for the next rectangle of it.
"""

import copy
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from memguard.hf.safetensors import Origin, WeightSource
from memguard.parallel.layout import ShardSlice


@dataclass(slots=True)
class _Converted:
    """Stored tensors that are converted together."""

    converter: WeightConverter
    """Of transformers; copied for each use, as it keeps the tensors that it is given."""
    name: str
    """Name in the model of the first of the results."""
    parts: dict[str, list[str]] = field(default_factory=dict)
    """Stored names by the converter's pattern that they match, in transformers' order."""

    @property
    def stored(self) -> tuple[str, ...]:
        """The stored names."""
        return tuple(name for names in self.parts.values() for name in names)

    @property
    def stacks(self) -> list[list[str]] | None:
        """Stored names of the experts by pattern, if the result has them stacked side by side.

        Side by side is along dimension 1, in the order of the converter's patterns.
        """
        first, *others = self.converter.operations
        is_joined = len(others) == 1 and isinstance(others[0], Concatenate) and others[0].dim == 1
        if (
            not isinstance(first, MergeModulelist)
            or first.dim != 0
            or len({len(names) for names in self.parts.values()}) != 1
            or (len(self.parts) != 1 if not others else not is_joined)
        ):
            return None
        patterns = [name for name in self.converter.source_patterns if name in self.parts]
        return [self.parts[pattern] for pattern in patterns]


class ModuleNames:
    """The tensors of a checkpoint, as the modules of its model have them."""

    def __init__(self, stored: WeightSource, model: Any) -> None:
        """Match the stored names with those of the unsharded model, on any device."""
        self._stored = stored
        self._model = model
        self._renamed: dict[str, str] = {}
        self._converted: dict[str, _Converted] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of tensors that the model lacks, by the stored name."""
        self._last: tuple[_Converted, dict[str, Tensor]] | None = None
        rules = get_model_conversion_mapping(model)
        unknown = self._match(rules)
        for name, source in self._renamed.items():
            self.shapes[name] = tuple(stored.shapes[source])
        for group in {id(group): group for group in self._converted.values()}.values():
            unknown += self._infer(group)
        # What the family's checkpoints have and its model does not read.
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        for name in unknown:
            if not any(re.search(pattern, name) for pattern in ignored):
                # Under its own name: the model has none for it.
                self.shapes.setdefault(name, tuple(stored.shapes[name]))
        self.origin = Origin(
            names={
                **{name: (source,) for name, source in self._renamed.items()},
                **{name: group.stored for name, group in self._converted.items()},
            },
            conversions=tuple(rule for rule in rules if rule.was_used()),
        )

    def _match(self, rules: list[Any]) -> list[str]:
        """Assign each stored name to a tensor of the model; return those without one."""
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        wanted = self._model.state_dict()
        prefix = self._model.base_model_prefix
        unknown = []
        # The order decides which tensor of a converter is the first expert, and so on.
        for source in sorted(self._stored.shapes, key=dot_natural_key):
            name, pattern = rename_source_key(source, renamings, converters, prefix, wanted)
            if name not in wanted and source in wanted:
                # It has the model's name already, which a rule for older files also matches.
                name, pattern = source, None
            if name not in wanted:
                unknown.append(source)
            elif pattern is not None and name not in self._renamed:
                group = self._converted.setdefault(name, _Converted(by_pattern[pattern], name))
                group.parts.setdefault(pattern, []).append(source)
            elif name not in self._converted:
                self._renamed.setdefault(name, source)
        return unknown

    def _infer(self, group: _Converted) -> list[str]:
        """Add the shapes of a group's results; return its stored names if it is not complete."""
        try:
            results = self._convert(group, meta=True)
        except Exception:  # Each operation has its own error for tensors that do not fit.
            del self._converted[group.name]
            return list(group.stored)
        for name, tensor in results.items():
            self._converted[name] = group
            self.shapes[name] = tuple(tensor.shape)
        return []

    def read(self, name: str, rectangle: ShardSlice) -> Tensor:
        """Return a rectangle of a tensor, on the CPU, in the dtype it is stored in."""
        group = self._converted.get(name)
        if group is None:
            return self._stored.read(self._renamed.get(name, name), rectangle)
        if (stacks := group.stacks) is not None:
            return self._read_stacked(stacks, rectangle)
        if self._last is None or self._last[0] is not group:
            self._last = None  # Frees its memory.
            self._last = (group, self._convert(group, meta=False))
        return self._last[1][name][rectangle.slices]

    def _read_stacked(self, stacks: list[list[str]], rectangle: ShardSlice) -> Tensor:
        """Return a rectangle of ``[E, I_1 + I_2 + ..., H]``; only its own bytes are read.

        ``stacks`` has the names of the experts ``[I_n, H]``, for each n.
        """
        experts, rows, columns = rectangle.slices
        result = torch.empty(0)
        first = 0
        for names in stacks:
            last = first + self._stored.shapes[names[0]][0]
            own = slice(max(rows.start, first), min(rows.stop, last))
            for number in range(experts.start, experts.stop) if own.start < own.stop else ():
                part = ShardSlice(
                    start=(own.start - first, columns.start),
                    shape=(own.stop - own.start, rectangle.shape[2]),
                )
                piece = self._stored.read(names[number], part)
                if not result.numel():
                    result = torch.empty(rectangle.shape, dtype=piece.dtype)
                # Precisions may be mixed; the result has the best, as in `torch.cat`.
                result = result.to(torch.promote_types(result.dtype, piece.dtype))
                target = slice(own.start - rows.start, own.stop - rows.start)
                result[number - experts.start, target] = piece
            first = last
        return result

    def _convert(self, group: _Converted, *, meta: bool) -> dict[str, Tensor]:
        """Run transformers' conversion of a group; ``meta``: without storage, for the shapes."""
        converter = copy.deepcopy(group.converter)
        for pattern, names in group.parts.items():
            for source in names:
                shape = self._stored.shapes[source]
                if meta:
                    tensor = torch.empty(shape, device="meta")
                else:
                    tensor = self._stored.read(source, ShardSlice.whole(shape))
                converter.add_tensor(group.name, source, pattern, tensor)
        converted = converter.convert(group.name, model=self._model, config=self._model.config)
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in converted.items()
        }
