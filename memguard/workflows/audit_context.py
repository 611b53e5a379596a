"""Resources of an audit: models loaded at their first use, tokenizer, cached scores, masks."""

import functools
import gc
import hashlib
import tempfile
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import transformers

from memguard.audit.cache import RecordCache
from memguard.audit.context import AuditContext, CompareMasks, OnProgress
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
from memguard.hf.adapter_files import find_config
from memguard.hf.checkpoint import load_config, load_tokenizer, max_positions
from memguard.hf.load import count_parameters, load_model, load_sharded, plan_devices
from memguard.hf.sharded import Sharding, count_sharded_parameters
from memguard.hf.variants import VariantForm
from memguard.mitigation import Goldfish, build_goldfish, build_mitigations, drops_labels
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.planner.meta_model import outline_model
from memguard.records import MaskChange
from memguard.runtime import Runtime, default_cache_dir
from memguard.workflows.audit_inputs import AuditTarget
from memguard.workflows.setup import DistributedContext

NEAR_DUPLICATES = "near-duplicates"
"""Name of the row, next to the rewritings, for near-duplicates among the documents."""


def open_audit_context(
    target: AuditTarget,
    suite: Suite,
    settings: AuditConfig,
    runtime: Runtime,
    on_progress: OnProgress,
) -> AuditContext:
    """Return the resources for the audit of a target.

    Raises:
        ModelError: no usable tokenizer, or the reference model has another one.
    """
    cache = RecordCache(default_cache_dir() / "scores") if settings.cache else None
    tokenizer = target.tokenizer
    if tokenizer is None:
        if target.reference is not None:
            raise ModelError(
                "'audit.reference' must have the vocabulary of the audited model, which has no "
                "tokenizer to compare. Remove the setting."
            )
        return AuditContext(cache=cache, peers=runtime, on_progress=on_progress)
    if target.reference is not None:
        _check_same_vocabulary(tokenizer, target.reference)
    why_not = _explain_what_is_missing(target, tokenizer)
    masks: CompareMasks | None = None
    if suite.mask_consistency is not None and "mask_consistency" not in why_not:
        masks = functools.partial(_compare_masks, tokenizer=tokenizer, target=target)
    return AuditContext(
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
    """Return, by the probe's name, why a probe cannot run."""
    why_not = {}
    if not target.canaries:
        why_not["canaries"] = (
            "the model was not trained by memguard, so it has no known canaries"
            if target.run is None
            else "the run has none: 'data.canaries.count' is 0, or too few documents are trained"
        )
    # Only mitigations that drop labels can mask copies differently.
    if target.run is None:
        why_not["mask_consistency"] = (
            "the model was not trained by memguard, so its masked labels are not known"
        )
    elif not any(drops_labels(config) for config in target.mitigations):
        why_not["mask_consistency"] = "no mitigation of the run drops labels"
    elif not tokenizer.is_fast:
        why_not["mask_consistency"] = (
            "the tokenizer has no tokenizer.json, which is needed for token offsets in the text"
        )
    return why_not


def _build_goldfish(target: AuditTarget, tokenizer: Any) -> Goldfish | None:
    """Return the goldfish mitigation of the training; None if it was not used."""
    config = find_mitigation(target.mitigations, GoldfishConfig)
    if config is None:
        return None
    return build_goldfish(
        config,
        special_ids=sorted(find_special_ids(tokenizer)),
        token_texts=lambda: list_token_texts(tokenizer),
    )


def _count_tightened(target: AuditTarget) -> int:
    """Return the number of documents under a stricter mitigation by the memorization budget."""
    watched = () if target.training is None else target.training.watched
    return sum(bucket.num_tightened for bucket in watched[-1].buckets) if watched else 0


def _build_codec(tokenizer: Any) -> Codec:
    # Special tokens are not decoded: encoding the text again would add a second BOS.
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
            f"'audit.reference' must have the vocabulary of the audited model; '{reference}' has "
            "another one. Use a model of the same family, or remove the setting."
        )


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LazyModel:
    """A checkpoint for `run_audit`: loaded at its first use and kept in memory until `free`."""

    def __init__(
        self,
        *,
        path: str,
        revision: str | None,
        base: str | None,
        weights_sha256: str | None,
        settings: AuditConfig,
        attn: str | None,
        distributed: DistributedContext,
        form: VariantForm | None = None,
    ) -> None:
        """Store the location of a checkpoint; nothing is loaded.

        Args:
            path: folder or hub id.
            revision: of a hub id.
            base: folder or hub id of an adapter's base; None locates it.
            weights_sha256: hash of the weights; None if not hashed, which disables the score cache.
            settings: the audit's.
            attn: attention implementation.
            distributed: this process and the mesh it is part of.
            form: of a variant, on one process; None loads the model as it is.
        """
        self._form = form
        self._path, self._revision, self._base, self._attn = path, revision, base, attn
        self._weights_sha256 = weights_sha256
        self._settings, self._distributed = settings, distributed
        self._lm: CausalLM | None = None
        self._scorer: ModelScorer | None = None
        self._decoder: Decoder | None = None
        self._num_parameters: int | None = None
        self._offload: tempfile.TemporaryDirectory[str] | None = None

    @property
    def identity(self) -> str | None:
        """Key of the score cache: weights, configuration, arithmetic; None if not hashed."""
        if self._weights_sha256 is None:
            return None
        # With another rotary base, window or scale the same weights are a different model.
        config = hashlib.sha256(find_config(self._path, base=self._base).read_bytes()).hexdigest()
        device = self._distributed.runtime.device.type
        versions = f"torch {torch.__version__} transformers {transformers.__version__}"
        arithmetic = f"{self._settings.dtype} {device} {self._attn}"
        form = "" if self._form is None else f" {self._form.describe()}"
        return f"{self._weights_sha256} {config} {arithmetic} {versions}{form}"

    @cached_property
    def max_tokens(self) -> int | None:
        """Number of positions; None if the configuration does not limit it."""
        return max_positions(self._path, revision=self._revision, base=self._base)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones counted once; does not load the model."""
        if self._num_parameters is None:
            config = load_config(self._path, revision=self._revision, base=self._base)
            self._num_parameters = outline_model(config, name=self._path).num_parameters
        return self._num_parameters

    def scorer(self) -> ModelScorer:
        """Return the scorer; the first call loads the model."""
        if self._scorer is None:
            tokens = self._settings.batch_tokens
            self._scorer = ModelScorer(self._get(), tokens, self._distributed.runtime)
        return self._scorer

    def decoder(self) -> Decoder:
        """Return the decoder; the first call loads the model."""
        if self._decoder is None:
            tokens = self._settings.batch_tokens or DECODED_TOKENS
            self._decoder = Decoder(self._get(), tokens, self._distributed.runtime)
        return self._decoder

    def free(self) -> None:
        """Release the model."""
        self._scorer = self._decoder = self._lm = None
        gc.collect()
        if self._offload is not None:
            self._offload.cleanup()
            self._offload = None

    def _get(self) -> CausalLM:
        if self._lm is None:
            gc.collect()  # Reference cycles may still hold a model that was trained before.
            self._lm = self._load()
        return self._lm

    def _load(self) -> CausalLM:
        dtype, runtime = DTYPES[self._settings.dtype], self._distributed.runtime
        if self._distributed.mesh is not None:
            sharding = Sharding(
                mesh=self._distributed.mesh, device=runtime.device, dtype=dtype, is_trained=False
            )
            layer = load_sharded(
                self._path, sharding, revision=self._revision, attn=self._attn, base=self._base
            )
            self._num_parameters = count_sharded_parameters(layer)
            return layer.lm
        if self._form is not None:
            return build_causal_lm(
                self._form.load(
                    self._path,
                    runtime.device,
                    revision=self._revision,
                    base=self._base,
                    attn=self._attn,
                )
            )
        if self._settings.device_map is not None:
            return build_causal_lm(self._load_spread(dtype))
        model = load_model(
            self._path,
            revision=self._revision,
            dtype=dtype,
            attn_implementation=self._attn,
            base=self._base,
        )
        self._num_parameters = count_parameters(model)
        return build_causal_lm(model.to(runtime.device))

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
