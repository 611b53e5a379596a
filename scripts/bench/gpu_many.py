"""Measure training of an 8B-shaped Llama on several GPUs, with transformers' Trainer (FSDP) beside.

scripts/gpu_check_many.sh               parity, speed, overlap; on 8, 4 or 2 GPUs, as visible
scripts/gpu_check_many.sh --gpus 4      on the first four
scripts/gpu_check_many.sh --dry-run     tiny sizes on CPU processes; the figures are meaningless,
                                        and the Trainer replicates: accelerate has FSDP on GPUs only

    parity    losses, gradients and weights of three steps of tiny models in float64 on every mesh
              of degrees 1 and 2, against the same model on one GPU (`gpu_parity.py`); then one step
              of two layers of the 8B shape in bf16, as users run it
    speed     tokens/s and MFU of memguard's meshes and of the Trainer with FSDP, with its defaults
              (fp32) and with bf16, TF32, fused AdamW and torch.compile, each without or, where that
              does not fit, with activation checkpointing; the fastest is its best
    overlap   share of the time of each axis' collectives during which the GPU also computes, from a
              profiled step of rank 0 (`gpu_overlap.py`)

Llama-3.1-8B with random weights, with all of its 32 layers where they fit; all rows of the table
use the same packed rows of tokens. `gpu_sizes.py` has the formula of MFU and torchtitan's figures
on 8 H100. Each row runs in processes of its own, started by memguard's launcher. The last line is a
verdict; exit 1 if parity, one of memguard's rows or a limit fails, 3 with fewer than two GPUs.
"""

import argparse
import os
import sys
from dataclasses import replace
from typing import Any

import torch
import transformers
from gpu_parity import TOLERANCES, Degrees, sample_meshes
from gpu_plan import show_machine, show_plan
from gpu_rows import Setting
from gpu_session import Row, Session, add_options, has_gpus
from gpu_sizes import TINY, Sizes, count_layers, keeps_activations
from gpu_work import Work
from harness import Table, build_parser

MAX_GPUS = 8
DRY_RANKS = 2
DEFAULT = "Trainer, FSDP, defaults"
CHECK_TOKENS = 1024


def choose_meshes(num_ranks: int) -> list[Degrees]:
    """Return the meshes whose speed is measured: the default, then each other axis beside z."""
    meshes = [(1, num_ranks, 1, 1), (1, num_ranks // 2, 1, 2), (1, num_ranks // 2, 2, 1)]
    if num_ranks >= 4:
        meshes += [(2, num_ranks // 2, 1, 1), (1, num_ranks // 4, 2, 2)]
    return meshes


def choose_rows(num_ranks: int, *, keeps_all: bool = True) -> list[Row]:
    """Return the rows of the table of speeds.

    Args:
        num_ranks: number of GPUs.
        keeps_all: whether to try first without activation checkpointing.
    """

    def try_modes(setting: Setting, *modes: str) -> tuple[Setting, ...]:
        chosen = modes if keeps_all else modes[1:]
        return tuple(replace(setting, checkpointing=mode) for mode in chosen)

    trainer = Setting(trainer=True)
    sides = {
        DEFAULT: replace(trainer, precision="fp32"),
        "Trainer, FSDP, bf16": trainer,
        "Trainer, FSDP, bf16, compile": replace(trainer, compile=True),
    }
    rows = [
        Row(name=name, settings=try_modes(setting, "none", "full"), counts=name != DEFAULT)
        for name, setting in sides.items()
    ]
    default, *others = choose_meshes(num_ranks)
    auto = Setting(mesh=default, auto=True)
    rows.append(Row(name=f"memguard {name_mesh(default)}, auto", settings=(auto,)))
    for mesh, compiled in [(default, False), (default, True), *((mesh, True) for mesh in others)]:
        setting = Setting(mesh=mesh, compile=compiled, goldfish=mesh == default)
        name = f"memguard {name_mesh(mesh)}{', compile' * compiled}"
        rows.append(Row(name=name, settings=try_modes(setting, "none", "selective", "full")))
    return rows


def name_mesh(mesh: Degrees) -> str:
    """Return a mesh as the axes (data, z, y, x)."""
    return f"({','.join(map(str, mesh))})"


def check_parity(session: Session) -> None:
    """Print the differences of tiny models in float64, then of one step in bf16."""
    # The other side computes all logits of all ranks' rows.
    sizes = replace(session.sizes, num_layers=2, batch_size=max(2, session.num_ranks))
    sizes = replace(sizes, seq_len=min(sizes.seq_len, CHECK_TOKENS))
    meshes = choose_meshes(session.num_ranks)
    settings = {f"memguard {name_mesh(mesh)}": Setting(mesh=mesh) for mesh in meshes}
    parity = Work(task="parity", setting=Setting(), sizes=sizes)
    differences, *checks = session.do([parity, *session.list_checks(settings, sizes)])
    session.answers["parity"] = differences
    show_parity(session, differences)
    session.show_checks(settings, sizes, checks)


def show_parity(session: Session, results: dict[str, Any]) -> None:
    """Print the largest relative differences of each mesh from one process."""
    print()
    columns = (f"{name:>12}" for name in TOLERANCES)
    table = Table(36, *columns, corner="parity, float64, mesh (data,z,y,x)")
    for mesh in sample_meshes(session.num_ranks):
        differences = results.get(str(mesh))
        if differences is None:
            table.failure(name_mesh(mesh), results.get("failed", "no result"))
            session.verdict.fail(f"parity of {name_mesh(mesh)} was not measured")
            continue
        wrong = [name for name, limit in TOLERANCES.items() if not differences[name] <= limit]
        cells = (f"{differences[name]:.1e}" for name in TOLERANCES)
        table.row(name_mesh(mesh), *cells, end="differs" if wrong else "ok")
        if wrong:
            session.verdict.fail(f"parity of {name_mesh(mesh)}: {', '.join(wrong)}")


def show_overlap(session: Session, rows: list[Row]) -> None:
    """Print the overlap of each axis' collectives with computation."""
    print()
    columns = ("axis", "ms a step", "hidden")
    table = Table(36, *(f"{column:>12}" for column in columns), corner="collectives, rank 0")
    for row in rows:
        speed = session.speeds.get(row.name)
        for axis, (total_ms, share) in (speed.result.get("overlap", {}) if speed else {}).items():
            table.row(row.name, axis, f"{total_ms:,.1f}", f"{share:.0%}")


def parse() -> argparse.Namespace:
    """Parse the arguments."""
    parser = build_parser(__doc__)
    add_options(parser, deadline_s=1800)
    parser.add_argument("--gpus", type=int, choices=(2, 4, 8), help="number of GPUs")
    parser.add_argument("--rows", type=int, default=2, help="rows of a step for each GPU")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of a row")
    return parser.parse_args()


def count_ranks(options: argparse.Namespace) -> int:
    """Return the number of ranks: as requested, else the largest power of two of visible GPUs."""
    if options.gpus is not None:
        return int(options.gpus)
    if options.dry_run:
        return DRY_RANKS
    available = min(torch.cuda.device_count(), MAX_GPUS)
    return max(2, 1 << (available.bit_length() - 1) if available else 0)


def main() -> int:
    """Run the check; return the exit code."""
    options = parse()
    transformers.utils.logging.set_verbosity_error()
    num_ranks = count_ranks(options)
    if not has_gpus(options, num_ranks):
        return 3
    if options.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        sizes = replace(TINY, batch_size=2 * num_ranks, num_heads=8, num_kv_heads=4)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = choose_devices(num_ranks)
        sizes = Sizes(batch_size=options.rows * num_ranks, seq_len=options.seq_len)
    session = Session(options, sizes, num_ranks=num_ranks)
    if not options.dry_run:
        layers = count_layers(sizes, session.memory_bytes, num_ranks=num_ranks)
        session.sizes = replace(sizes, num_layers=options.layers or layers)
    check_parity(session)
    keeps_all = options.dry_run or keeps_activations(
        session.sizes, session.memory_bytes, num_ranks=num_ranks
    )
    rows = choose_rows(num_ranks, keeps_all=keeps_all)
    session.measure(rows)
    session.show_speed(rows, DEFAULT)
    show_overlap(session, rows)
    machine = show_machine(session)
    if machine is not None:
        show_plan(session, rows, machine)
    return session.end()


def choose_devices(num_ranks: int) -> str:
    """Return the first devices of those that are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(MAX_GPUS)]
    return ",".join(names[:num_ranks])


if __name__ == "__main__":
    sys.exit(main())
