"""The parameters as the optimizer sees them: plain local tensors.

    parameter (DTensor over data, z, y, x)  ->  local tensor, the same storage

AdamW, clipping and the gradient norm run on local tensors. On DTensors of a 4-D mesh each of these
operations first plans the placement of every tensor, which takes 0.2 s per parameter at the first
step.

    norm^2 = all-reduce over all ranks (sum over local tensors  |g|^2 / copies of the tensor)

Biases of q, k, v, gate and up and norms of heads are the same on all ranks along y, each of which
computes their gradients itself, from the backward of attention. On GPUs this differs in its last
bits from rank to rank, and the copies would drift apart. They get one gradient:

    g      = all-reduce over y (g) / y             all such gradients together, in float64

Copies along x have equal gradients: these come from sums that all-reduces over x have made equal,
through kernels that give the same result for the same input.

Routers of experts and gates of shared experts (`experts`) are the same on all ranks along y and x.
Each has a part of their gradients:

    g      = all-reduce over y, then over x (g)                                in float64

Weights stored in bf16 have gradients in bf16. Those of several micro-batches are added in fp32 by
`sum_in_fp32`: FSDP2 and autograd would round each sum to bf16.

Adapters (`lora`) are stored outside FSDP2. Each rank has a part of the gradients of their factors:

    g      = all-reduce over the axis of the factor's copies (g)                one tensor an axis
    g      = all-reduce over z and data (g) / (z data)        of magnitudes too, one tensor
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate

from memguard.parallel.collectives import all_reduce
from memguard.parallel.experts import ExpertsBlock4D
from memguard.parallel.fused import FeatureOrder, find_orders
from memguard.parallel.layout import ShardSlice
from memguard.parallel.lora import is_adapter_parameter, is_factor
from memguard.parallel.mesh import Axis, Mesh4D, world_axis


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPiece:
    """A rectangle of a local tensor and its place in the whole tensor, as files order it."""

    slices: tuple[slice, ...]
    """Its place in the local tensor."""
    start: tuple[int, ...]
    """Index of its first element in the whole tensor."""

    def divided(self, block: int) -> "LocalPiece":
        """Return its place among tensors with one number for a block of the last dimension."""
        *before, last = self.slices
        return LocalPiece(
            slices=(*before, slice(last.start // block, last.stop // block)),
            start=(*self.start[:-1], self.start[-1] // block),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalParameter:
    """One parameter of the model and this rank's piece of it."""

    name: str
    source: nn.Parameter
    """The model's parameter."""
    local: nn.Parameter
    """The piece, in the same storage; the parameter itself if the model is not sharded."""
    num_copies: int
    """Ranks that hold this piece."""
    is_copied_over_y: bool = False
    """Whether all ranks along y hold this piece and compute its whole gradient."""
    is_adapter: bool = False
    """Whether it is part of an adapter, which FSDP2 does not reduce."""
    partial_over: tuple[str, ...] = ()
    """Axes over whose ranks the gradient is summed: of an adapter's factor, and in blocks of
    experts."""
    order: FeatureOrder | None = None
    """Order of its features if it is not that of files."""
    is_embedding: bool = False
    """Whether it is an embedding, perhaps also the head."""
    unit: str = ""
    """Name of the FSDP2 unit whose gradients arrive with it; without a mesh its own."""

    def split(self) -> list[LocalPiece]:
        """Return the rectangles of the local tensor: more than one of fused projections."""
        if not isinstance(self.source, DTensor):
            whole = ShardSlice.whole(self.source.shape)
            return [LocalPiece(slices=whole.slices, start=whole.start)]
        shape, start = compute_local_shape_and_global_offset(
            self.source.shape, self.source.device_mesh, self.source.placements
        )
        rectangle = ShardSlice(start=tuple(start), shape=tuple(shape))
        if self.order is None:
            slices = tuple(slice(0, size) for size in shape)
            return [LocalPiece(slices=slices, start=tuple(start))] if math.prod(shape) else []
        return [
            LocalPiece(slices=piece.mesh.slices, start=piece.file.start)
            for piece in self.order.split(rectangle)
        ]

    def to_global(self, value: Tensor, *, block: int = 1) -> Tensor:
        """Return a tensor of the piece's shape as one of the full shape, for checkpoints.

        It shares storage. It is no DTensor, which would move a copy on the CPU back to a GPU.
        ``value`` may have one number for ``block`` elements of the last dimension, which no
        rectangle cuts.
        """
        local, whole = (
            torch.Size((*shape[:-1], shape[-1] // block)) if block > 1 else shape
            for shape in (self.local.shape, self.source.shape)
        )
        if value.shape != local or not isinstance(self.source, DTensor):
            return value
        places = [piece.divided(block) for piece in self.split()]
        pieces = {place.start: value[place.slices] for place in places}
        return StoredPieces(whole, pieces, value.dtype)


def find_local_parameters(model: nn.Module, mesh: Mesh4D | None = None) -> list[LocalParameter]:
    """List the trainable parameters; call this once their storage will no longer change."""
    parameters = []
    orders = find_orders(model)
    in_experts = {
        parameter
        for block in model.modules()
        if isinstance(block, ExpertsBlock4D)
        for parameter in block.parameters()
    }
    embeddings = {each.weight for each in model.modules() if isinstance(each, nn.Embedding)}
    modules = dict(model.named_modules())
    units = {
        parameter: prefix  # Of the innermost: blocks come after the model.
        for prefix in [name for name, module in modules.items() if isinstance(module, FSDPModule)]
        for parameter in modules[prefix].parameters()
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_embedding = parameter in embeddings
        build = partial(LocalParameter, name=name, source=parameter, is_embedding=is_embedding)
        if not isinstance(parameter, DTensor):
            parameters.append(build(local=parameter, num_copies=1, unit=name))
            continue
        names = parameter.device_mesh.mesh_dim_names or ()
        is_adapter = is_adapter_parameter(name)
        assert "z" in names or is_adapter, (
            f"{name} is gathered: list it outside forward and backward"
        )
        copied_over = {
            names[dim]: parameter.device_mesh.size(dim)
            for dim, placement in enumerate(parameter.placements)
            if isinstance(placement, Replicate)
        }
        copies = math.prod(copied_over.values())
        if is_adapter:
            assert mesh is not None, "DTensors are on a mesh"
            copies *= mesh.shape.num_batch_ways
        partial_over: tuple[str, ...] = ()
        if is_factor(name):
            partial_over = tuple(copied_over)[:1]
        elif parameter in in_experts and {"y", "x"} <= copied_over.keys():
            partial_over = ("y", "x")
        parameters.append(
            build(
                local=nn.Parameter(parameter.to_local().detach()),
                num_copies=copies,
                is_copied_over_y="y" in copied_over and not partial_over,
                is_adapter=is_adapter,
                partial_over=partial_over,
                order=orders.get(name),
                unit=units.get(parameter, ""),
            )
        )
    return parameters


def sum_in_fp32(parameters: Sequence[LocalParameter]) -> None:
    """Let gradients of several backwards add up in fp32, of the weights that are not wider.

    Call this once. On a mesh FSDP2 casts a reduced gradient to the dtype of the weights, unless
    sums over data follow: each is moved to the local tensor's sum before the next can be added.
    """
    for parameter in parameters:
        if parameter.local.dtype != torch.bfloat16:
            continue
        # Of one process: autograd casts gradients to it.
        parameter.local.grad_dtype = torch.float32
        if parameter.local is not parameter.source:
            hook = partial(_move, parameter.local)
            parameter.source.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _move(local: nn.Parameter, source: Tensor) -> None:
    """Add the gradient of a model's parameter to the local tensor's, and clear it."""
    assert isinstance(source.grad, DTensor), "FSDP2 has reduced it"
    gradient, source.grad = source.grad.to_local(), None
    local.grad = gradient.float() if local.grad is None else local.grad.add_(gradient)


def take_gradients(parameters: Sequence[LocalParameter]) -> None:
    """Assign the gradients of the model's parameters to the local tensors; no copy."""
    for parameter in parameters:
        gradient = parameter.source.grad
        if parameter.local is not parameter.source and gradient is not None:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            parameter.local.grad = local


def average_copies(parameters: Sequence[LocalParameter], y: Axis) -> None:
    """Average over y the gradients of parameters that all ranks along y hold.

    All ranks along y call this, after `take_gradients`.
    """
    copied = [parameter for parameter in parameters if parameter.is_copied_over_y]
    # In float64 the mean of equal fp32 numbers is that number, for any number of ranks.
    _reduce_together(copied, y, divisor=y.degree, dtype=torch.float64)


def sum_partial_gradients(parameters: Sequence[LocalParameter], mesh: Mesh4D) -> None:
    """Sum the gradients of routers and adapters over the ranks that have parts of them.

    Every rank calls this once a step, after `take_gradients`.
    """
    adapters = [parameter for parameter in parameters if parameter.is_adapter]
    routers = [part for part in parameters if part.partial_over and not part.is_adapter]
    for axis in (mesh.axis("y"), mesh.axis("x")):
        _reduce_together([part for part in adapters if axis.name in part.partial_over], axis)
    # Groups of an axis may add in different orders. In float64 the sum of a few fp32 numbers
    # rounds to the same fp32 number, so that the sums differ in no bit between ranks.
    _reduce_together(routers, mesh.axis("y"), mesh.axis("x"), dtype=torch.float64)
    for axis in (mesh.axis("z"), mesh.axis("data")):
        _reduce_together(adapters, axis, divisor=axis.degree)


def _reduce_together(
    parameters: Sequence[LocalParameter],
    *axes: Axis,
    divisor: int = 1,
    dtype: torch.dtype | None = None,
) -> None:
    """Replace the gradients of some parameters by their sums over axes, in one tensor.

    ``dtype`` is that of the sums; None: that of the gradients.
    """
    gradients = [parameter.local.grad for parameter in parameters]
    present = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    if not present or all(axis.degree == 1 for axis in axes):
        return
    sums = torch.cat([gradient.flatten().to(dtype or gradient.dtype) for gradient in present])
    for axis in axes:
        sums = all_reduce(sums, axis, owned=True)
    sizes = [gradient.numel() for gradient in present]
    for gradient, part in zip(present, torch.split(sums, sizes), strict=True):
        gradient.copy_(part.view_as(gradient) / divisor)


def clear_gradients(parameters: Sequence[LocalParameter]) -> None:
    """Free all gradients."""
    for parameter in parameters:
        parameter.local.grad = None
        parameter.source.grad = None


def clip_gradients(parameters: Sequence[LocalParameter], max_norm: float | None) -> float:
    """Scale the gradients to a norm of at most ``max_norm``; return their norm before scaling.

    Called after `take_gradients`, on a mesh by every rank; ``max_norm`` None only measures.
    """
    squared = sum_squares(parameters)
    if any(isinstance(parameter.source, DTensor) for parameter in parameters):
        squared = all_reduce(squared, world_axis())
    norm = squared.sqrt()
    if max_norm is not None:
        # The formula of torch's clip_grad_norm_: the same results on one process and on a mesh.
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        gradients = [parameter.local.grad for parameter in parameters]
        torch._foreach_mul_([gradient for gradient in gradients if gradient is not None], scale)
    return float(norm)


def sum_squares(parameters: Sequence[LocalParameter]) -> Tensor:
    """Return this rank's share of the squared norm of all gradients: copies are counted once."""
    gradients = [(parameter.local.grad, parameter.num_copies) for parameter in parameters]
    present = [(gradient, copies) for gradient, copies in gradients if gradient is not None]
    assert present, "a step has gradients"
    wide = torch.promote_types(present[0][0].dtype, torch.float32)
    norms = _norms([gradient for gradient, _ in present], wide)
    copies = torch.tensor([copies for _, copies in present], dtype=wide, device=norms[0].device)
    return (torch.stack(norms).pow(2) / copies).sum()


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the norm of each tensor."""
    if gradients[0].is_cuda or dtype == torch.float64:
        return list(torch._foreach_norm(gradients, dtype=dtype))
    # On CPUs torch accumulates all squares of a tensor in one fp32 number: the error is 2 % at 60M
    # elements and depends on the mesh. Summed row by row, each sum is short.
    return [
        torch.linalg.vector_norm(grad, dim=-1, dtype=dtype).double().pow(2).sum().sqrt().to(dtype)
        for grad in gradients
    ]


class StoredPieces(Tensor):
    """A tensor of which a rank holds some rectangles, by their first elements.

    Of most parameters a rank holds one; of one that is several projections it holds one of each
    (`fused`). torch's distributed checkpoint saves and loads any tensor with the three methods
    below.
    """

    pieces: Mapping[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(
        cls, shape: torch.Size, pieces: Mapping[tuple[int, ...], Tensor], dtype: torch.dtype
    ) -> Self:
        """Wrap rectangles, which are written and read in place."""
        # One element; tensors on the meta device are replaced by empty ones before loading.
        stored: Self = torch.empty((), dtype=dtype).expand(shape).as_subclass(cls)
        stored.pieces = pieces
        return stored

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """Return what this rank writes."""
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size(self.shape),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return this rank's rectangles."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(start), sizes=piece.shape)
            for start, piece in self.pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the rectangle that begins at ``index.offset``."""
        assert index.offset is not None, "only rectangles are written and read"
        return self.pieces[tuple(index.offset)]
