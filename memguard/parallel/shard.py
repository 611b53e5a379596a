"""Shards a model on the meta device: first by role over y and x, then with FSDP2.

    1  plan_sharding            assigns a role to every module, or rejects the model
    2  shard_model              parameters become DTensors on (y, x), modules change their class
    3  checkpoint_blocks        sets what backward recomputes
    4  wrap_fsdp                decoder blocks, embedding, head and the rest are units over z;
                                inputs of checkpointed blocks are stored over x

Nothing is allocated. `hf.assembly` has these steps in their order, and fills the shards.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # Registers torch.ops.torch_attn.
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memguard.errors import ModelError
from memguard.parallel.embedding import Embedding4D, Positions4D
from memguard.parallel.experts import Experts4D, ExpertsBlock4D, Local4D, is_experts
from memguard.parallel.hf_plan import (
    HEAD_COUNTS,
    KEY_VALUE_COUNTS,
    KEY_VALUE_FEATURES,
    PLACEMENTS,
    QUERY_COUNTS,
    QUERY_FEATURES,
    RATIO,
    ShardingPlan,
    find_blocks,
)
from memguard.parallel.layout import find_storage_dim
from memguard.parallel.linear import Linear4D, LinearGroup4D, to_local
from memguard.parallel.lora import is_adapter_parameter
from memguard.parallel.mesh import Axis, Mesh4D
from memguard.parallel.model_sizes import read_num_kv_heads
from memguard.parallel.norm import Norm4D, measure_norm
from memguard.parallel.stored_inputs import store_inputs_in_parts

Checkpointing = Literal["none", "full", "selective"]


def shard_model(model: Any, plan: ShardingPlan, mesh: Mesh4D) -> None:
    """Turn every parameter into a DTensor and every module with a role into its sharded form.

    The model, on the meta device, is changed in place; parameter names stay.
    """
    if not plan.is_split:
        return  # Its parameters become DTensors by FSDP2.
    modules = dict(model.named_modules())
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    num_kv_heads = read_num_kv_heads(lambda field: getattr(config, field, None)) or num_heads
    x, y = mesh.axis("x"), mesh.axis("y")
    for name, role in plan.roles.items():
        module = modules[name]
        if role == "embedding":
            rows = mesh.cut_gathered(module.weight.shape, PLACEMENTS[role, "weight"])
            Embedding4D.convert(module, vocab_axis=x, first_token=rows.start[0])
        elif role == "plain":
            parts = plan.parts.get(name)
            has_keys = name in plan.key_value or (parts is not None and parts.key_value)
            Linear4D.convert(
                module,
                in_axis=y,
                out_axis=x,
                kv_replicas=mesh.kv_replicas(num_kv_heads) if has_keys else None,
                parts=parts,
            )
            if module is model.get_output_embeddings():
                module.__class__ = HeadLinear
        elif role == "transposed":
            Linear4D.convert(module, in_axis=x, out_axis=y)
        elif role == "norm":
            Norm4D.convert(module, measure_norm(module), feature_axis=y)
        elif role == "heads_norm":
            replicas = mesh.kv_replicas(num_kv_heads) if name in plan.key_value else None
            Norm4D.convert(module, measure_norm(module), feature_axis=x, kv_replicas=replicas)
        elif role == "head_norm":
            Norm4D.convert(module, measure_norm(module), gradient_axis=x)
        elif role == "positions":
            Positions4D.convert(module)
        elif role == "experts_block":
            ExpertsBlock4D.convert(module, feature_axis=y, width_axis=x)
        elif role in ("expert_plain", "expert_transposed") or type(module) is nn.Linear:
            # Inside a block of experts, where nothing is summed.
            Linear4D.convert(module, in_axis=Axis(name="none"), out_axis=Axis(name="none"))
        elif role == "alternating_experts":
            placements = PLACEMENTS[role, "down_proj_bias"]
            bias = mesh.cut_gathered(module.down_proj_bias.shape, placements)
            Experts4D.convert(module).bias_slice = bias
        elif role == "experts":
            order = plan.parts[name].order(mesh.shape.y * mesh.shape.x, 1)
            Experts4D.convert(module).order = order
        else:
            assert role in ("router", "sinks"), f"no sharded form of '{role}'"
            Local4D.convert(module)
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                _shard_parameter(module, leaf, plan.placements(f"{name}.{leaf}"), mesh)
    if plan.is_tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    for group in plan.groups:
        LinearGroup4D([modules[name] for name in group])
    for name in plan.attentions:
        _count_local_heads(modules[name], num_heads, num_kv_heads, x.degree)
    uncovered = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert not uncovered, f"the plan covers every parameter, but these are not sharded: {uncovered}"


class HeadLinear(Linear4D):
    """The LM head of a sharded model, which can run a function that needs its gathered weight.

    The function runs inside the module's call, around which FSDP2 gathers the weight.
    """

    def forward(self, input: Tensor, work: Callable[[Tensor], Any] | None = None) -> Any:
        """Return ``work(input)``, or the local logits ``[..., V/x]`` without ``work``."""
        return super().forward(input) if work is None else work(input)


def _count_local_heads(attention: Any, num_heads: int, num_kv_heads: int, degree: int) -> None:
    """Set the numbers of heads that an attention module stores to those of one rank along x."""
    heads, kv_heads = num_heads // degree, max(1, num_kv_heads // degree)
    local = {
        **dict.fromkeys(QUERY_COUNTS, heads),
        **dict.fromkeys(KEY_VALUE_COUNTS, kv_heads),
        RATIO: heads // kv_heads,
    }
    for field in HEAD_COUNTS:
        if hasattr(attention, field):
            setattr(attention, field, local[field])
    for field in QUERY_FEATURES:
        if hasattr(attention, field):
            setattr(attention, field, getattr(attention, field) // degree)
    if hasattr(attention, KEY_VALUE_FEATURES):
        features = getattr(attention, KEY_VALUE_FEATURES) // num_kv_heads * kv_heads
        setattr(attention, KEY_VALUE_FEATURES, features)
    if degree > 1 and _reads_config(attention):
        attention.config = _LocalConfig(attention.config, local)


def _reads_config(attention: Any) -> bool:
    """Whether an attention module's forward reads a number of heads from its configuration."""
    code = inspect.unwrap(type(attention).forward).__code__
    return any(name in code.co_names and not hasattr(attention, name) for name in HEAD_COUNTS)


class _LocalConfig:
    """The model's configuration with the numbers of heads of one rank.

    Not a copy: the attention kernel is set in the model's configuration later.
    """

    def __init__(self, config: Any, counts: dict[str, int]) -> None:
        self._config = config
        for name, count in counts.items():
            if hasattr(config, name):
                setattr(self, name, count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _shard_parameter(
    module: nn.Module, leaf: str, placements: tuple[Placement, Placement], mesh: Mesh4D
) -> None:
    full = module.get_parameter(leaf)
    assert full.is_meta, "a model is sharded before it has storage"
    local_shape = mesh.cut_gathered(full.shape, placements).shape
    sharded = DTensor.from_local(
        torch.empty(local_shape, dtype=full.dtype, device="meta"),
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

    What checkpointed blocks store for backward is sharded over x, see `stored_inputs`. The forward
    of ``root`` is called, which contains the model, sharded by `shard_model`. ``param_dtype`` is
    that of gathered weights and of the computation; None keeps the stored dtype. Gradients are
    reduced in fp32 in either case. With ``reshard_after_forward`` a block's gathered weights are
    freed until backward.

    Returns:
        Units whose gathered weights are freed after their forward.
    """
    store_inputs_in_parts(model, mesh.axis("x"))
    # Adapters are too small to be sharded, and stay in fp32.
    adapters = {p for name, p in model.named_parameters() if is_adapter_parameter(name)}
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=None if param_dtype is None else torch.float32
    )
    wrap: Any = functools.partial(
        fully_shard,
        mesh=mesh.batch_mesh,
        shard_placement_fn=lambda p: Shard(find_storage_dim(to_local(p).shape, mesh.shape.z)),
        mp_policy=policy,
        reshard_after_forward=reshard_after_forward,
        ignored_params=adapters,
    )
    modules = dict(model.named_modules())
    blocks: list[FSDPModule] = [wrap(modules[name]) for name in plan.blocks]
    embeddings: list[FSDPModule] = []
    if plan.is_split and not plan.is_tied:
        # A parameter cannot be in two units: if tied, embedding and head are in the root's unit.
        # So are those of other families, which may read a weight outside its module's call.
        embeddings.append(wrap(model.get_input_embeddings()))
        # Backward of an embedding does not read its weight.
        embeddings[0].set_unshard_in_backward(False)
        # Backward needs the head's weight first, like the root's.
        wrap(model.get_output_embeddings(), reshard_after_forward=False)
    # Backward needs the root's own parameters (final norm, tied embedding) first.
    wrap(root, reshard_after_forward=False)
    for before, after in itertools.pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    return [*blocks, *embeddings] if reshard_after_forward else []


def checkpoint_blocks(model: Any, mode: Checkpointing) -> None:
    """Make each decoder block recompute in backward the activations it does not keep.

    Args:
        model: a plain or sharded model.
        mode: ``full`` keeps only a block's input; ``selective`` also keeps the outputs of matmuls
            and collectives, so that no collective is repeated.

    Raises:
        ModelError: transformers has no checkpointing for this family.
    """
    if mode == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} has no activation checkpointing in transformers: set "
            "'train.activation_checkpointing' to none"
        )
    arguments: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        # Their biases are added in place, and what is kept must not change.
        adds_bias = any(is_experts(m) and m.has_bias for m in model.modules())
        kept = _COSTLY - _PRODUCTS_OF_EXPERTS if adds_bias else _COSTLY
        arguments["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, functools.partial(_keep, kept)
        )
    # transformers renamed this method in 5.2x and warns about the old name.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable(arguments)
    # transformers makes the embedding's output require a gradient, as reentrant checkpoints need.
    # With a frozen embedding the first block would compute one that nothing uses.
    model.disable_input_require_grads()


def _keep(
    kept: frozenset[Any], _: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operation in kept:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_COSTLY = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.linear.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.higher_order.flex_attention,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.wait_tensor.default,
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)

_PRODUCTS_OF_EXPERTS = frozenset({torch.ops.aten._grouped_mm.default, torch.ops.aten.bmm.default})


def compile_blocks(model: nn.Module) -> None:
    """Compile each decoder block; call this after `checkpoint_blocks` and before `wrap_fsdp`.

    Only calls with gradients are compiled. Others (checks of the model, held-out loss, generation)
    have many shapes, and a block compiled for these too would be trained with dynamic shapes.

    With selective checkpointing the checkpoint is compiled too, as the compiler itself must keep
    what the mode keeps. With full checkpointing the compiled block is inside the checkpoint:
    compiled outside, torch saves meshes of parameters for backward and fails.

    Raises:
        ModelError: selective checkpointing of blocks that checkpoint in their own ``__call__``, as
            those of transformers 5.17 do: compiled, their gradients are wrong.
    """
    for name in find_blocks(model):
        block: Any = model.get_submodule(name)
        checkpoint = getattr(block, "_gradient_checkpointing_func", None)
        if checkpoint is None:
            block._compiled_call_impl = _compile_training(block._call_impl)
        elif "context_fn" in checkpoint.keywords:
            if type(block).__call__ is not nn.Module.__call__:
                raise ModelError(
                    "'train.compile' with 'train.activation_checkpointing' selective gives wrong "
                    "gradients with this transformers: set one to false or full, or install 5.23"
                )
            # A group of linear layers stores outputs between calls. Backward recomputes them from
            # the graph, in which there are no calls.
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
            block._compiled_call_impl = _compile_training(block._call_impl)
        else:
            block._gradient_checkpointing_func = functools.partial(
                _checkpoint_compiled, checkpoint, _compile_training(_call)
            )


def _compile_training(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function's calls with gradients."""
    compiled = torch.compile(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else function)(*args, **kwargs)

    return call


def _checkpoint_compiled(
    checkpoint: Callable[..., Any], call: Callable[..., Any], function: Any, *args: Any
) -> Any:
    return checkpoint(functools.partial(call, function), *args)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
