"""Measure training of an 8B-shaped Llama on one GPU, compared with transformers' Trainer.

scripts/gpu_check.sh               correctness, speed, memory; runs this script in its environment
scripts/gpu_check.sh --dry-run     tiny sizes on the CPU; the figures are meaningless

Hidden size 4096, FFN 14336, 32 heads, 8 key/value heads, vocabulary 128256, random weights, as many
layers as fit: fp32 weights, gradients and AdamW moments, bf16 arithmetic (16 bytes per parameter,
and the activations of a step). All rows of the table use the same packed rows of tokens.

    MFU = FLOP a token * tokens/s / peak
    FLOP a token = 6 * (matmul parameters of the layers + V * D * kept labels / tokens)
                   + 6 * layers * D * T                    causal half of attention

Peak is the GPU's dense bf16 rate from a table in this file; --peak-tflops overrides it.
Recomputation is not counted. Each row runs in a separate process. Correctness is checked first: the
loss and gradient norm of one step on two layers must equal those of the Trainer's model within bf16
rounding. The last line is a verdict; exit 1 if correctness or one of memguard's rows fails, 3
without a GPU.
"""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import Table, Verdict, build_parser, describe_error
from workload import (
    as_tensors,
    build_llama,
    build_step,
    draw_batches,
    draw_model,
    train_by_trainer,
)

from memguard.config import TrainConfig
from memguard.data.loader import Batch
from memguard.hf.safetensors import ModuleWeights
from memguard.hf.sharded import Sharding, build_meta_layer, fill_layer
from memguard.model.checks import build_causal_lm
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.shard import checkpoint_blocks, compile_blocks

ROOT = Path(__file__).resolve().parents[2]
# Dense bf16 with fp32 accumulation, TFLOP/s, from the manufacturers' data sheets; the first name
# that matches is used.
PEAK_TFLOPS = {
    "GH200": 989.0,
    "GB200": 2450.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "L40S": 362.0,
    "A6000": 155.0,
    "RTX 4090": 165.0,
    "MI300X": 1307.0,
    "MI250X": 191.5,
}
LR = 1e-5
NUM_BATCHES = 4
ROW_TIMEOUT_S = 180
# bf16 has 8 bits: a loss near 12 nats is a mean of thousands of rounded values; a norm is a sum
# over all gradients, each computed from products of rounded values.
SAME_LOSS, SAME_NORM = 5e-3, 3e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the model, of a step and of the measurement."""

    hidden: int = 4096
    inner: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    lm: int = 128256
    num_layers: int = 2
    batch_size: int = 4
    seq_len: int = 2048
    num_warmup: int = 3
    num_steps: int = 8

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matmuls."""
        head_dim = self.hidden // self.num_heads
        attention = 2 * self.hidden * (self.num_heads + self.num_kv_heads) * head_dim
        return attention + 3 * self.hidden * self.inner

    @property
    def step_tokens(self) -> int:
        """Number of tokens of a step."""
        return self.batch_size * self.seq_len

    def flop_per_token(self, kept: float) -> float:
        """Return the FLOP per token of a step; see the formula at the top of this file."""
        matmul = self.num_layers * self.layer_parameters + kept * self.lm * self.hidden
        return 6 * matmul + 6 * self.num_layers * self.hidden * self.seq_len


TINY = Sizes(
    hidden=64,
    inner=128,
    num_heads=4,
    num_kv_heads=2,
    lm=512,
    batch_size=2,
    seq_len=64,
    num_warmup=1,
    num_steps=1,
)


def count_layers(sizes: Sizes, memory_bytes: int) -> int:
    """Return the number of layers that fit into a GPU, with a margin.

    A parameter takes 18 bytes: weight, gradient and moments in fp32, and a bf16 copy during a step.
    A token takes about 34 bytes per hidden feature and 14 per FFN feature in each layer, and its
    logits and their gradient, in bf16 and fp32, on the side that computes all logits at once.
    """
    outside = 18 * 2 * sizes.lm * sizes.hidden + sizes.step_tokens * 16 * sizes.lm
    kept = sizes.step_tokens * (34 * sizes.hidden + 14 * sizes.inner)
    return max(1, int((0.9 * memory_bytes - outside) // (18 * sizes.layer_parameters + kept)))


# -- inputs of every row -----------------------------------------------------------------------


def draw_llama(sizes: Sizes, device: torch.device) -> Any:
    """Create a random fp32 Llama with untied embeddings directly on the device."""
    config = build_llama(
        sizes.lm,
        sizes.hidden,
        sizes.inner,
        sizes.num_layers,
        sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        max_len=sizes.seq_len,
        is_tied=False,
    )
    return draw_model(config, device=device)


def draw_rows(sizes: Sizes, *, goldfish: bool) -> list[Batch]:
    """Create packed rows of documents of random tokens."""
    return draw_batches(
        sizes.lm,
        (sizes.batch_size, sizes.seq_len),
        document_tokens=(sizes.seq_len // 4, sizes.seq_len),
        num_batches=NUM_BATCHES,
        goldfish=goldfish,
    )


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_memory(device: torch.device) -> None:
    """Reset peak memory, so that building the model is not counted as training."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# -- rows: each returns the seconds of its steps and the share of labels kept --------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The training settings of one row."""

    trainer: bool = False
    """transformers' Trainer instead of memguard."""
    mesh: bool = False
    """The sharded engine, on a mesh of one rank."""
    compile: bool = False
    goldfish: bool = False
    checkpointing: str = "none"


ROWS: dict[str, Setting] = {
    "memguard": Setting(),
    "memguard, compile": Setting(compile=True),
    "memguard, goldfish k=2": Setting(goldfish=True),
    "memguard, checkpointing full": Setting(checkpointing="full"),
    "memguard, checkpointing selective": Setting(checkpointing="selective"),
    "memguard, mesh (1,1,1,1)": Setting(mesh=True),
    "Trainer": Setting(trainer=True),
    "Trainer, goldfish k=2": Setting(trainer=True, goldfish=True),
    "Trainer, compile": Setting(trainer=True, compile=True),
}
BESIDE = {
    "memguard": "Trainer",
    "memguard, compile": "Trainer, compile",
    "memguard, goldfish k=2": "Trainer, goldfish k=2",
    "memguard, checkpointing full": "Trainer",
    "memguard, checkpointing selective": "Trainer",
    "memguard, mesh (1,1,1,1)": "Trainer",
}


def make_step(sizes: Sizes, setting: Setting, device: torch.device, **optim: Any) -> Any:
    """Build memguard's step on a random model, as a run does."""
    train = TrainConfig.model_validate(
        {
            "precision": "bf16",
            "compile": setting.compile,
            "activation_checkpointing": setting.checkpointing,
        }
    )
    model = draw_llama(sizes, device)
    if setting.mesh:
        sharding = Sharding(
            mesh=build_mesh(MeshShape(), device.type),
            device=device,
            compute_dtype=torch.bfloat16,
            chunk_tokens=train.nll_chunk_tokens,
            checkpointing=train.activation_checkpointing,
            compile=train.compile,
        )
        layer = build_meta_layer(model.config, sharding, attn="sdpa")
        fill_layer(layer, ModuleWeights(model), name="a random Llama")
        lm = layer.lm
        # Two models fit into memory, but not together with the optimizer.
        del model
    else:
        lm = build_causal_lm(model, chunk_tokens=train.nll_chunk_tokens)
        checkpoint_blocks(model, train.activation_checkpointing)
        if train.compile:
            compile_blocks(model)
    return build_step(lm, train, device=device, lr=LR, **optim)


def time_memguard(sizes: Sizes, setting: Setting, device: torch.device) -> float:
    """Return the seconds of ``sizes.num_steps`` steps of memguard."""
    step = make_step(sizes, setting, device)
    batches = draw_rows(sizes, goldfish=setting.goldfish)
    begin_s = 0.0
    forget_memory(device)
    for number in range(sizes.num_warmup + sizes.num_steps):
        if number == sizes.num_warmup:
            wait_for(device)
            begin_s = time.perf_counter()
        batch = batches[number % NUM_BATCHES]
        step.run(batch, lr=LR, step=number + 1, first_sample=number * sizes.batch_size)
    wait_for(device)
    return time.perf_counter() - begin_s


def time_trainer(sizes: Sizes, setting: Setting, device: torch.device) -> float:
    """Return the seconds of ``sizes.num_steps`` steps of the Trainer, without logging or saving."""
    times: list[float] = []

    class MemorizationMonitor(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            forget_memory(device)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (sizes.num_warmup, sizes.num_warmup + sizes.num_steps):
                wait_for(device)
                times.append(time.perf_counter())

    train_by_trainer(
        draw_llama(sizes, device),
        draw_rows(sizes, goldfish=setting.goldfish),
        MemorizationMonitor(),
        lr=LR,
        max_steps=sizes.num_warmup + sizes.num_steps,
        bf16=True,
        torch_compile=setting.compile,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
    )
    return times[1] - times[0]


def measure_row(sizes: Sizes, setting: Setting, device: torch.device) -> dict[str, float]:
    """Return tokens/s, the share of labels kept and peak memory (bytes; 0 on a CPU)."""
    took_s = (time_trainer if setting.trainer else time_memguard)(sizes, setting, device)
    kept = sum(batch.num_kept for batch in draw_rows(sizes, goldfish=setting.goldfish))
    return {
        "tokens_per_s": sizes.num_steps * sizes.step_tokens / took_s,
        "kept": kept / (NUM_BATCHES * sizes.step_tokens),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0,
    }


def check_row(sizes: Sizes, setting: Setting, device: torch.device) -> dict[str, float]:
    """Return loss and gradient norm of one step of memguard and of the Trainer's model."""
    batch = draw_rows(sizes, goldfish=setting.goldfish)[0]
    model = draw_llama(sizes, device).train()
    # As accelerate does for bf16=True.
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = model(**as_tensors(batch, device), use_cache=False).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    theirs = {"their_loss": float(loss.detach()), "their_norm": float(norm)}
    del model, loss
    gc.collect()
    step = make_step(sizes, setting, device, max_grad_norm=None)
    result = step.run(batch, lr=LR, step=1, first_sample=0)
    return {"loss": result.loss, "norm": result.grad_norm, **theirs}


# -- processes ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of one process."""

    checks: bool
    """Whether to check correctness instead of speed."""
    setting: Setting
    sizes: Sizes
    device: str

    def run(self) -> dict[str, Any]:
        """Run in this process; a failure is returned as a result."""
        from torch import distributed as dist

        device = torch.device(self.device)
        folder = tempfile.TemporaryDirectory()
        try:
            if self.setting.mesh:
                backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
                store = dist.FileStore(str(Path(folder.name) / "store"), 1)
                dist.init_process_group(backend, store=store, rank=0, world_size=1)
            return (check_row if self.checks else measure_row)(self.sizes, self.setting, device)
        except torch.OutOfMemoryError:
            return {"failed": "out of memory"}
        except Exception as error:
            traceback.print_exc()
            return {"failed": describe_error(error)}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            folder.cleanup()

    def run_apart(self, timeout_s: float) -> dict[str, Any]:
        """Run in a separate process, which leaves nothing in GPU memory."""
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--work",
            json.dumps(asdict(self)),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"did not finish within {timeout_s:.0f} s"}
        lines = done.stdout.strip().splitlines()
        try:
            answer: dict[str, Any] = json.loads(lines[-1])
        except (IndexError, json.JSONDecodeError):
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            return {"failed": f"exit {done.returncode}: {last[:200]}"}
        if "failed" in answer:
            print(done.stderr[-2000:], file=sys.stderr)
        return answer


def read_work(text: str) -> Work:
    """Return the work that `run_apart` describes."""
    fields = json.loads(text)
    setting, sizes = Setting(**fields.pop("setting")), Sizes(**fields.pop("sizes"))
    return Work(setting=setting, sizes=sizes, **fields)


# -- the table ---------------------------------------------------------------------------------


class Session:
    """One run of the whole check."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Store the arguments and read the GPU's properties."""
        self.options = options
        self.begin_s = time.monotonic()
        self.device = torch.device("cpu" if options.dry_run else "cuda")
        self.verdict = Verdict()
        self.results: dict[str, dict[str, Any]] = {}
        self.peak_tflops: float | None = options.peak_tflops
        self.sizes = TINY if options.dry_run else Sizes(batch_size=options.batch_size)
        self.gpu = "none: a dry run"
        if not options.dry_run:
            properties = torch.cuda.get_device_properties(0)
            self.gpu = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            matches = (peak for name, peak in PEAK_TFLOPS.items() if name in properties.name)
            self.peak_tflops = self.peak_tflops or next(matches, None)
            num_layers = options.layers or count_layers(self.sizes, properties.total_memory)
            self.sizes = replace(self.sizes, num_layers=num_layers)

    @property
    def left_s(self) -> float:
        """Remaining time (seconds)."""
        return float(self.options.deadline_s - (time.monotonic() - self.begin_s))

    def run(self) -> int:
        """Run the checks, the measurements and the tests; return the exit code."""
        print(
            f"GPU: {self.gpu}; torch {torch.__version__}, transformers {transformers.__version__}"
        )
        peak = "unknown, set --peak-tflops" if self.peak_tflops is None else self.peak_tflops
        print(f"peak bf16: {peak} TFLOP/s (dense)")
        self.check()
        self.measure()
        self.test()
        took_s = time.monotonic() - self.begin_s
        return self.verdict.end(f" ({took_s:.0f} s)")

    def do(self, work: Work) -> dict[str, Any]:
        """Run one row, in this process or in a separate one."""
        if self.left_s < 30:
            return {"failed": "skipped: out of time"}
        return (
            work.run() if self.options.dry_run else work.run_apart(min(self.left_s, ROW_TIMEOUT_S))
        )

    def check(self) -> None:
        """Print loss and gradient norm, compared with the Trainer's model."""
        sizes = replace(self.sizes, num_layers=2, batch_size=2)
        print()
        headings = ("      loss", "   Trainer", "      norm", "   Trainer")
        table = Table(36, *headings, corner="correctness, 2 layers")
        for name in ("memguard", "memguard, goldfish k=2", "memguard, mesh (1,1,1,1)"):
            work = Work(checks=True, setting=ROWS[name], sizes=sizes, device=self.device.type)
            result = self.do(work)
            if "failed" in result:
                table.failure(name, result["failed"])
                self.verdict.fail(f"{name} was not checked")
                continue
            wrong = [
                key
                for key, bound in (("loss", SAME_LOSS), ("norm", SAME_NORM))
                if not abs(result[key] - result[f"their_{key}"]) <= bound * result[f"their_{key}"]
            ]
            figures = (result["loss"], result["their_loss"], result["norm"], result["their_norm"])
            cells = (f"{figure:.4f}" for figure in figures)
            table.row(name, *cells, end="differs" if wrong else "ok")
            for key in wrong:
                self.verdict.fail(f"{name}: {key} differs from the Trainer's")

    def measure(self) -> None:
        """Print speed and memory of every row."""
        # The Trainer needs the most memory, so it runs first and sets the layers of all rows.
        order = ["Trainer", *(name for name in ROWS if name != "Trainer")]
        for name in order:
            work = Work(checks=False, setting=ROWS[name], sizes=self.sizes, device=self.device.type)
            self.results[name] = self.do(work)
            while self.is_too_large(name) and self.sizes.num_layers > 2:
                self.sizes = replace(self.sizes, num_layers=self.sizes.num_layers * 3 // 4)
                print(f"out of memory; {self.sizes.num_layers} layers", flush=True)
                self.results[name] = self.do(replace(work, sizes=self.sizes))
        sizes = self.sizes
        print(
            f"\n{sizes.num_layers} layers, {sizes.batch_size} x {sizes.seq_len} tokens per step, "
            f"{sizes.num_steps} steps after {sizes.num_warmup} warm-up steps; ratios to the "
            "Trainer's row"
        )
        columns = ("tokens/s", "MFU", "peak GB", "held GB", "speed", "memory")
        table = Table(36, *(f"{column:>10}" for column in columns))
        for name, setting in ROWS.items():
            if "failed" not in self.results[name]:
                table.row(name, *self.format_cells(name))
                continue
            table.failure(name, self.results[name]["failed"])
            if not setting.trainer:
                self.verdict.fail(f"{name} did not run")

    def is_too_large(self, name: str) -> bool:
        """Return whether the first row ran out of memory, so that there are too many layers."""
        return name == "Trainer" and self.results[name].get("failed") == "out of memory"

    def format_cells(self, name: str) -> tuple[str, ...]:
        """Return the cells of a row; ratios are to the Trainer's row with the same setting."""
        result = self.results[name]
        flop_per_s = result["tokens_per_s"] * self.sizes.flop_per_token(result["kept"])
        other = self.results.get(BESIDE.get(name, ""), {"failed": ""})
        speed = memory = ""
        if "failed" not in other:
            speed = f"{result['tokens_per_s'] / other['tokens_per_s']:.2f}x"
            memory = f"{result['peak_bytes'] / max(1, other['peak_bytes']):.2f}x"
        return (
            f"{result['tokens_per_s']:,.0f}",
            f"{flop_per_s / self.peak_tflops / 1e12:.1%}" if self.peak_tflops else "-",
            f"{result['peak_bytes'] / 1e9:.1f}",
            f"{result['reserved_bytes'] / 1e9:.1f}",
            speed,
            memory,
        )

    def test(self) -> None:
        """Run the tests that need a GPU."""
        if self.options.dry_run or self.left_s < 60:
            print(f"\ntests: skipped ({'dry run' if self.options.dry_run else 'out of time'})")
            return
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=self.left_s, check=False
            )
        except subprocess.TimeoutExpired:
            self.verdict.fail("tests did not finish in time")
            return
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        if "No module named pytest" in lines[-1]:
            print("\ntests: skipped (pytest is not installed)")
        elif done.returncode == 5:
            print("\ntests: none needs a GPU yet")
        else:
            print(f"\ntests: {lines[-1]}")
            if done.returncode:
                print("\n".join(lines[-40:]))
                self.verdict.fail("tests failed")


def main() -> int:
    """Run the check; return the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--peak-tflops", type=float, help="the GPU's dense bf16 TFLOP/s")
    parser.add_argument("--layers", type=int, help="number of layers; default: as many as fit")
    parser.add_argument("--batch-size", type=int, default=4, help="rows of 2048 tokens")
    parser.add_argument("--deadline-s", type=float, default=520, help="total time limit (seconds)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if options.work:
        print(json.dumps(read_work(options.work).run()))
        return 0
    if options.dry_run:
        # A compiler may be missing, and the tests cover compilation.
        torch.compiler.set_stance("force_eager")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU; --dry-run shows that the rest works", file=sys.stderr)
        return 3
    return Session(options).run()


if __name__ == "__main__":
    sys.exit(main())
