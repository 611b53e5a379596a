"""Sentences and lists of facts of the pages: limitations, identity, method, glossary.

Pages state what was measured and its result, never that a model is free of risk.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from memguard.pages import formatting as fmt
from memguard.pages.facts import write_not_run, write_ran
from memguard.pages.page import Fact, Statement
from memguard.records import MIN_FOR_MEANS, WITHIN_LIMIT, AuditReport, Comparison
from memguard.records.audit import Method
from memguard.report.next_steps import count_tiny, has_attacks

_GLOSSARY = Path(__file__).with_name("glossary.toml")
CONFIDENTIALITY = (
    "Contains no excerpts: documents appear by ID and hash only. IDs, names and paths may be "
    "sensitive."
)
COMPARISON_CONFIDENTIALITY = (
    "Contains no excerpts and no document IDs. Names, settings and paths may be sensitive."
)

READING_GUIDE = (
    "Lower is better on both axes: fewer documents extracted, and a lower loss on documents that "
    "were never trained.",
    "One wrong token breaks an exact match, so a setting that drops labels can reach 0 % verbatim "
    "while the model generates nearly all of a text: near-verbatim counts such texts. "
    "Teacher-forced accuracy measures the prediction of each token given the true text before it, "
    "and is not extraction.",
)


def write_limits(report: AuditReport) -> tuple[Statement, ...]:
    """Return the scope and limitations of an audit, and the probes that did not run.

    Public are those that name nothing: fixed words and counts.
    """
    method = report.method
    prefix = f"{_write_everything(report)} before its {name_continuation(method)}"
    if method.prefix_tokens is not None and method.answers != "all":
        prefix = f"the {method.prefix_tokens} true tokens before the continuation"
        prefix += "" if method.answers == "none" else ", or everything before an answer"
    not_run, model = write_not_run(report), report.model
    form = Statement(
        f"The model was loaded as {model.load_as}: {fmt.clean_text(model.load_as_detail)}. The "
        "stored weights, and other forms, may give out more."
    )
    return (
        Statement(_write_coverage(report), "public"),
        Statement(
            f"The attacker is assumed to know the prefix: each document is prompted with {prefix}. "
            "An attacker without that text may extract less.",
            "public",
        ),
        Statement(_write_bound(report), "public"),
        Statement(
            f"Only these probes ran: {write_ran(report)}. They do not measure facts or personal "
            "data that the model repeats in other words."
        ),
        *([Statement(f"Not run: {not_run}.")] if not_run else []),
        Statement(
            _write_arithmetic(report), "public" if method.dtype in ("fp32", "bf16") else "owner"
        ),
        *([] if model.load_as == "stored" else [form]),
    )


def name_continuation(of: Method | Comparison) -> str:
    """Name the part of a document that is continued."""
    tokens = f"last {of.continuation_tokens:,} tokens"
    return {"none": tokens, "some": f"{tokens} or last answer"}.get(of.answers, "last answer")


def _write_everything(report: AuditReport) -> str:
    """Describe the text before a continuation."""
    if report.cut is None:
        return "everything"
    which, row = report.cut.window, report.cut.by == "training"
    what = f"{which} training piece" if row else f"{which} {report.cut.used_tokens:,} tokens"
    return f"everything (of {report.cut.num_documents:,} long documents: within the {what})"


def _write_bound(report: AuditReport) -> str:
    if has_attacks(report):
        return (
            "Rates, attack cost and attacks are lower bounds on what can be extracted: other "
            "prefixes, paraphrase or stronger attacks may extract more."
        )
    return (
        "Rates are a lower bound on what can be extracted: other prefixes, sampling, paraphrase, "
        "many attempts or stronger attacks may extract more than one greedy continuation does."
    )


def _write_coverage(report: AuditReport) -> str:
    scored = sum(bucket.num_documents for bucket in report.tables.buckets)
    too_short = sum(bucket.num_too_short for bucket in report.tables.buckets)
    others = sum(bucket.num_not_auditable for bucket in report.tables.buckets) - too_short
    not_sampled = sum(bucket.num_not_sampled for bucket in report.tables.buckets)
    short = f"; {fmt.count(too_short)} were too short to audit and are not covered"
    short = short if too_short else ""
    if others:
        short += (
            f"; {fmt.count(others)} could not be audited for reasons given in the notes and are "
            "not covered"
        )
    if not_sampled:
        eligible = fmt.count(scored + not_sampled)
        return (
            f"A random sample of {fmt.count(scored)} of {eligible} eligible documents was "
            f"scored{short}. The intervals cover the sampling error. {_INDEPENDENT}"
        )
    return f"All {fmt.count(scored)} eligible documents were scored{short}. {_INDEPENDENT}"


_INDEPENDENT = (
    "Intervals treat different texts as independent samples, and near-duplicates as less evidence "
    "than so many texts."
)


def _write_arithmetic(report: AuditReport) -> str:
    tiny = count_tiny(report)
    margin = fmt.number(report.method.tiny_margin)
    dtype = fmt.clean_text(report.method.dtype, 20)
    if tiny:
        depend = "1 result depends" if tiny == 1 else f"{fmt.count(tiny)} results depend"
        return (
            f"Scored in {dtype}: {depend} on a near-tie (a gap of less than {margin} logits "
            "between the two best tokens); other hardware, batch sizes or precision could change "
            f"{'it' if tiny == 1 else 'them'}."
        )
    return (
        f"Scored in {dtype}: no result depends on near-ties (<{fmt.NBSP}{margin} logits between "
        "the two best tokens), so other hardware, batch sizes or precision should give the same "
        "counts."
    )


def describe_loss_change(nll: float | None, base: float | None) -> str:
    """Describe the change of a held-out NLL from the base model's."""
    if nll is None or base is None:
        return ""
    change = fmt.relative_change(nll, base)
    if change is None:
        return f"base model {fmt.number(base)}"
    direction = "below" if change < 0 else "above"
    moved = f"{fmt.percent(abs(change))} {direction}" if change else "the same as"
    return f"{moved} the base model's {fmt.number(base)}"


def write_glossary(report: AuditReport | None, *, attacked: bool = False) -> tuple[Fact, ...]:
    """Return the glossary that the page of a report, or of a comparison (None), needs."""
    results = () if report is None else report.tables.results
    probes = {row.probe for row in results}
    shown = {
        "": True,
        "attacks": attacked or bool(probes & {"sampling", "attacks"}),
        "front": report is None,
        "change from base": any(row.against == "base" and row.is_known for row in results),
        "generation": "generation" in probes,
        "membership": any((row.probe, row.metric) == ("membership", "tpr") for row in results),
        "canaries": "canaries" in probes,
        "copies": any("copies_at_most" in row.parameters for row in results),
        "findings": report is not None and bool(report.findings),
    }
    values = {
        "share": fmt.threshold(0.1 if report is None else report.method.max_edit_share),
        "limit": WITHIN_LIMIT,
        "few": MIN_FOR_MEANS,
    }
    words = tomllib.loads(_GLOSSARY.read_text(encoding="utf-8"))
    return tuple(
        Fact(term, text.format_map(values))
        for results_of, terms in words.items()
        if shown[results_of]
        for term, text in terms.items()
    )


_WITHIN = "Within the audited part of a document."


def describe_identity(report: AuditReport) -> tuple[Fact, ...]:
    """List the facts in the header of the page."""
    base, adapter = report.model.base, report.model.adapter
    form, parts = [], []
    if report.model.load_as != "stored":
        made = fmt.clean_text(report.model.load_as_detail)
        detail = f"{made}; the stored weights were not audited"
        form = [Fact("Loaded as", report.model.load_as, detail=detail)]
    if adapter is not None:
        merged = fmt.clean_name(fmt.shorten_place(adapter.base), 48)
        detail = f"merged into {merged}, {fmt.hash(adapter.base_weights_sha256)}"
        parts = [Fact("Adapter", fmt.clean_name(adapter.description, 80), detail=detail)]
    return (
        Fact("Weights", fmt.hash(report.model.weights_sha256), code=True),
        *form,
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


def write_origin(report: AuditReport) -> str:
    """Return what was measured, by which version and when; hashes and names are in quotes."""
    model = report.model
    merged = ""
    if model.adapter is not None:
        # Cards name the base at their top if it is on a hub.
        merged = (
            f" (adapter {fmt.clean_text(model.adapter.description)} "
            f"'{fmt.hash(model.adapter.weights_sha256)}', merged into base weights "
            f"'{fmt.hash(model.adapter.base_weights_sha256)}')"
        )
    return (
        f"Measured by memguard {fmt.clean_name(report.tool_version, 40)} on weights "
        f"'{fmt.hash(model.weights_sha256)}'{merged} and documents "
        f"'{fmt.hash(report.data.documents_sha256)}', {fmt.clean_name(report.created, 40)}. The "
        "full report is 'audit/report.html' in the folder of the run."
    )


def describe_data(report: AuditReport) -> tuple[Fact, ...]:
    """List the audited documents."""
    data, equal = report.data, ""
    if data.num_equal:
        has = "has" if data.num_equal == 1 else "have"
        equal = (
            f"{fmt.count(data.num_texts or 0)} different texts: {fmt.count(data.num_equal)} {has} "
            "the text of another, and its keyed hash."
        )
    sources = [fmt.clean_name(source, 120) for source in data.sources]
    facts = [
        Fact("Sources", ", ".join(sources) or fmt.MISSING),
        Fact("Documents", fmt.count(data.num_documents), detail=equal),
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
    overlap, detail = "not measured", ""
    if data.overlap_with_control is not None:
        number = "" if data.near_duplicate_words is None else f"{data.near_duplicate_words} "
        overlap = fmt.rate(data.overlap_with_control)
        detail = (
            f"Control documents that share a run of {number}words with a trained one: a prompt or "
            "a passage, since near-duplicates are left out."
        )
    return (
        *facts,
        Fact("Overlap with control", overlap, detail=detail),
        Fact(
            "Hash",
            fmt.clean_name(data.documents_sha256, 80),
            detail="Hash of the ids and token hashes of all documents, in order.",
            code=True,
        ),
    )


def describe_method(report: AuditReport) -> tuple[Fact, ...]:
    """List the settings that are needed to reproduce the results."""
    method, model = report.method, report.model
    prefix = method.prefix_tokens
    prefix_text = "everything before the continuation"
    if prefix is not None and method.answers != "all":
        prefix_text = f"{prefix:,} tokens{'' if method.answers == 'none' else ' of a text'}"
    cut = report.cut
    sample = method.sample_size
    sample_text = "all" if sample is None else f"at most {sample:,} per bucket"
    facts = [
        Fact("Suite", f"{fmt.clean_name(method.suite)}, version {method.suite_version:,}"),
        Fact("Continuation", name_continuation(method)),
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
        for name, value in sorted(environment.items())
    )
