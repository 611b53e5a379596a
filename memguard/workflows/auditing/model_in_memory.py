"""A model in the memory of the program that calls memguard: what it is, and how it is borrowed.

    plain, LoRA, DoRA, 4 bits   a copy of the module tree that shares all parameters and buffers
    DDP                         the same on each rank; ranks split the documents
    FSDP2                       the module itself, since FSDP2 forbids copies; each rank runs the
                                same number of forwards

A copy needs no memory for weights, and the audit's settings (evaluation mode, attention of packed
rows, the adapter switched off) apply only to it. What an audit changes on a module of FSDP2 is
undone at its end. The program's model keeps its mode, device, dtype, gradients and hooks.

Trainers replace the `forward` of single modules, often by a closure over the original model. Such a
`forward` is not copied: the copy has that of its class. While the model is audited, hooks on the
decoder layers of the original raise an error if it runs all the same.
"""

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from memguard.errors import ModelError
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm, check_causal_lm
from memguard.model.evaluation import is_4bit
from memguard.model.fsdp_root import FsdpRoot, find_root
from memguard.parallel.hf_plan import find_blocks
from memguard.runtime import Runtime
from memguard.workflows.auditing.wrapped_models import (
    check_switchable,
    is_of_adapter,
    switched_off,
    unwrap,
)

_NAMES: dict[torch.dtype, Literal["fp32", "bf16"]] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_MAX_HASHED_BYTES = 8 << 30
"""Larger models are audited without the cache: hashing them would take longer than a minute."""
_SAVE = "save it and audit the folder"
_SAMPLED = 64
"""Values of each parameter that are compared between ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelInMemory:
    """A causal language model and its tokenizer."""

    model: Any
    """A `transformers.PreTrainedModel` on one device."""
    tokenizer: Any
    """None if all documents are token ids."""
    root: Any = None
    """The outermost module that FSDP2 shards; None if the model is not sharded."""
    adapter: str = ""
    """Description of the active peft adapter; "" without one."""
    is_adapter_off: bool = False
    """Whether it is the same model with the adapter switched off."""

    @classmethod
    def open(cls, model: Any, tokenizer: Any) -> "ModelInMemory":
        """Take a model, also one wrapped by peft (LoRA, DoRA), `torch.compile`, DDP or FSDP2."""
        module, adapter, wrappers = unwrap(model)
        root = find_root(*wrappers, module) if isinstance(module, torch.nn.Module) else None
        opened = cls(model=module, tokenizer=tokenizer, root=root, adapter=adapter)
        _ = opened.dtype  # Raises if it cannot be audited.
        return opened

    def switch_off(self) -> "ModelInMemory":
        """Return the model without its adapter, as it was before training."""
        if not self.adapter:
            raise ModelError(
                "'base' is 'adapter-off', and the model has no adapter of peft. Give the folder or "
                "hub id of the base model"
            )
        check_switchable(self.model)
        return replace(self, is_adapter_off=True)

    @property
    def name(self) -> str:
        """Last two parts of the path it was loaded from, else its class; and its adapter."""
        path = str(getattr(self.model.config, "_name_or_path", "") or "")
        name = "/".join(path.rstrip("/").split("/")[-2:]) or type(self.model).__name__
        if not self.adapter:
            return name
        return f"{name} without its adapter" if self.is_adapter_off else f"{name}, {self.adapter}"

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has only a part of the weights."""
        return self.root is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences of the report about the form in which the model is audited."""
        quantised = [module for module in self.model.modules() if is_4bit(module)]
        if not quantised:
            return ()
        kind = quantised[0].weight.quant_state.quant_type.upper()
        text = f"The model was audited as it is in memory: {len(quantised):,} layers in 4 bits "
        if not self.adapter:
            return (f"{text}({kind}).",)
        return (
            f"{text}({kind}), with its adapter over them. The adapter merged into the base that is "
            "not quantised is another model, with scores of its own: save the adapter and audit "
            "its folder, which loads that base, before such a model is shipped.",
        )

    @cached_property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """Dtype of the audit's computation: that of the weights, or to which they are cast."""
        if not isinstance(self.model, transformers.PreTrainedModel):
            raise ModelError(
                f"'model' must be a folder, a hub id or a transformers.PreTrainedModel; got "
                f"{type(self.model).__name__}"
            )
        quantised = [module for module in self.model.modules() if is_4bit(module)]
        packed = {id(module.weight) for module in quantised}
        # peft keeps adapters in fp32 over a base in bf16, and casts in each layer.
        tensors = [
            tensor
            for name, tensor in self.model.named_parameters()
            if not is_of_adapter(name) and id(tensor) not in packed
        ]
        dtypes = {tensor.dtype for tensor in tensors}
        if quantised:
            # Layers in 4 bits cast their inputs; other layers were prepared for training in fp32.
            dtypes |= {m.compute_dtype for m in quantised if m.compute_dtype is not None}
        if self.is_sharded:
            cast = self.root._get_fsdp_state()._mp_policy.param_dtype
            dtypes = dtypes if cast is None else {cast}
        obstacles = self._list_obstacles(tensors, dtypes, is_quantised=bool(quantised))
        if obstacle := next(obstacles, ""):
            raise ModelError(f"'model' {obstacle}")
        return "bf16" if torch.bfloat16 in dtypes else "fp32"

    def _list_obstacles(
        self, tensors: list[Tensor], dtypes: set[torch.dtype], *, is_quantised: bool
    ) -> Iterator[str]:
        """List why a model with these weights cannot be audited where it is."""
        if any(isinstance(tensor, DTensor) for tensor in tensors) and not self.is_sharded:
            yield f"is sharded over processes by something else than FSDP2; {_SAVE}"
        if self.is_sharded and is_quantised:
            yield f"has layers in 4 bits that FSDP2 shards; {_SAVE}"
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) > 1 or "meta" in devices:
            yield f"must be on one device; it is on {', '.join(sorted(devices))}"
        if self.is_sharded and devices == {"cpu"} and torch.cuda.is_available():
            yield f"keeps its shards on the CPU and computes on a GPU; {_SAVE}"
        if not dtypes <= _NAMES.keys() or (len(dtypes) > 1 and not is_quantised):
            yield (
                "must have all its weights in float32 or all in bfloat16; got "
                f"{', '.join(sorted(map(str, dtypes)))}. {_explain_dtype(dtypes)}"
            )

    @cached_property
    def weights_sha256(self) -> str | None:
        """Hash of configuration and weights; None for more than 8 GiB of weights.

        Of a sharded model every rank must read it: its weights are gathered one by one.
        """
        state: dict[str, Tensor] = self.model.state_dict()
        if self.is_adapter_off:
            state = {name: t for name, t in state.items() if not is_of_adapter(name)}
        if sum(tensor.nbytes for tensor in state.values()) > _MAX_HASHED_BYTES:
            return None
        digest = hashlib.sha256(self._describe_config().encode())
        for name, tensor in sorted(state.items()):
            digest.update(f"\0{name}\0{tensor.dtype}{list(tensor.shape)}\0".encode())
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            raw = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.numpy().data)
        return digest.hexdigest()

    def _describe_config(self) -> str:
        return json.dumps(self.model.config.to_dict(), sort_keys=True, default=str)

    def check_equal(self, runtime: Runtime) -> None:
        """Check that several ranks have the same model, from which they score other documents."""
        if runtime.world_size == 1 or self.is_sharded:
            return
        digest = hashlib.sha256(self._describe_config().encode())
        for name, tensor in sorted(self.model.named_parameters()):
            sample = tensor.detach().reshape(-1)[:_SAMPLED].cpu().contiguous()
            digest.update(name.encode() + sample.view(torch.uint8).numpy().tobytes())
        if len(set(runtime.gather_objects(digest.hexdigest()))) > 1:
            raise ModelError(
                "'model' has other weights on another process, so that they cannot share an audit; "
                "audit each model in a program of its own"
            )

    @contextmanager
    def borrow(self, runtime: Runtime) -> Iterator[CausalLM]:
        """Yield the model for scoring and decoding, on every rank; at the end it is as before.

        Raises:
            ModelError: a forward of the copy does not run the copy's decoder layers, or runs those
                of the original, which may be in training mode; or it is not a causal model.
        """
        self.check_equal(runtime)
        peers = runtime if runtime.world_size > 1 else None
        in_place = self.is_sharded
        borrowed = self._borrow_in_place(runtime, peers) if in_place else self._borrow_copy(peers)
        with torch.compiler.set_stance("force_eager"), borrowed as lm:
            yield lm

    @contextmanager
    def _borrow_in_place(self, runtime: Runtime, peers: Runtime | None) -> Iterator[CausalLM]:
        root = FsdpRoot(self.root, runtime)
        with ExitStack() as undo:
            undo.callback(root.close)
            lm = CausalLM(self.model, peers=peers, root=root, compute_dtype=root.compute_dtype)
            undo.callback(lm.attention.restore, self.model)
            if self.is_adapter_off:
                undo.enter_context(switched_off(self.model))
            check_causal_lm(lm)
            yield lm

    @contextmanager
    def _borrow_copy(self, peers: Runtime | None) -> Iterator[CausalLM]:
        copied = _copy_without_weights(self.model).eval()
        ran: set[torch.nn.Module] = set()

        def refuse(*_: Any) -> None:
            raise ModelError(
                "'model' has a 'forward' that a copy of the model shares with it, so the audit "
                f"would run the original in its own mode; {_SAVE}"
            )

        def note(layer: torch.nn.Module, *_: Any) -> None:
            ran.add(layer)

        with ExitStack() as undo:
            for layer in _find_layers(copied):
                layer.register_forward_pre_hook(note)
            for layer in _find_layers(self.model):
                undo.callback(layer.register_forward_pre_hook(refuse).remove)
            if self.is_adapter_off:
                undo.enter_context(switched_off(copied))
            dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float32
            lm = build_causal_lm(copied, peers=peers, compute_dtype=dtype)
            if not ran:
                raise ModelError(
                    "'model' has a 'forward' that does not run the decoder layers of a copy of the "
                    f"model; {_SAVE}"
                )
            yield lm


def _explain_dtype(dtypes: set[torch.dtype]) -> str:
    if any(not dtype.is_floating_point for dtype in dtypes):
        return "Of quantised models an audit reads 4 bits of bitsandbytes; audit the saved model"
    return "Convert it, e.g. model.float()"


def _copy_without_weights(model: Any) -> Any:
    """Return a copy of the module tree with the same parameters and buffers.

    Each module has the `forward` of its class, except modules with hooks of accelerate, which move
    tensors between devices: their `forward` is copied with them.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    replaced = {
        id(module.forward): module.forward
        for module in model.modules()
        if "forward" in vars(module) and not hasattr(module, "_hf_hook")
    }
    # Accelerate's note of the forward that it has wrapped, which may be that of a wrapper.
    noted = {
        id(forward): forward
        for module in model.modules()
        if (forward := vars(module).get("_original_forward")) is not None
    }
    copied = copy.deepcopy(model, shared | replaced | noted)
    for name, module in copied.named_modules():
        if id(vars(module).get("forward")) in replaced:
            if type(module).forward is torch.nn.Module.forward:
                raise ModelError(
                    f"'model': the class of {name or 'the model'} ({type(module).__name__}) has no "
                    f"'forward', only this object has; {_SAVE}"
                )
            del module.forward
    return copied


def _find_layers(model: Any) -> list[torch.nn.Module]:
    """Return the decoder layers; every module below the model if it has no list of layers.

    The model itself tells nothing: a copy's own hooks run too before a closure over the original.
    """
    layers = [model.get_submodule(name) for name in find_blocks(model)]
    return layers or [module for module in model.modules() if module is not model]
