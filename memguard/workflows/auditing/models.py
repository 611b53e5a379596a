"""A model of an audit: loaded at its first use and kept in memory until its last.

A folder or hub id is loaded plain, over several devices, on a mesh or in another form (`load_as`);
a model in memory is borrowed from the program, see `model_in_memory`. An adapter is merged; one
that was trained on a base in NF4 is audited as it was trained: beside weights in NF4, of which no
dense copy is made. Layers that y or x splits cannot be in NF4, and are merged.
"""

import gc
import hashlib
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from memguard.audit.decoding import Decoder
from memguard.audit.generation_time import GenerationLimit
from memguard.audit.scoring import ModelScorer
from memguard.config import AuditConfig
from memguard.hf.adapter_files import find_config, is_adapter, read_adapter
from memguard.hf.assembly import Assembly
from memguard.hf.checkpoint import find_positions, load_config
from memguard.hf.load import (
    count_parameters,
    find_quantization,
    load_assembled,
    load_model,
    load_sharded,
    plan_devices,
)
from memguard.hf.load_as import LoadedForm
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.planner.meta_model import describe_model
from memguard.runtime import Runtime
from memguard.workflows.auditing.checks import AuditRequest, check_load_as
from memguard.workflows.auditing.model_in_memory import ModelInMemory
from memguard.workflows.auditing.target import AuditTarget
from memguard.workflows.common.setup import DistributedContext

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def find_base_quantization(target: AuditTarget) -> Literal["nf4"] | None:
    """Return the form in which the base of an audited model is compared with it; None: as stored.

    An adapter that was trained on a base in NF4 is compared with that: the difference is what was
    trained, without what was lost by rounding.

    Args:
        target: of the audit; another model than the adapter's base is compared as stored.

    Raises:
        ModelError: the adapter cannot be read.
    """
    model, base = target.model, target.base
    if not isinstance(model, str) or not isinstance(base, str) or not is_adapter(model):
        return None
    adapter = read_adapter(model, base=target.adapter_base)
    is_own = target.run is not None or Path(base).resolve() == Path(adapter.base).resolve()
    return adapter.base_quantization if is_own else None


def choose_form(
    request: AuditRequest, settings: AuditConfig, num_processes: int
) -> LoadedForm | None:
    """Return the form in which an audited model is loaded; None: as it is stored.

    Weights are rounded to the precision of the run that trained them, as its export does.

    Raises:
        ConfigError: see `check_load_as`.
    """
    name = check_load_as(request.load_as, request.audited, settings, num_processes)
    if name == "stored":
        return None
    stored = settings.dtype
    if request.run_config is not None:
        stored = "bf16" if request.run_config.train.precision == "bf16" else "fp32"
    return LoadedForm(name=name, stored=DTYPES[stored], dtype=DTYPES[settings.dtype])


class LazyModel:
    """A model for `run_audit`; `free` releases it, or gives back a model in memory."""

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
        form: LoadedForm | None = None,
        limit: GenerationLimit | None = None,
        quantization: Literal["nf4"] | None = None,
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
            form: of the loaded weights, on one process; None loads them as they are stored.
            limit: longest time that it and other models generate; None: no limit.
            quantization: form of the linear layers of a model without an adapter; None: as stored.
        """
        self._limit = limit
        self._model, self._revision, self._base, self._attn = model, revision, base, attn
        self._weights_sha256, self._settings, self._form = weights_sha256, settings, form
        self._given_quantization = quantization
        self._mesh, self._runtime = distributed.mesh, distributed.runtime
        if isinstance(model, ModelInMemory):
            self._runtime = replace(self._runtime, device=model.model.device)
        self._lm: CausalLM | None = None
        self._scorer: ModelScorer | None = None
        self._decoder: Decoder | None = None
        self._num_parameters: int | None = None
        self._offload: tempfile.TemporaryDirectory[str] | None = None
        self._borrowed = ExitStack()

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
        form = "" if self._quantization is None else f" layers in {self._quantization}"
        form = form if self._form is None else f" {self._form.describe()}"
        return f"{weights} {self._runtime.device.type} {attn} {versions}{form}"

    @cached_property
    def _config(self) -> Any:
        if isinstance(self._model, ModelInMemory):
            return self._model.model.config
        return load_config(self._model, revision=self._revision, base=self._base)

    @cached_property
    def _quantization(self) -> Literal["nf4"] | None:
        """Form of the linear layers; of an adapter's base, that in which it was trained."""
        is_split = self._mesh is not None and self._mesh.shape.y * self._mesh.shape.x > 1
        if isinstance(self._model, ModelInMemory) or is_split:
            return None
        return find_quantization(self._model, base=self._base) or self._given_quantization

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
            self._num_parameters = describe_model(self._config, name=self._model).num_parameters
        return self._num_parameters

    @property
    def runtime(self) -> Runtime:
        """This rank, with the device of a model in memory."""
        return self._runtime

    def scorer(self) -> ModelScorer:
        """Return the scorer, the same object until `free`; the first call loads the model."""
        if self._scorer is None:
            tokens = self._settings.batch_tokens
            self._scorer = ModelScorer(self.load(), tokens, self._runtime)
        return self._scorer

    def decoder(self) -> Decoder:
        """Return the decoder, the same object until `free`; the first call loads the model."""
        if self._decoder is None:
            tokens = self._settings.batch_tokens
            self._decoder = Decoder(self.load(), tokens, self._runtime, self._limit)
        return self._decoder

    def free(self) -> None:
        """Release the model."""
        self._scorer = self._decoder = self._lm = None
        self._borrowed.close()
        gc.collect()
        if self._offload is not None:
            self._offload.cleanup()
            self._offload = None

    def load(self) -> CausalLM:
        """Return the model, the same object until `free`; the first call loads it."""
        if self._lm is None:
            gc.collect()  # Reference cycles may still hold a model that was trained before.
            self._lm = self._load()
        return self._lm

    def _load(self) -> CausalLM:
        if isinstance(self._model, ModelInMemory):
            return self._borrowed.enter_context(self._model.borrow(self._runtime))
        given: dict[str, Any] = {"revision": self._revision, "base": self._base}
        dtype, device = DTYPES[self._settings.dtype], self._runtime.device
        assembly = Assembly(
            mesh=self._mesh,
            device=device,
            dtype=dtype,
            quantization=self._quantization,
            is_trained=False,
        )
        if self._mesh is not None:
            layer = load_sharded(self._model, assembly, attn=self._attn, **given)
            if layer.assembly.adapter is None:
                self._num_parameters = count_parameters(layer.lm.model)
            return layer.lm
        if self._form is not None:
            return self._form.load(self._model, device, attn=self._attn, **given)
        if assembly.quantization is not None:
            return load_assembled(self._model, assembly, attn=self._attn, **given)
        given |= {"dtype": dtype, "attn_implementation": self._attn}
        if self._settings.device_map is not None:
            # It may be larger than one device.
            self._offload = tempfile.TemporaryDirectory(prefix="memguard-offload-")
            devices = plan_devices(self._config, dtype=dtype, max_memory=self._settings.max_memory)
            given |= {"devices": devices, "offload_folder": self._offload.name}
            return build_causal_lm(load_model(self._model, **given))
        model = load_model(self._model, **given)
        self._num_parameters = count_parameters(model)
        # Without a mesh several ranks, of another program, have a copy each.
        peers = self._runtime if self._runtime.world_size > 1 else None
        return build_causal_lm(model.to(device), peers=peers)
