"""Audits a model in memory without changing it.

The audit uses a copy of the module tree that shares all parameters and buffers: the copy needs no
memory for weights, and the audit's settings (evaluation mode, attention of packed rows) apply only
to the copy. The program's model keeps its mode, device, dtype, gradients and hooks.
"""

import copy
import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from memguard.audit.decoding import DECODED_TOKENS, Decoder
from memguard.audit.scoring import ModelScorer
from memguard.config import AuditConfig
from memguard.errors import ModelError
from memguard.hf.checkpoint import find_positions
from memguard.hf.load import count_parameters
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.runtime import Runtime

_MAX_HASHED_BYTES = 8 << 30
"""Larger models are audited without the cache: hashing them would take longer than a minute."""
_DTYPES: dict[torch.dtype, Literal["fp32", "bf16"]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelInMemory:
    """A causal language model and its tokenizer."""

    model: Any
    """A `transformers.PreTrainedModel` on one device."""
    tokenizer: Any
    """None if all documents are token ids."""

    @property
    def name(self) -> str:
        """Last two parts of the path it was loaded from, else the name of its class."""
        path = str(getattr(self.model.config, "_name_or_path", "") or "")
        return "/".join(path.rstrip("/").split("/")[-2:]) or type(self.model).__name__

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
        tensors = list(self.model.parameters())
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            raise ModelError("'model' is sharded over processes; save it and audit the folder")
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) > 1 or "meta" in devices:
            raise ModelError(
                f"'model' must be on one device; it is on {', '.join(sorted(devices))}"
            )
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1 or not dtypes <= _DTYPES.keys():
            raise ModelError(
                "'model' must have all its weights in float32 or all in bfloat16; got "
                f"{', '.join(sorted(map(str, dtypes)))}. Convert it, e.g. model.float()"
            )
        return _DTYPES[dtypes.pop()]

    @cached_property
    def weights_sha256(self) -> str | None:
        """Hash of configuration and weights; None for more than 8 GiB of weights."""
        state: dict[str, Tensor] = self.model.state_dict()
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


class OpenedModel:
    """A model in memory as `run_audit` uses it; `free` drops the copy and its caches."""

    def __init__(self, given: ModelInMemory, settings: AuditConfig, runtime: Runtime) -> None:
        """Store the model; it is copied at its first use."""
        self._given, self._settings = given, settings
        self._runtime = replace(runtime, device=given.model.device)
        self._lm: CausalLM | None = None
        self._scorer: ModelScorer | None = None
        self._decoder: Decoder | None = None
        self.num_parameters = count_parameters(given.model)
        """Tied parameters are counted once."""

    @property
    def identity(self) -> str | None:
        """Key of the score cache: weights, configuration, arithmetic; None if not hashed."""
        if self._given.weights_sha256 is None:
            return None
        attn = getattr(self._given.model.config, "_attn_implementation", None)
        arithmetic = f"{self._given.dtype} {self._runtime.device.type} {attn}"
        versions = f"torch {torch.__version__} transformers {transformers.__version__}"
        return f"in memory {self._given.weights_sha256} {arithmetic} {versions}"

    @property
    def max_tokens(self) -> int | None:
        """Number of positions; None if the model does not limit it."""
        return find_positions(self._given.model.config)

    def scorer(self) -> ModelScorer:
        """Return the model's scorer, the same object until `free`."""
        if self._scorer is None:
            tokens = self._settings.batch_tokens
            self._scorer = ModelScorer(self._get(), tokens, self._runtime)
        return self._scorer

    def decoder(self) -> Decoder:
        """Return the model's decoder, the same object until `free`."""
        if self._decoder is None:
            tokens = self._settings.batch_tokens or DECODED_TOKENS
            self._decoder = Decoder(self._get(), tokens, self._runtime)
        return self._decoder

    def free(self) -> None:
        """Release the copy; the program's model stays in memory."""
        self._scorer = self._decoder = self._lm = None

    def _get(self) -> CausalLM:
        if self._lm is None:
            self._lm = build_causal_lm(_copy_without_weights(self._given.model).eval())
        return self._lm


def _copy_without_weights(model: Any) -> Any:
    """Return a copy of the module tree with the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
