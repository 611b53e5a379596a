"""Compare what `memguard plan` expects of a row of the GPU benchmarks with what was measured.

Planned memory is what a plan calls "needed"; it is compared with the peak of what CUDA's allocator
reserved. Planned speed is that of a machine file. Only memory has limits, those of memory_pools.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import yaml
from gpu_machine import describe_machine
from gpu_rows import Setting, build_train_config
from gpu_session import Row, Session
from gpu_sizes import Sizes, build_config
from gpu_work import Work
from harness import Table
from workload import describe_step

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.cost import estimate_step
from memguard.planner.machine import Machine
from memguard.planner.memory import estimate_memory

AT_LEAST, AT_MOST = 0.98, 1.10
DRY_MEMORY = 80 * 2**30
"""Of the GPU that a dry run stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRow:
    """What a plan expects of one row."""

    needed_bytes: float
    """At its peak, with the allowance for fragmentation."""
    tokens_per_s: float
    """Of all ranks."""


def plan_row(sizes: Sizes, used: dict[str, Any], machine: Machine) -> PlannedRow:
    """Return the plan of a row.

    Args:
        sizes: of model and step.
        used: the settings with which it ran, as the measurement returns them.
        machine: of these GPUs.
    """
    mesh = used["mesh"]
    setting = Setting(**{**used, "mesh": None if mesh is None else tuple(mesh)})
    shape = setting.shape or MeshShape()
    train = build_train_config(setting).model_copy(update={"batch_size": sizes.batch_size})
    settings = describe_step(train, shape, seq_len=sizes.seq_len)
    settings = replace(
        settings,
        has_streams=machine.has_streams,
        has_mask=setting.precision != "bf16" or not machine.has_flash,
        is_compiled=setting.compile,
    )
    model = ModelSizes.from_config(build_config(sizes))
    use = estimate_memory(model, shape, settings, seq_len=sizes.seq_len).peak
    step = estimate_step(model, shape, settings, machine, seq_len=sizes.seq_len)
    return PlannedRow(
        needed_bytes=use.total + machine.fragmentation * use.transient,
        tokens_per_s=step.tokens_per_s,
    )


def show_machine(session: Session) -> Machine | None:
    """Measure the GPUs and print their machine file; return it, None if that failed."""
    (measured,) = session.do([Work(task="machine", setting=Setting(), sizes=session.sizes)])
    session.answers["machine"] = measured
    if "failed" in measured:
        session.verdict.fail(f"the machine was not measured: {measured['failed']}")
        return None
    fields = describe_machine(
        measured,
        gpu="dry run" if session.is_dry else torch.cuda.get_device_name(0),
        num_gpus=session.num_ranks if session.is_dry else torch.cuda.device_count(),
        memory_bytes=DRY_MEMORY if session.is_dry else session.memory_bytes,
        peak_tflops=session.peak_tflops,
    )
    print("\nmachine file, for `memguard plan --machine FILE`; see its 'assumed'")
    print(yaml.safe_dump(fields, sort_keys=False), end="")
    return Machine.model_validate(fields)


def show_plan(session: Session, rows: Sequence[Row], machine: Machine) -> None:
    """Print planned and measured memory and speed of memguard's rows."""
    columns = ("plan GB", "held GB", "plan/held", "retries", "plan tok/s", "x measured")
    print()
    table = Table(40, *(f"{column:>12}" for column in columns), corner="plan")
    for row in rows:
        speed = session.speeds.get(row.name)
        if row.is_trainer or speed is None:
            continue
        planned = plan_row(speed.sizes, speed.result["used"], machine)
        held = speed.result["reserved_bytes"]
        # The pools of a CPU are not counted.
        ratio = planned.needed_bytes / held if held else None
        end = ""
        if ratio is not None:
            end = session.verdict.check(
                f"{row.name}, planned memory", ratio, at_least=AT_LEAST, at_most=AT_MOST
            )
        table.row(
            row.name,
            f"{planned.needed_bytes / 1e9:.1f}",
            f"{held / 1e9:.1f}",
            "-" if ratio is None else f"{ratio:.2f}x",
            str(speed.result["num_alloc_retries"]),
            f"{planned.tokens_per_s:,.0f}",
            f"{planned.tokens_per_s / speed.tokens_per_s():.2f}x",
            end=end,
        )
