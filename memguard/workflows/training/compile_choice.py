"""Decides whether the decoder blocks of a run are compiled (`train.compile`).

    setting     run                                    compiled
    true, false any                                    as set
    auto        with an adapter, or deterministic      no
                begun before                           as then, if one block can still be compiled
                on a CPU                               no
                planned for at most ten minutes, or    no: compiling takes minutes
                for a time that is not known
                any other                              if one block can be compiled

The time is the planner's estimate of a step without compiling, times the number of steps. Rank 0
decides; then every rank compiles one block by itself (block_probe.py). If that fails on one of
them, no rank compiles: otherwise it would end in the first step, and the others would wait for it.

The choice and its reason are written to environment.json. A resumed run keeps it, as compiled
kernels round in other places.
"""

import functools
from collections.abc import Callable

from memguard.config import RunConfig
from memguard.data.loader import Loader
from memguard.errors import ConfigError, ModelError
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.cost import estimate_step
from memguard.planner.fit import PlanInputs, find_fit
from memguard.planner.machine import THIS_MACHINE, load_machine
from memguard.records.run_files import CompileChoice, load_compile_choice
from memguard.runtime import Console, format_duration
from memguard.workflows.common.setup import DistributedContext
from memguard.workflows.plan import read_run_model
from memguard.workflows.training.block_probe import find_compile_problem
from memguard.workflows.training.data import PreparedRun, build_training_data

LONG_RUN_S = 600.0
"""Planned time from which on compiling is worth its own time (seconds)."""


def choose_compile(
    config: RunConfig, prepared: PreparedRun, distributed: DistributedContext, console: Console
) -> CompileChoice:
    """Decide whether a run's blocks are compiled, the same on all ranks, and print it.

    Args:
        config: the run's settings, without `auto` but for `train.compile`.
        prepared: its documents and tokenizer.
        distributed: this process and its mesh; every rank must call this.
        console: shows the choice.
    """
    runtime = distributed.runtime
    device_type = _find_device_type(distributed)
    # Families whose time can be estimated mask attention between the documents of a row.
    load = functools.cache(lambda: build_training_data(config, prepared, share_rows=True).loader)
    kept = runtime.broadcast_object(
        runtime.only_on_main(lambda: load_compile_choice(prepared.folder))
    )
    choice: CompileChoice = runtime.broadcast_object(
        runtime.only_on_main(
            lambda: decide_compile(
                config,
                device_type=device_type,
                kept=kept,
                estimate=lambda: estimate_run_s(config, load(), distributed),
            )
        )
    )
    is_auto = config.train.compile == "auto"
    if is_auto and choice.is_on:
        console.info("compile: trying one decoder block, which may take some minutes")
        problem = find_compile_problem(config, prepared.tokenizer, load(), distributed)
        problems = runtime.gather_objects(problem)
        choice = _agree(choice, problems)
        if not choice.is_on:
            console.warn(f"decoder blocks are not compiled: {choice.reason}")
            return choice
    if device_type == "cuda" or choice.is_on or (is_auto and config.adapter is not None):
        state = "compiled" if choice.is_on else "not compiled"
        before = ", as when the run began" if is_auto and choice == kept else ""
        console.info(f"compile: decoder blocks are {state}{before} ({choice.reason})")
    return choice


def set_compile(config: RunConfig, choice: CompileChoice) -> RunConfig:
    """Return the settings with the choice instead of `auto`."""
    train = config.train.model_copy(update={"compile": choice.is_on})
    return config.model_copy(update={"train": train})


def decide_compile(
    config: RunConfig,
    *,
    device_type: str,
    kept: CompileChoice | None,
    estimate: Callable[[], float | None],
) -> CompileChoice:
    """Decide by everything but the compiler itself.

    Args:
        config: the run's settings.
        device_type: "cuda" or "cpu".
        kept: the choice when the run began; None if it begins now.
        estimate: returns the planned time of the run (seconds); None if it is not known.
    """
    setting = config.train.compile
    if setting != "auto":
        return CompileChoice(is_on=setting, reason=f"'train.compile' is {str(setting).lower()}")
    if config.adapter is not None:
        return _leave_out("layers with an adapter are not compiled")
    if config.train.deterministic:
        return _leave_out("'train.deterministic' is true, and the compiler chooses by timings")
    if kept is not None:
        return kept
    if device_type != "cuda":
        return _leave_out("the run began on a CPU")
    planned_s = estimate()
    if planned_s is None:
        return _leave_out("the planner cannot estimate the time of this model's steps")
    planned = f"the run is planned to take {format_duration(planned_s)}"
    if planned_s <= LONG_RUN_S:
        return _leave_out(f"{planned}, not more than ten minutes")
    return CompileChoice(is_on=True, reason=planned)


def _leave_out(reason: str) -> CompileChoice:
    return CompileChoice(is_on=False, reason=reason)


def _agree(choice: CompileChoice, problems: list[str | None]) -> CompileChoice:
    """Return the choice of all ranks, given why compiling failed on each of them."""
    failed = [rank for rank, problem in enumerate(problems) if problem is not None]
    if not failed:
        return choice
    where = f" on rank {failed[0]}" if len(problems) > 1 else ""
    more = f" (and on {len(failed) - 1:,} more)" if len(failed) > 1 else ""
    return _leave_out(f"compiling one block failed{where}{more}: {problems[failed[0]]}")


def estimate_run_s(
    config: RunConfig, loader: Loader, distributed: DistributedContext
) -> float | None:
    """Return the planned time of a run's steps on this machine, without compiling (seconds).

    Args:
        config: the run's settings.
        loader: builds its rows.
        distributed: this process and its mesh.

    Returns:
        None if the planner has no formula for the model, or cannot describe this machine.
    """
    num_ranks = distributed.runtime.world_size
    try:
        sizes = read_run_model(config)
        machine = load_machine(THIS_MACHINE, num_processes=num_ranks)
    except (ConfigError, ModelError):
        return None
    if not isinstance(sizes, ModelSizes):
        return None
    mesh = MeshShape() if distributed.mesh is None else distributed.mesh.shape
    work = PlanInputs.for_run(config, machine, num_ranks).work
    fit = find_fit(sizes, mesh, work, machine)
    step = estimate_step(sizes, mesh, fit.settings, machine, seq_len=work.seq_len)
    return min(loader.num_steps, config.train.max_steps or loader.num_steps) * step.step_s


def _find_device_type(distributed: DistributedContext) -> str:
    return distributed.runtime.device.type
