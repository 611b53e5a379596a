"""What an audit works with: models loaded at their first use, tokenizer, kept scores, masks."""

import functools
import gc
import hashlib
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from memguard.audit.cache import RecordCache
from memguard.audit.context import CompareMasks, OnProgress, Workshop
from memguard.audit.decoding import DECODED_TOKENS, Decoder
from memguard.audit.mask_consistency import measure_mask_consistency
from memguard.audit.membership_scores import Codec
from memguard.audit.scoring import ModelScorer
from memguard.audit.suite import Suite
from memguard.config import AuditConfig, GoldfishConfig
from memguard.config.mitigations import find_mitigation
from memguard.data.chat import find_special_ids
from memguard.data.tokenization import build_decoder, list_token_texts
from memguard.errors import ModelError
from memguard.hf.checkpoint import load_config, load_tokenizer, max_positions
from memguard.hf.load import count_parameters, load_model, load_sharded, plan_devices
from memguard.hf.sharded import Sharding, count_sharded_parameters
from memguard.mitigation import Goldfish, build_goldfish, build_mitigations, drops_labels
from memguard.model.causal_lm import VocabLayer
from memguard.model.checks import build_vocab_layer
from memguard.planner.meta_model import outline_model
from memguard.records import MaskChange
from memguard.runtime import Runtime, default_cache_dir
from memguard.workflows.audit_inputs import AuditTarget
from memguard.workflows.setup import Workplace

NEAR_DUPLICATES = "near-duplicates"
"""Stands beside the rewritings for copies that are among the documents."""


def open_workshop(
    target: AuditTarget,
    suite: Suite,
    settings: AuditConfig,
    runtime: Runtime,
    on_progress: OnProgress,
) -> Workshop:
    """Return what the audit of a target works with.

    Raises:
        ModelError: no usable tokenizer; or the reference model has another one.
    """
    cache = RecordCache(default_cache_dir() / "scores") if settings.cache else None
    if not target.has_tokenizer:
        if target.reference is not None:
            raise ModelError(
                "'audit.reference' must have the vocabulary of the model under audit, and that has "
                "no tokenizer to compare. Leave it out."
            )
        return Workshop(cache=cache, peers=runtime, on_progress=on_progress)
    tokenizer = load_tokenizer(target.model)
    if target.reference is not None:
        _check_same_vocabulary(tokenizer, target.reference)
    why_not = _explain_what_is_missing(target, tokenizer)
    masks: CompareMasks | None = None
    if suite.mask_consistency is not None and "mask_consistency" not in why_not:
        masks = functools.partial(_compare_masks, tokenizer=tokenizer, target=target)
    return Workshop(
        codec=_build_codec(tokenizer),
        cache=cache,
        peers=runtime,
        on_progress=on_progress,
        compare_masks=masks,
        why_not=why_not,
        goldfish=_build_goldfish(target, tokenizer),
        num_tightened=_count_tightened(target),
    )


def _explain_what_is_missing(target: AuditTarget, tokenizer: Any) -> dict[str, str]:
    """Say, by the probe's name, why there is nothing to run a probe on."""
    why_not = {}
    if not target.canaries:
        why_not["canaries"] = (
            "the model was not trained by memguard, so no canaries are known to be in it"
            if target.run is None
            else "the run has none: 'data.canaries.count' is 0, or too few documents are trained"
        )
    # Without such a mitigation nothing is masked, and copies cannot escape.
    if target.run is None:
        why_not["mask_consistency"] = (
            "the model was not trained by memguard, so it is not known what training dropped"
        )
    elif not any(drops_labels(config) for config in target.mitigations):
        why_not["mask_consistency"] = "no mitigation of the run drops labels"
    elif not tokenizer.is_fast:
        why_not["mask_consistency"] = (
            "the tokenizer has no tokenizer.json, which would say where tokens lie in the text"
        )
    return why_not


def _build_goldfish(target: AuditTarget, tokenizer: Any) -> Goldfish | None:
    """Return the goldfish of the training; None where labels were not dropped."""
    config = find_mitigation(target.mitigations, GoldfishConfig)
    if config is None:
        return None
    return build_goldfish(
        config,
        special_ids=sorted(find_special_ids(tokenizer)),
        token_texts=lambda: list_token_texts(tokenizer),
    )


def _count_tightened(target: AuditTarget) -> int:
    """Return the documents that a risk budget had moved up when training ended."""
    watched = () if target.training is None else target.training.watched
    return sum(bucket.num_tightened for bucket in watched[-1].buckets) if watched else 0


def _build_codec(tokenizer: Any) -> Codec:
    # Special tokens are no text: encoded again, a BOS would be there twice.
    decode = build_decoder(tokenizer)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return ids

    return Codec(decode=lambda ids: decode(ids.tolist()), encode=encode)


def _compare_masks(
    texts: Sequence[str], pairs: Sequence[tuple[str, str]], tokenizer: Any, target: AuditTarget
) -> list[MaskChange]:
    mitigations = build_mitigations(
        target.mitigations,
        special_ids=sorted(find_special_ids(tokenizer)),
        token_texts=lambda: list_token_texts(tokenizer),
    )
    found = measure_mask_consistency(
        texts,
        tokenizer,
        mitigations,
        pairs=pairs,
        seed=target.seed,
        max_passages=max(len(texts), len(pairs)),
    )
    rows = dict(found.rewritings)
    if pairs:
        rows[NEAR_DUPLICATES] = found.pairs
    return [
        MaskChange(
            rewriting=name,
            num_passages=row.masks_that_differ.num_documents,
            num_changed=row.masks_that_differ.num_matched,
            mean_leaked_share=None if row.leak_share is None else row.leak_share.value,
        )
        for name, row in rows.items()
    ]


def _check_same_vocabulary(tokenizer: Any, reference: str) -> None:
    if load_tokenizer(reference).get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"'audit.reference' must have the vocabulary of the model under audit; '{reference}' "
            "has another one. Take a model of the same family, or leave it out."
        )


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LazyModel:
    """A checkpoint as `run_audit` wants it: in memory between its first use and `free`."""

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
