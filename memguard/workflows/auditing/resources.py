"""Resources of an audit other than its models: tokenizer, cached scores, masks."""

import functools
from collections.abc import Sequence
from typing import Any

from memguard.audit.cache import RecordCache
from memguard.audit.context import AuditContext, OnProgress
from memguard.audit.passages import Codec
from memguard.audit.probes.masks import MaskChange, measure_mask_consistency
from memguard.audit.requests import CompareMasks
from memguard.config import AuditConfig, GoldfishConfig, MitigationConfig
from memguard.config.mitigations import find_mitigation
from memguard.data.encoding import find_special_ids
from memguard.data.tokenization import build_decoder, list_token_texts
from memguard.errors import ModelError
from memguard.hf.checkpoint import load_tokenizer
from memguard.mitigation import Goldfish, build_goldfish, build_mitigations, drops_labels
from memguard.runtime import Runtime, default_cache_dir
from memguard.workflows.auditing.target import AuditTarget


def open_audit_context(
    target: AuditTarget,
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
    if "mask_consistency" not in why_not:
        masks = functools.partial(_compare_masks, tokenizer=tokenizer, target=target)
    return AuditContext(
        codec=build_codec(tokenizer),
        cache=cache,
        peers=runtime,
        on_progress=on_progress,
        compare_masks=masks,
        why_not=why_not,
        goldfish=build_known_goldfish(target.mitigations, tokenizer),
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


def build_known_goldfish(
    mitigations: Sequence[MitigationConfig], tokenizer: Any
) -> Goldfish | None:
    """Return the goldfish mitigation of the training; None if it was not used."""
    config = find_mitigation(mitigations, GoldfishConfig)
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
    return sum(watched[-1].num_tightened.values()) if watched else 0


def build_codec(tokenizer: Any) -> Codec:
    """Return the functions of a tokenizer that an audit needs."""
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
    return measure_mask_consistency(
        texts,
        tokenizer,
        mitigations,
        pairs=pairs,
        seed=target.seed,
        max_passages=max(len(texts), len(pairs)),
    )


def _check_same_vocabulary(tokenizer: Any, reference: str) -> None:
    if load_tokenizer(reference).get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"'audit.reference' must have the vocabulary of the audited model; '{reference}' has "
            "another one. Use a model of the same family, or remove the setting."
        )
