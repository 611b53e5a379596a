"""README.md of a model on a hub: tags, the block of results that the hub shows, verdict, settings.

The card in the folder of a run is for its owner. This one is for readers elsewhere: it has no name
of the run, no source of documents and no hash of them, no seed, which the secrets of canaries are
drawn with, and of the settings those that are numbers or names of memguard's own. A base model and
datasets are named by hub ids only.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from memguard.pages import formatting as fmt
from memguard.records import AuditReport, BucketRow, ResultRow
from memguard.records.utility import ITEMS, UTILITY
from memguard.report.model_card import (
    HOW_TO_LOAD,
    MARKDOWN,
    NEEDS_BASE,
    NO_AUDIT,
    escape,
    list_mitigations,
    list_tags,
    show_config,
    write_audit,
    write_merged,
    write_origin,
)

_TASK = {"type": "text-generation", "name": "Text generation"}
_ROLES = {
    "trained": "Training documents",
    "control": "Documents that were never trained",
    "forget": "Documents to forget",
}
"""Roles of buckets in the block of results, in its order."""
_RATES = {"verbatim": "Verbatim extraction", "near_verbatim": "Near-verbatim extraction"}
_MOST_BUCKETS = 20
_UNPUBLISHED = "unknown"
"""Type of a dataset that is on no hub; the hub makes a link of others."""
_SHOWN_WHOLE = ("mitigations", "adapter", "optim", "train", "budget")
"""Parts of a configuration without texts of the user's."""
_WORD = re.compile(r"""[^\s`'"|()<>,;]+""")
_SHORTEST_ID = 6
_NO_BASE = (
    "This repository has an adapter only, and its base model is not named. With `peft`: load the "
    'base, then `PeftModel.from_pretrained(base, ".")`.'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubCard:
    """What a card says besides the audit."""

    title: str
    """Name of the repository."""
    is_adapter: bool
    """Whether the weights that are sent are those of an adapter."""
    base: str | None
    """Hub id of the base model; None if it has none or is not known."""
    has_base: bool
    """Whether training started from a checkpoint instead of random weights."""
    license: Mapping[str, str] = field(default_factory=dict)
    """Entries `license`, `license_name` and `license_link` of the base model's card."""
    datasets: tuple[str, ...] = ()
    """Hub ids of the training documents."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run."""
    merged: Mapping[str, Any] | None = None
    """Of an adapter that was merged: the result of `memguard export --merge --json`."""


def render_hub_card(report: AuditReport | None, card: HubCard) -> str:
    """Write README.md.

    Args:
        report: audit of these weights; None if there was none.
        card: what else it says.
    """
    mitigations = list_mitigations(dict(card.config))
    trained_adapter = card.is_adapter or card.merged is not None
    sections = [
        _dump(list_entries(report, card)),
        f"# {escape(fmt.clean_name(card.title))}",
        write_origin(card.base, mitigations, is_adapter=trained_adapter, has_base=card.has_base),
    ]
    if card.merged is not None:
        base = f"`{card.base}`" if card.base else "a local base model"
        sections += write_merged(card.merged, base)
    sections += [
        "## Memorization audit",
        *(write_audit(report, is_for_hub=True) if report else [NO_AUDIT]),
        "## How to load",
        *([] if not card.is_adapter else [NEEDS_BASE if card.base else _NO_BASE]),
        *([HOW_TO_LOAD] if card.base or not card.is_adapter else []),
    ]
    if shown := _select_settings(card):
        sections += ["## Configuration", show_config(shown)]
    return "\n\n".join(sections) + "\n"


def _dump(entries: Mapping[str, Any]) -> str:
    # One line for each text: a folded one could begin like the end of the header.
    text = yaml.safe_dump(dict(entries), sort_keys=False, allow_unicode=True, width=10**6)
    return f"---\n{text}---"


def list_entries(report: AuditReport | None, card: HubCard) -> dict[str, Any]:
    """Return the entries of the YAML header.

    Args:
        report: audit of these weights; None if there was none.
        card: what else the card says.
    """
    tags = list_tags(report, list_mitigations(dict(card.config)), is_adapter=card.is_adapter)
    entries: dict[str, Any] = {
        **card.license,
        "library_name": "peft" if card.is_adapter else "transformers",
        "pipeline_tag": "text-generation",
    }
    if card.base:
        entries["base_model"] = card.base
        entries["base_model_relation"] = "adapter" if card.is_adapter else "finetune"
    if card.datasets:
        entries["datasets"] = list(card.datasets)
    entries["tags"] = ["memguard", *tags]
    results = list(_list_results(report)) if report else []
    if results:
        name = _clean(fmt.clean_name(card.title))
        entries["model-index"] = [{"name": name, "results": results}]
    return entries


def _list_results(report: AuditReport) -> Iterator[dict[str, Any]]:
    """Yield the parts of the hub's block: a data set each, with its metrics."""
    for role, name in _ROLES.items():
        metrics = list(_list_rates(report, role))
        if role == "trained":
            # First: rates of zero beside a red verdict would reassure.
            metrics.insert(0, _make_metric("verdict", report.verdict.describe(), "Verdict"))
        if metrics:
            yield _make_result(name, role, metrics)
    if report.training is not None and report.training.heldout_nll is not None:
        # No more digits than the text of the card: exact values may confirm a guess of a text.
        nll = float(f"{report.training.heldout_nll:.3f}")
        metric = _make_metric("nll", nll, "Held-out loss (nats a token)")
        yield _make_result("Held-out documents", "heldout", [metric])
    yield from _list_tasks(report)


def _list_rates(report: AuditReport, role: str) -> Iterator[dict[str, Any]]:
    buckets = [bucket for bucket in report.tables.buckets if bucket.role == role]
    for bucket in buckets[:_MOST_BUCKETS]:
        for metric, name in _RATES.items():
            row = report.tables.find("extraction", metric, bucket.bucket)
            if row is not None and row.value is not None:
                label = f"{name}, {_name_bucket(bucket)}: {fmt.rate(row)}"
                yield _make_metric(f"{metric}_extraction", round(row.value, 6), label)


def _name_bucket(bucket: BucketRow) -> str:
    return f"'{fmt.clean_name(bucket.bucket)}'"


def _list_tasks(report: AuditReport) -> Iterator[dict[str, Any]]:
    """Yield the benchmark tasks of an audit, on the trained model."""
    tasks: dict[str, list[ResultRow]] = {}
    for row in report.tables.results:
        is_own = row.model == "trained" and row.against is None
        if row.probe == UTILITY and row.bucket == ITEMS and is_own and row.value is not None:
            tasks.setdefault(row.parameters.removeprefix("task="), []).append(row)
    for task, rows in tasks.items():
        metrics = [
            _make_metric(row.metric, round(row.value or 0.0, 6), _label(row)) for row in rows
        ]
        yield _make_result(fmt.clean_name(task), "", metrics, kind=task)


def _label(row: ResultRow) -> str:
    interval = f", 95 % CI {row.low:.4g} to {row.high:.4g}" if row.ci else ""
    return f"{fmt.clean_name(row.metric)} ({row.num_documents:,} items{interval})"


def _make_result(
    name: str, split: str, metrics: list[dict[str, Any]], *, kind: str | None = None
) -> dict[str, Any]:
    """Return a data set of the block.

    Args:
        name: shown on the hub.
        split: tells data sets that are on no hub apart.
        metrics: from `_make_metric`.
        kind: name of a task; None for documents, which are on no hub.
    """
    if kind is None:
        dataset = {"name": f"{name} (not published)", "type": _UNPUBLISHED, "split": split}
    else:
        is_name = fmt.is_hub_id(kind)
        dataset = {"name": _clean(name), "type": kind if is_name else _UNPUBLISHED}
        if not is_name:
            dataset["config"] = _clean(name)
    return {"task": dict(_TASK), "dataset": dataset, "metrics": metrics}


def _make_metric(kind: str, value: float | str, name: str) -> dict[str, Any]:
    shown = _clean(value) if isinstance(value, str) else value
    return {"type": _clean(kind), "value": shown, "name": _clean(name)}


def _clean(text: str) -> str:
    """Clean a text of a record for the header, which no Markdown is read in."""
    return fmt.hide_paths(fmt.clean_text(text.replace(fmt.NBSP, " "), fmt.SENTENCE_LIMIT))


def _select_settings(card: HubCard) -> dict[str, Any]:
    """Return the settings that readers elsewhere may see."""
    config = card.config
    shown = {key: config[key] for key in _SHOWN_WHOLE if key in config}
    model = config.get("model")
    if isinstance(model, dict):
        named = {"path": card.base, "revision": model.get("revision")} if card.base else {}
        scratch = model.get("scratch")
        if isinstance(scratch, dict):
            named["scratch"] = {**scratch, "tokenizer": None}
        shown = {"model": named, **shown}
    if isinstance(config.get("data"), dict):
        shown["data"] = _keep_numbers(config["data"])
    return shown


def _keep_numbers(value: Any) -> Any:
    """Keep the numbers of settings: texts name files, columns and people's groups."""
    if isinstance(value, dict):
        kept = {key: _keep_numbers(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None}
    return value if isinstance(value, bool | int | float) else None


def redact(card: str, places: Iterable[str], ids: Collection[str]) -> str:
    """Return a card without paths, names of files and ids of documents.

    Texts of probes of other packages may have them, and names of buckets, which are the user's.

    Args:
        card: from `render_hub_card`.
        places: paths and names of files.
        ids: of documents; short ones and plain words are kept, since they occur anywhere.
    """
    for place in sorted(places, key=len, reverse=True):
        for written in (place, MARKDOWN.sub(r"\\\1", place)):
            card = card.replace(written, "(local path)")
    for word in set(_WORD.findall(card)):
        plain = word.replace("\\", "")
        is_telling = len(plain) >= _SHORTEST_ID and any(map(str.isdigit, plain))
        if is_telling and plain in ids:
            card = card.replace(word, "(id)")
    return card
