"""Simulate a training step of a model of any size on any number of ranks, in one process.

python scripts/simulate.py --model CONFIG_JSON --ranks 16384            405B: less than a minute
python scripts/simulate.py --model CONFIG_JSON --ranks 512 4096 16384 --view 0 -1
python scripts/simulate.py --model CONFIG_JSON --ranks 256 --checkpointing none selective full
python scripts/simulate.py --model CONFIG_JSON --ranks 256 --mesh z=16,y=2,x=8 --rows 4

The engine's own code runs on fake tensors and a fake process group: the model on the meta device,
`shard_model`, FSDP2 and the training step. For one rank's view the script prints the memory of
weights, gradients, optimizer state and the peak, compared with the prediction of `memguard plan`,
and the collectives of each axis, compared with the formula in memguard/parallel/__init__.py. No GPU
is needed.

CONFIG_JSON is a config.json of Llama, Mistral, Qwen2 or Qwen3, or its folder. Without --mesh, x
gets up to 8 ranks, y gets 2 if at least 512 remain, z up to 128, and data the rest. The last line
is a verdict. Exit codes: 1 if a collective differs from the formula, stored state by more than 5 %
or the peak by more than 15 %; 2 if the mesh does not fit the model; 3 if the model is of another
family or does not exist.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from bench.harness import build_parser
from bench.workload import describe_step, pair_memory
from fake_mesh import Calls
from fake_step import SimulatedStep, list_collectives, simulate_step

from memguard.config import ParallelConfig, TrainConfig
from memguard.errors import ConfigError, MemguardError
from memguard.parallel.mesh_shape import MeshShape, resolve_mesh
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.memory import MemoryEstimate, estimate_memory
from memguard.workflows.common.checks import read_mesh

MANY, MOST_Z = 512, 128
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One rank of one mesh, and its training settings."""

    mesh: MeshShape
    rank: int
    rows: int
    """Rows of one step on this rank."""
    checkpointing: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The simulated and the predicted results of a view."""

    view: View
    simulated: SimulatedStep
    predicted: MemoryEstimate
    formula: Calls
    has_less: bool
    """Whether this rank's shard of the vocabulary may be smaller than rank 0's, which the formula
    assumes."""
    took_s: float

    def memory(self) -> dict[str, tuple[int, int, float]]:
        """Return simulated and predicted bytes of each kind, and the relative tolerance."""
        return pair_memory(self.simulated, self.predicted)

    def problems(self) -> list[str]:
        """Return the differences beyond their tolerances."""
        problems = []
        for kind, (simulated, predicted, tolerance) in self.memory().items():
            if abs(predicted / simulated - 1) > tolerance:
                problems.append(f"{kind} is {predicted / simulated:.2f} of simulated")
        if not all(is_equal for _, _, is_equal in group_calls(self).values()):
            problems.append("collectives differ from the formula")
        return problems

    def sent(self) -> Calls:
        """Return the collectives of more than one rank, which the formula counts."""
        return Counter(
            {call: n for call, n in self.simulated.calls.items() if self._degree(call[1]) > 1}
        )

    def _degree(self, axis: str) -> int:
        mesh = self.view.mesh
        return mesh.degree(axis) if axis in mesh.order else 2


def simulate(config: Any, sizes: ModelSizes, view: View, options: argparse.Namespace) -> Outcome:
    """Simulate one step of one view."""
    started_s = time.perf_counter()
    train = TrainConfig(
        batch_size=view.rows * view.mesh.num_batch_ways,
        micro_batch_size=view.rows,
        precision=options.precision,
        activation_checkpointing=view.checkpointing,
        nll_chunk_tokens=options.chunk_tokens,
    )
    simulated = simulate_step(
        config, view.mesh, train=train, seq_len=options.seq_len, rank=view.rank
    )
    settings = describe_step(train, view.mesh, seq_len=options.seq_len)
    formula: Calls = Counter()
    for call in list_collectives(sizes, view.mesh, settings):
        formula[call.phase, call.axis, call.operation, call.num_bytes] += call.num_calls
    return Outcome(
        view=view,
        simulated=simulated,
        predicted=estimate_memory(sizes, view.mesh, settings, seq_len=options.seq_len),
        formula=formula,
        has_less=view.rank > 0 and sizes.vocab_size % view.mesh.x > 0,
        took_s=time.perf_counter() - started_s,
    )


# -- output ------------------------------------------------------------------------------------


def show(outcome: Outcome, options: argparse.Namespace) -> None:
    """Print one view."""
    view, simulated = outcome.view, outcome.simulated
    print(
        f"\n{view.mesh.num_ranks:,} ranks {view.mesh}, view of rank {view.rank:,}: "
        f"{view.rows} x {options.seq_len:,} tokens a rank, {options.precision}, "
        f"recomputation {view.checkpointing}"
    )
    print(f"  {simulated.num_stored:,} of {simulated.num_parameters:,} parameters stored here")
    print(f"\n  {'GiB':<12}{'simulated':>12}{'predicted':>12}{'ratio':>8}")
    for kind, (actual, predicted, _) in outcome.memory().items():
        ratio = predicted / actual
        print(f"  {kind:<12}{actual / GIB:>12.3f}{predicted / GIB:>12.3f}{ratio:>8.3f}")
    print(f"  peak predicted during {outcome.predicted.moment}")
    print(f"\n  {'axis':<13}{'collective':<16}{'phase':<10}{'calls':>8}{'GiB':>12}{'formula':>9}")
    for (axis, operation, phase), (calls, num_bytes, is_equal) in group_calls(outcome).items():
        verdict = "equal" if is_equal else "DIFFERS"
        print(
            f"  {axis:<13}{operation:<16}{phase:<10}{calls:>8,}{num_bytes / GIB:>12.3f}{verdict:>9}"
        )
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in simulated.stages_s.items())
    print(f"\n  took {outcome.took_s:.1f} s: {stages}", flush=True)


def group_calls(outcome: Outcome) -> dict[tuple[str, str, str], tuple[int, int, bool]]:
    """Return calls, bytes and whether they equal the formula's, by axis, operation and phase."""
    sent, formula = outcome.sent(), outcome.formula
    keys = sorted({(axis, op, phase) for phase, axis, op, _ in (*sent, *formula)})
    grouped = {}
    for axis, op, phase in keys:
        mine = {c: n for c, n in sent.items() if (c[1], c[2], c[0]) == (axis, op, phase)}
        expected = {c: n for c, n in formula.items() if (c[1], c[2], c[0]) == (axis, op, phase)}
        calls, num_bytes = count(mine)
        is_equal = mine == expected
        if outcome.has_less:
            expected_calls, most_bytes = count(expected)
            is_equal = calls == expected_calls and num_bytes <= most_bytes
        grouped[axis, op, phase] = (calls, num_bytes, is_equal)
    return grouped


def count(calls: dict[tuple[str, str, str, int], int]) -> tuple[int, int]:
    """Return the total number of calls and bytes."""
    return sum(calls.values()), sum(call[3] * number for call, number in calls.items())


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return one view for `--json`."""
    view = outcome.view
    return {
        "mesh": {axis: view.mesh.degree(axis) for axis in view.mesh.order},
        "rank": view.rank,
        "rows": view.rows,
        "checkpointing": view.checkpointing,
        "num_parameters": outcome.simulated.num_parameters,
        "num_stored": outcome.simulated.num_stored,
        "bytes": {
            kind: {"simulated": simulated, "predicted": predicted}
            for kind, (simulated, predicted, _) in outcome.memory().items()
        },
        "collectives": [
            {"axis": axis, "operation": op, "phase": phase, "calls": n, "bytes": b, "as_formula": e}
            for (axis, op, phase), (n, b, e) in group_calls(outcome).items()
        ],
        "took_s": round(outcome.took_s, 1),
        "problems": outcome.problems(),
    }


# -- arguments ---------------------------------------------------------------------------------


def choose_views(sizes: ModelSizes, options: argparse.Namespace) -> list[View]:
    """Return every combination of ranks, views and recomputation."""
    views = []
    for num_ranks, checkpointing in itertools.product(options.ranks, options.checkpointing):
        mesh = choose_mesh(sizes, num_ranks, options)
        for rank in options.view:
            if not -num_ranks <= rank < num_ranks:
                raise ConfigError(f"'--view' must be a rank of {num_ranks:,}; got {rank}")
            views.append(
                View(
                    mesh=mesh, rank=rank % num_ranks, rows=options.rows, checkpointing=checkpointing
                )
            )
    return views


def choose_mesh(sizes: ModelSizes, num_ranks: int, options: argparse.Namespace) -> MeshShape:
    """Return the requested mesh, or a typical one."""
    if options.mesh is not None:
        return resolve_mesh(read_mesh(options.mesh, command="simulate"), num_ranks, sizes)
    # As many ranks as hold a whole key/value head each, up to a node of 8; y of 2 with many ranks.
    x = next(x for x in (8, 4, 2, 1) if sizes.num_kv_heads % x == 0 and num_ranks % x == 0)
    y = 2 if num_ranks // x >= MANY and num_ranks % (2 * x) == 0 else 1
    z = math.gcd(num_ranks // (x * y), MOST_Z)
    return resolve_mesh(ParallelConfig(data=-1, z=z, y=y, x=x), num_ranks, sizes)


def at_least(smallest: int) -> Callable[[str], int]:
    """Return a parser of whole numbers of at least ``smallest``."""

    def read(text: str) -> int:
        if not text.isdigit() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"must be {smallest} or more, got {text}")
        return int(text)

    return read


def parse() -> argparse.Namespace:
    """Read the arguments."""
    parser = build_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="config.json, or its folder")
    parser.add_argument("--ranks", type=at_least(1), nargs="+", required=True)
    parser.add_argument("--view", type=int, nargs="+", default=[0], help="ranks; -1 is the last")
    parser.add_argument("--mesh", help="e.g. data=8,z=128,y=2,x=8")
    parser.add_argument("--rows", type=at_least(1), default=1, help="rows of a step on one rank")
    parser.add_argument("--seq-len", type=at_least(2), default=2048)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--chunk-tokens", type=at_least(1), default=1024)
    modes = ("none", "selective", "full")
    parser.add_argument("--checkpointing", nargs="+", choices=modes, default=["full"])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def main() -> int:
    """Simulate every view; return 1 if one differs."""
    started_s = time.perf_counter()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    options = parse()
    path = options.model / "config.json" if options.model.is_dir() else options.model
    try:
        fields = json.loads(path.read_text())
        sizes = ModelSizes.from_json(fields)
        views = choose_views(sizes, options)
        config = transformers.AutoConfig.for_model(**fields)
    except (MemguardError, OSError, ValueError) as error:
        print(f"simulate.py: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    outcomes = []
    for view in views:
        outcome = simulate(config, sizes, view, options)
        outcomes.append(outcome)
        if not options.json:
            show(outcome, options)
    problems = [f"{o.view.mesh}, rank {o.view.rank}: {p}" for o in outcomes for p in o.problems()]
    if options.json:
        print(json.dumps([as_json(outcome) for outcome in outcomes], indent=2))
        return 1 if problems else 0
    took_s = time.perf_counter() - started_s
    print()
    if problems:
        print(f"FAIL: {'; '.join(problems)}")
        return 1
    calls = sum(sum(outcome.sent().values()) for outcome in outcomes)
    print(
        f"PASS: {len(outcomes)} step{'' if len(outcomes) == 1 else 's'} of "
        f"{outcomes[0].simulated.num_parameters:,} parameters on "
        f"{', '.join(f'{n:,}' for n in options.ranks)} ranks in {took_s:.0f} s; "
        f"{calls:,} collectives equal the formula, memory matches the prediction"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
