"""Model cards: true, publishable, and valid for the hub's parser."""

from pathlib import Path
from typing import Any

import pytest
import report_examples as examples
import yaml
from result_examples import change_buckets

from memguard import records as r
from memguard.report import render_model_card

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
