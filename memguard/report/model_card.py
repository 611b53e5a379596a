"""README.md of a model: of a run's folder, of a merged model, and of a repository on a hub.

A card is meant for publication: it contains no excerpt, no document id and no local path. The hub's
is for readers elsewhere, and takes what is for the public alone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from memguard.pages import formatting as fmt
from memguard.pages.facts import Facts
from memguard.pages.page import Fact, Table
from memguard.records import AuditReport
from memguard.report.audit_facts import collect_facts

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~$!&])")
"""Characters that are escaped in texts of records."""
_QUOTED = re.compile(r"'([^']*)'")
_LONGEST_CONFIG, _MOST_ROWS = 20_000, 100
_LOCAL = "(local path)"
_NOT_SHOWN = ("output_dir", "parallel", "audit")
"""Parts of a configuration that do not change the weights."""
_NO_AUDIT = (
    "These weights have not been audited: it is not known which training documents can be "
    "extracted from them. `memguard audit` on the run folder measures it."
)
_NEEDS_BASE = (
    "This folder has an adapter only: `peft` must be installed, and the base model must be where "
    "`base_model_name_or_path` in `adapter_config.json` says."
)
_NO_BASE = (
    "This repository has an adapter only, and its base model is not named. With `peft`: load the "
    'base, then `PeftModel.from_pretrained(base, ".")`.'
)
_HOW_TO_LOAD = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or the model's id on a hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
```"""


def render_model_card(
    report: AuditReport | None, *, run_name: str, base_model: str | None, config_yaml: str
) -> str:
    """Write the model card; ``report`` is the audit of these weights, None if there was none.

    Settings of ``config_yaml`` that hold a local path or null, or that do not change the weights,
    are omitted; the base model is named only if it is a hub id.
    """
    config = _read_config(config_yaml)
    listed = (config or {}).get("mitigations")
    mitigations = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    is_adapter, base = (config or {}).get("adapter") is not None, _name_base(base_model)
    tags = _list_tags(mitigations, is_audited=report is not None, is_adapter=is_adapter)
    sections = [
        _dump_front_matter("peft" if is_adapter else "transformers", base, tags),
        f"# Model of run '{_escape(fmt.clean_name(run_name))}'",
        _describe_origin(base, mitigations, is_adapter=is_adapter, has_base=base_model is not None),
        "## Memorization audit",
        *(_write_audit(collect_facts(report)) if report else [_NO_AUDIT]),
        "## How to load",
        *([_NEEDS_BASE] if is_adapter else []),
        _HOW_TO_LOAD,
    ]
    if config is not None:
        shown = {key: value for key, value in config.items() if key not in _NOT_SHOWN}
        if base is None and isinstance(shown.get("model"), dict):
            shown["model"] = {**shown["model"], "path": None}
        sections += ["## Configuration", _show_config(shown)]
    return "\n\n".join(sections) + "\n"


def render_hub_card(
    report: AuditReport | None,
    *,
    title: str,
    is_adapter: bool,
    base: str | None,
    has_base: bool,
    mitigations: Sequence[str],
) -> str:
    """Write README.md of a repository on a hub.

    ``base`` is the hub id of the base model, None if it has none or is not named; ``has_base`` says
    whether training started from a checkpoint instead of random weights.
    """
    from huggingface_hub import ModelCardData

    named = [{"name": name} for name in mitigations]
    facts = None if report is None else collect_facts(report)
    tags = _list_tags(named, is_audited=report is not None, is_adapter=is_adapter)
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation=("adapter" if is_adapter else "finetune") if base else None,
        tags=["memguard", *tags],
        model_name=title if facts else None,
        eval_results=[_make_result(facts)] if facts else None,
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {_escape(title)}",
        _describe_origin(base, named, is_adapter=is_adapter, has_base=has_base),
        "## Memorization audit",
        *(_write_public(facts) if facts else [_NO_AUDIT]),
        "## How to load",
        *([_NEEDS_BASE if base else _NO_BASE] if is_adapter else []),
        *([_HOW_TO_LOAD] if base or not is_adapter else []),
    ]
    return "\n\n".join(sections) + "\n"


# -- the audit -------------------------------------------------------------------------------------


def _write_audit(facts: Facts) -> Iterator[str]:
    """Yield the paragraphs on the audit: badges, verdict, notices, sections, limitations."""
    yield _escape("; ".join(badge.describe() for badge in facts.badges))
    yield f"**{_escape(f'{facts.verdict.label}. {facts.verdict.text}')}**"
    yield _escape(f"{facts.membership.text} {facts.scope}")
    yield from (f"> {_escape(notice.text)}" for notice in facts.notices)
    own = [section for section in facts.sections if section.audience == "owner"]
    *told, measured = (one for section in own for one in section.brief)
    yield from map(_write_brief, told)
    yield "Scope and limitations:"
    yield "\n".join(f"- {_escape(limit.text)}" for limit in facts.limits)
    yield _write_brief(measured)


def _write_public(facts: Facts) -> Iterator[str]:
    """Yield the paragraphs on the audit: what is for the public, and nothing else."""
    for section in facts.sections:
        if section.audience != "public":
            continue
        verdict, *others = section.lead
        yield f"**{_escape(verdict)}**"
        yield _escape(" ".join(others))
        if warnings := sum(notice.level == "warning" for notice in facts.notices):
            yield f"> Warnings in the report of this audit that are not shown here: {warnings:,}."
        yield from map(_write_brief, section.tables)
        limits = [limit.text for limit in facts.limits if limit.audience == "public"]
        yield "\n".join(f"- {_escape(limit)}" for limit in (*limits, *section.points))
        yield from map(_write_brief, section.brief)


def _make_result(facts: Facts) -> "EvalResult":
    """Return what the hub shows beside the card: no rate alone, which could reassure."""
    from huggingface_hub import EvalResult

    return EvalResult(
        task_type="text-generation",
        dataset_type="unknown",  # The hub makes a link of others.
        dataset_name="Training documents (not published)",
        metric_type="verdict",
        metric_value=next(one.lead[0] for one in facts.sections if one.audience == "public"),
    )


def _write_brief(told: Fact | Table) -> str:
    if isinstance(told, Fact):
        text = _escape(f"{told.term}: {told.value}" if told.term else told.value)
        return _QUOTED.sub(r"`\1`", text) if told.code else text
    # The head of a row is a name; its cells are numbers, which need no escaping.
    rows = [[column.text for column in told.columns], ["---"] * len(told.columns)]
    for row in told.rows[:_MOST_ROWS]:
        rows.append([_escape(row.head.text), *(cell.text for cell in row.cells)])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    more = len(told.rows) - _MOST_ROWS
    return f"{table}\n\nAnd {more:,} more rows in the report." if more > 0 else table


# -- origin and settings ---------------------------------------------------------------------------


def _read_config(config_yaml: str) -> dict[str, Any] | None:
    """Return the settings of a YAML text; None if it is not a mapping."""
    try:
        config = yaml.safe_load(config_yaml)
    except (yaml.YAMLError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _escape(text: str) -> str:
    """Clean text, replace local paths and escape the special characters of Markdown."""
    return _MARKDOWN.sub(r"\\\1", fmt.hide_paths(fmt.clean_text(text, 2000)))


def _name_base(base_model: str | None) -> str | None:
    """Return the base model's hub id; None if it is or looks like a folder."""
    if base_model is None or not fmt.is_hub_id(base_model) or Path(base_model).exists():
        return None
    return base_model


def _list_tags(
    mitigations: Sequence[Mapping[str, Any]], *, is_audited: bool, is_adapter: bool
) -> list[str]:
    """Return the tags of a card, besides that of memguard."""
    has_goldfish = any(mitigation.get("name") == "goldfish" for mitigation in mitigations)
    tags = {"lora": is_adapter, "memorization-audit": is_audited, "goldfish-loss": has_goldfish}
    return [tag for tag, applies in tags.items() if applies]


def _dump_front_matter(library: str, base: str | None, tags: list[str]) -> str:
    entries = {
        "library_name": library,
        "pipeline_tag": "text-generation",
        **({"base_model": base} if base else {}),
        "tags": ["memguard", *tags],
    }
    return f"---\n{yaml.safe_dump(entries, sort_keys=False)}---"


def _describe_origin(
    base: str | None, mitigations: Sequence[Mapping[str, Any]], *, is_adapter: bool, has_base: bool
) -> str:
    """Return the sentence on the model that training started from, and on the loss."""
    start = f"`{base}`" if base else "a local checkpoint" if has_base else "random weights"
    named = "; ".join(_escape(fmt.settings(m)) for m in mitigations)
    return (
        f"{'A LoRA adapter' if is_adapter else 'A causal language model'} trained with memguard "
        f"{'for' if is_adapter else 'from'} {start}. "
        f"Mitigations in the loss: {named or 'none (plain loss)'}."
    )


def _show_config(config: dict[str, Any]) -> str:
    """Return settings as a block of YAML, without local paths."""
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


# -- a merged model --------------------------------------------------------------------------------


_OVER_4_BITS = (
    " If the adapter was trained over a base in 4 bits, these weights are another model than the "
    "trained one: an audit of that one does not hold for them."
)


def render_merged_card(result: Mapping[str, Any]) -> str:
    """Write the card of a merged model, from the result of `memguard export --merge --json`."""
    base, difference = _name_base(result["base"]), result["difference"]
    sections = [
        _dump_front_matter("transformers", base, []),
        "# Merged model",
        f"A causal language model: an adapter ({result['adapter']}, weights "
        f"`{fmt.hash(result['adapter_sha256'])}`), merged by memguard into "
        f"{f'`{base}`' if base else 'a local base model'} (weights "
        f"`{fmt.hash(result['base_sha256'])}`).",
        f"Compared with adapter and base on {difference['num_tokens']:,} tokens in fp32, logits "
        f"differ by at most {difference['largest']:.2g}, and the KL divergence is "
        f"{difference['mean_kl']:.2g} nats a token. The merged weights are stored in "
        f"{result['dtype']}.",
        "What these weights memorized has not been measured; `memguard audit --model` measures it."
        + ("" if result["is_base_form_known"] else _OVER_4_BITS),
        "## How to load",
        _HOW_TO_LOAD,
    ]
    return "\n\n".join(sections) + "\n"
