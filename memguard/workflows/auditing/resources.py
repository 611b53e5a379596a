"""Resources of an audit other than its models: tokenizer, cached scores, masks, progress."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from memguard.audit.cache import RecordCache
from memguard.audit.context import AuditContext, Stage
from memguard.audit.passages import Codec
from memguard.audit.plan import AuditPlan
from memguard.audit.probes.masks import MaskChange, measure_mask_consistency
from memguard.audit.requests import NOT_NEEDED
from memguard.config import AuditConfig
from memguard.data.encoding import build_decoder, find_special_ids
from memguard.data.tokenization import list_token_texts
from memguard.errors import ModelError
from memguard.hf.checkpoint import load_tokenizer
from memguard.mitigation import build_mitigations, drops_labels
from memguard.runtime import Console, Runtime, default_cache_dir
from memguard.workflows.auditing.target import Subject

ShowStage = Callable[[Stage, int, int, str], None]
"""Takes a stage, what is done and all there is, in units: documents, items of a task."""


def open_resources(
    plan: AuditPlan,
    subject: Subject,
    settings: AuditConfig,
    runtime: Runtime,
    show: ShowStage,
) -> AuditContext:
    """Return the resources of an audit."""
    context = AuditContext(
        cache=RecordCache(default_cache_dir() / "scores") if settings.cache else None,
        peers=runtime,
        on_progress=lambda stage, done, total: show(stage, done, total, "documents"),
    )
    tokenizer, reference = subject.tokenizer, subject.reference
    if tokenizer is None:
        if reference is not None:
            raise ModelError(
                "'audit.reference' must have the vocabulary of the audited model, which has no "
                "tokenizer to compare. Remove the setting."
            )
        return context
    if reference is not None and load_tokenizer(reference).get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"'audit.reference' must have the vocabulary of the audited model; '{reference}' has "
            "another one. Use a model of the same family, or remove the setting."
        )
    why_not = _explain_what_is_missing(plan, subject)
    watched = () if subject.training is None else subject.training.watched
    mitigations = build_mitigations(
        subject.mitigations,
        special_ids=sorted(find_special_ids(tokenizer)),
        token_texts=lambda: list_token_texts(tokenizer),
    )

    def compare_masks(texts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[MaskChange]:
        most = max(len(texts), len(pairs))
        return measure_mask_consistency(
            texts, tokenizer, mitigations, pairs=pairs, seed=plan.seed, max_passages=most
        )

    return replace(
        context,
        codec=build_codec(tokenizer),
        compare_masks=None if "mask_consistency" in why_not else compare_masks,
        why_not=why_not,
        goldfish=mitigations.goldfish,
        # Documents under a stricter mitigation by the memorization budget.
        num_tightened=sum(watched[-1].num_tightened.values()) if watched else 0,
    )


def _explain_what_is_missing(plan: AuditPlan, subject: Subject) -> dict[str, str]:
    """Return, by the probe's name, why a probe cannot run."""
    why_not = {}
    if not plan.canaries:
        why_not["canaries"] = (
            "the model was not trained by memguard, so it has no known canaries"
            if subject.run is None
            else "the run has none: 'data.canaries.count' is 0, or too few documents are trained"
        )
    # Only mitigations that drop labels can mask copies differently.
    if subject.run is None:
        why_not["mask_consistency"] = (
            "the model was not trained by memguard, so its masked labels are not known"
        )
    elif not any(drops_labels(config) for config in subject.mitigations):
        why_not["mask_consistency"] = f"{NOT_NEEDED}: no mitigation drops labels"
    elif not subject.tokenizer.is_fast:
        why_not["mask_consistency"] = (
            "the tokenizer has no tokenizer.json, which is needed for token offsets in the text"
        )
    return why_not


def build_codec(tokenizer: Any) -> Codec:
    """Return the functions of a tokenizer that an audit needs."""
    # Special tokens are not decoded: encoding the text again would add a second BOS.
    decode = build_decoder(tokenizer)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return ids

    return Codec(decode=lambda ids: decode(ids.tolist()), encode=encode)


@contextmanager
def show_progress(console: Console) -> Iterator[ShowStage]:
    """Yield what an audit calls while it runs."""
    with ExitStack() as stack:
        advance: dict[Stage, Any] = {}
        before = 0

        def show(stage: Stage, done: int, total: int, unit: str) -> None:
            nonlocal before
            if stage not in advance:
                stack.close()
                what = "audit" if stage == "model" else f"audit, {stage}"
                advance[stage] = stack.enter_context(console.progress(what, total, unit))
                before = 0
            advance[stage](done - before, "")
            before = done

        yield show
