"""Measure the engine's speed and memory beside transformers' Trainer, FSDP2 and tensor parallelism.

python scripts/bench_engine.py                 everything; some minutes
python scripts/bench_engine.py --quick         tiny sizes, to see that it works; seconds

Each side is a process of its own (or four). Sides take turns, a block of steps each, in five
rounds; what is shown are medians of the rounds, and the ratio is the median of the rounds' ratios,
because a machine that others use changes speed from minute to minute. All sides see the same
packed rows with the same labels (position_ids included), the same AdamW and clipping, in fp32.
With goldfish, the same half of the labels is ignored on both sides; a step counts as many tokens
as without. Memory is anonymous memory (RssAnon), sampled from outside in fresh processes, at its
peak within three steps, above its level when the model is loaded.

The last line is a verdict; exit 1 where a bar is missed, or where the sides do not learn the same.
Linux only.
"""

import argparse
import functools
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STORIES = ROOT.parent / "shared" / "data" / "checkpoints" / "stories260K"
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.distributed",
    "transformers.trainer",
    "transformers.integrations.tensor_parallel",
    "transformers.models.llama.modeling_llama",
    "memguard.train.step",
    "memguard.hf.load",
]
MIN_SPEED, MIN_GOLDFISH_SPEED, MAX_MEMORY = 1.0, 1.25, 0.8
LR, BETAS, EPS, MAX_GRAD_NORM = 1e-3, (0.9, 0.95), 1e-8, 1.0
NUM_BATCHES = 32
MEMORY_STEPS = 3
SAMPLE_EVERY_S = 0.002
TIMEOUT_S = 300
# Losses after the same steps in another order of summation, fp32.
SAME_LOSS = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is trained, on what."""

    folder: str
    """Of the checkpoint."""
    batch_size: int
    seq_len: int
    goldfish: bool = False
    mesh: tuple[tuple[str, int], ...] = ()
    """Degrees of memguard's mesh."""
    num_threads: int = 1

    @property
    def step_tokens(self) -> int:
        """Tokens of one step, ignored or not."""
        return self.batch_size * self.seq_len


# -- what the sides are given ------------------------------------------------------------------


def build_config(vocab_size: int, width: int, inner: int, num_layers: int, num_heads: int) -> Any:
    """Return a small Llama's configuration, head and embedding tied."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )


def write_checkpoint(folder: Path, config: Any) -> str:
    """Draw a model and write it; return its folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return str(folder)


def build_batches(case: Case, vocab_size: int) -> list[Any]:
    """Draw packed rows of documents of 64 to 256 random tokens, as `Loader` would give them."""
    import numpy as np

    from memguard.config import GoldfishConfig
    from memguard.data.loader import Batch
    from memguard.mitigation import build_mitigations
    from memguard.records import IGNORE_LABEL
    from memguard.seeds import derive_generator

    draw = derive_generator(0, "bench batches")
    configs = [GoldfishConfig(name="goldfish", k=2)] if case.goldfish else []
    mitigations = build_mitigations(configs, special_ids=[])
    shape = (case.batch_size, case.seq_len)
    batches = []
    for _ in range(NUM_BATCHES):
        input_ids = draw.integers(0, vocab_size, shape)
        is_first = np.zeros(shape, dtype=bool)
        for row in is_first:
            row[np.cumsum(draw.integers(64, 257, 1 + case.seq_len // 64)) % case.seq_len] = True
        is_first[:, 0] = True
        document_ids = np.cumsum(is_first, axis=1)
        places = np.broadcast_to(np.arange(case.seq_len), shape)
        position_ids = places - np.maximum.accumulate(np.where(is_first, places, 0), axis=1)
        plain = np.where(is_first, IGNORE_LABEL, input_ids)
        labels = mitigations.mask_labels(
            input_ids, plain, document_ids=document_ids, generator=draw
        )
        batches.append(
            Batch(
                input_ids=input_ids,
                labels=labels,
                position_ids=position_ids,
                document_ids=document_ids,
                num_supervised=int((plain != IGNORE_LABEL).sum()),
                num_kept=int((labels != IGNORE_LABEL).sum()),
            )
        )
    return batches


def take_rows(batch: Any, part: int, num_parts: int) -> Any:
    """Return one rank's rows of a batch."""
    rows = slice(part, None, num_parts)
    labels = batch.labels[rows]
    return replace(
        batch,
        input_ids=batch.input_ids[rows],
        labels=labels,
        position_ids=batch.position_ids[rows],
        document_ids=batch.document_ids[rows],
        num_supervised=batch.num_supervised // num_parts,
        num_kept=int((labels >= 0).sum()),
    )


def load_plain(case: Case) -> Any:
    """Load the checkpoint as transformers does."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32)


def measure_loss(model: Any, batch: Any) -> float:
    """Return a plain model's own loss on two rows (nats)."""
    import torch

    given = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    with torch.no_grad():
        tensors = {name: torch.as_tensor(array[:2]) for name, array in given.items()}
        labels = torch.as_tensor(batch.labels[:2])
        return float(model(**tensors, labels=labels, use_cache=False).loss)


# -- sides: each loads, then trains as many steps as it is told --------------------------------


class Turns:
    """A side's end of the pipe: what it may do, and how long that took."""

    def __init__(self, pipe: Any, sync: Callable[[], None]) -> None:
        """Take the pipe and a barrier over the ranks of this side."""
        self.pipe, self.sync = pipe, sync
        self.left, self.begin_s = 0, 0.0

    def loaded(self) -> None:
        """Say that the model is there and wait until it may be trained."""
        self.sync()
        self.pipe.send(("loaded", None))
        self.pipe.recv()

    def wait(self) -> bool:
        """Wait for the next block of steps; return whether there is one."""
        self.left = self.pipe.recv()
        self.sync()
        self.begin_s = time.perf_counter()
        return self.left > 0

    def finish_step(self) -> bool:
        """Count a step; at the end of a block say how long it took. Return whether to go on."""
        self.left -= 1
        if self.left:
            return True
        self.sync()
        self.pipe.send(("took", time.perf_counter() - self.begin_s))
        return self.wait()

    def play(self, take_step: Callable[[int], None]) -> None:
        """Take steps as long as there are blocks."""
        number = 0
        goes_on = self.wait()
        while goes_on:
            take_step(number)
            number += 1
            goes_on = self.finish_step()


def run_memguard(case: Case, turns: Turns) -> float | None:
    """Our engine, on one process or on a mesh."""
    import torch

    from memguard.config import OptimConfig, TrainConfig
    from memguard.hf.load import load_model, load_sharded
    from memguard.hf.sharded import Sharding
    from memguard.mitigation import build_mitigations
    from memguard.model.checks import build_vocab_layer
    from memguard.parallel.mesh import build_mesh
    from memguard.parallel.mesh_shape import MeshShape
    from memguard.runtime import Runtime
    from memguard.train.step import TrainStep

    train = TrainConfig()
    device = torch.device("cpu")
    if case.mesh:
        mesh = build_mesh(MeshShape(**dict(case.mesh)), "cpu")
        sharding = Sharding(mesh=mesh, device=device, chunk_tokens=train.nll_chunk_tokens)
        vocab = load_sharded(case.folder, sharding).vocab
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        runtime = Runtime(device=device, rank=rank, world_size=world_size)
    else:
        model = load_model(case.folder)
        vocab = build_vocab_layer(model, chunk_tokens=train.nll_chunk_tokens)
        runtime = Runtime(device=device)
    turns.loaded()
    vocab.model.train()
    step = TrainStep(
        vocab=vocab,
        mitigations=build_mitigations([], special_ids=[]),
        train=train,
        optim=OptimConfig(
            lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, max_grad_norm=MAX_GRAD_NORM
        ),
        seed=0,
        runtime=runtime,
    )
    whole = build_batches(case, vocab.vocab_size)
    batches = [take_rows(each, vocab.batch_rank, vocab.num_batch_ways) for each in whole]

    def take_step(number: int) -> None:
        batch = batches[number % NUM_BATCHES]
        step.run(batch, lr=LR, step=number + 1, first_sample=number * case.batch_size)

    turns.play(take_step)
    return None if case.mesh else measure_loss(vocab.model, whole[0])


def run_trainer(case: Case, turns: Turns) -> float | None:
    """`transformers.Trainer` with its defaults, nothing logged, saved or evaluated."""
    import torch
    import transformers

    class TakeTurns(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0 and not turns.wait():
                raise SystemExit

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not turns.finish_step()

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)

    model = load_plain(case)
    turns.loaded()
    batches = build_batches(case, model.config.vocab_size)
    names = ("input_ids", "labels", "position_ids")
    rows = [
        {name: torch.from_numpy(getattr(batch, name)[row].copy()) for name in names}
        for batch in batches
        for row in range(case.batch_size)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=case.batch_size,
            max_steps=1_000_000,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = InOrder(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=transformers.default_data_collator,
            callbacks=[TakeTurns()],
        )
        # It prints its summary at the end, among our lines.
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return measure_loss(model.eval(), batches[0])


def run_fsdp2(case: Case, turns: Turns) -> None:
    """`fully_shard` on every block of transformers' own model, with its own loss."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world_size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    model = load_plain(case)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    turns.loaded()
    train_by_hand(case, turns, model, part=torch.distributed.get_rank(), num_parts=world_size)


def run_tensor_parallel(case: Case, turns: Turns) -> None:
    """Transformers' own tensor parallelism."""
    import torch
    import transformers
    from transformers.distributed import DistributedConfig

    model = transformers.AutoModelForCausalLM.from_pretrained(
        case.folder,
        dtype=torch.float32,
        distributed_config=DistributedConfig(tp_size=torch.distributed.get_world_size()),
    )
    turns.loaded()
    train_by_hand(case, turns, model, is_mixed=True)


def train_by_hand(
    case: Case,
    turns: Turns,
    model: Any,
    *,
    part: int = 0,
    num_parts: int = 1,
    is_mixed: bool = False,
) -> None:
    """Train with the model's own loss: what one writes around FSDP2 or tensor parallelism.

    A mix of DTensors and plain parameters is refused by torch's `clip_grad_norm_` and by all but
    the slowest AdamW: it goes without clipping and takes that.
    """
    import torch

    model.train()
    whole = build_batches(case, model.config.vocab_size)
    batches = [take_rows(each, part, num_parts) for each in whole]
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
        batch = batches[number % NUM_BATCHES]
        loss = model(
            input_ids=torch.from_numpy(batch.input_ids),
            position_ids=torch.from_numpy(batch.position_ids.copy()),
            labels=torch.from_numpy(batch.labels),
            use_cache=False,
        ).loss
        loss.backward()
        if not is_mixed:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    turns.play(take_step)


Side = Callable[[Case, Turns], float | None]


# -- processes ---------------------------------------------------------------------------------


def run_rank(side: Side, case: Case, rank: int, num_ranks: int, port: int, pipe: Any) -> None:
    """In a process of its own: be one rank of one side."""
    import torch
    import transformers
    from torch import distributed as dist

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(case.num_threads)
    sync: Callable[[], None] = lambda: None  # noqa: E731
    try:
        if num_ranks > 1:
            # Only here: a Trainer that finds one of these wraps its model for several processes.
            os.environ.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                WORLD_SIZE=str(num_ranks),
                LOCAL_WORLD_SIZE=str(num_ranks),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
            )
            dist.init_process_group("gloo")
            sync = dist.barrier
        pipe.send(("ended", side(case, Turns(pipe, sync))))
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1]
        pipe.send(("failed", " ".join(last.split())[:200]))
        if os.environ.get("BENCH_TRACEBACK"):
            traceback.print_exc()


class Failed(Exception):
    """A side does not work here; the message says why."""


class Group:
    """The processes of one side, told what to do together."""

    def __init__(self, side: Side, case: Case, num_ranks: int) -> None:
        """Start them and wait until the model is loaded."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_rank, args=(side, case, rank, num_ranks, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        try:
            self.hear("loaded")
            self.level_mb = self.memory_mb()
            self.tell("train")
        except Failed:
            self.end()
            raise

    def tell(self, message: Any) -> None:
        """Send a message to every rank."""
        for pipe in self.pipes:
            pipe.send(message)

    def hear(self, expected: str, meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """Wait for one answer of every rank.

        Raises:
            Failed: a rank could not, died or was silent for too long.
        """
        answers = []
        deadline_s = time.monotonic() + TIMEOUT_S
        for pipe in self.pipes:
            while not pipe.poll(TIMEOUT_S if meanwhile is None else SAMPLE_EVERY_S):
                if meanwhile is None or time.monotonic() > deadline_s:
                    raise Failed(f"no answer within {TIMEOUT_S} s")
                meanwhile()
            try:
                kind, answer = pipe.recv()
            except EOFError:
                raise Failed("a process died without a word") from None
            if kind != expected:
                raise Failed(str(answer))
            answers.append(answer)
        return answers

    def take_steps(self, num_steps: int, meanwhile: Callable[[], None] | None = None) -> float:
        """Let the side take a block of steps; return the seconds of its slowest rank."""
        self.tell(num_steps)
        return max(self.hear("took", meanwhile))

    def finish(self) -> float | None:
        """Let the side end; return its loss after training."""
        self.tell(0)
        loss: float | None = self.hear("ended")[0]
        return loss

    def memory_mb(self) -> float:
        """Return RssAnon of all ranks (MB, 10^6 bytes)."""
        return sum(read_anonymous_mb(process.pid or 0) for process in self.processes)

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.kill()
            process.join()


def read_anonymous_mb(pid: int) -> float:
    """Return RssAnon of a process; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


# -- measurements ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """What taking turns found, a figure a round."""

    block_s: dict[str, list[float]]
    """Seconds of each side's blocks."""
    losses: dict[str, float | None]
    """After all steps, where a side says."""
    failures: dict[str, str]

    def tokens_per_s(self, side: str, block_tokens: int) -> float:
        """Return the median of a side's rounds."""
        return block_tokens / statistics.median(self.block_s[side])

    def ratio(self, side: str, other: str) -> float:
        """Return the median of how many times as fast as another a side is."""
        pairs = zip(self.block_s[side], self.block_s[other], strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)


def take_turns(sides: dict[str, tuple[Side, Case, int]], *, rounds: int, block_steps: int) -> Timed:
    """Let sides (function, case, ranks) train in turns; what fails is left out and told."""
    groups: dict[str, Group] = {}
    failures: dict[str, str] = {}
    block_s: dict[str, list[float]] = {}
    losses: dict[str, float | None] = {}

    def attempt(name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Failed as failure:
            failures[name] = str(failure)
            if name in groups:
                groups.pop(name).end()

    def start(name: str) -> None:
        side, case, num_ranks = sides[name]
        groups[name] = Group(side, case, num_ranks)
        # Not counted: buffers are made, caches filled.
        groups[name].take_steps(block_steps)

    def time_block(name: str) -> None:
        block_s.setdefault(name, []).append(groups[name].take_steps(block_steps))

    def finish(name: str) -> None:
        losses[name] = groups[name].finish()

    try:
        for name in sides:
            attempt(name, functools.partial(start, name))
        for number in range(rounds):
            # Who goes first changes: a machine that grows slower favours nobody.
            for name in list(groups)[:: 1 if number % 2 == 0 else -1]:
                attempt(name, functools.partial(time_block, name))
        for name in list(groups):
            attempt(name, functools.partial(finish, name))
    finally:
        for group in groups.values():
            group.end()
    return Timed(block_s=block_s, losses=losses, failures=failures)


def measure_memory(side: Side, case: Case) -> float:
    """Return the most memory of three steps above the level after loading (MB).

    Raises:
        Failed: the side does not work here.
    """
    group = Group(side, case, 1)
    peak_mb = group.level_mb

    def look() -> None:
        nonlocal peak_mb
        peak_mb = max(peak_mb, group.memory_mb())

    try:
        for _ in range(MEMORY_STEPS):
            group.take_steps(1, look)
    finally:
        group.end()
    return peak_mb - group.level_mb


# -- tables ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured ratio and its bar."""

    name: str
    cells: tuple[str, ...]
    ratio: float | None
    bar: float | None = None
    at_most: bool = False
    broken: bool = False
    """Whether something does not work that has to."""
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the bar is reached, if there is one, by a figure that means something."""
        if self.broken:
            return False
        if self.bar is None or self.ratio is None:
            return self.bar is None
        return self.ratio <= self.bar if self.at_most else self.ratio >= self.bar

    def __str__(self) -> str:
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}x"
        bar = "" if self.bar is None else f"{'<=' if self.at_most else '>='} {self.bar:.2f}x"
        mark = "MISSED" if not self.met else "" if self.bar is None else "ok"
        line = f"{self.name:<34}{''.join(f'{cell:>12}' for cell in self.cells)}{ratio:>9}"
        return f"{line}  {bar:<9}{mark:<8}{self.note}".rstrip()


def print_header(title: str, columns: Sequence[str]) -> None:
    """Print a table's first lines."""
    print(f"\n{title}\n{'':<34}{''.join(f'{each:>12}' for each in columns)}{'ratio':>9}  bar")


def measure_one_process(name: str, case: Case, sizes: "Sizes", has_bars: bool) -> Iterator[Row]:
    """Yield rows of speed: plain and goldfish."""
    for goldfish in (False, True):
        given = replace(case, goldfish=goldfish)
        sides: dict[str, tuple[Side, Case, int]] = {
            "memguard": (run_memguard, given, 1),
            "Trainer": (run_trainer, given, 1),
        }
        timed = take_turns(sides, rounds=sizes.rounds, block_steps=sizes.block_steps[name])
        label = f"{name}, {'goldfish k=2' if goldfish else 'plain'}"
        bar = MIN_SPEED if not goldfish else MIN_GOLDFISH_SPEED if has_bars else None
        if timed.failures:
            note = "; ".join(f"{side} failed: {why}" for side, why in timed.failures.items())
            yield Row(name=label, cells=("-", "-"), ratio=None, bar=bar, broken=True, note=note)
            continue
        tokens = given.step_tokens * sizes.block_steps[name]
        ours, theirs = (timed.losses[side] or 0.0 for side in sides)
        yield Row(
            name=label,
            cells=tuple(f"{timed.tokens_per_s(side, tokens):,.0f}" for side in sides),
            ratio=timed.ratio("memguard", "Trainer"),
            bar=bar,
            # Who learns something else may be as fast as it likes.
            broken=abs(ours - theirs) > SAME_LOSS * abs(theirs),
            note=f"loss after: {ours:.4f}, {theirs:.4f}",
        )


def measure_one_memory(name: str, case: Case) -> Row:
    """Return the row of memory."""
    try:
        ours, theirs = (measure_memory(side, case) for side in (run_memguard, run_trainer))
    except Failed as failure:
        return Row(name=name, cells=("-", "-"), ratio=None, broken=True, note=str(failure))
    return Row(
        name=f"{name}, memory",
        cells=(f"{ours:,.0f}", f"{theirs:,.0f}"),
        ratio=ours / theirs,
        bar=MAX_MEMORY,
        at_most=True,
    )


def measure_four_processes(case: Case, sizes: "Sizes") -> Iterator[Row]:
    """Yield a row for each mesh beside FSDP2 and one beside tensor parallelism."""
    meshes = {"(z=4)": {"z": 4}, "(x=4)": {"x": 4}, "(x=2, y=2)": {"x": 2, "y": 2}}
    sides: dict[str, tuple[Side, Case, int]] = {
        name: (run_memguard, replace(case, mesh=tuple(degrees.items())), 4)
        for name, degrees in meshes.items()
    }
    others: dict[str, Side] = {
        "FSDP2": run_fsdp2,
        "transformers' TP": run_tensor_parallel,
    }
    sides |= {name: (side, case, 4) for name, side in others.items()}
    timed = take_turns(sides, rounds=sizes.rounds, block_steps=sizes.block_steps["mesh"])
    tokens = case.step_tokens * sizes.block_steps["mesh"]
    for name in meshes:
        for other in others:
            failed = {
                side: timed.failures[side] for side in (name, other) if side in timed.failures
            }
            speeds = [
                "-" if side in failed else f"{timed.tokens_per_s(side, tokens):,.0f}"
                for side in (name, other)
            ]
            yield Row(
                name=f"{name} beside {other}",
                cells=tuple(speeds),
                ratio=None if failed else timed.ratio(name, other),
                broken=name in failed,
                note="; ".join(f"{side} does not run: {why}" for side, why in failed.items()),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large everything is."""

    llama: tuple[int, int, int, int, int]
    """vocabulary, width, FFN width, layers, heads of the random Llama; and of the meshes'."""
    mesh_llama: tuple[int, int, int, int, int]
    batch: tuple[int, int]
    """Rows and tokens a row."""
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


def main() -> int:
    """Measure everything; return 1 where a bar is missed."""
    summary, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stories", type=Path, default=STORIES, help="folder of stories260K")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; no figure means anything")
    asked = parser.parse_args()
    sizes = QUICK if asked.quick else FULL
    threads = os.cpu_count() or 1
    os.environ.update(
        OMP_NUM_THREADS=str(threads),
        GLOO_SOCKET_IFNAME="lo",
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)

    with tempfile.TemporaryDirectory(prefix="bench_engine.") as folder:
        drawn = write_checkpoint(Path(folder) / "llama", build_config(*sizes.llama))
        small = write_checkpoint(Path(folder) / "mesh", build_config(*sizes.mesh_llama))
        batch_size, seq_len = sizes.batch
        cases = {"random 30M": drawn}
        if (asked.stories / "config.json").is_file():
            cases = {"stories260K": str(asked.stories), **cases}
        one = Case(folder="", batch_size=batch_size, seq_len=seq_len, num_threads=threads)
        print_header(
            f"one process, {threads} threads, {batch_size} x {seq_len} tokens a step: tokens/s",
            ("memguard", "Trainer"),
        )
        if "stories260K" not in cases:
            print(f"stories260K: left out, it is not in {asked.stories}")
        for name, path in cases.items():
            case = replace(one, folder=path)
            for row in measure_one_process(name, case, sizes, name == "random 30M"):
                show(row)
        print_header("the same, memory above the level after loading: MB", ("memguard", "Trainer"))
        for name, path in cases.items():
            show(measure_one_memory(name, replace(one, folder=path)))
        batch_size, seq_len = sizes.mesh_batch
        print_header(
            f"4 processes, 1 thread each, {batch_size} x {seq_len} tokens a step: tokens/s",
            ("memguard", "other"),
        )
        case = Case(folder=small, batch_size=batch_size, seq_len=seq_len)
        for row in measure_four_processes(case, sizes):
            show(row)
    missed = [row.name for row in rows if not row.met]
    num_bars = sum(row.bar is not None for row in rows)
    print(
        f"\nFAIL: {len(missed)} rows: {'; '.join(missed)}"
        if missed
        else f"\nPASS: all {num_bars} bars met"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
