"""Compare the engine's speed and memory with transformers' Trainer, FSDP2 and tensor parallelism.

python scripts/bench/engine.py                 everything; some minutes
python scripts/bench/engine.py --quick         tiny sizes, to check that the script works; seconds

Each side runs in a separate process (or four). Sides alternate, with a block of steps each, in five
rounds; figures are medians over rounds, and a ratio is the median of the ratios of each round. All
sides use the same packed rows, labels and position_ids, the same AdamW and clipping, in fp32. With
goldfish, the same half of the labels is ignored on both sides; tokens per step are counted as
without it. Memory is anonymous memory (RssAnon), sampled from outside in new processes: the peak in
three steps above the level after loading the model.

The last line is a verdict; exit 1 if a limit is missed, or if the losses of the sides differ. Linux
only.
"""

import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import Failed, Rank, Ranks, Rounds, Table, Verdict, build_parser, take_turns
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig
from workload import (
    BETAS,
    EPS,
    MAX_GRAD_NORM,
    as_tensors,
    build_llama,
    build_step,
    draw_batches,
    take_rows,
    train_by_trainer,
    write_checkpoint,
)

from memguard.config import TrainConfig
from memguard.data.loader import Batch
from memguard.hf.assembly import Assembly
from memguard.hf.load import load_assembled, load_model
from memguard.model.checks import build_causal_lm
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape

STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "checkpoints" / "stories260K"
MIN_SPEED, MIN_GOLDFISH_SPEED, MAX_MEMORY = 1.0, 1.25, 0.8
LR = 1e-3
NUM_BATCHES = 32
MEMORY_STEPS = 3
# Counts of labels and of signals, which the trainer sends with the loss.
NUM_SHARED = 4
# Tolerance of losses after the same steps with another order of summation, fp32.
SAME_LOSS = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and its training data."""

    folder: str
    """Folder of the checkpoint."""
    batch_size: int
    seq_len: int
    goldfish: bool = False
    mesh: MeshShape | None = None
    """memguard's; None is one process with plain modules."""
    num_ranks: int = 1
    num_threads: int = 1

    def draw_batches(self, vocab_size: int) -> list[Batch]:
        """Return the rows of all ranks."""
        return draw_batches(
            vocab_size,
            (self.batch_size, self.seq_len),
            document_tokens=(64, 256),
            num_batches=NUM_BATCHES,
            goldfish=self.goldfish,
        )


# -- sides: each loads, then trains the requested numbers of steps ------------------------------


class Turns:
    """The blocks of steps of a side."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._left, self._begin_s = 0, 0.0

    def wait(self, answer: float | None = None) -> bool:
        """Send an answer, wait for the next block of steps, and return whether there is one."""
        self._left = self._rank.report(answer)
        self._begin_s = time.perf_counter()
        return self._left > 0

    def finish_step(self) -> bool:
        """Count a step; at the end of a block report its seconds. Return whether to continue."""
        self._left -= 1
        return self._left > 0 or self.wait(time.perf_counter() - self._begin_s)

    def play(self, take_step: Callable[[int], object]) -> None:
        """Run steps until there are no more blocks."""
        for number in itertools.count():
            take_step(number)
            if not self.finish_step():
                return


def run_memguard(case: Case, rank: Rank) -> float | None:
    """The engine of memguard, on one process or on a mesh."""
    turns, train = Turns(rank), TrainConfig(micro_batch_size=None)
    if case.mesh:
        sharding = Assembly(
            mesh=build_mesh(case.mesh, "cpu"),
            device=torch.device("cpu"),
            chunk_tokens=train.nll_chunk_tokens,
        )
        lm = load_assembled(case.folder, sharding).lm
    else:
        lm = build_causal_lm(load_model(case.folder), chunk_tokens=train.nll_chunk_tokens)
    turns.wait()
    step = build_step(lm, train, lr=LR)
    whole = case.draw_batches(lm.vocab_size)
    batches = [take_rows(batch, lm.batch_rank, lm.num_batch_ways) for batch in whole]

    def take_step(number: int) -> None:
        index = number % NUM_BATCHES
        # As in a run, labels are known from the step before, and those of the next are sent.
        step.run(
            batches[index],
            lr=LR,
            step=number + 1,
            first_sample=number * case.batch_size,
            labels=(whole[index].num_supervised, whole[index].num_kept),
            share=lambda: [0.0] * NUM_SHARED,
        )

    turns.play(take_step)
    return None if case.mesh else measure_loss(lm.model, whole[0])


def run_trainer(case: Case, rank: Rank) -> float:
    """`transformers.Trainer` with its defaults."""
    turns = Turns(rank)

    class TakeTurns(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not turns.finish_step()

    model = load_plain(case)
    turns.wait()
    batches = case.draw_batches(model.config.vocab_size)
    train_by_trainer(model, batches, TakeTurns(), lr=LR, max_steps=1_000_000, use_cpu=True)
    return measure_loss(model.eval(), batches[0])


def run_fsdp2(case: Case, rank: Rank) -> None:
    """`fully_shard` on every block of transformers' own model, with its own loss."""
    mesh = init_device_mesh("cpu", (case.num_ranks,))
    model = load_plain(case)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train_by_hand(case, Turns(rank), model, part=mesh.get_rank(), num_parts=case.num_ranks)


def run_tensor_parallel(case: Case, rank: Rank) -> None:
    """Transformers' own tensor parallelism."""
    model = load_plain(case, distributed_config=DistributedConfig(tp_size=case.num_ranks))
    train_by_hand(case, Turns(rank), model, is_mixed=True)


def load_plain(case: Case, **settings: Any) -> Any:
    """Load the checkpoint with transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        case.folder, dtype=torch.float32, **settings
    )


def train_by_hand(
    case: Case,
    turns: Turns,
    model: Any,
    *,
    part: int = 0,
    num_parts: int = 1,
    is_mixed: bool = False,
) -> None:
    """Train with the model's own loss, in a typical loop for FSDP2 or tensor parallelism.

    torch's `clip_grad_norm_` and all AdamW implementations except the slowest reject a mix of
    DTensors and plain parameters: such a mix is trained without clipping and with that AdamW.
    """
    turns.wait()
    model.train()
    whole = case.draw_batches(model.config.vocab_size)
    batches = [as_tensors(take_rows(batch, part, num_parts)) for batch in whole]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=0.0,
        fused=not is_mixed,
        foreach=False,
    )

    def take_step(number: int) -> None:
        model(**batches[number % NUM_BATCHES], use_cache=False).loss.backward()
        if not is_mixed:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    turns.play(take_step)


@torch.no_grad()
def measure_loss(model: Any, batch: Batch) -> float:
    """Return a plain model's own loss on two rows (nats)."""
    tensors = {name: tensor[:2] for name, tensor in as_tensors(batch).items()}
    return float(model(**tensors, use_cache=False).loss)


# -- measurements ------------------------------------------------------------------------------

Work = Callable[[Case, Rank], float | None]


class Side:
    """One side of a comparison, whose ranks train one block of steps per turn."""

    def __init__(self, work: Work, case: Case, block_steps: int) -> None:
        self._work, self._case, self._block_steps = work, case, block_steps
        self._ranks: Ranks | None = None

    def start(self) -> Ranks:
        """Start the ranks and wait until the model is loaded."""
        self._ranks = Ranks(
            self._work,
            self._case,
            num_ranks=self._case.num_ranks,
            num_threads=self._case.num_threads,
        )
        self._ranks.hear()
        return self._ranks

    def __call__(self) -> float:
        """Run a block of steps; return the slowest rank's seconds per token."""
        took_s = max((self._ranks or self.start()).go(self._block_steps))
        return took_s / (self._block_steps * self._case.batch_size * self._case.seq_len)

    def finish(self) -> float:
        """End training; return the final loss."""
        assert self._ranks is not None
        return self._ranks.go(0)[0]

    def measure_memory(self) -> int:
        """Return the peak memory of three steps above the level after loading (bytes)."""
        ranks = self.start()
        (level,) = ranks.anonymous_bytes()
        return max(ranks.monitor(1)[1][0] for _ in range(MEMORY_STEPS)) - level

    def end(self) -> None:
        """Kill all ranks that still run."""
        if self._ranks:
            self._ranks.end()


def end_all(sides: dict[str, Side]) -> contextlib.ExitStack:
    """Return a context manager that ends all sides."""
    stack = contextlib.ExitStack()
    for side in sides.values():
        stack.callback(side.end)
    return stack


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of models, batches and measurements."""

    llama: tuple[int, int, int, int, int]
    """Vocabulary, width, FFN width, layers and heads of the random Llama."""
    mesh_llama: tuple[int, int, int, int, int]
    """The same for the meshes."""
    batch: tuple[int, int]
    """Rows, and tokens per row."""
    mesh_batch: tuple[int, int]
    rounds: int
    block_steps: dict[str, int]


FULL = Sizes(
    llama=(32000, 384, 1024, 10, 6),
    mesh_llama=(8192, 256, 704, 4, 8),
    batch=(8, 512),
    mesh_batch=(8, 128),
    rounds=5,
    block_steps={"stories260K": 4, "random 30M": 1, "mesh": 2},
)
QUICK = Sizes(
    llama=(512, 32, 64, 2, 4),
    mesh_llama=(256, 32, 64, 2, 8),
    batch=(4, 64),
    mesh_batch=(4, 64),
    rounds=1,
    block_steps={"stories260K": 1, "random 30M": 1, "mesh": 1},
)


def show_speed(
    table: Table, name: str, rounds: Rounds, pair: tuple[str, str], limit: str, note: str
) -> None:
    """Print the row of a pair of sides."""
    failed = {side: rounds.failures[side] for side in pair if side in rounds.failures}
    speeds = ["-" if side in failed else f"{1 / rounds.median_s(side):,.0f}" for side in pair]
    ratio = "-" if failed else f"{rounds.ratio(*pair):.2f}x"
    notes = [note, *(f"{side} does not run: {reason}" for side, reason in failed.items())]
    table.row(name, *speeds, ratio, end=f"{limit:<18}{'; '.join(filter(None, notes))}")


def compare_speed(
    table: Table, verdict: Verdict, name: str, case: Case, sizes: Sizes, limit: float | None
) -> None:
    """Print a row that compares one process's speed with the Trainer's."""
    sides = {
        "memguard": Side(run_memguard, case, sizes.block_steps[name]),
        "Trainer": Side(run_trainer, case, sizes.block_steps[name]),
    }
    name = f"{name}, {'goldfish k=2' if case.goldfish else 'plain'}"
    words = note = ""
    with end_all(sides):
        rounds = take_turns(sides, rounds=sizes.rounds)
        if rounds.failures:
            verdict.fail(f"{name} does not run")
        else:
            words = verdict.check(name, rounds.ratio("memguard", "Trainer"), at_least=limit)
            ours, theirs = (side.finish() for side in sides.values())
            note = f"loss after: {ours:.4f}, {theirs:.4f}"
            # Speed is comparable only if both sides reach the same loss.
            if not abs(ours - theirs) <= SAME_LOSS * abs(theirs):
                verdict.fail(f"{name}: {note}")
    show_speed(table, name, rounds, ("memguard", "Trainer"), words, note)


def compare_memory(table: Table, verdict: Verdict, name: str, case: Case) -> None:
    """Print a row that compares one process's memory with the Trainer's."""
    sides = {"memguard": Side(run_memguard, case, 1), "Trainer": Side(run_trainer, case, 1)}
    try:
        with end_all(sides):
            ours, theirs = (side.measure_memory() for side in sides.values())
    except Failed as failure:
        verdict.fail(f"{name}: {failure}")
        table.failure(name, str(failure))
        return
    limit = verdict.check(name, ours / theirs, at_most=MAX_MEMORY)
    table.row(
        name, f"{ours / 1e6:,.0f}", f"{theirs / 1e6:,.0f}", f"{ours / theirs:.2f}x", end=limit
    )


def compare_meshes(table: Table, verdict: Verdict, case: Case, sizes: Sizes) -> None:
    """Print rows that compare each mesh with FSDP2 and with tensor parallelism."""
    meshes = {"(z=4)": MeshShape(z=4), "(x=4)": MeshShape(x=4), "(x=2, y=2)": MeshShape(x=2, y=2)}
    others: dict[str, Work] = {"FSDP2": run_fsdp2, "transformers' TP": run_tensor_parallel}
    steps = sizes.block_steps["mesh"]
    sides = {
        name: Side(run_memguard, replace(case, mesh=mesh), steps) for name, mesh in meshes.items()
    }
    sides |= {name: Side(work, case, steps) for name, work in others.items()}
    with end_all(sides):
        rounds = take_turns(sides, rounds=sizes.rounds)
    for name, other in itertools.product(meshes, others):
        show_speed(table, f"{name} vs {other}", rounds, (name, other), "", "")
    for name in meshes:
        if name in rounds.failures:
            verdict.fail(f"{name} does not run")


def main() -> int:
    """Run all measurements; return 1 if a limit is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--stories", type=Path, default=STORIES, help="folder of stories260K")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; figures are meaningless")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    threads = os.cpu_count() or 1
    verdict = Verdict()
    columns = ("    memguard", "     Trainer", "    ratio")
    with tempfile.TemporaryDirectory(prefix="bench_engine.") as folder:
        folders = {
            name: write_checkpoint(
                Path(folder) / name, build_llama(*shape, num_kv_heads=shape[-1] // 2, max_len=512)
            )
            for name, shape in (("llama", sizes.llama), ("mesh", sizes.mesh_llama))
        }
        batch_size, seq_len = sizes.batch
        one = Case(folder="", batch_size=batch_size, seq_len=seq_len, num_threads=threads)
        cases = {"random 30M": replace(one, folder=folders["llama"])}
        print(
            f"\none process, {threads} threads, {batch_size} x {seq_len} tokens per step: tokens/s"
        )
        table = Table(34, *columns, end="limit")
        if (options.stories / "config.json").is_file():
            cases = {"stories260K": replace(one, folder=str(options.stories)), **cases}
        else:
            print(f"stories260K: skipped, not found in {options.stories}")
        for name, case in cases.items():
            goldfish_limit = MIN_GOLDFISH_SPEED if name == "random 30M" else None
            for goldfish, limit in ((False, MIN_SPEED), (True, goldfish_limit)):
                masked = replace(case, goldfish=goldfish)
                compare_speed(table, verdict, name, masked, sizes, limit)
        print("\nthe same cases, memory above the level after loading: MB")
        table = Table(34, *columns, end="limit")
        for name, case in cases.items():
            compare_memory(table, verdict, f"{name}, memory", case)
        batch_size, seq_len = sizes.mesh_batch
        print(f"\n4 processes, 1 thread each, {batch_size} x {seq_len} tokens per step: tokens/s")
        table = Table(34, columns[0], "       other", columns[2])
        case = Case(folder=folders["mesh"], batch_size=batch_size, seq_len=seq_len, num_ranks=4)
        compare_meshes(table, verdict, case, sizes)
    return verdict.end()


if __name__ == "__main__":
    sys.exit(main())
