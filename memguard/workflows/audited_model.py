"""A model of an audit: loaded at its first use and kept in memory until its last.

    folder or hub id   plain, over several devices, on a mesh, or as a variant
    model in memory    a copy of the module tree that shares all parameters and buffers

The copy needs no memory for weights, and the audit's settings (evaluation mode, attention of packed
rows) apply only to it. The program's model keeps its mode, device, dtype, gradients and hooks.

Trainers replace the `forward` of single modules, often by a closure over the original model. Such a
`forward` is not copied: the copy has that of its class. While the model is audited, hooks on the
decoder layers of the original raise an error if it runs all the same.
"""

import copy
import gc
import hashlib
import json
import tempfile
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from memguard.audit.decoding import DECODED_TOKENS, Decoder
from memguard.audit.scoring import ModelScorer
from memguard.config import AuditConfig
from memguard.errors import ModelError
from memguard.hf.adapter_files import find_config
from memguard.hf.assembly import Assembly
from memguard.hf.checkpoint import find_positions, load_config
from memguard.hf.load import count_parameters, load_model, load_sharded, plan_devices
from memguard.hf.variants import VariantForm
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.hf_plan import find_blocks
from memguard.planner.meta_model import outline_model
from memguard.workflows.peft_models import (
    check_switchable,
    is_of_adapter,
    switch_adapters_off,
    unwrap,
)
from memguard.workflows.setup import DistributedContext

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NAMES: dict[torch.dtype, Literal["fp32", "bf16"]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
}
_MAX_HASHED_BYTES = 8 << 30
"""Larger models are audited without the cache: hashing them would take longer than a minute."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelInMemory:
    """A causal language model and its tokenizer."""

    model: Any
    """A `transformers.PreTrainedModel` on one device."""
    tokenizer: Any
    """None if all documents are token ids."""
    adapter: str = ""
    """Description of the active peft adapter; "" without one."""
    is_adapter_off: bool = False
    """Whether it is the same model with the adapter switched off."""

    @classmethod
    def open(cls, model: Any, tokenizer: Any) -> "ModelInMemory":
        """Take a model, also one wrapped by peft (LoRA, DoRA) or by `torch.compile`.

        Raises:
            ModelError: see `unwrap` and `dtype`.
        """
        module, adapter = unwrap(model)
        opened = cls(model=module, tokenizer=tokenizer, adapter=adapter)
        _ = opened.dtype  # Raises if it cannot be audited.
        return opened

    def switch_off(self) -> "ModelInMemory":
        """Return the model without its adapter, as it was before training.

        Raises:
            ModelError: it has no adapter, or is another model without it.
        """
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

    @cached_property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """Dtype of the audit's computation, equal to that of the weights.

        Raises:
            ModelError: not an unsharded model on one device in fp32 or bf16.
        """
        if not isinstance(self.model, transformers.PreTrainedModel):
            raise ModelError(
                f"'model' must be a folder, a hub id or a transformers.PreTrainedModel; got "
                f"{type(self.model).__name__}"
            )
        # peft keeps adapters in fp32 over a base in bf16, and casts in each layer.
        tensors = [t for name, t in self.model.named_parameters() if not is_of_adapter(name)]
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            raise ModelError("'model' is sharded over processes; save it and audit the folder")
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) > 1 or "meta" in devices:
            raise ModelError(
                f"'model' must be on one device; it is on {', '.join(sorted(devices))}"
            )
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1 or not dtypes <= _NAMES.keys():
            raise ModelError(
                "'model' must have all its weights in float32 or all in bfloat16; got "
                f"{', '.join(sorted(map(str, dtypes)))}. Convert it, e.g. model.float()"
            )
        return _NAMES[dtypes.pop()]

    @cached_property
    def weights_sha256(self) -> str | None:
        """Hash of configuration and weights; None for more than 8 GiB of weights."""
        state: dict[str, Tensor] = self.model.state_dict()
        if self.is_adapter_off:
            state = {name: t for name, t in state.items() if not is_of_adapter(name)}
        if sum(tensor.nbytes for tensor in state.values()) > _MAX_HASHED_BYTES:
            return None
        digest = hashlib.sha256(self._describe_config().encode())
        for name, tensor in sorted(state.items()):
            digest.update(f"\0{name}\0{tensor.dtype}{list(tensor.shape)}\0".encode())
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.numpy().data)
        return digest.hexdigest()

    def _describe_config(self) -> str:
        return json.dumps(self.model.config.to_dict(), sort_keys=True, default=str)


class LazyModel:
    """A model for `run_audit`; `free` releases it, or the copy of a model in memory."""

    def __init__(
        self,
        model: str | ModelInMemory,
        *,
        revision: str | None = None,
        base: str | None = None,
        weights_sha256: str | None,
        settings: AuditConfig,
        attn: str | None,
        distributed: DistributedContext,
        form: VariantForm | None = None,
    ) -> None:
        """Store the location of a model; nothing is loaded or copied.

        Args:
            model: folder or hub id; or a model in memory, which is audited on its own device, in
                its dtype and with its attention.
            revision: of a hub id.
            base: folder or hub id of an adapter's base; None locates it.
            weights_sha256: hash of the weights; None if not hashed, which disables the score cache.
            settings: the audit's.
            attn: attention implementation.
            distributed: this process and the mesh it is part of.
            form: of a variant, on one process; None loads the model as it is.
        """
        self._model, self._revision, self._base, self._attn = model, revision, base, attn
        self._weights_sha256, self._settings, self._form = weights_sha256, settings, form
        self._mesh, self._runtime = distributed.mesh, distributed.runtime
        if isinstance(model, ModelInMemory):
            self._runtime = replace(self._runtime, device=model.model.device)
        self._lm: CausalLM | None = None
        self._scorer: ModelScorer | None = None
        self._decoder: Decoder | None = None
        self._num_parameters: int | None = None
        self._offload: tempfile.TemporaryDirectory[str] | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def identity(self) -> str | None:
        """Key of the score cache: weights, configuration, arithmetic; None if not hashed."""
        if self._weights_sha256 is None:
            return None
        if isinstance(self._model, ModelInMemory):
            attn = getattr(self._config, "_attn_implementation", None)
            weights = f"in memory {self._weights_sha256} {self._model.dtype}"
        else:
            # With another rotary base, window or scale the same weights are a different model.
            config = hashlib.sha256(find_config(self._model, base=self._base).read_bytes())
            attn = self._attn
            weights = f"{self._weights_sha256} {config.hexdigest()} {self._settings.dtype}"
        versions = f"torch {torch.__version__} transformers {transformers.__version__}"
        form = "" if self._form is None else f" {self._form.describe()}"
        return f"{weights} {self._runtime.device.type} {attn} {versions}{form}"

    @cached_property
    def _config(self) -> Any:
        if isinstance(self._model, ModelInMemory):
            return self._model.model.config
        return load_config(self._model, revision=self._revision, base=self._base)

    @property
    def max_tokens(self) -> int | None:
        """Number of positions; None if the configuration does not limit it."""
        return find_positions(self._config)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones counted once; does not load the model."""
        if isinstance(self._model, ModelInMemory):
            return count_parameters(self._model.model)
        if self._num_parameters is None:
            self._num_parameters = outline_model(self._config, name=self._model).num_parameters
        return self._num_parameters

    def scorer(self) -> ModelScorer:
        """Return the scorer, the same object until `free`; the first call loads the model."""
        if self._scorer is None:
            tokens = self._settings.batch_tokens
            self._scorer = ModelScorer(self._get(), tokens, self._runtime)
        return self._scorer

    def decoder(self) -> Decoder:
        """Return the decoder, the same object until `free`; the first call loads the model."""
        if self._decoder is None:
            tokens = self._settings.batch_tokens or DECODED_TOKENS
            self._decoder = Decoder(self._get(), tokens, self._runtime)
        return self._decoder

    def free(self) -> None:
        """Release the model."""
        self._scorer = self._decoder = self._lm = None
        while self._hooks:
            self._hooks.pop().remove()
        gc.collect()
        if self._offload is not None:
            self._offload.cleanup()
            self._offload = None

    def _get(self) -> CausalLM:
        if self._lm is None:
            gc.collect()  # Reference cycles may still hold a model that was trained before.
            self._lm = self._load()
        return self._lm

    def _wrap_copy(self, original: Any, *, is_adapter_off: bool) -> CausalLM:
        """Return the copy of a model in memory.

        Raises:
            ModelError: a forward of the copy does not run the copy's decoder layers, or runs those
                of the original, which may be in training mode.
        """
        copied = _copy_without_weights(original).eval()
        if is_adapter_off:
            switch_adapters_off(copied)
        ran: set[torch.nn.Module] = set()

        def refuse(*_: Any) -> None:
            raise ModelError(
                "'model' has a 'forward' that a copy of the model shares with it, so the audit "
                "would run the original in its own mode; save it and audit the folder"
            )

        def note(layer: torch.nn.Module, *_: Any) -> None:
            ran.add(layer)

        self._hooks += [layer.register_forward_pre_hook(note) for layer in _find_layers(copied)]
        self._hooks += [layer.register_forward_pre_hook(refuse) for layer in _find_layers(original)]
        lm = build_causal_lm(copied)
        if not ran:
            raise ModelError(
                "'model' has a 'forward' that does not run the decoder layers of a copy of the "
                "model; save it and audit the folder"
            )
        return lm

    def _load(self) -> CausalLM:
        if isinstance(self._model, ModelInMemory):
            off = self._model.is_adapter_off
            return self._wrap_copy(self._model.model, is_adapter_off=off)
        given: dict[str, Any] = {"revision": self._revision, "base": self._base}
        dtype, device = DTYPES[self._settings.dtype], self._runtime.device
        if self._mesh is not None:
            assembly = Assembly(mesh=self._mesh, device=device, dtype=dtype, is_trained=False)
            layer = load_sharded(self._model, assembly, attn=self._attn, **given)
            self._num_parameters = count_parameters(layer.lm.model)
            return layer.lm
        if self._form is not None:
            return build_causal_lm(self._form.load(self._model, device, attn=self._attn, **given))
        given |= {"dtype": dtype, "attn_implementation": self._attn}
        if self._settings.device_map is not None:
            # It may be larger than one device.
            self._offload = tempfile.TemporaryDirectory(prefix="memguard-offload-")
            devices = plan_devices(self._config, dtype=dtype, max_memory=self._settings.max_memory)
            given |= {"devices": devices, "offload_folder": self._offload.name}
            return build_causal_lm(load_model(self._model, **given))
        model = load_model(self._model, **given)
        self._num_parameters = count_parameters(model)
        return build_causal_lm(model.to(device))


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
    copied = copy.deepcopy(model, shared | replaced)
    for name, module in copied.named_modules():
        if id(vars(module).get("forward")) in replaced:
            if type(module).forward is torch.nn.Module.forward:
                raise ModelError(
                    f"'model': the class of {name or 'the model'} ({type(module).__name__}) has no "
                    "'forward', only this object has; save it and audit the folder"
                )
            del module.forward
    return copied


def _find_layers(model: Any) -> list[torch.nn.Module]:
    """Return the decoder layers; every module below the model if it has no list of layers.

    The model itself tells nothing: a copy's own hooks run too before a closure over the original.
    """
    layers = [model.get_submodule(name) for name in find_blocks(model)]
    return layers or [module for module in model.modules() if module is not model]
