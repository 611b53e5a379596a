"""What is certain of a model whose step has no formula: what a rank stores at least. No torch.

    elements of a rank = sum over parameters of numel / (y if split over y) / (x if over x) / z
    bytes              = 4 of a weight, 4 of its gradient, 8 of AdamW's moments; of a frozen weight
                         only those of its dtype

This is the mean over ranks, so that the fullest rank stores at least as much. A run is refused only
if that alone exceeds the memory of a GPU; activations and buffers, which come on top, are unknown.
"""

from dataclasses import dataclass

from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import AXES, MeshShape
from memguard.parallel.model_sizes import Sizes
from memguard.planner.disk import format_bytes
from memguard.planner.fit import BETTER_MACHINE, PlanInputs
from memguard.planner.step_settings import Work
from memguard.records.record import Record

_TRAINED_BYTES = 4 + 4 + 8
_NF4_BYTES = 0.5
"""Of a weight, without the scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStorage:
    """The parameters of a model, by the axes that split them."""

    family: str
    """Its ``model_type``."""
    sizes: Sizes
    """What determines its valid meshes."""
    num_parameters: int
    """Tied parameters are counted once."""
    elements: tuple[tuple[bool, bool, int], ...]
    """(split over y, split over x, number of elements)."""
    unknown: str
    """Why memory and time cannot be estimated."""

    def count_stored(self, mesh: MeshShape) -> int:
        """Return the elements that the fullest rank stores at least."""
        total = sum(
            count / (mesh.y if over_y else 1) / (mesh.x if over_x else 1)
            for over_y, over_x, count in self.elements
        )
        return int(total / mesh.z)

    def count_bytes(self, mesh: MeshShape, work: Work) -> int:
        """Return the bytes that the fullest rank stores at least."""
        count = self.count_stored(mesh)
        if _trains_all(work):
            return _TRAINED_BYTES * count
        if work.adapter is None:
            return 4 * count  # Frozen weights of chosen modules are in fp32.
        return int((_NF4_BYTES if work.adapter.is_nf4 else work.compute_bytes) * count)


class LeastMemory(Record):
    """Memory that a rank needs at least, of a model whose step is not predicted (bytes)."""

    family: str
    not_predicted: str
    """Why memory and speed of a step, and the meshes on which it fits, are not predicted."""
    mesh: dict[str, int]
    """Degrees of the requested mesh, or of the one that stores least."""
    other_mesh: dict[str, int] | None
    """A mesh that may hold it where the requested one cannot."""
    stored: str
    """What is counted."""
    at_least: int
    """Of the rank that stores most; activations and buffers come on top."""
    usable: int
    """Memory of a GPU that is available for tensors."""

    def describe(self) -> str:
        """Return a sentence of what is known."""
        return (
            f"a rank stores at least {format_bytes(self.at_least)} of {self.stored} on "
            f"{_write(self.mesh)}, {format_bytes(self.usable)} are available, and a step needs more"
        )

    def refuse(self, gpu: str) -> None:
        """Raise ConfigError if this alone exceeds the memory of a GPU, which has this name."""
        if self.at_least <= self.usable:
            return
        ways = [] if self.other_mesh is None else [f"use the mesh {_write(self.other_mesh)}"]
        if "moments" in self.stored:
            ways.append("train LoRA adapters instead of the weights, adapter.name=lora")
        raise ConfigError(
            f"the mesh {_write(self.mesh)} needs at least {format_bytes(self.at_least)} for "
            f"{self.stored}; "
            f"{format_bytes(self.usable)} are available for tensors on each {gpu}; "
            f"{' or '.join(ways) or BETTER_MACHINE}"
        )


def find_least_memory(model: ModelStorage, inputs: PlanInputs) -> tuple[LeastMemory, int]:
    """Return what a rank stores at least, and the number of valid meshes.

    Raises:
        ConfigError: no mesh of this many GPUs, or not the requested one, is valid.
    """
    work = inputs.work
    requested, meshes = inputs.list_meshes(model.sizes)
    usable = inputs.machine.usable_bytes
    smallest = min(meshes, key=lambda each: model.count_bytes(each, work))
    mesh = requested or smallest
    has_other = model.count_bytes(smallest, work) <= usable < model.count_bytes(mesh, work)
    least = LeastMemory(
        family=model.family,
        not_predicted=model.unknown,
        mesh={axis: mesh.degree(axis) for axis in AXES},
        other_mesh={axis: smallest.degree(axis) for axis in AXES} if has_other else None,
        stored="weights, gradients and moments" if _trains_all(work) else "weights",
        at_least=model.count_bytes(mesh, work),
        usable=usable,
    )
    return least, len(meshes)


def _write(mesh: dict[str, int]) -> str:
    """Write a mesh as users see it: ``(data=1, z=16, y=2, x=8)``."""
    return f"({', '.join(f'{axis}={degree}' for axis, degree in mesh.items())})"


def _trains_all(work: Work) -> bool:
    """Return whether every weight has a gradient and moments."""
    return work.adapter is None and work.trained_modules is None
