"""Measure training of an 8B-shaped Llama on one GPU, compared with transformers' Trainer.

scripts/gpu_check.sh               correctness, speed, memory, tests; under 9 minutes
scripts/gpu_check.sh --dry-run     tiny sizes on the CPU; the figures are meaningless

Layers of Llama-3.1-8B with random weights, as many as fit, on the same packed rows of tokens for
all rows of the table; `gpu_sizes.py` has the formula of MFU and the peak rates. Each row runs in a
process of its own, with the environment that memguard's launcher gives its ranks. The Trainer runs
with its defaults (fp32), and with bf16, TF32, fused AdamW, scaled-dot-product attention (or flash
attention, where it is installed), with and without torch.compile: the fastest is its best. "auto"
is a run of memguard that sets no precision, micro-batch or checkpointing. Figures are medians of
five rounds; rows with goldfish are timed in turns with plain rows on the same model.

Correctness is checked first: the loss and gradient norm of one step on two layers must equal those
of transformers' model within bf16 rounding. The tests with the mark `gpu` run, if pytest is
installed; then the rows with recomputation, if there is time left. The last line is a verdict; exit
1 if correctness, one of memguard's rows, a limit or a test fails, 3 without a GPU.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from gpu_plan import show_machine, show_plan
from gpu_rows import Setting
from gpu_session import Row, Session, add_options, has_gpus
from gpu_sizes import TINY, Sizes, count_layers
from gpu_work import OUT_OF_MEMORY
from harness import build_parser

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = "Trainer, defaults"
_TRAINER = Setting(trainer=True)
_MEMGUARD = Setting(goldfish=True)
# The Trainer's bf16 row is first: it needs the most memory, and sets the layers of all rows.
ROWS = (
    Row(name="Trainer, bf16", settings=(_TRAINER,)),
    Row(name="Trainer, bf16, compile", settings=(replace(_TRAINER, compile=True),)),
    Row(name=DEFAULT, settings=(replace(_TRAINER, precision="fp32"),), counts=False),
    Row(name="memguard, auto", settings=(Setting(auto=True),)),
    Row(name="memguard", settings=(_MEMGUARD,)),
    Row(name="memguard, compile", settings=(replace(_MEMGUARD, compile=True),)),
    Row(name="memguard, mesh (1,1,1,1)", settings=(Setting(mesh=(1, 1, 1, 1)),)),
)
# After the tests, if there is time left.
EXTRA_ROWS = tuple(
    Row(
        name=f"memguard, checkpointing {mode}",
        settings=(Setting(checkpointing=mode),),
        counts=False,
    )
    for mode in ("selective", "full")
)
FLASH = Row(
    name="Trainer, bf16, compile, flash",
    settings=(replace(_TRAINER, compile=True, attn="flash_attention_2"),),
)
CHECKS = {
    "memguard": Setting(),
    "memguard, goldfish k=2": _MEMGUARD,
    "memguard, mesh (1,1,1,1)": Setting(mesh=(1, 1, 1, 1)),
}


def choose_rows() -> list[Row]:
    """Return the rows of this machine."""
    has_flash = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    return [*ROWS[:2], *([FLASH] if has_flash else []), *ROWS[2:]]


def choose_layers(session: Session, rows: list[Row]) -> None:
    """Measure the first row with fewer layers until it fits."""
    session.measure(rows[:1], may_halve=False)
    while session.answers[rows[0].name].get("failed") == OUT_OF_MEMORY:
        if session.sizes.num_layers <= 2:
            return
        layers = session.sizes.num_layers * 3 // 4
        print(f"out of memory; {layers} layers", flush=True)
        session.sizes = replace(session.sizes, num_layers=layers)
        session.measure(rows[:1], may_halve=False)


def run_tests(session: Session) -> str:
    """Run the tests that need a GPU; return a summary."""
    if session.is_dry:
        return "skipped (dry run)"
    if importlib.util.find_spec("pytest") is None:
        return "skipped (pytest is not installed)"
    # Without the plugins of the default run: they may be missing, and one process is enough.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    timeout_s = session.left_s
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        session.verdict.fail("tests did not finish in time")
        return f"not finished after {timeout_s:.0f} s; --deadline-s allows more"
    lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
    if done.returncode:
        session.verdict.fail("tests failed")
        return "\n".join(lines[-40:])
    return lines[-1]


def parse() -> argparse.Namespace:
    """Parse the arguments."""
    parser = build_parser(__doc__)
    add_options(parser, deadline_s=520)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a step")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a row")
    return parser.parse_args()


def main() -> int:
    """Run the check; return the exit code."""
    options = parse()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not has_gpus(options, "gpu_check", 1):
        return 3
    sizes = Sizes(batch_size=options.batch_size, seq_len=options.seq_len)
    if options.dry_run:
        # A compiler may be missing, and the tests cover compilation.
        torch.compiler.set_stance("force_eager")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        sizes = TINY
    session = Session(options, sizes, num_ranks=1)
    if not options.dry_run:
        layers = options.layers or count_layers(sizes, session.memory_bytes)
        session.sizes = replace(sizes, num_layers=layers)
    session.check(CHECKS, replace(session.sizes, num_layers=2, batch_size=2))
    rows = choose_rows()
    choose_layers(session, rows)
    session.measure(rows[1:])
    tests = run_tests(session)
    session.measure(EXTRA_ROWS)
    session.show_speed([*rows, *EXTRA_ROWS], DEFAULT)
    machine = show_machine(session)
    if machine is not None:
        show_plan(session, [*rows, *EXTRA_ROWS], machine)
    print(f"\ntests: {tests}")
    return session.end()


if __name__ == "__main__":
    sys.exit(main())
