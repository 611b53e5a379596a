"""Compares a sharded model with plain transformers, step by step, on every rank.

The other side is independent of memguard: transformers' own forward on the whole batch, torch's
cross-entropy on all logits, torch's clipping and AdamW. In float64 both sides run with
transformers' own upcasts to fp32, of norms, softmax and routers, turned into float64.
"""

import copy
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import peft
import pytest
import torch
import transformers
from meshes import mesh_of, to_mesh
from plain_losses import reduce_plainly
from ranks import RankPool
from tiny_families import build
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional

from memguard.config import GoldfishConfig, OptimConfig, TrainConfig
from memguard.data.loader import Batch
from memguard.hf.assembly import Assembly, build_meta_layer, fill_layer
from memguard.hf.safetensors import ModuleWeights
from memguard.mitigation import Mitigations, build_mitigations
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm, check_causal_lm, keeps_documents_apart
from memguard.parallel.fused import find_orders
from memguard.parallel.linear import Linear4D, to_local
from memguard.parallel.lora import (
    DropoutMasks,
    LoraSpec,
    attach_lora,
    fill_lora,
    is_adapter_parameter,
)
from memguard.parallel.mesh import Mesh4D
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.shard import checkpoint_blocks
from memguard.records import IGNORE_LABEL
from memguard.runtime import Runtime
from memguard.seeds import derive_generator
from memguard.train.step import TrainStep

NUM_ROWS, NUM_TOKENS = 8, 12
# float64: sums over ranks differ by some units in the last place (1e-16), matmuls of a few dozen
# terms by 1e-15; the slightest leak or factor is 1e-3 and more.
EXACT = 1e-10
# AdamW divides by sqrt(v) + 1e-8, which magnifies differences where a gradient is nearly zero.
EXACT_WEIGHTS = 1e-9
# float32: 1e-7 an operation, some hundred operations deep.
SINGLE = 1e-5

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)
# 131 and 97 divide by neither 2 nor 4: the last rank has fewer rows of the vocabulary.
TIED = (("tie_word_embeddings", True), ("vocab_size", 131))
UNTIED = (("tie_word_embeddings", False), ("vocab_size", 97))

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler to compile with"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and one way of training it."""

    family: str = "llama"
    changes: tuple[tuple[str, Any], ...] = ()
    """Fields of its configuration."""
    dtype: torch.dtype = torch.float64
    compute_dtype: torch.dtype | None = None
    micro_batch_size: int | None = None
    checkpointing: str = "none"
    compile: bool = False
    reshard_after_forward: bool = True
    order: tuple[str, ...] = ("data", "z", "y", "x")
    chunk_tokens: int = 7
    num_steps: int = 2
    """AdamW's moments need two."""
    mitigations: tuple[Any, ...] = ()
    """Configurations, beside the goldfish that masks the labels."""
    device: str = "cpu"
    """Of this rank, for both sides."""
    adapter: LoraSpec | None = None
    """Trained instead of the weights, on the other side by `peft`."""
    packed: bool = True
    """Rows of several documents; False for families that do not keep them apart."""
    quantization: Literal["nf4"] | None = None
    """Form of the frozen weights; the other side has them as bitsandbytes dequantises them."""
    padded: bool = False
    """Rows that end in padding."""
    plain: bool = False
    """One process, which keeps transformers' modules, instead of a mesh."""


def case_of(family: str, **fields: Any) -> Case:
    """Return the case of a family: packed rows if it keeps documents apart, experts in float64."""
    model = build(family)
    has_kernels = getattr(model.config, "_experts_implementation", "eager") != "eager"
    return Case(
        family=family,
        # Other kernels of experts have no float64.
        changes=(("experts_implementation", "eager"),) if has_kernels else (),
        packed=keeps_documents_apart(build_causal_lm(model)),
        **fields,
    )


@dataclass(frozen=True, kw_only=True)
class Worst:
    """Largest differences over all steps; each as a share of what it is compared with."""

    loss: float
    gradient: float
    norm: float
    weight: float
    router: float
    """Of the load-balancing loss, if the family's configuration has it."""
    where: str
    """The parameter with the largest difference of gradients."""


Degrees = tuple[int, int, int, int]


def compare(degrees: Degrees, cases: list[Case]) -> list[Worst]:
    """Train each case on a mesh (data, z, y, x) and on one process; on every rank."""
    results = []
    for number, case in enumerate(cases):
        build_reference(case)  # Imports the family's code, which is patched.
        is_first = case.family not in {each.family for each in cases[:number]}
        with upcasting_to(torch.promote_types(case.dtype, torch.float32)):
            results.append(_compare(degrees, case, is_first=is_first))
    return results


def check(ranks: RankPool, degrees: Degrees, cases: list[Case], tolerance: float = EXACT) -> None:
    """Assert that each case has the numbers of one process on a mesh, on every rank."""
    world_size = torch.Size(degrees).numel()
    results = ranks(compare, world_size, degrees, cases, timeout_s=280)
    for case, first, *others in zip(cases, *results, strict=True):
        assert all(each == first for each in others), "all ranks agree on every figure"
        largest = max(first.loss, first.gradient, first.norm, first.router)
        assert largest <= tolerance, (degrees, case, first)
        if tolerance == EXACT:
            assert first.weight <= EXACT_WEIGHTS, (degrees, case, first)


def _compare(degrees: Degrees, case: Case, *, is_first: bool) -> Worst:
    names = ("data", "z", "y", "x")
    shape = MeshShape(**dict(zip(names, degrees, strict=True)), order=case.order)
    device = torch.device(case.device)
    mesh = mesh_of(shape, device.type)
    model = build_reference(case)
    lm = _build_plain(case) if case.plain else build_sharded(case, model, mesh)
    if is_first:
        # As loading does: forwards without gradients come before the optimizer, and a head that
        # memguard does not know is replaced by the model's own forward.
        check_causal_lm(lm, is_split=not case.plain and max(degrees[2:]) > 1)
        assert keeps_documents_apart(lm) == case.packed
    lm.model.train()
    for each in (model, lm.model):
        _choose_experts_without_noise(each)
    if case.quantization is not None:
        _round_to_nf4(model)
    model = _wrap_in_peft(case, model, lm)
    step = TrainStep(
        lm=lm,
        mitigations=build_mitigations(case.mitigations, special_ids=[]),
        train=TrainConfig(batch_size=NUM_ROWS, micro_batch_size=case.micro_batch_size),
        optim=OPTIM,
        seed=0,
        runtime=Runtime(device=device, rank=dist.get_rank(), world_size=dist.get_world_size()),
    )
    frozen = {n: to_local(p).clone() for n, p in lm.model.named_parameters() if not p.requires_grad}
    gradients: dict[str, Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        gradients.clear()
        for each in step.parameters:
            if each.local.grad is not None:
                gradients[each.name] = each.local.grad.clone()

    step.optimizer.inner.register_step_pre_hook(keep_gradients)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    batches = [
        make_batch(number, vocab_size, packed=case.packed, padded=case.padded)
        for number in range(case.num_steps)
    ]
    groups = list_groups(case, mesh.shape.num_batch_ways)
    worst = {"loss": 0.0, "gradient": 0.0, "norm": 0.0, "weight": 0.0, "router": 0.0}
    where = ""
    expectations = _step_on_rank_0(model, case, groups, batches)
    for number, (batch, expected) in enumerate(zip(batches, expectations, strict=True), 1):
        result = step.run(share(batch, mesh), lr=OPTIM.lr, step=number, first_sample=0)
        assert result.num_kept == batch.num_kept
        assert result.loss is not None
        assert result.grad_norm is not None
        worst["loss"] = max(worst["loss"], abs(result.loss / expected.loss - 1))
        worst["norm"] = max(worst["norm"], abs(result.grad_norm / expected.grad_norm - 1))
        assert (result.router_loss is None) == (expected.router_loss is None)
        if result.router_loss is not None and expected.router_loss is not None:
            difference = abs(result.router_loss / expected.router_loss - 1)
            worst["router"] = max(worst["router"], difference)
        clipped_norm = min(expected.grad_norm, OPTIM.max_grad_norm or np.inf)
        floor = 1e-3 * clipped_norm
        assert gradients.keys() == expected.gradients.keys()
        reached = [each for each in step.parameters if each.name in gradients]
        for name, error in _distances(reached, gradients, expected.gradients, floor):
            if error > worst["gradient"]:
                worst["gradient"], where = error, name
        ours = {each.name: each.local.detach() for each in step.parameters}
        assert ours.keys() == expected.weights.keys()
        for _, error in _distances(step.parameters, ours, expected.weights, 0.0):
            worst["weight"] = max(worst["weight"], error)
    for name, parameter in lm.model.named_parameters():
        if name in frozen:
            assert torch.equal(to_local(parameter), frozen[name]), f"{name} is frozen"
            assert parameter.grad is None, f"{name} is frozen"
    return Worst(**worst, where=where)


def _step_on_rank_0(
    model: Any, case: Case, groups: list[list[int]], batches: list[Batch]
) -> "list[Expected]":
    """Take the steps of the other side on one rank, and return what they gave on every rank."""
    steps: list[Any] = [None]
    if dist.get_rank() == 0:
        reference = Reference(model, case.mitigations, groups)
        steps = [[reference.step(batch) for batch in batches]]
    dist.broadcast_object_list(steps, device=torch.device("cpu"))
    for expected in steps[0]:
        for tensors in (expected.gradients, expected.weights):
            tensors.update({name: tensor.to(case.device) for name, tensor in tensors.items()})
    expectations: list[Expected] = steps[0]
    return expectations


def build_sharded(case: Case, model: Any, mesh: Mesh4D) -> CausalLM:
    layer = build_meta_layer(
        # transformers writes into the configuration of a model that it makes.
        copy.deepcopy(model.config),
        Assembly(
            mesh=mesh,
            device=torch.device(case.device),
            dtype=case.dtype,
            compute_dtype=case.compute_dtype,
            chunk_tokens=case.chunk_tokens,
            checkpointing=case.checkpointing,  # type: ignore[arg-type]
            reshard_after_forward=case.reshard_after_forward,
            compile=case.compile,
            adapter=case.adapter,
            quantization=case.quantization,
        ),
    )
    fill_layer(layer, ModuleWeights(model), name="parity")
    return layer.lm


def _build_plain(case: Case) -> CausalLM:
    model = build_reference(case)
    lm = build_causal_lm(model, chunk_tokens=case.chunk_tokens)
    assert case.adapter is not None, "a mesh is compared with transformers otherwise"
    attach_lora(model, case.adapter)
    fill_lora(model, case.adapter)
    checkpoint_blocks(model, case.checkpointing)  # type: ignore[arg-type]
    return lm


@torch.no_grad()
def _round_to_nf4(model: Any) -> None:
    """Replace the weights of all linear layers but the head, each quantised whole."""
    # Of the extra `quant`, which other comparisons do not need.
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            row = module.weight.detach().to(torch.float32).reshape(1, -1)
            packed, state = quantize_4bit(row, blocksize=64, quant_type="nf4")
            dense = dequantize_4bit(packed, state)
            module.weight.copy_(dense.reshape(module.weight.shape))


@torch.no_grad()
def _wrap_in_peft(case: Case, model: Any, lm: CausalLM) -> Any:
    """Give the other side adapters too, and both sides the same values, none of them zero."""
    spec = case.adapter
    if spec is None:
        return model
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=spec.r,
            lora_alpha=spec.alpha,  # type: ignore[arg-type]
            target_modules=list(spec.target_modules or ()) or "all-linear",
            use_rslora=spec.use_rslora,
            use_dora=spec.use_dora,
            lora_dropout=spec.dropout,
            task_type="CAUSAL_LM",
        ),
    ).to(case.dtype)
    if spec.dropout:
        _use_masks(wrapped, spec, lm)
    values = dict(trained_parameters(wrapped))
    magnitudes = {n: p.detach().clone() for n, p in values.items() if p.ndim == 1}
    generator = torch.Generator().manual_seed(2)
    for name in sorted(values):
        noise = torch.randn(values[name].shape, generator=generator, dtype=torch.float64)
        # Magnitudes are near the norms of the rows.
        is_factor = values[name].ndim == 2
        values[name].copy_(noise * 0.2 + (0 if is_factor else values[name]))
    found = {n: p for n, p in lm.model.named_parameters() if is_adapter_parameter(n)}
    assert found.keys() == values.keys()
    orders = find_orders(lm.model)

    def take_piece(name: str, full: Tensor) -> Tensor:
        parameter = found[name]
        if not isinstance(parameter, DTensor):
            return full
        full = to_mesh(orders[name], full) if name in orders else full
        return full[own_piece(parameter)]

    for name, parameter in found.items():
        if name in magnitudes:
            # peft's own values, which it computes in float32.
            initial = take_piece(name, magnitudes[name])
            torch.testing.assert_close(to_local(parameter).detach(), initial, rtol=1e-5, atol=0)
        to_local(parameter).copy_(take_piece(name, values[name]))
    return wrapped.train()


def trained_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that train, by the names that memguard has for them."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = name.removeprefix("base_model.model.").replace(".default.", ".")
            yield name, parameter


def _use_masks(wrapped: Any, spec: LoraSpec, lm: CausalLM) -> None:
    """Drop the features on the other side that the ranks drop, put together from their pieces."""
    for name, layer in lm.model.named_modules():
        if not isinstance(layer, Linear4D) or layer.draw_mask is None:
            continue
        num_ways = 1 if lm.mesh is None else lm.mesh.shape.num_batch_ways
        pieces = [
            [DropoutMasks(spec, name, rank) for rank in range(layer.in_axis.degree)]
            for _ in range(num_ways)
        ]
        for way, masks in enumerate(pieces):
            for mask in masks:
                mask.start(way * (NUM_ROWS // num_ways))
        other = wrapped.get_submodule(f"base_model.model.{name}")
        other.lora_dropout["default"] = _Masked(pieces, spec.dropout)


class _Masked(nn.Module):
    def __init__(self, pieces: list[list[DropoutMasks]], rate: float) -> None:
        super().__init__()
        self.pieces, self.rate = pieces, rate

    def forward(self, input_MK: Tensor) -> Tensor:
        rows = []
        for pieces, share in zip(self.pieces, input_MK.chunk(len(self.pieces)), strict=True):
            parts = share.chunk(len(pieces), -1)
            masks = [piece(part) for piece, part in zip(pieces, parts, strict=True)]
            rows.append(torch.cat(masks, -1))
        return input_MK * torch.cat(rows) / (1 - self.rate)


def own_piece(tensor: DTensor) -> tuple[slice, ...]:
    """Return torch's own account of what this rank stores; ours is what the loader went by."""
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))


def _distances(
    parameters: Any, local: dict[str, Tensor], full: dict[str, Tensor], floor: float
) -> list[tuple[str, float]]:
    """Return name and ||ours - theirs|| / max(||theirs||, floor), over all ranks' pieces."""
    squares = []
    for each in parameters:
        source, ours, theirs = each.source, local[each.name], full[each.name]
        if not isinstance(source, DTensor):
            squares.append((ours - theirs).double().pow(2).sum())
            continue
        theirs = theirs if each.order is None else to_mesh(each.order, theirs)
        theirs = theirs[own_piece(source)]
        assert theirs.shape == ours.shape, each.name
        squares.append((ours - theirs).double().pow(2).sum() / each.num_copies)
    sums = torch.stack(squares)
    dist.all_reduce(sums)
    return [
        (each.name, square**0.5 / max(float(full[each.name].double().norm()), floor))
        for each, square in zip(parameters, sums.tolist(), strict=True)
    ]


def share(batch: Batch, mesh: Mesh4D) -> Batch:
    size = -(-NUM_ROWS // mesh.shape.num_batch_ways)
    rows = slice(mesh.batch_rank * size, (mesh.batch_rank + 1) * size)
    labels = batch.labels[rows]
    return Batch(
        input_ids=batch.input_ids[rows],
        labels=labels,
        position_ids=batch.position_ids[rows],
        document_ids=batch.document_ids[rows],
        num_supervised=int((labels != IGNORE_LABEL).sum()),
        num_kept=int((labels != IGNORE_LABEL).sum()),
        reference_nll=None if batch.reference_nll is None else batch.reference_nll[rows],
        forget=None if batch.forget is None else batch.forget[rows],
    )


def list_groups(case: Case, num_ways: int) -> list[list[int]]:
    """The rows that all ranks have in each micro-batch."""
    parts = np.arange(NUM_ROWS).reshape(num_ways, -1)
    size = case.micro_batch_size or parts.shape[1]
    return [
        parts[:, first : first + size].ravel().tolist() for first in range(0, len(parts[0]), size)
    ]


def make_batch(number: int, vocab_size: int, *, packed: bool = True, padded: bool = False) -> Batch:
    """Rows of two or three documents, or of one, with goldfish on."""
    draw = derive_generator(number, "parity batch")
    shape = (NUM_ROWS, NUM_TOKENS)
    # The last token is never drawn: its row of the head still has a gradient.
    input_ids = draw.integers(0, vocab_size - 1, shape)
    starts = np.zeros(shape, dtype=bool)
    starts[:, 0] = True
    for row in range(NUM_ROWS if packed else 0):
        starts[row, draw.choice(np.arange(2, NUM_TOKENS - 1), 1 + row % 2, replace=False)] = True
    document_ids = starts.cumsum(1) - 1
    columns = np.arange(NUM_TOKENS)
    begins = np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
    labels = _goldfish().mask_labels(
        input_ids,
        np.where(starts, IGNORE_LABEL, input_ids),
        document_ids=document_ids,
        generator=draw,
    )
    # One rank's rows have no label at all.
    labels[:1] = IGNORE_LABEL
    if padded:
        for row in range(NUM_ROWS):
            end = NUM_TOKENS - row % 4
            document_ids[row, end:], labels[row, end:] = -1, IGNORE_LABEL
    num_kept = int((labels != IGNORE_LABEL).sum())
    # Of models of about a hundred tokens, some labels known better than those of the model here.
    reference_nll = draw.normal(4.7, 0.7, shape).astype(np.float32)
    return Batch(
        input_ids=input_ids,
        labels=labels,
        position_ids=columns - begins,
        document_ids=document_ids,
        num_supervised=num_kept,
        num_kept=num_kept,
        reference_nll=reference_nll,
        # The first piece of every other row.
        forget=(document_ids == 0) & (np.arange(NUM_ROWS) % 2 == 1)[:, None],
    )


def _goldfish() -> Mitigations:
    config = GoldfishConfig(name="goldfish", k=3, context_width=2)
    return build_mitigations([config], special_ids=[])


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One step of the other side."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    """After clipping; of parameters that text does not reach, none."""
    weights: dict[str, Tensor]
    """After the step."""
    router_loss: float | None = None


def build_reference(case: Case) -> Any:
    """Build the same tiny random model on every rank, with weights that leave nothing zero."""
    model = build(case.family, dtype=case.dtype, **dict(case.changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(case.dtype)
            parameter.add_(noise * (0.1 if parameter.ndim == 1 else 0.05))
    _set_buffers(model)
    return model.to(case.device).train()


def _set_buffers(model: Any) -> None:
    """Compute buffers that no file has as loading does: GPT-J's angles differ by 1e-7 otherwise.

    A model made from a configuration computes them in its own dtype, a loaded one in fp32.
    """
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        is_owner = isinstance(module, transformers.PreTrainedModel)
        owners[name] = module if is_owner else owners[name.rpartition(".")[0]]
        if module._non_persistent_buffers_set and not module._parameters:
            owners[name]._init_weights(module)


def _choose_experts_without_noise(model: Any) -> None:
    """Phi-MoE draws experts at random in training, whatever its configuration sets."""
    for module in model.modules():
        if hasattr(module, "router_jitter_noise"):
            module.eval()


class Reference:
    """transformers and torch on one process."""

    def __init__(
        self, model: Any, mitigations: tuple[Any, ...] = (), groups: list[list[int]] | None = None
    ) -> None:
        self.model, self.mitigations = model, mitigations
        self.groups = groups or [list(range(NUM_ROWS))]
        self.parameters = [parameter for _, parameter in trained_parameters(model)]
        vectors = [p for p in self.parameters if p.ndim < 2]
        matrices = [p for p in self.parameters if p.ndim >= 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": OPTIM.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=OPTIM.lr,
            betas=OPTIM.betas,
            eps=OPTIM.eps,
        )

    def step(self, batch: Batch) -> Expected:
        """Take one step on the whole batch."""
        has_noise = any(config.name == "neftune" for config in self.mitigations)
        logits = self.model(
            # Some families look tokens up in other tables too.
            **{"inputs_embeds": self._embed(batch)}
            if has_noise
            else {"input_ids": self._move(batch.input_ids)},
            position_ids=self._move(batch.position_ids),
            use_cache=False,
        ).logits[:, :-1]
        labels = self._move(batch.labels)[:, 1:]
        if self.mitigations:
            assert batch.reference_nll is not None
            assert batch.forget is not None
            piece_ids = np.arange(NUM_ROWS)[:, None] * NUM_TOKENS + batch.document_ids
            loss = reduce_plainly(
                logits.flatten(0, 1),
                labels.flatten(),
                self.mitigations,
                reference_nll_N=self._move(batch.reference_nll)[:, 1:].flatten(),
                piece_N=self._move(piece_ids)[:, 1:].flatten(),
                forget_N=self._move(batch.forget)[:, 1:].flatten(),
            )
        else:
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        router_loss = None
        if getattr(self.model.config, "output_router_logits", False):
            router_loss = self._find_router_loss(batch)
        self.optimizer.zero_grad()
        if router_loss is None:
            loss.backward()
        else:
            (loss + self.model.router_aux_loss_coef * router_loss).backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, OPTIM.max_grad_norm or np.inf)
        gradients = {}
        for name, parameter in trained_parameters(self.model):
            if parameter.grad is not None:
                gradients[name] = parameter.grad.clone()
        self.optimizer.step()
        return Expected(
            loss=float(loss.detach()),
            grad_norm=float(norm),
            gradients=gradients,
            weights={n: p.detach().clone() for n, p in trained_parameters(self.model)},
            router_loss=None if router_loss is None else float(router_loss.detach()),
        )

    def _find_router_loss(self, batch: Batch) -> Tensor:
        """Mean over micro-batches of the loss that transformers computes of their rows."""
        function = sys.modules[type(self.model).__module__].load_balancing_loss_func  # type: ignore[attr-defined]
        losses = []
        for rows in self.groups:
            logits = self.model(
                input_ids=self._move(batch.input_ids[rows]),
                position_ids=self._move(batch.position_ids[rows]),
                use_cache=False,
            ).router_logits
            # Given to the model, a mask of packed rows would let their documents see each other.
            mask = self._move((batch.document_ids[rows] >= 0).astype(np.int64))
            counts = self.model.num_experts, self.model.num_experts_per_tok
            losses.append(function(logits, *counts, mask))
        return torch.stack(losses).mean()

    def _move(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)

    def _embed(self, batch: Batch) -> Tensor:
        """Look up the tokens, with NEFTune's noise where it is asked for."""
        embedding = self.model.get_input_embeddings()
        hidden: Tensor = embedding(self._move(batch.input_ids))
        for config in self.mitigations:
            if config.name == "neftune":
                size = (NUM_TOKENS, hidden.shape[2])
                scale = np.float32(config.alpha / np.prod(size) ** 0.5)
                draws = [derive_generator(0, "neftune", row) for row in range(NUM_ROWS)]
                noise = [(2 * draw.random(size, np.float32) - 1) * scale for draw in draws]
                hidden = hidden + self._move(np.stack(noise)).to(hidden.dtype)
        return hidden


class _Torch:
    """The module `torch`, for code that names ``torch.float32``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.float32 = self.float = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def upcasting_to(dtype: torch.dtype) -> Iterator[None]:
    """Let transformers, which upcasts to fp32 in places, upcast to another dtype meanwhile."""
    if dtype == torch.float32:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            is_code = name.startswith("transformers.") and getattr(module, "__dict__", None)
            if is_code and vars(module).get("torch") is torch:
                patch.setattr(module, "torch", _Torch(dtype))
        to_single = Tensor.float
        patch.setattr(
            Tensor, "float", lambda tensor: tensor if tensor.dtype == dtype else to_single(tensor)
        )
        yield
