"""Decides whether the decoder blocks of a run are compiled (`train.compile`).

    setting     run                                    compiled
    true, false any                                    as set
    auto        with an adapter, or deterministic      no: with an adapter it is not measured on
                                                       a GPU yet
                begun before                           as then, if one block can still be compiled
                on a CPU                               no
                planned for at most ten minutes, or    no: compiling takes minutes
                for a time that is not known
                any other                              if one block can be compiled

The time is the planner's estimate of a step without compiling, times the number of steps. Rank 0
decides; then every rank compiles one block by itself. If that fails on one of them, no rank
compiles: otherwise it would end in the first step, and the others would wait for it.

The choice and its reason are written to environment.json. A resumed run keeps it, as compiled
kernels round in other places.
"""

import functools
import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memguard.config import RunConfig
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.data.loader import Loader
from memguard.errors import ConfigError, ModelError, shorten
from memguard.hf.assembly import Assembly, allocate, assemble, build_meta_layer
from memguard.hf.from_config import build_on_meta, reduce_config
from memguard.mitigation import build_mitigations
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Mesh4D
from memguard.parallel.mesh_shape import AXES, MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.cost import estimate_step
from memguard.planner.fit import PlanInputs, find_fit
from memguard.planner.machine import THIS_MACHINE, load_machine
from memguard.records import IGNORE_LABEL
from memguard.records.run_files import CompileChoice, load_compile_choice
from memguard.runtime import Console, format_duration
from memguard.train.step import TrainStep, build_own_batch
from memguard.workflows.common.setup import DistributedContext, read_model_config
from memguard.workflows.training.data import PreparedRun, build_training_data
from memguard.workflows.training.memory import read_run_model, set_train

LONG_RUN_S = 600.0
"""Planned time from which on compiling is worth its own time (seconds)."""
_NUM_STEPS = 2
_VOCABULARY = 1024
_ONE_LAYER = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1),
    "vocab_size": _VOCABULARY,
}
_MOST = 300
"""Characters of the compiler's message that are kept."""
_BACKEND = re.compile(r"backend=.* raised:$")


def choose_compile(
    config: RunConfig, prepared: PreparedRun, distributed: DistributedContext, console: Console
) -> CompileChoice:
    """Decide whether a run's blocks are compiled, the same on all ranks, and print it."""
    runtime = distributed.runtime
    device_type = runtime.device.type
    # Families whose time can be estimated mask attention between the documents of a row.
    load = functools.cache(lambda: build_training_data(config, prepared, share_rows=True).loader)
    kept = runtime.from_main(lambda: load_compile_choice(prepared.folder))
    choice = runtime.from_main(
        lambda: decide_compile(
            config,
            device_type=device_type,
            kept=kept,
            estimate=lambda: estimate_run_s(config, load(), distributed),
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


def decide_compile(
    config: RunConfig,
    *,
    device_type: str,
    kept: CompileChoice | None,
    estimate: Callable[[], float | None],
) -> CompileChoice:
    """Decide by everything but the compiler itself.

    ``kept`` is the choice when the run began, ``estimate`` the planned time of the run (seconds).
    """
    setting = config.train.compile
    if setting != "auto":
        return CompileChoice(is_on=setting, reason=f"'train.compile' is {str(setting).lower()}")
    if config.adapter is not None:
        return _leave_out("with an adapter only 'train.compile: true' compiles them")
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


# -- whether one block can be compiled -----------------------------------------------------------
#
#     model    that of the run, with one layer, few vocabulary entries and random weights
#     mesh     of the run's shape; its process groups are torch's fake ones, which send nothing
#     rows     this rank's first micro-batches of the run, two if it has two steps: the second
#              differs in length or documents, for which torch compiles once more
#
# The compiler may fail on some ranks only. They would leave the others waiting in a collective, so
# nothing is sent: what comes from other ranks is wrong, but has its shape. Only whether everything
# runs counts. The code of forward and backward is that of training.


def find_compile_problem(
    config: RunConfig, tokenizer: Any, loader: Loader, distributed: DistributedContext
) -> str | None:
    """Compile one block of a run's model and return why that fails on this rank; None if it works.

    Every rank must call this. A rank on which it fails does not wait for the others.
    """
    device = distributed.runtime.device
    hf_config = reduce_config(read_model_config(config, tokenizer), _ONE_LAYER)
    mesh = None if distributed.mesh is None else _SilentMesh(distributed.mesh)
    problem = None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            _run_block(config, hf_config, loader, mesh, distributed)
    except Exception as error:
        # Its traceback would keep the tensors of all frames.
        problem = _describe(error)
    finally:
        torch.compiler.reset()
        if mesh is not None:
            mesh.close()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return problem


def _run_block(
    config: RunConfig,
    hf_config: Any,
    loader: Loader,
    mesh: "Mesh4D | None",
    distributed: DistributedContext,
) -> None:
    # Which modules are trained is left out: their names may be those of other layers.
    train = set_train(config, compile=True, trainable_modules=None).train
    runtime = distributed.runtime
    assembly = Assembly.for_training(
        train,
        mesh=mesh,
        device=runtime.device,
        reshard_after_forward=config.parallel.reshard_after_forward,
    )
    attn = config.model.attn_implementation
    if mesh is None:
        lm = assemble(build_on_meta(hf_config, attn=attn, dtype=assembly.dtype), assembly)
    else:
        lm = build_meta_layer(hf_config, assembly, attn=attn).lm
    allocate(lm, runtime.device)
    with torch.no_grad():
        # This rank's weights, whose memory is uninitialised.
        for parameter in lm.model.parameters():
            to_local(parameter).normal_(std=0.02)
    lm.model.train()
    step = TrainStep(
        lm=lm,
        mitigations=build_mitigations((), special_ids=[]),
        train=train,
        optim=config.optim,
        seed=config.seed,
        runtime=runtime,
    )
    has_own_passes = find_mitigation(config.mitigations, DpSgdConfig) is not None
    for number in range(min(_NUM_STEPS, loader.num_steps)):
        own = build_own_batch(loader, number, lm)
        # With tokens of the small vocabulary.
        labels = np.where(own.labels == IGNORE_LABEL, IGNORE_LABEL, own.labels % lm.vocab_size)
        batch = replace(own, input_ids=own.input_ids % lm.vocab_size, labels=labels)
        num_rows = len(batch.input_ids)
        size = 1 if has_own_passes else min(train.count_micro_rows(num_rows), num_rows)
        step.rehearse(batch, slice(0, size))
    if runtime.device.type == "cuda":
        # Errors of kernels are reported when the GPU is waited for.
        torch.cuda.synchronize(runtime.device)


def _describe(error: Exception) -> str:
    """Return the first line of an error that says something, after its type."""
    # The error of a backend contains the one that it caught.
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines()]
    text = next((line for line in lines if line and not _BACKEND.match(line)), "")
    return shorten(f"{type(inner).__name__}{f': {text}' if text else ''}", _MOST)


class _SilentMesh(Mesh4D):
    """A mesh of the same shape and ranks, whose collectives do nothing."""

    def __init__(self, mesh: Mesh4D) -> None:
        """Create its process groups; every rank must call this, and none waits."""
        # Registers the backend.
        import torch.testing._internal.distributed.fake_pg  # noqa: F401

        self._groups: dict[tuple[int, ...], Any] = {}
        groups = [mesh.device_mesh.get_group(name) for name in AXES]
        device_mesh = DeviceMesh.from_group(
            [self._join(dist.get_process_group_ranks(group)) for group in groups],
            mesh.device_mesh.device_type,
            mesh.device_mesh.mesh,
            mesh_dim_names=AXES,
        )
        super().__init__(mesh.shape, device_mesh, mesh._timeout)

    def close(self) -> None:
        """Remove its process groups."""
        for group in self._groups.values():
            dist.destroy_process_group(group)

    def _join(self, ranks: Sequence[int], name: str = "") -> Any:
        if (members := tuple(ranks)) not in self._groups:
            self._groups[members] = dist.new_group(
                list(ranks), backend="fake", use_local_synchronization=True
            )
        return self._groups[members]
