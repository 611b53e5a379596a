"""Runs one compiled decoder block forward and backward, to find whether it can be compiled.

    model    that of the run, with one layer, few vocabulary entries and random weights
    mesh     of the run's shape; its process groups are torch's fake ones, which send nothing
    rows     this rank's first micro-batches of the run, two if it has two steps: the second differs
             in length or documents, for which torch compiles once more, with dynamic shapes

The compiler may fail on some ranks only. They would leave the others waiting in a collective, so
nothing is sent: what comes from other ranks is wrong, but has its shape. Only whether everything
runs counts. The code of forward and backward is that of training.
"""

import gc
import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memguard.config import RunConfig
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.data.loader import Batch, Loader
from memguard.errors import shorten
from memguard.hf.assembly import Assembly, allocate, assemble, build_meta_layer
from memguard.hf.from_config import build_on_meta, reduce_config
from memguard.mitigation import build_mitigations
from memguard.model.causal_lm import CausalLM
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Axis, Mesh4D
from memguard.parallel.mesh_shape import AXES
from memguard.records import IGNORE_LABEL
from memguard.train.step import TrainStep
from memguard.workflows.common.setup import DistributedContext, read_model_config

_NUM_STEPS = 2
_VOCABULARY = 1024
_ONE_LAYER = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1),
    "vocab_size": _VOCABULARY,
}
_MOST = 300
"""Characters of the compiler's message that are kept."""
_BACKEND = re.compile(r"backend=.* raised:$")


def find_compile_problem(
    config: RunConfig, tokenizer: Any, loader: Loader, distributed: DistributedContext
) -> str | None:
    """Compile one block of a run's model and return why that fails on this rank; None if it works.

    Every rank must call this. A rank on which it fails does not wait for the others.

    Args:
        config: the run's settings, without `auto` for micro-batches, precision and checkpointing.
        tokenizer: of the run.
        loader: builds its rows.
        distributed: this process and its mesh.
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
    changes = {"compile": True, "trainable_modules": None}
    train = config.train.model_copy(update=changes)
    runtime = distributed.runtime
    assembly = Assembly.for_training(
        train,
        mesh=mesh,
        device=runtime.device,
        reshard_after_forward=distributed.parallel.reshard_after_forward,
    )
    attn = config.model.attn_implementation
    if mesh is None:
        lm = assemble(build_on_meta(hf_config, attn=attn, dtype=assembly.dtype), assembly)
    else:
        lm = build_meta_layer(hf_config, assembly, attn=attn).lm
    allocate(lm, runtime.device)
    _fill(lm)
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
        batch = _build_batch(loader, number, lm)
        num_rows = len(batch.input_ids)
        size = 1 if has_own_passes else min(train.count_micro_rows(num_rows), num_rows)
        step.rehearse(batch, slice(0, size))
    if runtime.device.type == "cuda":
        # Errors of kernels are reported when the GPU is waited for.
        torch.cuda.synchronize(runtime.device)


@torch.no_grad()
def _fill(lm: CausalLM) -> None:
    """Draw this rank's weights, whose memory is uninitialised."""
    for parameter in lm.model.parameters():
        to_local(parameter).normal_(std=0.02)


def _build_batch(loader: Loader, step: int, lm: CausalLM) -> Batch:
    """Build this rank's rows of a step, from 0, with tokens of the small vocabulary."""
    samples = loader.samples(step)
    num_rows = -(-len(samples) // lm.num_batch_ways)
    mine = samples[lm.batch_rank * num_rows :][:num_rows]
    batch = loader.batch(mine, num_rows=num_rows)
    labels = np.where(batch.labels == IGNORE_LABEL, IGNORE_LABEL, batch.labels % lm.vocab_size)
    return replace(batch, input_ids=batch.input_ids % lm.vocab_size, labels=labels)


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
        ranks = [self._list_ranks(mesh.axis(name)) for name in AXES]
        device_mesh = DeviceMesh.from_group(
            [self._join(members) for members in ranks],
            mesh.device_mesh.device_type,
            mesh.device_mesh.mesh,
            mesh_dim_names=AXES,
        )
        super().__init__(mesh.shape, device_mesh, mesh._timeout)

    def kv_replicas(self, num_kv_heads: int) -> Axis:
        """Return the ranks along x that share one key/value head, see `Mesh4D.kv_replicas`."""
        x = self.axis("x")
        replicas = max(1, x.degree // num_kv_heads)
        if replicas == 1:
            return Axis(name="x")
        first = x.rank // replicas * replicas
        members = self._list_ranks(x)[first : first + replicas]
        return Axis(
            name="kv_replicas",
            degree=replicas,
            rank=x.rank % replicas,
            group=self._join(members),
        )

    def close(self) -> None:
        """Remove its process groups."""
        for group in self._groups.values():
            dist.destroy_process_group(group)

    @staticmethod
    def _list_ranks(axis: Axis) -> tuple[int, ...]:
        assert axis.group is not None, "axes of a mesh have groups"
        return tuple(dist.get_process_group_ranks(axis.group))

    def _join(self, ranks: tuple[int, ...]) -> Any:
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(
                list(ranks), backend="fake", use_local_synchronization=True
            )
        return self._groups[ranks]
