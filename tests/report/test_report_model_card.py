"""Model cards: that of a run is publishable; that on a hub is what its library reads."""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import evidence_examples as evidence
import pydantic
import pytest
import report_examples as examples
import yaml
from evidence_examples import make_full_report
from huggingface_hub import ModelCard
from result_examples import change_buckets, change_tables, make_metric

from memguard import records as r
from memguard.pages.page import Fact, Section
from memguard.records.verdict import Reason
from memguard.report import audit_facts
from memguard.report.html import render_report
from memguard.report.model_card import render_hub_card, render_model_card

CONFIG = """
name: quickstart-k4
model:
  path: /home/alice/models/secret base
data:
  train: ['jsonl:/srv/secret/a.jsonl', ../secret/b.jsonl, 'docstrings:json']
mitigations:
- {name: goldfish, k: 4}
"""


def read_front_matter(card: str) -> dict[str, Any]:
    _, front, _ = card.split("---\n", 2)
    entries = yaml.safe_load(front)
    assert isinstance(entries, dict)
    return entries


def render(report: r.AuditReport | None = None, base: str | None = None, config: str = "") -> str:
    return render_model_card(report, run_name="run", base_model=base, config_yaml=config)


def test_front_matter_names_what_is_true() -> None:
    card = render(examples.make_report(True), "meta-llama/Llama-3.2-1B", CONFIG)
    front = read_front_matter(card)
    assert front["tags"] == ["memguard", "memorization-audit", "goldfish-loss"]
    assert front["base_model"] == "meta-llama/Llama-3.2-1B"
    assert front["library_name"] == "transformers"
    plain = read_front_matter(render())
    assert plain["tags"] == ["memguard"]
    assert "base_model" not in plain


@pytest.mark.parametrize("base", ["/home/alice/model", "./model", "../model", "~/model", None])
def test_a_local_base_model_is_not_named(base: str | None) -> None:
    card = render(examples.make_report(), base, CONFIG)
    assert "base_model" not in read_front_matter(card)
    assert "alice" not in card
    assert "secret" not in card


def test_a_folder_that_looks_like_a_hub_id_is_not_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "base").mkdir(parents=True)
    assert "base_model" in read_front_matter(render(base="runs/base"))
    monkeypatch.chdir(tmp_path)
    assert "base_model" not in read_front_matter(render(base="runs/base"))


def test_audit_section_has_verdict_counts_intervals_and_limits() -> None:
    report = examples.make_report()
    card = render(report, config=CONFIG).replace("\u00a0", " ")
    assert report.verdict.sentence in card
    assert "| r64 | 64 | 40 of 40, 100 % (95 % CI 91.2–100 %) |" in card
    assert "held-out NLL 4.372 nats a token, 12.8 % below the base model's 5.012" in card
    assert "lower bound" in card
    assert "AutoModelForCausalLM.from_pretrained" in card
    assert "docstrings:json" in card
    assert report.findings[0].id not in card


def test_near_verbatim_that_was_not_generated_is_no_zero() -> None:
    report = examples.drop_near_verbatim(examples.make_report())
    rows = [line for line in render(report).splitlines() if line.startswith("| r64")]
    cells = [cell.strip().replace("\u00a0", " ") for cell in rows[0].split("|")]
    assert cells[3].startswith("40 of 40")
    assert (cells[4], cells[6]) == ("not generated", "not generated")


def test_without_an_audit_it_says_so() -> None:
    assert "have not been audited" in render()


@pytest.mark.parametrize(
    "text",
    ["<script>", "a|b\n# c", "```\nx", "[x](http://e)", "\u202ex", "/home/alice/x", "\x00", "---"],
)
def test_hostile_names_stay_names(text: str) -> None:
    full = examples.make_report()
    verdict = full.verdict.model_copy(update={"sentence": text})
    report = change_buckets(full, bucket=text)
    report = report.model_copy(update={"verdict": verdict, "created": text})
    card = render_model_card(
        report, run_name=text, base_model=text, config_yaml=yaml.safe_dump({"name": text})
    )
    card.encode()
    read_front_matter(card)
    assert "alice" not in card
    body = card.split("## Configuration")[0]
    assert "<script>" not in body
    assert "[x](" not in body
    assert "\u202e" not in card
    assert "\x00" not in card
    assert card.count("\n```") == 4, "two fenced blocks"
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {7}


@pytest.mark.parametrize("config", ["", "[1, 2", "- a", "mitigations: 3", "mitigations: [x]"])
def test_a_strange_configuration_is_left_out(config: str) -> None:
    read_front_matter(render(config=config))


def test_the_configuration_has_the_settings_that_change_the_weights() -> None:
    config = (
        "output_dir: runs/x\nmodel: {path: runs/base, revision: null}\nseed: 0\n"
        "parallel: {x: 2}\naudit: {suite: full}\n"
        "train: {epochs: 2, compile: false, dropout: null}\n"
    )
    shown = render(base=None, config=config).split("## Configuration")[1]
    assert yaml.safe_load(shown.replace("```yaml", "").replace("```", "")) == {
        "seed": 0,
        "train": {"epochs": 2, "compile": False},
    }
    named = render(base="org/base", config="model: {path: org/base}")
    assert "path: org/base" in named.split("## Configuration")[1]


def test_an_adapter_is_named_with_its_base_weights() -> None:
    report = examples.make_report()
    assert "adapter" not in render(report)
    adapter = r.AdapterIdentity(
        description="LoRA, r=8, alpha=16",
        weights_sha256="ab12" * 16,
        base="models/base",
        base_weights_sha256="cd34" * 16,
    )
    model = report.model.model_copy(update={"adapter": adapter})
    card = render(report.model_copy(update={"model": model}))
    line = next(line for line in card.splitlines() if line.startswith("Measured by"))
    assert "(adapter LoRA, r=8, alpha=16 `ab12ab12" in line
    assert "merged into base weights `cd34cd34" in line
    # A local folder; it must not look like a hub id.
    assert "models/base" not in card


PLANTED = "/home/alice/notes.jsonl patient_7731 gs_ward_bucket"
COUNTS = "40 of 40 counted trained documents were extracted, 0 of 40 unseen ones"


def render_hub(report: r.AuditReport | None, **changes: Any) -> str:
    values = {"title": "notes", "is_adapter": False, "base": None, "has_base": True}
    card = render_hub_card(report, **{**values, "mitigations": ["goldfish"], **changes})
    return card.replace("\u00a0", " ")


def test_entries_are_what_the_library_of_the_hub_reads() -> None:
    report = examples.make_report()
    card = render_hub(report, base="org/base")
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
    rows = [line.split(" | ") for line in render_hub(examples.make_report()).splitlines()]
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
    card = render_hub(report)
    assert card.count("| not measured |") == len(report.tables.buckets)
    assert "Not run: attacks, 1 more." in card
    assert "- Audited: 120 of 120 trained documents; none was attacked." in card
    assert "of 120 trained documents; attacked: 120." in render_hub(make_full_report())
    banners = [r.Banner(level="warning", text="of document patient_7")]
    card = render_hub(report.model_copy(update={"banners": banners}))
    assert "> Warnings in the report of this audit that are not shown here: 1." in card


@pytest.mark.parametrize("reason", [*typing.get_args(Reason), None])
def test_every_verdict_says_counts_and_reason(reason: Any) -> None:
    level = {"control": "memorized", "canaries": "memorized", None: "none-found"}.get(reason)
    made = examples.make_green() if reason is None else examples.make_verdict(reason=reason)
    made = made.model_copy(update={"level": level or "extracted"})
    card = render_hub(examples.make_report().model_copy(update={"verdict": made}))
    assert f"{r.LEVEL_NAMES[made.level]}: {made.trained.num_matched} of 40 counted" in card
    assert ("(at most 9 in 100 could be)" in card) == (reason is None)
    nothing = made.model_copy(
        update={"trained": examples.make_counts(0, 0), "base": None, "true_share": None}
    )
    card = render_hub(examples.make_report().model_copy(update={"verdict": nothing}))
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
    card, page = render_hub(planted), render_report(planted)
    for text in PLANTED.split():
        assert text not in card, text
        assert text in page.replace("<wbr>", ""), text
    card = render_hub(report)
    for text in (*report.data.sources, report.method.command, str(report.run), "r64", "(secrets)"):
        assert text not in card, text
    assert report.data.documents_sha256[:12] not in card
    assert report.findings[0].id not in card
    assert "Random secrets extracted: 3 of 17 trained ones, and 0 of 15 that were" in card


def test_no_card_has_the_section_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kind:
        @staticmethod
        def section(_: r.AuditReport) -> Section:
            told = (Fact("Told", PLANTED),)
            return Section(key="x", title="x", lead=(PLANTED,), brief=told, audience="public")

    report = examples.make_report()
    metrics = [*report.tables.metrics, make_metric("inhouse", "m", package="inhouse 1.0")]
    report = change_tables(report, metrics=metrics)
    monkeypatch.setattr(audit_facts, "load_foreign", lambda *_: SimpleNamespace(kind=Kind))
    assert PLANTED.split()[1] in render_report(report)
    card = render_model_card(report, run_name="x", base_model=None, config_yaml="")
    for text in PLANTED.split():
        assert text not in card.replace("\\", "")
        assert text not in render_hub(report)


def test_the_weights_are_named_by_their_hash() -> None:
    report = examples.make_report()
    weights = "4be1f7d09c35" + "a7" * 26
    assert report.model.weights_sha256 == weights
    assert "Measured by memguard 0.1.0 on weights `4be1f7d09c35…`." in render_hub(report)
    for text in ("<script>", "a|b", "\u202e", "\x00", weights.upper(), "0.1.0 x"):
        model = report.model.model_copy(update={"weights_sha256": text})
        changed = report.model_copy(update={"model": model, "tool_version": text})
        assert "Measured by memguard (unknown) on weights `(unknown)`." in render_hub(changed)


def test_a_model_without_an_audit_is_not_reassured() -> None:
    card = render_hub(None)
    assert "These weights have not been audited" in card
    data = ModelCard(card).data
    assert data.eval_results is None
    assert data.tags == ["memguard", "goldfish-loss"]


@pytest.mark.parametrize("base", [None, "org/base"])
def test_an_adapter_says_how_it_is_loaded(base: str | None) -> None:
    card = render_hub(examples.make_report(), is_adapter=True, base=base)
    data = ModelCard(card).data.to_dict()
    assert (data["library_name"], data.get("base_model")) == ("peft", base)
    assert data.get("base_model_relation") == (None if base is None else "adapter")
    assert "lora" in data["tags"]
    assert ("AutoModelForCausalLM.from_pretrained" in card) == (base is not None)
    assert ("PeftModel.from_pretrained(base" in card) == (base is None)
