"""What an audit works with beside models and documents: tokenizer, kept scores, masks, progress."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.cache import RecordCache
from memguard.audit.mask_consistency import Consistency, measure_mask_consistency
from memguard.audit.own_passes import Codec
from memguard.audit.suite import Suite
from memguard.audit.workshop import CompareMasks, OnProgress, Workshop
from memguard.cli.subjects import Subject
from memguard.config import AuditConfig, GoldfishConfig
from memguard.data.chat import find_special_ids
from memguard.data.tokenization import list_token_texts
from memguard.errors import ModelError
from memguard.mitigation import Goldfish, build_goldfish, build_mitigations, drops_labels
from memguard.parallel.checkpoint_folder import load_tokenizer
from memguard.records import MaskChange
from memguard.runtime import Runtime, default_cache_dir

NEAR_DUPLICATES = "near-duplicates"
"""Stands beside the rewritings for copies that are among the documents."""


def open_workshop(
    subject: Subject,
    suite: Suite,
    settings: AuditConfig,
    runtime: Runtime,
    on_progress: OnProgress,
) -> Workshop:
    """Return what the audit of a subject works with.

    Raises:
        ModelError: no usable tokenizer; or the reference model has another one.
    """
    cache = RecordCache(default_cache_dir() / "scores") if settings.cache else None
    if not subject.has_tokenizer:
        if subject.reference is not None:
            raise ModelError(
                "'audit.reference' must have the vocabulary of the model under audit, and that has "
                "no tokenizer to compare. Leave it out."
            )
        return Workshop(cache=cache, peers=runtime, on_progress=on_progress)
    tokenizer = load_tokenizer(subject.model)
    if subject.reference is not None:
        _check_same_vocabulary(tokenizer, subject.reference)
    why_not = _explain_what_is_missing(subject, tokenizer)
    masks: CompareMasks | None = None
    if suite.mask_consistency is not None and "mask_consistency" not in why_not:
        masks = functools.partial(_compare_masks, tokenizer=tokenizer, subject=subject)
    return Workshop(
        codec=_build_codec(tokenizer),
        cache=cache,
        peers=runtime,
        on_progress=on_progress,
        compare_masks=masks,
        why_not=why_not,
        goldfish=_build_goldfish(subject, tokenizer),
        num_tightened=_count_tightened(subject),
    )


def _explain_what_is_missing(subject: Subject, tokenizer: Any) -> dict[str, str]:
    """Say, by the probe's name, why there is nothing to run a probe on."""
    why_not = {}
    if not subject.canaries:
        why_not["canaries"] = (
            "the model was not trained by memguard, so no canaries are known to be in it"
            if subject.run is None
            else "the run has none: 'data.canaries.count' is 0, or too few documents are trained"
        )
    # Without such a mitigation nothing is masked, and copies cannot escape.
    if subject.run is None:
        why_not["mask_consistency"] = (
            "the model was not trained by memguard, so it is not known what training dropped"
        )
    elif not any(drops_labels(config) for config in subject.mitigations):
        why_not["mask_consistency"] = "no mitigation of the run drops labels"
    elif not tokenizer.is_fast:
        why_not["mask_consistency"] = (
            "the tokenizer has no tokenizer.json, which would say where tokens lie in the text"
        )
    return why_not


def _build_goldfish(subject: Subject, tokenizer: Any) -> Goldfish | None:
    """Return the goldfish of the training; None where labels were not dropped."""
    special_ids = sorted(find_special_ids(tokenizer))
    # Named once at most.
    goldfish = [
        build_goldfish(
            config,
            special_ids=special_ids,
            token_texts=lambda: list_token_texts(tokenizer),
        )
        for config in subject.mitigations
        if isinstance(config, GoldfishConfig)
    ]
    return goldfish[0] if goldfish else None


def _count_tightened(subject: Subject) -> int:
    """Return the documents that a risk budget had moved up when training ended."""
    watched = () if subject.training is None else subject.training.watched
    return sum(bucket.num_tightened for bucket in watched[-1].buckets) if watched else 0


def _build_codec(tokenizer: Any) -> Codec:
    def decode(ids: NDArray[np.int32]) -> str:
        # Special tokens are no text: encoded anew, a BOS would stand there twice.
        text: str = tokenizer.decode(
            ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return ids

    return Codec(decode=decode, encode=encode)


def _compare_masks(
    texts: Sequence[str], pairs: Sequence[tuple[str, str]], tokenizer: Any, subject: Subject
) -> list[MaskChange]:
    mitigations = build_mitigations(
        subject.mitigations,
        special_ids=sorted(find_special_ids(tokenizer)),
        token_texts=lambda: list_token_texts(tokenizer),
    )
    found = measure_mask_consistency(
        texts,
        tokenizer,
        mitigations,
        pairs=pairs,
        seed=subject.seed,
        max_passages=max(len(texts), len(pairs)),
    )
    rows = dict(found.rewritings)
    if pairs:
        rows[NEAR_DUPLICATES] = found.pairs
    return [_record(name, row) for name, row in rows.items()]


def _record(name: str, row: Consistency) -> MaskChange:
    return MaskChange(
        rewriting=name,
        num_passages=row.masks_that_differ.num_documents,
        num_changed=row.masks_that_differ.num_matched,
        mean_leaked_share=None if row.leak_share is None else row.leak_share.value,
    )


def _check_same_vocabulary(tokenizer: Any, reference: str) -> None:
    if load_tokenizer(reference).get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"'audit.reference' must have the vocabulary of the model under audit; '{reference}' "
            "has another one. Take a model of the same family, or leave it out."
        )
