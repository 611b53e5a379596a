"""Compare training a LoRA adapter with peft and transformers' Trainer: speed, memory, state.

python scripts/bench/adapters.py               everything; some minutes
python scripts/bench/adapters.py --rounds 2    fewer rounds
python scripts/bench/adapters.py --quick       tiny sizes, to check that the script works; seconds

Both sides train the same adapters (r=16 on every linear layer but the head, without dropout, the
same initial values) of the same random model on the same packed rows, with the same AdamW and
clipping, each in processes of its own. Speed: sides alternate with a block of steps each; figures
are medians over rounds, and a ratio is the median of the ratios of each round. Memory: in new
processes, the largest resident set (VmRSS) from before the model is loaded to the end of three
steps, less the resident set before, when everything is imported and a tiny model has been trained;
the median of the rounds. State: bytes of weights, gradients and optimizer in a step of memguard,
with AdamW on all weights in fp32 beside it. `plan` is the memory that `memguard plan` predicts for
the same step.

The last line is a verdict; exit 1 if a limit is missed, or if the losses of the sides differ. Linux
only.
"""

import gc
import itertools
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import quieted  # noqa: F401  Silences the libraries that are imported next.
import torch
import transformers
from engine import SAME_LOSS, Side, Turns, end_all, measure_loss
from harness import Failed, Rank, Ranks, Table, Verdict, build_parser, take_turns
from safetensors.torch import load_file, save_file
from workload import build_llama, build_step, draw_batches, train_by_trainer, write_checkpoint

from memguard.config import TrainConfig
from memguard.data.loader import Batch
from memguard.hf.load import load_model
from memguard.model.checks import build_causal_lm
from memguard.parallel.lora import LoraSpec, attach_lora, fill_lora, is_adapter_parameter
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.machine import FRAGMENTATION_ONE_CPU
from memguard.planner.memory import estimate_memory
from memguard.planner.step_settings import AdapterSizes, StepSettings

MIN_SPEED, MAX_MEMORY, MAX_PLAN_ERROR = 0.97, 0.9, 0.15
MAX_STATE = {"fp32": 0.33, "bf16": 0.2}
SPEC = LoraSpec(r=16, alpha=16)
LR = 1e-3
NUM_BATCHES = 16
MEMORY_STEPS = 3
INITIAL = "initial.safetensors"

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and its training data, with the fields of a case of the engine's benchmark."""

    folder: str
    """Folder of the checkpoint, which also has the initial adapters."""
    tiny: str
    """Folder of a tiny checkpoint, trained before the memory is measured."""
    batch_size: int
    seq_len: int
    precision: Precision = "fp32"
    num_ranks: int = 1
    num_threads: int = 1

    @property
    def train(self) -> TrainConfig:
        """Settings of the step."""
        return TrainConfig(micro_batch_size=None, precision=self.precision)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the base model."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def draw_batches(self, vocab_size: int) -> list[Batch]:
        """Return the rows."""
        return draw_batches(
            vocab_size,
            (self.batch_size, self.seq_len),
            document_tokens=(self.seq_len // 8, self.seq_len // 2),
            num_batches=NUM_BATCHES,
        )


# -- sides: each warms up, loads, then trains the requested numbers of steps --------------------


def run_memguard(case: Case, rank: Rank) -> float:
    """The engine of memguard."""
    take_step, _ = prepare_memguard(replace(case, folder=case.tiny))
    take_step(0)
    del take_step
    gc.collect()
    turns = Turns(rank)
    rank.report()
    take_step, model = prepare_memguard(case)
    turns.wait()
    turns.play(take_step)
    return measure_loss(model, case.draw_batches(model.config.vocab_size)[0])


def prepare_memguard(case: Case, *, is_full: bool = False) -> tuple[Callable[[int], Any], Any]:
    """Load the model; return a function that takes a step, and the model."""
    model = load_model(case.folder, dtype=case.dtype)
    lm = build_causal_lm(model, chunk_tokens=case.train.nll_chunk_tokens)
    if not is_full:
        attach_lora(model, SPEC)
        fill_lora(model, SPEC)
    step = build_step(lm, case.train, lr=LR)
    batches = case.draw_batches(lm.vocab_size)

    def take_step(number: int) -> Any:
        batch = batches[number % NUM_BATCHES]
        # As in a run, labels are known from the step before.
        step.run(
            batch,
            lr=LR,
            step=number + 1,
            first_sample=number * case.batch_size,
            labels=(batch.num_supervised, batch.num_kept),
            share=list,
        )
        return step

    return take_step, model


def run_trainer(case: Case, rank: Rank) -> float:
    """`peft`, and `transformers.Trainer` with its defaults."""
    tiny = replace(case, folder=case.tiny)
    train_by_peft(tiny, load_peft(tiny), transformers.TrainerCallback(), max_steps=1)
    gc.collect()
    turns = Turns(rank)

    class TakeTurns(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not turns.finish_step()

    rank.report()
    model = load_peft(case)
    turns.wait()
    train_by_peft(case, model, TakeTurns(), max_steps=1_000_000)
    return measure_loss(model.eval(), case.draw_batches(model.config.vocab_size)[0])


def load_peft(case: Case) -> Any:
    """Load the model with transformers and attach the initial adapters with peft."""
    import peft  # Warns when imported, unless the libraries are silenced.

    model = transformers.AutoModelForCausalLM.from_pretrained(case.folder, dtype=case.dtype)
    config = peft.LoraConfig(
        r=SPEC.r, lora_alpha=int(SPEC.alpha), target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, config)
    peft.set_peft_model_state_dict(adapted, load_file(Path(case.folder) / INITIAL))
    return adapted


def train_by_peft(
    case: Case, model: Any, callback: transformers.TrainerCallback, *, max_steps: int
) -> None:
    """Train a model of `load_peft`."""
    batches = case.draw_batches(model.config.vocab_size)
    train_by_trainer(model, batches, callback, lr=LR, max_steps=max_steps, use_cpu=True)


def write_initial(folder: str) -> None:
    """Write the initial adapters into the folder of a checkpoint."""
    model = load_model(folder)
    attach_lora(model, SPEC)
    fill_lora(model, SPEC)
    adapters = {
        f"base_model.model.{name}": parameter.detach()
        for name, parameter in model.named_parameters()
        if is_adapter_parameter(name)
    }
    save_file(adapters, Path(folder) / INITIAL)


def count_state(case: Case, is_full: bool, rank: Rank) -> int:
    """Return the bytes of weights, gradients and optimizer when a step updates the weights."""
    take_step, model = prepare_memguard(case, is_full=is_full)
    step, gradients = take_step(0), []
    step.optimizer.inner.register_step_pre_hook(
        lambda *_: gradients.extend(part.local.grad.nbytes for part in step.parameters)
    )
    take_step(1)
    moments = [
        value.nbytes
        for state in step.optimizer.inner.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return sum(part.nbytes for part in model.parameters()) + sum(gradients) + sum(moments)


# -- measurements ------------------------------------------------------------------------------


class AdapterSide(Side):
    """A side that reports once before it loads its model."""

    def start(self) -> Ranks:
        """Start the process and load the model."""
        ranks = super().start()
        ranks.go()
        return ranks

    def measure_memory(self) -> int:
        """Return the largest resident set above that before loading (bytes)."""
        ranks = super().start()
        (level,) = read_resident(ranks)
        peak = level

        def look() -> None:
            nonlocal peak
            peak = max(peak, *read_resident(ranks))

        ranks.go(None, look)
        for _ in range(MEMORY_STEPS):
            ranks.go(1, look)
        self.end()
        return peak - level


def read_resident(ranks: Ranks) -> list[int]:
    """Return VmRSS of each process, which includes mapped files (bytes)."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in ranks.process_ids]
    return [int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) * 1024 for text in texts]


def predict(case: Case) -> int:
    """Return the memory that `memguard plan` predicts for memguard's side (bytes)."""
    config = transformers.AutoConfig.from_pretrained(case.folder)
    num_tokens = case.batch_size * case.seq_len
    settings = StepSettings(
        num_tokens=num_tokens,
        num_labels=num_tokens - case.batch_size,
        chunk_tokens=case.train.nll_chunk_tokens,
        compute_bytes=case.dtype.itemsize,
        adapter=AdapterSizes(r=SPEC.r),
    )
    sizes = ModelSizes.from_config(config)
    peak = estimate_memory(sizes, MeshShape(), settings, seq_len=case.seq_len).peak
    return round(peak.total + FRAGMENTATION_ONE_CPU * peak.transient)


def compare_speed(table: Table, verdict: Verdict, case: Case, *, rounds: int, steps: int) -> None:
    """Print the row of tokens/s."""
    sides: dict[str, Side] = {
        "memguard": AdapterSide(run_memguard, case, steps),
        "peft": AdapterSide(run_trainer, case, steps),
    }
    name = f"tokens/s, {case.precision}"
    with end_all(sides):
        results = take_turns(sides, rounds=rounds)
        if results.failures:
            verdict.fail(f"{name}: {results.failures}")
            table.failure(name, str(results.failures))
            return
        ratio = results.ratio("memguard", "peft")
        limit = verdict.check(name, ratio, at_least=MIN_SPEED if is_barred(case) else None)
        speeds = [f"{1 / results.median_s(side):,.0f}" for side in sides]
        losses = [side.finish() for side in sides.values()]
    # Speed is comparable only if both sides reach the same loss.
    note = f"loss after: {losses[0]:.4f}, {losses[1]:.4f}"
    if not abs(losses[0] - losses[1]) <= SAME_LOSS * abs(losses[1]):
        verdict.fail(f"{name}: {note}")
    table.row(name, *speeds, f"{ratio:.2f}x", end=f"{limit:<18}{note}")


def compare_memory(table: Table, verdict: Verdict, case: Case, *, rounds: int) -> None:
    """Print the rows of peak memory and of its prediction."""
    name = f"peak memory, {case.precision} (MB)"
    peaks: dict[str, list[int]] = {"memguard": [], "peft": []}
    work = {"memguard": run_memguard, "peft": run_trainer}
    try:
        for _, side in itertools.product(range(rounds), work):
            one = {side: AdapterSide(work[side], case, 1)}
            with end_all({**one}):
                peaks[side].append(one[side].measure_memory())
    except Failed as failure:
        verdict.fail(f"{name}: {failure}")
        table.failure(name, str(failure))
        return
    ours, theirs = (statistics.median(many) for many in peaks.values())
    ratio = statistics.median(a / b for a, b in zip(*peaks.values(), strict=True))
    limit = verdict.check(name, ratio, at_most=MAX_MEMORY if is_barred(case) else None)
    table.row(name, f"{ours / 1e6:,.0f}", f"{theirs / 1e6:,.0f}", f"{ratio:.2f}x", end=limit)
    name = f"plan, {case.precision} (MB)"
    predicted = predict(case)
    limit = verdict.check(
        name, predicted / ours, at_least=1 - MAX_PLAN_ERROR, at_most=1 + MAX_PLAN_ERROR
    )
    cells = (f"{predicted / 1e6:,.0f}", f"{ours / 1e6:,.0f}", f"{predicted / ours:.2f}x")
    table.row(name, *cells, end=f"{limit}: predicted, measured")


def compare_state(table: Table, verdict: Verdict, case: Case) -> None:
    """Print the row of weights, gradients and optimizer, beside AdamW on all weights in fp32."""
    name = f"state, {case.precision} (MB)"
    full = replace(case, precision="fp32")
    with Ranks(count_state, case, False) as ranks, Ranks(count_state, full, True) as others:
        (ours,), (all_weights,) = ranks.hear(), others.hear()
    ratio = ours / all_weights
    limit = verdict.check(name, ratio, at_most=MAX_STATE[case.precision])
    cells = (f"{ours / 1e6:,.0f}", f"{all_weights / 1e6:,.0f}", f"{ratio:.2f}x")
    table.row(name, *cells, end=f"{limit}: r={SPEC.r}, full AdamW in fp32")


def is_barred(case: Case) -> bool:
    """Return whether speed and memory have limits: bf16 on CPUs depends on the machine."""
    return case.precision == "fp32"


def main() -> int:
    """Run all measurements; return 1 if a limit is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each comparison")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; figures are meaningless")
    options = parser.parse_args()
    shape, batch, rounds, steps = (32000, 384, 1024, 10, 6), (8, 512), options.rounds, 1
    if options.quick:
        shape, batch, rounds = (512, 32, 64, 2, 4), (4, 64), 1
    verdict = Verdict()
    with tempfile.TemporaryDirectory(prefix="bench_adapters.") as folder:
        folders = []
        for name, sizes in (("tiny", (256, 32, 64, 2, 4)), ("llama", shape)):
            config = build_llama(*sizes, num_kv_heads=sizes[-1] // 2, max_len=batch[1])
            folders.append(write_checkpoint(Path(folder) / name, config))
            write_initial(folders[-1])
        tiny, model = folders
        threads = os.cpu_count() or 1
        case = Case(
            folder=model, tiny=tiny, batch_size=batch[0], seq_len=batch[1], num_threads=threads
        )
        print(f"LoRA r={SPEC.r}, one process, {threads} threads, {batch[0]} x {batch[1]} tokens")
        table = Table(28, "    memguard", "        peft", "    ratio", end="limit")
        for precision in ("fp32", "bf16"):
            here = replace(case, precision=precision)
            compare_speed(table, verdict, here, rounds=rounds, steps=steps)
            compare_memory(table, verdict, here, rounds=rounds)
            compare_state(table, verdict, here)
    return verdict.end()


if __name__ == "__main__":
    sys.exit(main())
