"""Compare the predicted memory of a training step with the simulated and with the measured.

python scripts/bench_plan.py                        everything; some ten minutes
python scripts/bench_plan.py --model config.json    another model's as well
python scripts/bench_plan.py --quick                tiny sizes, to see that it works; seconds

Predicted is `estimate_memory`, arithmetic on a model's sizes. Simulated is the engine's own step of
rank 0 on fake tensors: the most they would take together. Every simulation has a process of its
own. Both count tensors.

Measured is anonymous memory (RssAnon) of the worst of four processes that train on random rows,
sampled from outside every few milliseconds, at its peak in the steps after the first, above its
level before the model is built; by then everything is imported, every group has met, and a tiny
model has taken a step. It is the median of the runs, with malloc as a user finds it, so that beside
tensors it has what kernels and collectives take, and the holes in malloc's heap: glibc's
posix_memalign, from which torch takes tensors, asks for a little more than their size, and the hole
that a tensor of the same size has left is too small for it. `predicted` is what `memguard plan`
says that a CPU process needs, tensors and its allowance for these holes, a share that was measured
here on the first and third rows. The second has no bar: where blocks are recomputed, as many holes
stand beside fewer tensors. The column `no holes` is a run in which malloc maps each tensor by
itself and so gives it back at once, to be compared with the tensors alone.

The last line is a verdict; exit 1 where a bar is missed. Linux with glibc only.
"""

import argparse
import ctypes
import functools
import gc
import json
import multiprocessing
import os
import re
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.testing._internal.distributed.fake_pg",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "memguard.simulation.step",
]
MAX_STORED_ERROR, MAX_PEAK_ERROR = 0.05, 0.15
NUM_STEPS = 3
SAMPLE_EVERY_S = 0.002
TIMEOUT_S = 300
GIB = 2**30
# Of malloc.h: what is larger is mapped by itself.
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 2**16

# Sizes as in the config.json of each model's repository on the Hugging Face hub.
PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "meta-llama/Llama-3.1-70B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "meta-llama/Llama-3.1-405B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-32B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
# As drawn by bench_engine.py, with key/value heads that two ranks can share out.
RANDOM_30M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A step of a model on a mesh."""

    fields: dict[str, Any]
    """Of the model's configuration."""
    mesh: tuple[int, int, int, int]
    """Degrees of data, z, y, x."""
    num_layers: int | None = None
    """None takes all the model has."""
    checkpointing: str = "none"
    precision: str = "bf16"
    num_rows: int = 1
    """Of a step on one rank."""
    num_micro_batches: int = 1
    seq_len: int = 4096

    @property
    def config_fields(self) -> dict[str, Any]:
        """Fields of the configuration with as many layers as asked, and room for the rows."""
        layers = self.num_layers or self.fields["num_hidden_layers"]
        limit = {"num_hidden_layers": layers, "max_position_embeddings": self.seq_len}
        return {"tie_word_embeddings": False, **self.fields, **limit}

    def __str__(self) -> str:
        layers = f"{self.num_layers or self.fields['num_hidden_layers']}"
        mesh = f"({', '.join(map(str, self.mesh))})"
        rows = f"{self.num_micro_batches} x {self.num_rows // self.num_micro_batches}"
        return f"  {mesh:<15}{layers:>4} {self.checkpointing:<10}{self.precision:<5}{rows}"


MEASURED = Case(fields=RANDOM_30M, mesh=(1, 2, 1, 2), num_rows=4, seq_len=512)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Of one rank (bytes)."""

    weights: int
    gradients: int
    optimizer: int
    peak: int


# -- the two sides -----------------------------------------------------------------------------


def estimate(case: Case) -> Any:
    """Return the planner's estimate, from sizes alone."""
    from memguard.parallel.mesh_shape import ModelSizes
    from memguard.planner.memory import estimate_memory

    return estimate_memory(
        ModelSizes.from_json(case.config_fields),
        build_shape(case),
        build_settings(case),
        seq_len=case.seq_len,
    )


def predict(case: Case) -> Memory:
    """Return what the planner says of tensors."""
    said = estimate(case)
    return Memory(
        weights=said.weight_bytes,
        gradients=said.gradient_bytes,
        optimizer=said.optimizer_bytes,
        peak=said.peak.total,
    )


def predict_needed(case: Case) -> int:
    """Return what `memguard plan` says that a CPU process needs: tensors, and holes in the heap."""
    from memguard.planner.machine import FRAGMENTATION_CPU

    peak = estimate(case).peak
    return round(peak.total + FRAGMENTATION_CPU * peak.transient)


def simulate(case: Case) -> Memory:
    """Return what the engine's own step takes on fake tensors."""
    from memguard.simulation.step import simulate_step

    step = simulate_step(
        build_config(case), build_shape(case), train=build_train(case), seq_len=case.seq_len
    )
    return Memory(
        weights=step.weight_bytes,
        gradients=step.gradient_bytes,
        optimizer=step.optimizer_bytes,
        peak=step.peak_bytes,
    )


def build_shape(case: Case) -> Any:
    """Return the mesh."""
    from memguard.parallel.mesh_shape import MeshShape

    data, z, y, x = case.mesh
    return MeshShape(data=data, z=z, y=y, x=x)


def build_train(case: Case) -> Any:
    """Return the settings of training."""
    from memguard.config import TrainConfig

    data, z, *_ = case.mesh
    settings = {
        "batch_size": case.num_rows * data * z,
        "micro_batch_size": case.num_rows // case.num_micro_batches,
        "precision": case.precision,
        "activation_checkpointing": case.checkpointing,
    }
    return TrainConfig.model_validate(settings)


def build_settings(case: Case) -> Any:
    """Return what the planner takes of them."""
    from memguard.planner.traffic import StepSettings

    train = build_train(case)
    return StepSettings(
        num_tokens=train.micro_batch_size * case.seq_len,
        num_labels=train.micro_batch_size * (case.seq_len - 1),
        num_micro_batches=case.num_micro_batches,
        chunk_tokens=train.nll_chunk_tokens,
        compute_bytes=2 if case.precision == "bf16" else 4,
        checkpointing=train.activation_checkpointing,
    )


def build_config(case: Case) -> Any:
    """Return transformers' configuration."""
    import transformers

    fields = dict(case.config_fields)
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


# -- processes ---------------------------------------------------------------------------------


class Failed(Exception):
    """Something does not work here; the message says why."""


class Processes:
    """Ranks, each with a pipe."""

    def __init__(self, work: Callable[..., None], *arguments: Any, num_ranks: int = 1) -> None:
        """Start ``work(*arguments, rank, port, pipe)`` in so many processes."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=guard, args=(work, *arguments, rank, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def tell(self, message: Any) -> None:
        """Send a message to every rank."""
        for pipe in self.pipes:
            pipe.send(message)

    def hear(self, meanwhile: Callable[[], None] | None = None) -> list[Any]:
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
                failure, answer = pipe.recv()
            except EOFError:
                raise Failed("a process died without a word") from None
            if failure:
                raise Failed(failure)
            answers.append(answer)
        return answers

    def anonymous_bytes(self) -> list[int]:
        """Return RssAnon of each rank."""
        return [read_anonymous_bytes(process.pid or 0) for process in self.processes]

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.kill()
            process.join()


def guard(work: Callable[..., None], *arguments: Any) -> None:
    """In a process of its own: work, and say why where that fails."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    pipe = arguments[-1]
    try:
        work(*arguments)
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1]
        pipe.send((" ".join(last.split())[:200], None))
        if os.environ.get("BENCH_TRACEBACK"):
            traceback.print_exc()


def run_simulation(case: Case, rank: int, port: int, pipe: Any) -> None:
    """Simulate; a process of its own, because a fake process group is left behind."""
    pipe.send(("", simulate(case)))


def run_rank(case: Case, maps_all: bool, rank: int, port: int, pipe: Any) -> None:
    """Be one of the ranks that really train."""
    if maps_all:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    data, z, y, x = case.mesh
    num_ranks = data * z * y * x
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
    )
    import torch
    from torch import distributed as dist

    from memguard.parallel.mesh import build_mesh

    dist.init_process_group("gloo")
    mesh = build_mesh(build_shape(case), "cpu")
    mesh.connect(torch.device("cpu"))
    # What a first step makes once and for all: threads, buffers of sockets, code of kernels.
    tiny = replace(case, fields=TINY, num_layers=None, seq_len=32)
    take_step = build_step(tiny, mesh)
    take_step(1)
    del take_step
    gc.collect()
    dist.barrier()
    pipe.send(("", None))
    pipe.recv()
    take_step = build_step(case, mesh)
    take_step(1)
    dist.barrier()
    pipe.send(("", None))
    pipe.recv()
    for number in range(2, NUM_STEPS + 1):
        take_step(number)
    dist.barrier()
    pipe.send(("", None))
    pipe.recv()


def build_step(case: Case, mesh: Any) -> Callable[[int], None]:
    """Build a random model on this rank; return what takes a step on random rows."""
    import torch

    from memguard.config import OptimConfig
    from memguard.hf.sharded import Sharding, allocate, build_meta_layer
    from memguard.mitigation import build_mitigations
    from memguard.parallel.linear import to_local
    from memguard.runtime import Runtime
    from memguard.seeds import derive_generator
    from memguard.train.step import TrainStep

    train, device = build_train(case), torch.device("cpu")
    sharding = Sharding(
        mesh=mesh,
        device=device,
        compute_dtype=torch.bfloat16 if case.precision == "bf16" else None,
        chunk_tokens=train.nll_chunk_tokens,
        checkpointing=train.activation_checkpointing,
    )
    layer = build_meta_layer(build_config(case), sharding)
    allocate(layer)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(rank)
    for parameter in layer.vocab.model.parameters():
        piece = to_local(parameter.data)
        # Vectors are norms, which are the same on ranks that hold the same.
        piece.normal_(std=0.02) if piece.ndim > 1 else piece.fill_(1.0)
    layer.vocab.model.train()
    step = TrainStep(
        vocab=layer.vocab,
        mitigations=build_mitigations([], special_ids=[]),
        train=train,
        optim=OptimConfig(),
        seed=0,
        runtime=Runtime(device=device, rank=rank, world_size=world_size),
    )
    # Ranks along y and x see the same rows.
    draw = derive_generator(0, f"bench rows {layer.vocab.batch_rank}")

    def take_step(number: int) -> None:
        batch = draw_batch(case, draw)
        step.run(batch, lr=1e-4, step=number, first_sample=number * train.batch_size)

    return take_step


def draw_batch(case: Case, draw: Any) -> Any:
    """Draw rows of random tokens, two documents each."""
    import numpy as np

    from memguard.data.loader import Batch
    from memguard.records import IGNORE_LABEL

    shape = (case.num_rows, case.seq_len)
    input_ids = draw.integers(0, case.fields["vocab_size"], shape)
    places = np.broadcast_to(np.arange(case.seq_len), shape)
    second = draw.integers(case.seq_len // 4, 3 * case.seq_len // 4, (case.num_rows, 1))
    document_ids = (places >= second).astype(np.int64)
    position_ids = places - document_ids * second
    labels = np.where(position_ids == 0, IGNORE_LABEL, input_ids)
    num_labels = int((labels != IGNORE_LABEL).sum())
    return Batch(
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        document_ids=document_ids,
        num_supervised=num_labels,
        num_kept=num_labels,
    )


def read_anonymous_bytes(pid: int) -> int:
    """Return RssAnon of a process; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


# -- measurements ------------------------------------------------------------------------------


def simulate_apart(case: Case) -> Memory:
    """Return `simulate` of a case.

    Raises:
        Failed: it does not work.
    """
    processes = Processes(run_simulation, case)
    try:
        memory: Memory = processes.hear()[0]
    finally:
        processes.end()
    return memory


def measure(case: Case, *, maps_all: bool = False) -> list[int]:
    """Return the growth of each rank's anonymous memory to its most in steps 2 and later (bytes).

    Args:
        case: what is trained.
        maps_all: whether malloc maps each tensor by itself.

    Raises:
        Failed: it does not work.
    """
    data, z, y, x = case.mesh
    processes = Processes(run_rank, case, maps_all, num_ranks=data * z * y * x)
    try:
        processes.hear()
        before = processes.anonymous_bytes()
        peaks = [0] * len(before)

        def look() -> None:
            for rank, now in enumerate(processes.anonymous_bytes()):
                peaks[rank] = max(peaks[rank], now)

        processes.tell("build")
        processes.hear()
        processes.tell("go on")
        processes.hear(look)
    finally:
        processes.end()
    return [peak - level for peak, level in zip(peaks, before, strict=True)]


# -- cases -------------------------------------------------------------------------------------


def list_cases() -> dict[str, list[Case]]:
    """Return each published model at full depth on one mesh, and a few layers of it on others."""
    few, twice = {"num_layers": 4}, {"num_rows": 2, "num_micro_batches": 2}
    settings: dict[str, list[dict[str, Any]]] = {
        "meta-llama/Llama-3.1-8B": [
            {"mesh": (1, 8, 1, 1), "checkpointing": "full"},
            {"mesh": (1, 2, 1, 2), **few},
            # Rows of weights that z does not divide.
            {"mesh": (1, 3, 2, 2), "checkpointing": "full", **few},
            # Two ranks share a key/value head.
            {"mesh": (1, 2, 1, 16), "num_rows": 2, **few},
            {"mesh": (2, 2, 1, 2), "checkpointing": "selective", **few, **twice},
            {"mesh": (1, 2, 2, 2), "precision": "fp32", **few},
            {"mesh": (1, 1, 1, 1), **few},
        ],
        "meta-llama/Llama-3.1-70B": [
            {"mesh": (1, 16, 1, 8), "checkpointing": "selective"},
            {"mesh": (1, 8, 2, 4), **few},
            {"mesh": (2, 4, 2, 16), "checkpointing": "full", **few, **twice},
        ],
        "meta-llama/Llama-3.1-405B": [
            {"mesh": (8, 128, 2, 8), "checkpointing": "full"},
            {"mesh": (1, 16, 4, 8), **few},
            {"mesh": (1, 24, 1, 8), "checkpointing": "selective", **few},
        ],
        "Qwen/Qwen3-32B": [
            {"mesh": (1, 16, 1, 4), "checkpointing": "full"},
            {"mesh": (1, 8, 2, 4), **few},
            {"mesh": (2, 4, 1, 8), "checkpointing": "selective", **few},
        ],
    }
    return {
        model: [Case(fields=PUBLISHED[model], **each) for each in many]
        for model, many in settings.items()
    }


def list_cases_of(fields: dict[str, Any]) -> list[Case]:
    """Return cases of any model, on meshes that it can run on.

    Raises:
        MemguardError: it is of a family whose sizes mean something else, or lacks one.
    """
    from memguard.parallel.mesh_shape import MeshShape, ModelSizes, nearest_meshes

    sizes = ModelSizes.from_json(fields)
    shapes = [MeshShape(z=4, x=2), MeshShape(z=2, y=2, x=2), MeshShape(x=8)]
    meshes = []
    for shape in shapes:
        near, *_ = nearest_meshes(shape, shape.num_ranks, sizes)
        meshes.append((near.data, near.z, near.y, near.x))
    few = min(4, sizes.num_layers)
    return [
        Case(fields=fields, mesh=meshes[0], checkpointing="full"),
        *(
            Case(fields=fields, mesh=mesh, num_layers=few, checkpointing=mode)
            for mesh, mode in zip(meshes, ("selective", "none", "full"), strict=True)
        ),
    ]


# -- tables ------------------------------------------------------------------------------------

COLUMNS = ("weights", "gradients", "optimizer", "peak")
CAPTION = (
    "rank 0 of (data, z, y, x), layers, what backward computes again, precision, micro-batches x "
    "rows of 4096 tokens"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One predicted figure beside another."""

    name: str
    predicted: float
    other: float
    max_error: float

    @property
    def ratio(self) -> float:
        """Predicted to the other."""
        return self.predicted / self.other if self.other else float("inf")

    @property
    def met(self) -> bool:
        """Whether the two are near enough."""
        return abs(self.ratio - 1) <= self.max_error


def compare_simulated(name: str, case: Case) -> list[Compared]:
    """Print a case's row; return its figures.

    Raises:
        Failed: the simulation does not work.
    """
    begin_s = time.monotonic()
    ours, theirs = predict(case), simulate_apart(case)
    took_s = time.monotonic() - begin_s
    figures = [
        Compared(
            name=f"{name}, {column}",
            predicted=getattr(ours, column),
            other=getattr(theirs, column),
            max_error=MAX_PEAK_ERROR if column == "peak" else MAX_STORED_ERROR,
        )
        for column in COLUMNS
    ]
    cells = "".join(
        f"{each.predicted / GIB:>10.2f}{each.other / GIB:>7.2f}{each.ratio:>7.3f}"
        for each in figures
    )
    print(f"{case!s:<38}{cells}{took_s:>5.0f}{mark(figures)}", flush=True)
    return figures


def compare_measured(case: Case, num_runs: int) -> list[Compared]:
    """Print a measured case's row; return its figure, if it has a bar.

    Raises:
        Failed: it does not work.
    """
    tensors, simulated = predict(case).peak, simulate_apart(case).peak
    ours = predict_needed(case)
    runs = [max(measure(case)) for _ in range(num_runs)]
    without_holes = max(measure(case, maps_all=True))
    figure = Compared(
        name=f"measured {' '.join(str(case).split())}",
        predicted=ours,
        other=statistics.median(runs),
        max_error=MAX_PEAK_ERROR,
    )
    amounts = (tensors, simulated, ours, figure.other)
    cells = "".join(f"{each / 1e6:>10,.0f}" for each in amounts)
    has_bar = case.checkpointing == "none"
    end = mark([figure]) if has_bar else "  no bar"
    print(
        f"{case!s:<38}{cells}{figure.ratio:>7.3f}"
        f"{f'{min(runs) / 1e6:,.0f} - {max(runs) / 1e6:,.0f}':>16}"
        f"{without_holes / 1e6:>10,.0f}{tensors / without_holes:>7.3f}{end}",
        flush=True,
    )
    return [figure] if has_bar else []


def mark(figures: list[Compared]) -> str:
    """Return the end of a row."""
    return "" if all(each.met for each in figures) else "  MISSED"


def load_fields(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Read a model's config.json; end with a message where there is none."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--model {path}: {error}")
    return fields


def main() -> int:
    """Compare everything; return 1 where a bar is missed."""
    summary, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="config.json of another model"
    )
    parser.add_argument("--runs", type=int, help="of what is measured, 3; medians count")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; no figure means anything")
    asked = parser.parse_args()
    num_runs = asked.runs or (1 if asked.quick else 3)
    os.environ.update(
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    from memguard.errors import MemguardError

    models = {"tiny": list_cases_of(TINY)} if asked.quick else list_cases()
    for path in asked.model:
        try:
            models[str(path)] = list_cases_of(load_fields(path, parser))
        except MemguardError as error:
            parser.error(f"--model {path}: {error}")
    measured = [
        replace(MEASURED, precision="fp32"),
        replace(MEASURED, precision="fp32", checkpointing="full"),
        replace(MEASURED, num_rows=2),
    ]
    if asked.quick:
        measured = [replace(each, fields=TINY, seq_len=64) for each in measured]
    figures: list[Compared] = []
    failed: list[str] = []

    def attempt(name: str, work: Callable[[], list[Compared]]) -> None:
        try:
            figures.extend(work())
        except Failed as failure:
            failed.append(name)
            print(f"  {name} does not run: {failure}", flush=True)

    columns = "".join(f"{f'{column}, GiB':>24}" for column in COLUMNS)
    print(f"{CAPTION}\n{'':<38}{columns}")
    cells = f"{'predicted':>10}{'sim.':>7}{'ratio':>7}" * len(COLUMNS)
    print(f"{'':<38}{cells}{'s':>5}")
    for model, cases in models.items():
        print(model, flush=True)
        for case in cases:
            name = f"{model} {' '.join(str(case).split())}"
            attempt(name, functools.partial(compare_simulated, name, case))
    print(
        f"\nfour processes, rows of {measured[0].seq_len} tokens, tensors and RssAnon, MB (10^6 "
        f"bytes); runs: {num_runs}\n{'':<38}{'tensors':>10}{'sim.':>10}{'predicted':>10}"
        f"{'measured':>10}"
        f"{'ratio':>7}{'runs':>16}{'no holes':>10}{'ratio':>7}",
        flush=True,
    )
    for case in measured:
        name = f"measured {' '.join(str(case).split())}"
        attempt(name, functools.partial(compare_measured, case, num_runs))
    missed = [*failed, *(each.name for each in figures if not each.met)]
    print(
        f"\nFAIL: {len(missed)} of {len(figures) + len(failed)}: {'; '.join(missed)}"
        if missed
        else f"\nPASS: all {len(figures)} figures within {MAX_STORED_ERROR:.0%} (weights, "
        f"gradients, optimizer) and {MAX_PEAK_ERROR:.0%} (peak)"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
