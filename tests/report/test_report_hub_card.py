"""The card on a hub: entries that the hub's own library reads, and nothing of the user's files."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import evidence_examples as evidence
import pydantic
import pytest
import report_examples as examples
from huggingface_hub import ModelCard
from result_examples import change_tables

from memguard import records as r
from memguard.records.verdict import Reason
from memguard.report import render_report
from memguard.report.model_card import render_hub_card

PLANTED = "/home/alice/notes.jsonl patient_7731 gs_ward_bucket"
COUNTS = "40 of 40 counted trained documents were extracted, 0 of 40 unseen ones"


def render(report: r.AuditReport | None, **changes: Any) -> str:
    values = {"title": "notes", "is_adapter": False, "base": None, "has_base": True}
    card = render_hub_card(report, **{**values, "mitigations": ["goldfish"], **changes})
    return card.replace("\u00a0", " ")


def test_entries_are_what_the_library_of_the_hub_reads() -> None:
    report = examples.make_report()
    card = render(report, base="org/base")
    data = ModelCard(card).data
    (result,) = data.eval_results or ()
    said = f"Memorized: {COUNTS}, 0 of 40 by the base model; the model memorized training text."
    assert (result.metric_type, result.metric_value) == ("verdict", said)
    assert f"**{said}**" in card
    entries = data.to_dict()
    assert entries.pop("model-index")[0]["name"] == "notes"
    assert entries == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "tags": ["memguard", "memorization-audit", "goldfish-loss"],
    }


def test_every_bucket_has_its_rates_under_its_role() -> None:
    rows = [line.split(" | ") for line in render(examples.make_report()).splitlines()]
    rows = [row for row in rows if row[0].startswith("| ")]
    assert [row[:2] for row in rows[2:]] == [
        ["| never trained", "0"],
        *(["| trained", number] for number in ("4", "16", "64")),
    ]
    assert [row[2].partition(",")[0] for row in rows[2:]] == [
        *("0 of 40", "0 of 40", "17 of 40", "40 of 40")
    ]


def test_what_was_not_measured_is_said() -> None:
    report = examples.drop_near_verbatim(examples.make_report())
    runs = [
        r.ProbeRun(name=name, version=1, num_documents=None, reason_not_run="why")
        for name in ("attacks", "inhouse")
    ]
    report = report.model_copy(update={"probe_runs": [*report.probe_runs, *runs]})
    card = render(report)
    assert card.count("| not measured |") == len(report.tables.buckets)
    assert "Not run: attacks, 1 more." in card
    banners = [r.Banner(level="warning", text="of document patient_7")]
    card = render(report.model_copy(update={"banners": banners}))
    assert "> Warnings in the report of this audit that are not shown here: 1." in card


@pytest.mark.parametrize("reason", [*typing.get_args(Reason), None])
def test_every_verdict_says_counts_and_reason(reason: Any) -> None:
    level = {"control": "memorized", "canaries": "memorized", None: "none-found"}.get(reason)
    made = examples.make_green() if reason is None else examples.make_verdict(reason=reason)
    made = made.model_copy(update={"level": level or "extracted"})
    card = render(examples.make_report().model_copy(update={"verdict": made}))
    assert f"{r.LEVEL_NAMES[made.level]}: {made.trained.num_matched} of 40 counted" in card
    assert ("(true share up to" in card) == (reason is None)
    nothing = made.model_copy(update={"trained": examples.make_counts(0, 0), "base": None})
    card = render(examples.make_report().model_copy(update={"verdict": nothing}))
    assert f"{r.LEVEL_NAMES[made.level]}: no trained document counts, 0 of 40 unseen" in card


def plant(value: Any) -> Any:
    """Return a record with a planted text in every text, except where a fixed set is allowed."""
    if isinstance(value, str):
        return PLANTED
    if isinstance(value, Mapping):
        return {key: plant(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plant(item) for item in value)
    if isinstance(value, pydantic.BaseModel):
        for name in type(value).model_fields:
            changed = plant(getattr(value, name))
            try:
                type(value).model_validate({**dict(value), name: changed})
            except (pydantic.ValidationError, KeyError):
                continue
            value = value.model_copy(update={name: changed})
    return value


def plant_rows(report: r.AuditReport) -> r.AuditReport:
    """Return a report whose buckets, reasons and notes are planted; keys of rows stay."""
    tables = report.tables
    names = {bucket.bucket: f"{PLANTED} {n}" for n, bucket in enumerate(tables.buckets)}

    def change(row: Any) -> Any:
        changes = {"bucket": names.get(row.bucket, row.bucket)}
        if getattr(row, "missing_because", None):
            changes["missing_because"] = PLANTED
        return dataclasses.replace(row, **changes)

    told = {"heading": PLANTED, "meaning": PLANTED, "note": PLANTED}
    return change_tables(
        report,
        buckets=[*map(change, tables.buckets)],
        results=[*map(change, tables.results)],
        tests=[*map(change, tables.tests)],
        metrics=[dataclasses.replace(metric, **told) for metric in tables.metrics],
    )


def test_nothing_of_the_users_files_is_in_the_card() -> None:
    report = evidence.make_full_report()
    planted = plant(report).model_copy(update={"tables": plant_rows(report).tables})
    assert planted.verdict.sentence == planted.findings[0].id == planted.tool_version == PLANTED
    assert planted.verdict.level == report.verdict.level
    card, page = render(planted), render_report(planted)
    for text in PLANTED.split():
        assert text not in card, text
        assert text in page.replace("<wbr>", ""), text
    card = render(report)
    for text in (*report.data.sources, report.method.command, str(report.run), "r64", "(secrets)"):
        assert text not in card, text
    assert report.data.documents_sha256[:12] not in card
    assert report.findings[0].id not in card
    assert "Random secrets extracted: 3 of 17 trained ones, and 0 of 15 that were" in card


def test_the_weights_are_named_by_their_hash() -> None:
    report = examples.make_report()
    weights = "4be1f7d09c35" + "a7" * 26
    assert report.model.weights_sha256 == weights
    assert "Measured by memguard 0.1.0 on weights `4be1f7d09c35…`." in render(report)
    for text in ("<script>", "a|b", "\u202e", "\x00", weights.upper(), "0.1.0 x"):
        model = report.model.model_copy(update={"weights_sha256": text})
        changed = report.model_copy(update={"model": model, "tool_version": text})
        assert "Measured by memguard (unknown) on weights `(unknown)`." in render(changed)


def test_a_model_without_an_audit_is_not_reassured() -> None:
    card = render(None)
    assert "These weights have not been audited" in card
    data = ModelCard(card).data
    assert data.eval_results is None
    assert data.tags == ["memguard", "goldfish-loss"]


@pytest.mark.parametrize("base", [None, "org/base"])
def test_an_adapter_says_how_it_is_loaded(base: str | None) -> None:
    card = render(examples.make_report(), is_adapter=True, base=base)
    data = ModelCard(card).data.to_dict()
    assert (data["library_name"], data.get("base_model")) == ("peft", base)
    assert data.get("base_model_relation") == (None if base is None else "adapter")
    assert "lora" in data["tags"]
    assert ("AutoModelForCausalLM.from_pretrained" in card) == (base is not None)
    assert ("PeftModel.from_pretrained(base" in card) == (base is None)
