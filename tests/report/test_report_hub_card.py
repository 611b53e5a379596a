"""The card on a hub: entries that the hub's own library reads, and nothing of the user's files."""

from dataclasses import replace
from typing import Any

import pytest
import report_examples as examples
from huggingface_hub import ModelCard
from result_examples import change_buckets, change_tables

from memguard import records as r
from memguard.report.model_card import render_hub_card


def render(report: r.AuditReport | None, **changes: Any) -> str:
    values = {"title": "notes", "is_adapter": False, "base": None, "has_base": True}
    return render_hub_card(report, **{**values, "mitigations": ["goldfish"], **changes})


def test_entries_are_what_the_library_of_the_hub_reads() -> None:
    report = examples.make_report(True)
    data = ModelCard(render(report, base="org/base")).data
    (result,) = data.eval_results or ()
    assert (result.metric_type, result.metric_value) == ("verdict", report.verdict.describe())
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
    card = render(examples.make_report()).replace("\u00a0", " ")
    rows = [line.split(" | ") for line in card.splitlines() if line.startswith("| ")]
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


def test_nothing_of_the_users_files_is_in_the_card() -> None:
    report = examples.make_report()
    names = {bucket.bucket: f"ward-{n}" for n, bucket in enumerate(report.tables.buckets)}
    tables = change_tables(
        report,
        buckets=[replace(bucket, bucket=names[bucket.bucket]) for bucket in report.tables.buckets],
        results=[replace(row, bucket=names.get(row.bucket, "x")) for row in report.tables.results],
    ).tables
    sentence = "6 of 40 documents of 'ward-3' were extracted, 0 of 40 unseen ones."
    verdict = report.verdict.model_copy(update={"sentence": sentence})
    report = report.model_copy(update={"tables": tables, "verdict": verdict})
    card = render(report)
    for text in ("ward-", *report.data.sources, report.method.command, str(report.run)):
        assert text not in card, text
    assert "6 of 40 documents of one bucket were extracted, 0 of 40 unseen ones." in card
    assert report.data.documents_sha256[:12] not in card
    assert report.model.weights_sha256[:12] in card
    assert report.findings[0].id not in card


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


@pytest.mark.parametrize(
    "text", ["<script>", "a|b\n# c", "---", "a: b", "'", "{x", "\u202ex", "/home/alice/x", "\x00"]
)
def test_hostile_names_stay_away(text: str) -> None:
    full = examples.make_report()
    verdict = full.verdict.model_copy(
        update={"sentence": f"6 of 40 documents of '{text}' were extracted."}
    )
    card = render(change_buckets(full, bucket=text).model_copy(update={"verdict": verdict}))
    assert card.count("documents of one bucket were extracted.") == 2
    assert ModelCard(card).data.model_name == "notes"
    for planted in ("<script>", "alice", "\u202e", "\x00"):
        assert planted not in card
