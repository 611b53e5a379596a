"""Bytes that each optimizer keeps of a parameter: measured, predicted, and how fast it updates.

python scripts/bench/optimizers.py            everything; about two minutes
python scripts/bench/optimizers.py --quick    a tiny model, to check the script; seconds

`bytes` is anonymous memory (RssAnon) of four processes together, on the mesh (1, 2, 1, 2), for each
parameter of a model of 30 million: when backward has ended and the update begins, above the level
before the model is built, at which everything is imported and another such model has run a step and
was freed. So it is weights, gradients and state. malloc maps each tensor separately, and so frees
it immediately. The limit is the figure of the design, 16 for AdamW, and 10 %. Where backward
updates the weights, the gradients of one unit, the largest of which has `unit` bytes, come on top.

`predicted` is what `memguard plan` counts for the same three, this unit included, within 15 %.

`M/s` are millions of parameters that one process on one core updates in a second, median of the
rounds; gradients are random.

The last line is a verdict; exit 1 if a limit is missed. Linux with glibc only.
"""

import ctypes
import gc
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from harness import Failed, Rank, Ranks, Table, Verdict, build_parser
from workload import build_step, describe_step, draw_batches

from memguard.config import TrainConfig
from memguard.config.optimizers import OPTIMIZERS
from memguard.hf.assembly import Assembly, allocate, assemble, build_meta_layer
from memguard.optim.in_backward import Lomo
from memguard.optim.mezo import EPSILON, Mezo
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Mesh4D, build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.fit import count_parameters
from memguard.planner.memory import estimate_memory
from memguard.train.step import TrainStep

MESH = MeshShape(z=2, x=2)
SEQ_LEN, NUM_ROUNDS = 64, 5
# As in bench/plan.py.
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 2**16
TOLERANCE, PLAN_TOLERANCE = 0.10, 0.15
LEAST_8BIT_PER_S = 15e6

# Nearly all parameters are quantised: the embedding, which is not, is small.
RANDOM_30M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": True,
}
TINY = {**RANDOM_30M, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """An optimizer, and what its weights and gradients are."""

    name: str
    expected: float
    """Bytes of a parameter."""
    weights: str = "fp32"
    num_micro_batches: int = 1
    fields: dict[str, Any]

    @property
    def config(self) -> Any:
        """The model's transformers configuration."""
        return transformers.AutoConfig.for_model(**self.fields)

    @property
    def train(self) -> TrainConfig:
        """The settings of training: one row of a rank in a micro-batch."""
        rows = MESH.num_batch_ways * self.num_micro_batches
        return TrainConfig(
            batch_size=rows,
            micro_batch_size=1 if self.num_micro_batches > 1 else None,
            precision="bf16",
            activation_checkpointing="none",
            weights=self.weights,  # type: ignore[arg-type]
        )

    @property
    def optim(self) -> dict[str, Any]:
        """The settings of the optimizer."""
        clips = not OPTIMIZERS[self.name].why_no_clipping
        return {"name": self.name, "max_grad_norm": 1.0 if clips else None}

    def __str__(self) -> str:
        many = "several micro-batches" if self.num_micro_batches > 1 else ""
        narrow = self.weights if self.weights != "fp32" else ""
        return ", ".join(filter(None, (self.name, narrow, many)))


def list_cases(fields: dict[str, Any]) -> list[Case]:
    """Return the rows of the table."""
    return [
        Case(name="adamw", expected=16, fields=fields),
        Case(name="adamw_8bit", expected=10.1, fields=fields),
        Case(name="adamw_8bit", expected=8.1, weights="bf16", num_micro_batches=2, fields=fields),
        *(Case(name=name, expected=4, fields=fields) for name in ("adalomo", "lomo", "mezo")),
        Case(name="adalomo", expected=2, weights="bf16", fields=fields),
    ]


# -- memory ------------------------------------------------------------------------------------


def predict(case: Case) -> tuple[float, float]:
    """Return the planner's bytes of a parameter: weights, gradients and state, and a unit's."""
    sizes = ModelSizes.from_json(case.fields)
    no_gradients = OPTIMIZERS[case.name].gradients == "none"
    settings = replace(
        describe_step(case.train, MESH, seq_len=SEQ_LEN),
        optimizer=case.name,
        weight_bytes=2 if case.weights == "bf16" else 4,
        trained_modules=() if no_gradients else None,
    )
    memory = estimate_memory(sizes, MESH, settings, seq_len=SEQ_LEN)
    scale = MESH.num_ranks / count_parameters(sizes)
    is_freed = OPTIMIZERS[case.name].gradients == "unit"
    kept = memory.peak.weights + memory.peak.optimizer + memory.gradient_bytes
    return scale * kept, scale * memory.gradient_bytes if is_freed else 0.0


def measure(case: Case) -> float:
    """Return the bytes of a parameter on all ranks at an update.

    Raises:
        Failed: a rank fails.
    """
    with Ranks(run_rank, case, num_ranks=MESH.num_ranks) as ranks:
        ranks.hear()
        before = ranks.anonymous_bytes()
        ranks.go()
        now = ranks.anonymous_bytes()
        ranks.go()
    return (sum(now) - sum(before)) / count_parameters(ModelSizes.from_json(case.fields))


def run_rank(case: Case, rank: Rank) -> None:
    """Report before the model is built, and when the second step updates it."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    mesh = build_mesh(MESH, "cpu")
    mesh.connect(torch.device("cpu"))
    warnings.simplefilter("ignore", FutureWarning)
    # Allocates what stays: threads, buffers of sockets and of kernels.
    step: TrainStep | None = make_step(case, mesh)
    take_step(step, case, number=1)
    step = None
    free_unused()
    rank.report()
    step = make_step(case, mesh)
    take_step(step, case, number=1)
    update, reports = step.optimizer.update, []

    def report_first() -> None:
        free_unused()
        reports.append(rank.report())
        update()

    step.optimizer.update = report_first  # type: ignore[method-assign]
    take_step(step, case, number=2)
    if not reports:
        rank.report()


def free_unused() -> None:
    """Give back what no object uses."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def make_step(case: Case, mesh: Mesh4D | None) -> TrainStep:
    """Build a random model on this rank, or on one process, and its training step."""
    assembly = Assembly.for_training(case.train, mesh=mesh, device=torch.device("cpu"))
    if mesh is None:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(case.config, dtype=assembly.dtype)
        return build_step(assemble(model, assembly), case.train, **case.optim)
    lm = build_meta_layer(case.config, assembly).lm
    allocate(lm, assembly.device)
    torch.manual_seed(torch.distributed.get_rank())
    for parameter in lm.model.parameters():
        piece = to_local(parameter.data)
        piece.normal_(std=0.02) if piece.ndim > 1 else piece.fill_(1.0)
    return build_step(lm, case.train, **case.optim)


def take_step(step: TrainStep, case: Case, *, number: int) -> None:
    """Take one step on random rows."""
    (batch,) = draw_batches(
        case.fields["vocab_size"],
        (case.num_micro_batches, SEQ_LEN),
        document_tokens=(SEQ_LEN // 2, SEQ_LEN),
        num_batches=1,
        part=step.lm.batch_rank,
    )
    step.run(batch, lr=1e-4, step=number, first_sample=number * case.train.batch_size)


# -- speed -------------------------------------------------------------------------------------


def measure_speed(case: Case) -> float:
    """Return the parameters that one process updates in a second.

    Raises:
        Failed: the process fails.
    """
    with Ranks(run_updates, case) as ranks:
        speed: float = ranks.hear()[0]
    return speed


def run_updates(case: Case, rank: Rank) -> float:
    """Update all weights with random gradients, some times; the first of them warms up."""
    step = make_step(case, None)
    optimizer, seconds = step.optimizer, []
    for number in range(1, NUM_ROUNDS + 2):
        for parameter in step.parameters:
            source = parameter.source
            source.grad = torch.randn(source.shape, dtype=source.grad_dtype or source.dtype)
        begin_s = time.perf_counter()
        optimizer.begin(step=number, lr=1e-4)
        if isinstance(optimizer, Lomo):
            for parameter in step.parameters:
                optimizer._receive(parameter, parameter.source)
            optimizer.finish()
        if isinstance(optimizer, Mezo):
            # To both sides, where forwards would be.
            optimizer.move(EPSILON)
            optimizer.move(-2 * EPSILON)
        optimizer.update()
        seconds.append(time.perf_counter() - begin_s)
    return sum(parameter.local.numel() for parameter in step.parameters) / statistics.median(
        seconds[1:]
    )


# -- the table ---------------------------------------------------------------------------------


def main() -> int:
    """Print the table and a verdict; return the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model; no limits")
    options = parser.parse_args()
    verdict, is_quick = Verdict(), options.quick
    table = Table(38, "  expected", "   bytes", "  predicted", "    unit", "   M/s")
    for case in list_cases(TINY if is_quick else RANDOM_30M):
        predicted, unit = predict(case)
        try:
            measured, per_s = measure(case), measure_speed(case)
        except Failed as error:
            table.failure(str(case), str(error))
            verdict.fail(f"{case}: {error}")
            continue
        figures = (case.expected, measured, predicted, unit)
        table.row(str(case), *(f"{figure:.2f}" for figure in figures), f"{per_s / 1e6:.0f}")
        if is_quick:
            continue
        most = case.expected * (1 + TOLERANCE) + unit
        verdict.check(f"{case}: bytes", measured, at_most=most)
        verdict.check(f"{case}: bytes", measured, at_least=case.expected * (1 - TOLERANCE))
        ratio = predicted / measured
        verdict.check(
            f"{case}: plan", ratio, at_least=1 - PLAN_TOLERANCE, at_most=1 + PLAN_TOLERANCE
        )
        if case.name == "adamw_8bit":
            verdict.check(f"{case}: M/s", per_s / 1e6, at_least=LEAST_8BIT_PER_S / 1e6)
    return verdict.end()


if __name__ == "__main__":
    sys.exit(main())
