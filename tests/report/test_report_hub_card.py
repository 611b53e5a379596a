"""The card on a hub: entries that the hub's own library reads, and nothing of the user's files."""

from typing import Any

import pytest
import report_examples as examples
import yaml
from huggingface_hub import ModelCard
from result_examples import change_buckets

from memguard.records.results import ResultRow
from memguard.report.hub_card import HubCard, redact, render_hub_card

CONFIG: dict[str, Any] = {
    "name": "acme-mails",
    "output_dir": "/srv/runs",
    "seed": 17,
    "model": {"path": "/srv/base", "revision": "v3", "scratch": None},
    "data": {
        "train": ["/srv/mails.jsonl"],
        "columns": {"text": "letters"},
        "seq_len": 512,
        "canaries": {"count": 32, "secret": "none"},
    },
    "mitigations": [{"name": "goldfish", "k": 4}],
    "optim": {"lr": 0.001},
    "audit": {"suite": "/srv/suite.yaml"},
}


def make_card(**changes: Any) -> HubCard:
    values = {"title": "notes", "is_adapter": False, "base": None, "has_base": True}
    return HubCard(**{**values, "config": CONFIG, **changes})


def read_results(card: str) -> dict[tuple[str, str], list[tuple[str, Any, str]]]:
    """Return type, value and name of the metrics by type and split, as the hub's library does."""
    found: dict[tuple[str, str], list[tuple[str, Any, str]]] = {}
    for result in ModelCard(card).data.eval_results or ():
        key = result.dataset_type, result.dataset_split or ""
        metric = result.metric_type, result.metric_value, str(result.metric_name)
        found.setdefault(key, []).append(metric)
    return found


def test_entries_are_what_the_library_of_the_hub_reads() -> None:
    card = make_card(base="org/base", license={"license": "apache-2.0"}, datasets=("org/texts",))
    data = ModelCard(render_hub_card(examples.make_report(True), card)).data.to_dict()
    index = data.pop("model-index")
    assert data == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "datasets": ["org/texts"],
        "tags": ["memguard", "memorization-audit", "goldfish-loss"],
    }
    assert index[0]["name"] == "notes"


def test_the_block_has_the_rates_and_the_loss_of_the_report() -> None:
    report = examples.make_report()
    results = read_results(render_hub_card(report, make_card()))
    trained = results["unknown", "trained"]
    assert trained[0] == ("verdict", report.verdict.describe(), "Verdict")
    row = report.tables.find("extraction", "near_verbatim", "r64")
    assert row is not None
    assert row.value is not None
    (metric,) = (m for m in trained if m[0] == "near_verbatim_extraction" and "'r64'" in m[2])
    assert metric[1] == pytest.approx(row.value, abs=1e-6)  # Six digits are written.
    assert f"{row.num_matched} of {row.num_documents}" in metric[2]
    assert report.training is not None
    # Not more digits than in the text, since exact losses confirm guesses of a text.
    assert results["unknown", "heldout"] == [("nll", 4.372, "Held-out loss (nats a token)")]
    control = results["unknown", "control"]
    assert {metric[0] for metric in control} == {"verbatim_extraction", "near_verbatim_extraction"}


def test_a_rate_that_was_not_measured_is_not_in_the_block() -> None:
    report = examples.drop_near_verbatim(examples.make_report())
    results = read_results(render_hub_card(report, make_card()))
    assert {kind for kind, _, _ in results["unknown", "trained"]} == {
        "verdict",
        "verbatim_extraction",
    }


def make_task_row(task: str, metric: str, **changes: Any) -> ResultRow:
    values: dict[str, Any] = {
        "probe": "utility",
        "parameters": f"task={task}",
        "metric": metric,
        "statistic": "rate",
        "bucket": "(items)",
        "num_documents": 200,
        "num_matched": 100,
        "value": 0.5,
        "low": 0.43,
        "high": 0.57,
        "interval": "clopper-pearson",
    }
    return ResultRow(**{**values, **changes})


def test_benchmark_tasks_are_data_sets_of_their_own() -> None:
    report = examples.make_report()
    rows = (
        make_task_row("arc_easy", "acc"),
        make_task_row("arc_easy", "acc_norm", value=0.25, num_matched=50),
        make_task_row("arc_easy", "acc", model="base", value=0.125),
        make_task_row("arc_easy", "acc", against="base", value=0.375, num_matched=None),
        make_task_row("our task!", "acc"),
        make_task_row("lost", "acc", value=None, missing_because="no items"),
    )
    tables = report.tables.model_copy(update={"results": (*report.tables.results, *rows)})
    results = read_results(
        render_hub_card(report.model_copy(update={"tables": tables}), make_card())
    )
    assert results["arc_easy", ""] == [
        ("acc", 0.5, "acc (200 items, 95 % CI 0.43 to 0.57)"),
        ("acc_norm", 0.25, "acc_norm (200 items, 95 % CI 0.43 to 0.57)"),
    ]
    assert results["unknown", ""] == [("acc", 0.5, "acc (200 items, 95 % CI 0.43 to 0.57)")]
    assert not any("lost" in key[0] for key in results)


def test_nothing_of_the_users_files_is_in_the_card() -> None:
    report = examples.make_report()
    card = render_hub_card(report, make_card())
    for text in ("acme-mails", "/srv", "mails.jsonl", "letters", "suite.yaml", "seed", "v3"):
        assert text not in card, text
    assert report.data.documents_sha256[:12] not in card
    assert report.model.weights_sha256[:12] in card
    assert report.findings[0].id not in card
    settings = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert settings == {
        "mitigations": [{"name": "goldfish", "k": 4}],
        "optim": {"lr": 0.001},
        "data": {"seq_len": 512, "canaries": {"count": 32}},
    }
    named = render_hub_card(report, make_card(base="org/base"))
    shown = yaml.safe_load(named.split("```yaml")[1].split("```")[0])
    assert shown["model"] == {"path": "org/base", "revision": "v3"}


def test_a_model_without_an_audit_is_not_reassured() -> None:
    card = render_hub_card(None, make_card())
    assert "These weights have not been audited" in card
    data = ModelCard(card).data
    assert data.eval_results is None
    assert data.tags == ["memguard", "goldfish-loss"]


@pytest.mark.parametrize("base", [None, "org/base"])
def test_an_adapter_says_how_it_is_loaded(base: str | None) -> None:
    card = render_hub_card(examples.make_report(), make_card(is_adapter=True, base=base))
    data = ModelCard(card).data.to_dict()
    assert (data["library_name"], data.get("base_model")) == ("peft", base)
    assert data.get("base_model_relation") == (None if base is None else "adapter")
    assert "lora" in data["tags"]
    assert ("AutoModelForCausalLM.from_pretrained" in card) == (base is not None)
    assert ("PeftModel.from_pretrained(base" in card) == (base is None)


def test_a_merged_model_says_what_was_merged() -> None:
    merged = {
        "adapter": "LoRA, r=4, alpha=8",
        "adapter_sha256": "ab" * 32,
        "base_sha256": "cd" * 32,
        "base": "/srv/base",
        "dtype": "bfloat16",
        "difference": {"num_tokens": 512, "largest": 1e-6, "mean_kl": 1e-9},
    }
    card = render_hub_card(examples.make_report(), make_card(merged=merged))
    assert ModelCard(card).data.library_name == "transformers"
    assert "LoRA, r=4, alpha=8" in card
    assert "merged by memguard into a local base model" in card
    assert "/srv/base" not in card


@pytest.mark.parametrize(
    "text", ["<script>", "a|b\n# c", "---", "a: b", "'", "{x", "\u202ex", "/home/alice/x", "\x00"]
)
def test_hostile_names_stay_names(text: str) -> None:
    full = examples.make_report()
    verdict = full.verdict.model_copy(update={"sentence": text})
    report = change_buckets(full, bucket=text).model_copy(update={"verdict": verdict})
    card = render_hub_card(report, make_card(title="notes"))
    data = ModelCard(card).data
    assert data.model_name == "notes"
    assert len(data.to_dict()) == 4
    body = card.split("\n---\n", 1)[1]
    assert "<script>" not in body
    assert "alice" not in card
    assert "\u202e" not in card
    assert "\x00" not in card


def test_paths_and_ids_are_hidden() -> None:
    card = r"of `docs/a_b.txt`, docs/a\_b.txt, a\_b.txt: patient\_7 and (patient_7), trained, d1"
    hidden = redact(card, ["a_b.txt", "docs/a_b.txt"], {"patient_7", "trained", "d1"})
    assert hidden == ("of `(local path)`, (local path), (local path): (id) and ((id)), trained, d1")
