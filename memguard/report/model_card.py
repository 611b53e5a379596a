"""README.md of a model: of a run's folder, of a merged model, and of a repository on a hub.

A card is meant for publication: it contains no excerpt, no document id and no local path. The hub's
is for readers elsewhere: of the report only counts, rates and sentences of fixed words and counts
are shown. Names of buckets, files and others' probes, settings and seeds are not read.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from memguard.audit.probes.canaries import write_canaries
from memguard.audit.suite import PROBES
from memguard.pages import formatting as fmt
from memguard.records import MIN_FOR_QUANTILES, NO_DOCUMENTS, AuditReport, BucketRow, ResultRow
from memguard.report.audit_training import describe_budget, describe_privacy, describe_utility
from memguard.report.texts import describe_loss_change, write_counted_limits, write_limits

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~$!&])")
"""Characters that are escaped in texts of records."""
_LONGEST_CONFIG = 20_000
_LOCAL = "(local path)"
_NOT_SHOWN = ("output_dir", "parallel", "audit")
"""Parts of a configuration that do not change the weights."""


def render_model_card(
    report: AuditReport | None, *, run_name: str, base_model: str | None, config_yaml: str
) -> str:
    """Write the model card.

    Args:
        report: audit of these weights; None if there was none.
        run_name: name of the run, shown in the heading.
        base_model: model that training started from; named only if it is a hub id.
        config_yaml: resolved configuration; settings that hold a local path or null, or that
            do not change the weights, are omitted.
    """
    config = _read_config(config_yaml)
    mitigations = _list_mitigations(config)
    is_adapter = (config or {}).get("adapter") is not None
    sections = [
        _write_front_matter(report, base_model, mitigations, is_adapter=is_adapter),
        f"# Model of run '{escape(fmt.clean_name(run_name))}'",
        write_origin(
            _name_base(base_model),
            mitigations,
            is_adapter=is_adapter,
            has_base=base_model is not None,
        ),
        "## Memorization audit",
        *(_write_audit(report) if report else [NO_AUDIT]),
        "## How to load",
        *([NEEDS_BASE] if is_adapter else []),
        HOW_TO_LOAD,
    ]
    if config is not None:
        shown = {key: value for key, value in config.items() if key not in _NOT_SHOWN}
        if _name_base(base_model) is None and isinstance(shown.get("model"), dict):
            shown["model"] = {**shown["model"], "path": None}
        sections += ["## Configuration", _show_config(shown)]
    return "\n\n".join(sections) + "\n"


NO_AUDIT = (
    "These weights have not been audited: it is not known which training documents can be "
    "extracted from them. `memguard audit` on the run folder measures it."
)
NEEDS_BASE = (
    "This folder has an adapter only: `peft` must be installed, and the base model must be where "
    "`base_model_name_or_path` in `adapter_config.json` says."
)
HOW_TO_LOAD = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or the model's id on a hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
```"""


def _read_config(config_yaml: str) -> dict[str, Any] | None:
    """Return the settings of a YAML text; None if it is not a mapping.

    Args:
        config_yaml: of a run.
    """
    try:
        config = yaml.safe_load(config_yaml)
    except (yaml.YAMLError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _list_mitigations(config: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the mitigations of a configuration.

    Args:
        config: from `_read_config`.
    """
    listed = (config or {}).get("mitigations") or []
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def escape(text: str) -> str:
    """Clean text, replace local paths and escape the special characters of Markdown.

    Args:
        text: of a record.
    """
    return _MARKDOWN.sub(r"\\\1", fmt.hide_paths(fmt.clean_text(text, 2000)))


def _name_base(base_model: str | None) -> str | None:
    """Return the base model's hub id; None if it is or looks like a folder."""
    if base_model is None or not fmt.is_hub_id(base_model) or Path(base_model).exists():
        return None
    return base_model


def _write_front_matter(
    report: AuditReport | None,
    base_model: str | None,
    mitigations: list[dict[str, Any]],
    *,
    is_adapter: bool,
) -> str:
    library = "peft" if is_adapter else "transformers"
    tags = list_tags(report, mitigations, is_adapter=is_adapter)
    return _dump_front_matter(library, base_model, tags)


def list_tags(
    report: AuditReport | None, mitigations: list[dict[str, Any]], *, is_adapter: bool
) -> list[str]:
    """Return the tags of a card, besides that of memguard.

    Args:
        report: audit of the weights; None if there was none.
        mitigations: of the configuration.
        is_adapter: whether the weights are those of an adapter.
    """
    has_goldfish = any(mitigation.get("name") == "goldfish" for mitigation in mitigations)
    tags = {
        "lora": is_adapter,
        "memorization-audit": report is not None,
        "goldfish-loss": has_goldfish,
    }
    return [tag for tag, applies in tags.items() if applies]


def _dump_front_matter(library: str, base_model: str | None, tags: list[str]) -> str:
    """Return the YAML header; a base model that is not on a hub is left out."""
    base = _name_base(base_model)
    entries = {
        "library_name": library,
        "pipeline_tag": "text-generation",
        **({"base_model": base} if base else {}),
        "tags": ["memguard", *tags],
    }
    return f"---\n{yaml.safe_dump(entries, sort_keys=False)}---"


def write_origin(
    base: str | None,
    mitigations: list[dict[str, Any]],
    *,
    is_adapter: bool,
    has_base: bool,
) -> str:
    """Return the sentence on the model that training started from, and on the loss.

    Args:
        base: hub id of that model; None if it is not named.
        mitigations: of the configuration.
        is_adapter: whether an adapter was trained.
        has_base: whether training started from a checkpoint instead of random weights.
    """
    start = f"`{base}`" if base else "a local checkpoint" if has_base else "random weights"
    named = "; ".join(escape(fmt.settings(m)) for m in mitigations[:20])
    return (
        f"{'A LoRA adapter' if is_adapter else 'A causal language model'} trained with memguard "
        f"{'for' if is_adapter else 'from'} {start}. "
        f"Mitigations in the loss: {named or 'none (plain loss)'}."
    )


def _write_audit(report: AuditReport) -> list[str]:
    """Return the paragraphs on the audit: verdict, warnings, rates, costs, limitations."""
    verdict = report.verdict
    parts = [f"**{escape(verdict.describe())}**"]
    parts.append(escape(f"{verdict.membership.sentence} {verdict.scope}"))
    parts += [f"> {escape(banner.text)}" for banner in report.banners[:20]]
    parts.append(_write_table(report))
    parts += _write_costs(report)
    if canaries := write_canaries(report):
        parts.append(f"Canaries: {escape(canaries)}")
    if report.training and report.training.budget:
        parts.append(escape(describe_budget(report.training)))
    if report.training and report.training.heldout_nll is not None:
        nll, base = report.training.heldout_nll, report.training.base_heldout_nll
        change = describe_loss_change(nll, base)
        parts.append(
            f"Utility: held-out NLL {fmt.number(nll)} nats a token"
            f"{f', {change}' if change else ''}."
        )
    parts += [f"Utility: {escape(line)}." for line in describe_utility(report.tables)]
    for fact in describe_privacy(report.training) if report.training else ():
        parts.append(f"{fact.term}: {escape(f'{fact.value}. {fact.detail}')}")
    parts.append("Scope and limitations:")
    parts.append("\n".join(f"- {escape(limit)}" for limit in write_limits(report)))
    parts.append(
        f"Measured by memguard {escape(report.tool_version)} on weights "
        f"`{_code(fmt.hash(report.model.weights_sha256))}`{_write_adapter(report)} and documents "
        f"`{_code(fmt.hash(report.data.documents_sha256))}`, {escape(report.created)}. The full "
        "report is `audit/report.html` in the folder of the run."
    )
    return parts


def _write_adapter(report: AuditReport) -> str:
    adapter = report.model.adapter
    if adapter is None:
        return ""
    # The base is named at the top of the card if it is on a hub.
    own, base = fmt.hash(adapter.weights_sha256), fmt.hash(adapter.base_weights_sha256)
    return (
        f" (adapter {escape(adapter.description)} `{_code(own)}`, merged into base weights "
        f"`{_code(base)}`)"
    )


def _write_costs(report: AuditReport) -> list[str]:
    """Report the attack cost of the verdict's bucket and of the control in one line."""
    control = report.tables.control
    costs = []
    for bucket in dict.fromkeys((report.verdict.bucket, control.bucket if control else "")):
        cost = report.tables.find("sampling", "log10_queries", bucket, statistic="median")
        if cost and cost.num_documents >= MIN_FOR_QUANTILES:
            costs.append(f"{escape(fmt.clean_name(bucket))} {fmt.cost(cost)}")
    if not costs:
        return []
    return [
        "Attack cost, median queries until the true continuation is generated with a probability "
        f"of one half: {'; '.join(costs)}."
    ]


def _code(text: str) -> str:
    return text.replace("`", "'")


def _write_table(report: AuditReport) -> str:
    lines = [
        "| Bucket | Repetitions | Verbatim | Near-verbatim | Teacher-forced token accuracy "
        "| Base, near-verbatim |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_write_row(report, bucket) for bucket in report.tables.buckets[:100]]
    return "\n".join(lines)


def _write_row(report: AuditReport, bucket: BucketRow) -> str:
    def find(metric: str, model: str = "trained") -> ResultRow | None:
        return report.tables.find("extraction", metric, bucket.bucket, model=model)

    accuracy, base = find("token_accuracy"), find("verbatim", "base")
    has_base = base is not None and base.is_known
    role = "" if bucket.role in ("trained", bucket.bucket) else f" ({bucket.role})"
    cells = (
        f"{escape(fmt.clean_name(bucket.bucket))}{role}",
        fmt.repetitions(bucket.num_repetitions),
        _write_rate(find("verbatim")),
        _write_rate(find("near_verbatim")),
        fmt.number(accuracy.value if accuracy else None),
        _write_rate(find("near_verbatim", "base")) if has_base else fmt.MISSING,
    )
    return f"| {' | '.join(cells)} |"


def _write_rate(rate: ResultRow | None) -> str:
    if rate is None or rate.value is None:
        is_empty = rate is not None and rate.missing_because == NO_DOCUMENTS
        return NO_DOCUMENTS if is_empty else "not generated"
    return f"{fmt.counts(rate)}, {fmt.percent(rate.value)} ({fmt.percent_ci(rate.ci)})"


def _show_config(config: dict[str, Any]) -> str:
    """Return settings as a block of YAML, without local paths.

    Args:
        config: the settings to show.
    """
    text = yaml.safe_dump(_omit_empty(_hide(config)), sort_keys=False, allow_unicode=True)
    if len(text) > _LONGEST_CONFIG:
        return f"Too long to show here ({fmt.count(len(text))} characters)."
    lines = "\n".join(fmt.clean_text(line, 400) for line in text.split("\n")).rstrip()
    return f"```yaml\n{lines.replace('```', chr(39) * 3)}\n```"


def _omit_empty(value: Any) -> Any:
    """Remove settings that hold nothing but a local path, or that are not set."""
    if not isinstance(value, dict):
        return value
    shown = {key: _omit_empty(item) for key, item in value.items()}
    return {key: item for key, item in shown.items() if item not in (None, {}, [], _LOCAL)}


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {_hide(key): _hide(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_hide(item) for item in value]
    if not isinstance(value, str):
        return value
    hidden = fmt.hide_paths(value)
    # A path may contain spaces, which end it in a sentence but not here.
    return _LOCAL if hidden.startswith(_LOCAL) else hidden


# The card of a merged model.

_OVER_4_BITS = (
    " If the adapter was trained over a base in 4 bits, these weights are another model than the "
    "trained one: an audit of that one does not hold for them."
)


def render_merged_card(result: Mapping[str, Any]) -> str:
    """Write the card of a merged model: adapter and base, and the difference of its logits.

    Args:
        result: of `memguard export --merge --json`.
    """
    base = _name_base(result["base"])
    sections = [
        _dump_front_matter("transformers", base, []),
        "# Merged model",
        *_write_merged(result, f"`{base}`" if base else "a local base model"),
        "What these weights memorized has not been measured; `memguard audit --model` measures it."
        + ("" if result["is_base_form_known"] else _OVER_4_BITS),
        "## How to load",
        HOW_TO_LOAD,
    ]
    return "\n\n".join(sections) + "\n"


def _write_merged(result: Mapping[str, Any], base: str) -> list[str]:
    """Return the paragraphs on an adapter and the base that it was merged into.

    Args:
        result: of `memguard export --merge --json`.
        base: what the base is called.
    """
    difference = result["difference"]
    return [
        f"A causal language model: an adapter ({result['adapter']}, weights "
        f"`{fmt.hash(result['adapter_sha256'])}`), merged by memguard into {base} (weights "
        f"`{fmt.hash(result['base_sha256'])}`).",
        f"Compared with adapter and base on {difference['num_tokens']:,} tokens in fp32, logits "
        f"differ by at most {difference['largest']:.2g}, and the KL divergence is "
        f"{difference['mean_kl']:.2g} nats a token. The merged weights are stored in "
        f"{result['dtype']}.",
    ]


_ROLES = {"control": "never trained", "trained": "trained", "forget": "to be forgotten"}
_NO_BASE = (
    "This repository has an adapter only, and its base model is not named. With `peft`: load the "
    'base, then `PeftModel.from_pretrained(base, ".")`.'
)


def render_hub_card(
    report: AuditReport | None,
    *,
    title: str,
    is_adapter: bool,
    base: str | None,
    has_base: bool,
    mitigations: Sequence[str],
) -> str:
    """Write README.md.

    Args:
        report: audit of these weights; None if there was none.
        title: name of the repository.
        is_adapter: whether the weights are those of an adapter.
        base: hub id of the base model; None if it has none or is not named.
        has_base: whether training started from a checkpoint instead of random weights.
        mitigations: names of memguard's mitigations in the loss.
    """
    from huggingface_hub import ModelCardData

    named = [{"name": name} for name in mitigations]
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation=("adapter" if is_adapter else "finetune") if base else None,
        tags=["memguard", *list_tags(report, named, is_adapter=is_adapter)],
        model_name=title if report else None,
        eval_results=[_make_result(_write_verdict(report))] if report else None,
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {escape(title)}",
        write_origin(base, named, is_adapter=is_adapter, has_base=has_base),
        "## Memorization audit",
        *(_write_public_audit(report) if report else [NO_AUDIT]),
        "## How to load",
        *([NEEDS_BASE if base else _NO_BASE] if is_adapter else []),
        *([HOW_TO_LOAD] if base or not is_adapter else []),
    ]
    return "\n\n".join(sections) + "\n"


def _make_result(verdict: str) -> "EvalResult":
    """Return what the hub shows beside the card: no rate alone, which could reassure."""
    from huggingface_hub import EvalResult

    return EvalResult(
        task_type="text-generation",
        dataset_type="unknown",  # The hub makes a link of others.
        dataset_name="Training documents (not published)",
        metric_type="verdict",
        metric_value=verdict,
    )


def _write_verdict(report: AuditReport) -> str:
    """Return level and sentence, in which quotes have nothing but the name of a bucket."""
    return re.sub("'.*'", "one bucket", report.verdict.describe(), flags=re.DOTALL)


def _write_public_audit(report: AuditReport) -> Iterator[str]:
    """Yield the paragraphs on the audit: verdict, scope, rates, limits, what was not run."""
    verdict = report.verdict
    yield f"**{escape(_write_verdict(report))}**"
    # The rest of the scope names probes, of which others' are only counted below.
    yield escape(f"{verdict.membership.sentence} {verdict.scope.partition(' Not run: ')[0]}")
    if warnings := sum(banner.level == "warning" for banner in report.banners):
        yield f"> Warnings in the report of this audit that are not shown here: {warnings:,}."
    yield _write_roles(report)
    ran = [run.name for run in report.probe_runs if run.num_documents is not None]
    not_run = [run.name for run in report.probe_runs if run.num_documents is None]
    probes = f"Only these probes ran: {_name_probes(ran)}. Not run: {_name_probes(not_run)}."
    yield "\n".join(f"- {escape(limit)}" for limit in (*write_counted_limits(report), probes))
    yield (
        f"Measured by memguard {escape(report.tool_version)} on weights "
        f"`{fmt.hash(report.model.weights_sha256)}`."
    )


def _name_probes(names: Sequence[str]) -> str:
    """Name memguard's own probes, and count the others."""
    own = [name for name in names if name in PROBES]
    others = [f"{len(names) - len(own):,} more"] if len(own) < len(names) else []
    return ", ".join([*own, *others]) or "none"


def _write_roles(report: AuditReport) -> str:
    """Return a row for each bucket, since a sum over them would hide the highest rate."""
    buckets = [bucket for bucket in report.tables.buckets if bucket.role in _ROLES]
    rates = [report.tables.risks(bucket.bucket) for bucket in buckets]
    is_shown = {"verbatim", "near_verbatim"}.union(*rates)
    risks = [risk for risk in fmt.RISK_LABELS if risk in is_shown]
    lines = [["Documents", "Repetitions", *(fmt.RISK_LABELS[risk] for risk in risks)]]
    lines.append(["---"] * len(lines[0]))
    for bucket, found in zip(buckets, rates, strict=True):
        cells = [fmt.rate(found[risk]) if risk in found else "not measured" for risk in risks]
        lines.append([_ROLES[bucket.role], fmt.repetitions(bucket.num_repetitions), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
