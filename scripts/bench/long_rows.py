"""Planned speed of long rows, with inputs of blocks stored in parts over x and stored whole.

python scripts/bench/long_rows.py             three models, four lengths; a minute on one core

Figures of the planner on dgx-h100, not measured: tokens/s of a GPU on the best mesh of each side. A
step has 32,768 tokens per GPU, in the last lines 512. `waits` is the share of a step in which
communication is not hidden on the best mesh, of which the part of x and y is `waits x, y`: no other
way to split a step, such as pipeline or context parallelism, can gain more than all of it, and one
that splits the residual between the layers of x moves the same bytes as all-reduces of it do.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from harness import Table, build_parser
from plan import PUBLISHED

from memguard.parallel.mesh_shape import MeshShape, list_meshes
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner import activations, traffic
from memguard.planner.cost import StepEstimate
from memguard.planner.fit import rank_meshes
from memguard.planner.machine import load_machine
from memguard.planner.step_settings import Work

LENGTHS = (2048, 8192, 16384, 32768)
CASES = (("8B", 8), ("70B", 32), ("405B", 512))
FEW_TOKENS = 512
SMALL_CASES = (("70B", 256), ("405B", 512))
"""Steps of 131,072 and 262,144 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The fastest mesh of one side."""

    mesh: MeshShape
    checkpointing: str
    step: StepEstimate

    @property
    def name(self) -> str:
        """Mesh and recomputation."""
        degrees = ",".join(str(self.mesh.degree(axis)) for axis in ("data", "z", "y", "x"))
        return f"({degrees}) {self.checkpointing}"


@contextmanager
def whole_inputs() -> Iterator[None]:
    """Plan as if each rank stored the whole input of a block."""
    with (
        mock.patch.object(activations, "stores_parts", return_value=False),
        mock.patch.object(traffic, "stores_parts", return_value=False),
    ):
        yield


def find_best(sizes: ModelSizes, num_gpus: int, seq_len: int, rows: int) -> Best | None:
    """Return the fastest mesh; None if none fits."""
    machine, work = load_machine("dgx-h100"), Work(seq_len=seq_len, batch_size=rows)
    ranked, _ = rank_meshes(sizes, list_meshes(num_gpus, sizes, batch_size=rows), work, machine)
    if not ranked:
        return None
    best = ranked[0]
    assert best.step is not None, "it fits"
    return Best(mesh=best.mesh, checkpointing=best.settings.checkpointing, step=best.step)


def main() -> int:
    """Print the table."""
    build_parser(__doc__).parse_args()
    names = ("whole, mesh", "tokens/s/GPU", "parts, mesh", "tokens/s/GPU", "gain")
    columns = (f"{name:>{width}}" for name, width in zip(names, (24, 12, 24, 12, 8), strict=True))
    table = Table(24, *columns, "   waits", "waits x, y", corner="model, GPUs, row")
    cases = [
        (model, num_gpus, seq_len, max(LENGTHS) // seq_len * num_gpus)
        for model, num_gpus in CASES
        for seq_len in LENGTHS
    ]
    cases += [
        (model, num_gpus, LENGTHS[0], FEW_TOKENS * num_gpus // LENGTHS[0])
        for model, num_gpus in SMALL_CASES
    ]
    for model, num_gpus, seq_len, rows in cases:
        name = f"{model}, {num_gpus}, {seq_len:,}"
        sizes = ModelSizes.from_json(PUBLISHED[f"meta-llama/Llama-3.1-{model}"])
        parts = find_best(sizes, num_gpus, seq_len, rows)
        with whole_inputs():
            whole = find_best(sizes, num_gpus, seq_len, rows)
        if parts is None or whole is None:
            table.failure(name, "no mesh fits")
            continue
        speeds = [side.step.tokens_per_s / num_gpus for side in (whole, parts)]
        layers = sum(axis.exposed_s for axis in parts.step.axes if axis.axis in ("x", "y"))
        table.row(
            name,
            whole.name,
            f"{speeds[0]:,.0f}",
            parts.name,
            f"{speeds[1]:,.0f}",
            f"{speeds[1] / speeds[0]:.2f}x",
            f"{parts.step.exposed_s / parts.step.step_s:.0%}",
            f"{layers / parts.step.step_s:.0%}",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
