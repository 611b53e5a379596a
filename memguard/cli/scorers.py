"""Models under audit: loaded when first asked, freed when they have answered."""

import gc
import hashlib
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from memguard.audit.decoding import DECODED_TOKENS, Decoder
from memguard.audit.scoring import ModelScorer
from memguard.cli.start import Workplace
from memguard.config import AuditConfig
from memguard.parallel.assemble import Sharding, count_sharded_parameters
from memguard.parallel.checkpoint_folder import load_config, max_positions
from memguard.parallel.dispatch import plan_devices
from memguard.parallel.vocab import VocabLayer
from memguard.parallel.vocab_checks import build_vocab_layer
from memguard.parallel.weights import count_parameters, load_model, load_sharded
from memguard.planner.weightless import outline_model

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LoadedWhenAsked:
    """A checkpoint as `run_audit` wants it: in memory between its first question and `free`."""

    def __init__(
        self,
        *,
        path: str,
        revision: str | None,
        weights_sha256: str | None,
        settings: AuditConfig,
        attn: str | None,
        workplace: Workplace,
    ) -> None:
        """Take a checkpoint.

        Args:
            path: folder or hub id.
            revision: of a hub id.
            weights_sha256: None where nobody hashed them; what it says is then not kept.
            settings: the audit's.
            attn: attention implementation.
            workplace: this process and the mesh it is part of.
        """
        self._path, self._revision, self._attn = path, revision, attn
        self._weights_sha256 = weights_sha256
        self._settings, self._workplace = settings, workplace
        self._vocab: VocabLayer | None = None
        self._scorer: ModelScorer | None = None
        self._decoder: Decoder | None = None
        self._num_parameters: int | None = None
        self._offload: tempfile.TemporaryDirectory[str] | None = None

    @property
    def identity(self) -> str | None:
        """Weights, configuration and arithmetic; None for weights that were not hashed."""
        if self._weights_sha256 is None:
            return None
        # The same weights under another rotary base, window or scale are another model.
        config = hashlib.sha256((Path(self._path) / "config.json").read_bytes()).hexdigest()
        device = self._workplace.runtime.device.type
        versions = f"torch {torch.__version__} transformers {transformers.__version__}"
        arithmetic = f"{self._settings.dtype} {device} {self._attn}"
        return f"{self._weights_sha256} {config} {arithmetic} {versions}"

    @cached_property
    def max_tokens(self) -> int | None:
        """Positions it has; None where it states none."""
        return max_positions(self._path, revision=self._revision)

    @property
    def num_parameters(self) -> int:
        """Tied ones once; counted without weights where it never had to be loaded."""
        if self._num_parameters is None:
            config = load_config(self._path, revision=self._revision)
            self._num_parameters = outline_model(config, name=self._path).num_parameters
        return self._num_parameters

    def scorer(self) -> ModelScorer:
        """Return who answers, loading the model at the first call."""
        if self._scorer is None:
            tokens = self._settings.batch_tokens
            self._scorer = ModelScorer(self._get(), tokens, self._workplace.runtime)
        return self._scorer

    def decoder(self) -> Decoder:
        """Return who writes on, loading the model at the first call."""
        if self._decoder is None:
            tokens = self._settings.batch_tokens or DECODED_TOKENS
            self._decoder = Decoder(self._get(), tokens, self._workplace.runtime)
        return self._decoder

    def free(self) -> None:
        """Drop the model."""
        self._scorer = self._decoder = self._vocab = None
        gc.collect()
        if self._offload is not None:
            self._offload.cleanup()
            self._offload = None

    def _get(self) -> VocabLayer:
        if self._vocab is None:
            gc.collect()  # A model that was trained before lies in reference cycles.
            self._vocab = self._load()
        return self._vocab

    def _load(self) -> VocabLayer:
        dtype, runtime = _DTYPES[self._settings.dtype], self._workplace.runtime
        if self._workplace.mesh is not None:
            sharding = Sharding(mesh=self._workplace.mesh, device=runtime.device, dtype=dtype)
            layer = load_sharded(self._path, sharding, revision=self._revision, attn=self._attn)
            self._num_parameters = count_sharded_parameters(layer)
            return layer.vocab
        if self._settings.device_map is not None:
            return build_vocab_layer(self._load_spread(dtype))
        model = load_model(
            self._path, revision=self._revision, dtype=dtype, attn_implementation=self._attn
        )
        self._num_parameters = count_parameters(model)
        return build_vocab_layer(model.to(runtime.device))

    def _load_spread(self, dtype: torch.dtype) -> Any:
        """Load a model that may be larger than one device."""
        config = load_config(self._path, revision=self._revision)
        places = plan_devices(config, dtype=dtype, max_memory=self._settings.max_memory)
        self._offload = tempfile.TemporaryDirectory(prefix="memguard-offload-")
        return load_model(
            self._path,
            revision=self._revision,
            dtype=dtype,
            attn_implementation=self._attn,
            devices=places,
            offload_folder=self._offload.name,
        )
