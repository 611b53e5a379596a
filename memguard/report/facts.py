"""Lists of facts: identity, training, data, method and environment."""

from collections.abc import Mapping

from memguard.pages import formatting as fmt
from memguard.pages.page import Fact
from memguard.records import (
    RISK_NAMES,
    AdapterIdentity,
    AuditReport,
    Budget,
    DataIdentity,
    LoadAs,
    ModelIdentity,
    TrainingSummary,
)
from memguard.report.texts import describe_loss_change, describe_overlap

_MOST_SOURCES = 40
_WITHIN = "Within the audited part of a document."


def describe_identity(report: AuditReport) -> tuple[Fact, ...]:
    """List the facts in the header of the page."""
    base, adapter = report.model.base, report.model.adapter
    parts = () if adapter is None else (_describe_adapter(adapter),)
    return (
        Fact("Weights", fmt.hash(report.model.weights_sha256), code=True),
        *_describe_form(report.model),
        *parts,
        Fact("Parameters", fmt.count(report.model.num_parameters)),
        Fact(
            "Base model",
            fmt.clean_name(fmt.shorten_place(base), 48) if base else "not scored",
            detail=fmt.hash(report.model.base_weights_sha256) if base else "",
        ),
        Fact("Documents", fmt.hash(report.data.documents_sha256), code=True),
        Fact("Run", fmt.clean_name(report.run) if report.run else "external model"),
        Fact(
            "Created",
            fmt.time(report.created),
            detail=f"memguard {fmt.clean_name(report.tool_version, 40)}",
        ),
    )


def _describe_form(model: ModelIdentity) -> tuple[Fact, ...]:
    """Report that the numbers are not those of the stored weights; nothing if they are."""
    if model.load_as == "stored":
        return ()
    made = fmt.clean_text(model.load_as_detail)
    return (
        Fact("Loaded as", model.load_as, detail=f"{made}; the stored weights were not audited"),
    )


def _describe_adapter(adapter: AdapterIdentity) -> Fact:
    base = fmt.clean_name(fmt.shorten_place(adapter.base), 48)
    return Fact(
        "Adapter",
        fmt.clean_name(adapter.description, 80),
        detail=f"merged into {base}, {fmt.hash(adapter.base_weights_sha256)}",
    )


_PRIVACY_LIMITS = (
    "The guarantee is per row. It does not cover copies of a document, its other pieces, what the "
    "base model knew, or this report, which is computed from the documents."
)


def describe_training(training: TrainingSummary, load_as: LoadAs = "stored") -> tuple[Fact, ...]:
    """List mitigations, privacy, cost of training and loss on held-out documents."""
    mitigations = [fmt.settings(mitigation) for mitigation in training.mitigations[:20]]
    heldout = [f"{fmt.count(training.heldout_num_documents)} documents"]
    heldout.append(f"{fmt.count(training.heldout_num_tokens)} tokens")
    if training.heldout_bucket:
        heldout.append(f"bucket {fmt.clean_name(training.heldout_bucket)}")
    budget = training.budget
    bounded = () if budget is None else (_describe_budget(budget),)
    removed = Fact("Copies removed", f"{fmt.count(training.num_removed or 0)} documents")
    return (
        Fact("Mitigations", "; ".join(mitigations) or "none (plain loss)"),
        *bounded,
        *([] if training.num_removed is None else [removed]),
        *describe_privacy(training),
        Fact(
            "Labels dropped",
            describe_dropped(training.dropped_fraction, bool(training.mitigations)),
            detail=_describe_target(training),
        ),
        Fact(
            "Held-out NLL",
            fmt.number(training.heldout_nll),
            detail=describe_loss_change(training.heldout_nll, training.base_heldout_nll),
        )
        if load_as == "stored"
        else Fact("Held-out NLL", "not measured", detail="Training measured the stored model."),
        Fact("Held-out on", ", ".join(heldout)),
        Fact("Steps", fmt.count(training.num_steps)),
        Fact("Supervised tokens", fmt.count(training.num_supervised_tokens)),
        Fact("Time", fmt.duration(training.train_s)),
    )


def _describe_target(training: TrainingSummary) -> str:
    """Return the share of labels that goldfish should drop; "" if it differs by document."""
    goldfish = [m for m in training.mitigations if isinstance(m.get("k"), int) and m["k"] > 0]
    is_tightened = training.budget is not None and training.budget.action == "tighten"
    if not goldfish or goldfish[0].get("k_by_dose") or is_tightened:
        return ""
    k = goldfish[0]["k"]
    return f"masked by goldfish; target {fmt.threshold(1 / k)} (1 in {k:,})"


def _describe_budget(budget: Budget) -> Fact:
    metric = RISK_NAMES[budget.metric]
    value = f"at most {fmt.percent(budget.limit)} {metric} extraction per bucket"
    return Fact("Risk budget", value, detail=f"action if exceeded: {budget.action}")


def describe_privacy(training: TrainingSummary) -> tuple[Fact, ...]:
    """Report the privacy loss of dp_sgd and what it does not cover; nothing without dp_sgd."""
    if training.epsilon is None or training.delta is None:
        return ()
    sampled = fmt.number(training.epsilon_if_sampled)
    return (
        Fact(
            "Differential privacy",
            f"ε = {fmt.number(training.epsilon)} at δ = {training.delta:g}, per row",
            detail=f"With Poisson sampling of rows, as papers assume: {sampled}. {_PRIVACY_LIMITS}",
        ),
    )


def describe_dropped(share: float | None, mitigated: bool) -> str:
    """Format the share of labels that were dropped; plain loss drops none."""
    return "none" if share is None and not mitigated else fmt.percent(share)


def describe_data(report: AuditReport) -> tuple[Fact, ...]:
    """List the audited documents."""
    data = report.data
    sources = [fmt.clean_name(source, 120) for source in data.sources[:_MOST_SOURCES]]
    if len(data.sources) > _MOST_SOURCES:
        sources.append(f"and {len(data.sources) - _MOST_SOURCES:,} more")
    facts = [
        Fact("Sources", ", ".join(sources) or fmt.MISSING),
        Fact("Documents", fmt.count(data.num_documents), detail=_describe_equal(data)),
    ]
    if data.identity_key is not None:
        facts.append(
            Fact(
                "Identity key",
                fmt.clean_name(data.identity_key, 80),
                detail="Fingerprint of the key of the keyed hashes; not the key.",
                code=True,
            )
        )
    if data.num_clusters is not None:
        detail = "Intervals of means treat a cluster as one observation."
        if report.training is not None:
            detail = f"Control and buckets are sampled by cluster. {detail}"
        clusters = fmt.count(data.num_clusters)
        facts.append(Fact("Clusters of near-duplicates", clusters, detail=detail))
    return (
        *facts,
        describe_overlap(report),
        Fact(
            "Hash",
            fmt.clean_name(data.documents_sha256, 80),
            detail="Hash of the ids and token hashes of all documents, in order.",
            code=True,
        ),
    )


def _describe_equal(data: DataIdentity) -> str:
    """Count the documents that share a keyed hash, and so an identity."""
    if not data.num_equal:
        return ""
    return (
        f"{fmt.count(data.num_texts or 0)} different texts: {fmt.count(data.num_equal)} "
        f"{'has' if data.num_equal == 1 else 'have'} the text of another, and its keyed hash."
    )


def describe_method(report: AuditReport) -> tuple[Fact, ...]:
    """List the settings that are needed to reproduce the results."""
    method, model = report.method, report.model
    prefix = method.prefix_tokens
    prefix_text = "everything before the continuation" if prefix is None else f"{prefix:,} tokens"
    cut = report.cut
    sample = method.sample_size
    sample_text = "all" if sample is None else f"at most {sample:,} per bucket"
    facts = [
        Fact("Suite", f"{fmt.clean_name(method.suite)}, version {method.suite_version:,}"),
        Fact("Continuation", f"{method.continuation_tokens:,} tokens"),
        Fact("Prefix", prefix_text, detail="" if cut is None else _WITHIN),
        Fact(
            "Audited part",
            "the whole of every document"
            if cut is None
            else f"of {cut.num_documents:,} of {cut.num_given:,} documents the {cut.window} part",
            detail=""
            if cut is None
            else f"The longest has {cut.longest_tokens:,} tokens; at most {cut.used_tokens:,} of a "
            "document were used.",
        ),
        Fact("Near-verbatim threshold", f"{fmt.threshold(method.max_edit_share)} edits"),
        Fact("Tiny margin threshold", f"{fmt.number(method.tiny_margin)} logits"),
        Fact("Precision", fmt.clean_name(method.dtype, 20)),
        Fact(
            "Tokens per forward pass",
            "as many as fit" if method.batch_tokens is None else fmt.count(method.batch_tokens),
        ),
        Fact("Documents scored", sample_text),
        Fact("Seed", str(method.seed)),
        Fact("Time", fmt.duration(method.wall_s)),
        Fact("Weights", fmt.clean_name(model.weights_sha256, 80), code=True),
    ]
    if model.adapter is not None:
        adapter = model.adapter
        facts += [
            Fact("Adapter", fmt.clean_name(adapter.description, 80)),
            Fact("Adapter weights", fmt.clean_name(adapter.weights_sha256, 80), code=True),
            Fact("Base of the adapter", fmt.clean_name(adapter.base, 240)),
            Fact("Its weights", fmt.clean_name(adapter.base_weights_sha256, 80), code=True),
        ]
    if model.base:
        facts.append(Fact("Base model", fmt.clean_name(model.base, 240)))
    if model.base_weights_sha256:
        value = fmt.clean_name(model.base_weights_sha256, 80)
        facts.append(Fact("Base weights", value, code=True))
    return tuple(facts)


def describe_environment(environment: Mapping[str, str]) -> tuple[Fact, ...]:
    """List versions and hardware, by name."""
    return tuple(
        Fact(fmt.clean_name(name), fmt.clean_text(value, 200), code=True)
        for name, value in sorted(environment.items())[:200]
    )
