"""Shards a model that lies on the meta device: roles first, then FSDP2.

    1  plan_sharding            every module gets a role, or the model is refused
    2  shard_model              parameters become DTensors on (y, x), modules change their class
    3  checkpoint_blocks        what backward computes again
    4  wrap_fsdp                decoder blocks, embedding, head and the rest are units over z

Nothing is allocated: `weights` fills the shards afterwards.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memguard.parallel.embedding import Embedding4D
from memguard.parallel.hf_plan import PLACEMENTS, ShardingPlan, find_blocks
from memguard.parallel.layout import find_rectangle
from memguard.parallel.linear import Linear4D, LinearGroup4D
from memguard.parallel.mesh import Mesh4D
from memguard.parallel.norm import Norm4D, measure_norm

Checkpointing = Literal["none", "full", "selective"]


def shard_model(model: Any, plan: ShardingPlan, mesh: Mesh4D) -> None:
    """Turn every parameter into a DTensor and every module with a role into its sharded form.

    Args:
        model: on the meta device; changed in place, names of parameters stay.
        plan: of this model.
        mesh: the ranks.
    """
    modules = dict(model.named_modules())
    config = model.config.get_text_config()
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    x, y = mesh.axis("x"), mesh.axis("y")
    for name, role in plan.roles.items():
        module = modules[name]
        if role == "embedding":
            _convert_embedding(module, mesh)
        elif role == "plain":
            replicas = mesh.kv_replicas(num_kv_heads) if name in plan.key_value else None
            Linear4D.convert(module, in_axis=y, out_axis=x, kv_replicas=replicas)
            if module is model.get_output_embeddings():
                module.__class__ = HeadLinear
        elif role == "transposed":
            Linear4D.convert(module, in_axis=x, out_axis=y)
        elif role == "norm":
            Norm4D.convert(module, measure_norm(module), feature_axis=y)
        else:
            Norm4D.convert(module, measure_norm(module), gradient_axis=x)
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                _shard_parameter(module, leaf, PLACEMENTS[role, leaf], mesh)
    if plan.is_tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    for group in plan.groups:
        LinearGroup4D([modules[name] for name in group])
    for name in plan.attentions:
        kv_heads_here = max(1, num_kv_heads // x.degree)
        heads_here = config.num_attention_heads // x.degree
        modules[name].num_key_value_groups = heads_here // kv_heads_here
    uncovered = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert not uncovered, f"the plan covers every parameter, but these are not sharded: {uncovered}"


class HeadLinear(Linear4D):
    """The LM head of a sharded model: lends its local weight to whoever needs losses.

    Called as a module, so that FSDP2 gathers its weight around the call.
    """

    def forward(self, input: Tensor, work: Callable[[Tensor], Any] | None = None) -> Any:
        """Return ``work(input)``, or the local logits ``[..., V/x]`` without ``work``."""
        return super().forward(input) if work is None else work(input)


def _convert_embedding(module: Any, mesh: Mesh4D) -> None:
    rows = find_rectangle(
        module.weight.shape,
        PLACEMENTS["embedding", "weight"],
        mesh.shape,
        {"x": mesh.axis("x").rank, "y": mesh.axis("y").rank},
        over_z=False,
    )
    Embedding4D.convert(module, vocab_axis=mesh.axis("x"), first_token=rows.start[0])


def _shard_parameter(
    module: nn.Module, leaf: str, placements: tuple[Placement, Placement], mesh: Mesh4D
) -> None:
    full = module.get_parameter(leaf)
    assert full.is_meta, "a model is sharded before it has storage"
    here = {"x": mesh.axis("x").rank, "y": mesh.axis("y").rank}
    rectangle = find_rectangle(full.shape, placements, mesh.shape, here, over_z=False)
    sharded = DTensor.from_local(
        torch.empty(rectangle.shape, dtype=full.dtype, device="meta"),
        mesh.tensor_mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    setattr(module, leaf, nn.Parameter(sharded, requires_grad=full.requires_grad))


def wrap_fsdp(
    root: nn.Module,
    model: Any,
    plan: ShardingPlan,
    mesh: Mesh4D,
    *,
    param_dtype: torch.dtype | None,
    reshard_after_forward: bool,
) -> list[FSDPModule]:
    """Shard storage over z and replicate over data; gathers are prefetched one block ahead.

    Args:
        root: what is called; holds ``model``.
        model: sharded by `shard_model`.
        plan: of this model.
        mesh: the ranks.
        param_dtype: of gathered weights and of the arithmetic; None keeps the stored dtype.
            Gradients are reduced in fp32 in either case.
        reshard_after_forward: whether a block's gathered weights are freed until backward.

    Returns:
        Units whose gathered weights are freed after their forward.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=None if param_dtype is None else torch.float32
    )
    wrap: Any = functools.partial(
        fully_shard,
        mesh=mesh.batch_mesh,
        mp_policy=policy,
        reshard_after_forward=reshard_after_forward,
    )
    modules = dict(model.named_modules())
    blocks: list[FSDPModule] = [wrap(modules[name]) for name in plan.blocks]
    embeddings: list[FSDPModule] = []
    if not plan.is_tied:
        # One parameter cannot be in two units: tied, both are in the root's.
        embeddings.append(wrap(model.get_input_embeddings()))
        # A table that was looked up in is not read in backward.
        embeddings[0].set_unshard_in_backward(False)
        # Needed again at once in backward, like the root's.
        wrap(model.get_output_embeddings(), reshard_after_forward=False)
    # The root's own (final norm, tied embedding) are needed again at once in backward.
    fully_shard(root, mesh=mesh.batch_mesh, mp_policy=policy, reshard_after_forward=False)
    for before, after in itertools.pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    return [*blocks, *embeddings] if reshard_after_forward else []


def checkpoint_blocks(model: Any, mode: Checkpointing) -> None:
    """Make each decoder block compute again in backward what it does not keep.

    Args:
        model: plain or sharded.
        mode: ``full`` keeps a block's input only; ``selective`` also the outputs of matmuls and
            of all-reduces, so that nothing is sent twice.
    """
    if mode == "none":
        return
    arguments: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        arguments["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _keep_costly
        )
    # transformers renamed it in 5.2x and warns of the old name, the only one before.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable(arguments)


def _keep_costly(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _COSTLY:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_COSTLY = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.linear.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.wait_tensor.default,
        torch.ops._c10d_functional.all_gather_into_tensor.default,
    }
)


def compile_blocks(model: nn.Module) -> None:
    """Compile each decoder block; to be called after `checkpoint_blocks`, before `wrap_fsdp`.

    With selective checkpointing the blocks of a sharded model run as they are: compiled around the
    checkpoint, groups of linear layers change their state within what torch would trace, and it
    gives up; compiled inside, buffers are reused that the checkpoint keeps.
    """
    for name in find_blocks(model):
        block: Any = model.get_submodule(name)
        checkpoint = getattr(block, "_gradient_checkpointing_func", None)
        if checkpoint is None or "context_fn" in checkpoint.keywords:
            block.compile()
        else:
            block._gradient_checkpointing_func = functools.partial(
                _checkpoint_compiled, checkpoint, torch.compile(_call)
            )


def _checkpoint_compiled(
    checkpoint: Callable[..., Any], call: Callable[..., Any], function: Any, *args: Any
) -> Any:
    return checkpoint(functools.partial(call, function), *args)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
