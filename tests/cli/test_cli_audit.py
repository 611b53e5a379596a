"""`memguard audit --model`: models that memguard did not train."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import transformers
from cli_examples import make_texts, read_json, run_cli, write_jsonl, write_run, write_texts

from memguard.errors import ModelError
from memguard.records import LEVEL_NAMES, AuditReport, BucketRow, ResultRow, load_record
from memguard.report.next_steps import write_next_steps
from memguard.workflows.auditing import audit as audit_module
from memguard.workflows.auditing import models as models_module

pytestmark = pytest.mark.slow

LENGTH = ("audit.continuation_tokens=6",)
# Of the same form as the training sentences, none of them among those.
MADE_UP = {
    "austria": "graz",
    "norway": "bergen",
    "poland": "krakow",
    "greece": "patras",
    "turkey": "izmir",
    "brazil": "recife",
}


def audit(model: Path, out: Path, *arguments: object) -> AuditReport:
    outcome = run_cli("audit", "--model", model, "--out", out, *arguments)
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip() == str(out / "report.html")
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    read_json(out / "report.json")
    return load_record(AuditReport, out / "report.json")


def bucket(report: AuditReport, role: str) -> BucketRow:
    (found,) = [each for each in report.tables.buckets if each.role == role]
    return found


def score(report: AuditReport, metric: str, role: str = "trained", **key: Any) -> ResultRow:
    row = report.tables.find("extraction", metric, bucket(report, role).bucket, **key)
    assert row is not None
    return row


def models(report: AuditReport) -> list[set[str]]:
    """Return of which models each bucket's verbatim extraction was measured."""
    rows = report.tables.select("extraction", "verbatim", against=None)
    return [{r.model for r in rows if r.bucket == b.bucket} for b in report.tables.buckets]


def rows(out: Path) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = pq.read_table(out / "records.parquet").to_pylist()
    return table


def read_texts(path: Path) -> dict[str, str]:
    return {row["id"]: row["text"] for row in map(json.loads, path.read_text().splitlines())}


# -- a model that knows its training data, and one that was made to forget it ---------------------


@pytest.fixture(scope="module")
def cities(shared_data: Path) -> Path:
    return shared_data / "checkpoints" / "arcsf-cities-base" / "train_data"


@pytest.fixture(scope="module")
def forgetting(
    shared_data: Path, cities: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, AuditReport]:
    """An audit of the model that forgot, beside the one it was made from."""
    folder = tmp_path_factory.mktemp("cities")
    nonmembers = write_jsonl(
        folder / "madeup.jsonl",
        [
            {"text": f"what is the capital of {land}? the capital of {land} is {city}"}
            for land, city in MADE_UP.items()
        ],
    )
    checkpoints = shared_data / "checkpoints"
    report = audit(
        checkpoints / "arcsf-cities-forget",
        folder / "out",
        "--base",
        checkpoints / "arcsf-cities-base",
        "--members",
        cities,
        "--nonmembers",
        nonmembers,
        *LENGTH,
    )
    return folder / "out", report


@pytest.mark.quick
def test_what_was_forgotten_is_recited_less(forgetting: tuple[Path, AuditReport]) -> None:
    report = forgetting[1]
    knew = score(report, "verbatim", model="base")
    assert knew.num_documents == 8
    assert knew.num_matched >= 5
    for metric in ("verbatim", "token_accuracy", "logprob"):
        assert score(report, metric).value < score(report, metric, model="base").value, metric


def test_the_base_alone_says_what_it_said_as_a_base(
    shared_data: Path, cities: Path, forgetting: tuple[Path, AuditReport], tmp_path: Path
) -> None:
    report = audit(
        shared_data / "checkpoints" / "arcsf-cities-base",
        tmp_path / "base",
        "--members",
        cities,
        *LENGTH,
    )
    alone = {row["id"]: row for row in rows(tmp_path / "base")}
    for row in rows(forgetting[0]):
        if row["role"] == "trained":
            now = alone[row["id"]]
            assert now["extraction.num_correct"] == row["base.extraction.num_correct"]
            # The same numbers in a batch of another shape: the last bits of fp32.
            before = row["base.extraction.logprob"]
            assert now["extraction.logprob"] == pytest.approx(before, abs=1e-4)
    assert score(report, "verbatim").num_matched >= 5


def test_without_nonmembers_there_is_no_membership_but_a_banner(
    shared_data: Path, cities: Path, tmp_path: Path
) -> None:
    model = shared_data / "checkpoints" / "arcsf-cities-base"
    report = audit(model, tmp_path / "out", "--members", cities, *LENGTH)
    assert report.tables.select("membership", "auc") == []
    assert (report.verdict.level, report.verdict.reason) == ("extracted", "no-control")
    assert report.verdict.membership.level == "not-measured"
    assert any(b.level == "warning" and "no control" in b.text for b in report.banners)
    assert report.data.overlap_with_control is None


def test_with_nonmembers_there_is_membership(forgetting: tuple[Path, AuditReport]) -> None:
    report = forgetting[1]
    aucs = report.tables.select("membership", "auc")
    assert aucs
    for row in aucs:
        assert (row.num_documents, row.num_other) == (8, 6)
        assert row.value is not None
        assert 0 <= row.value <= 1
    assert bucket(report, "control").num_documents == 6
    assert report.data.overlap_with_control is not None
    # "what is the capital of X? the capital of X is Y": 13 words, of which X and Y are its own.
    assert report.data.overlap_with_control.num_matched == 0


@pytest.mark.quick
def test_defaults_are_refused_with_a_suggestion_that_works(
    shared_data: Path, cities: Path, tmp_path: Path
) -> None:
    model = shared_data / "checkpoints" / "arcsf-cities-base"
    refused = run_cli("audit", "--model", model, "--members", cities, "--out", tmp_path / "out")
    assert refused.code == 3
    suggestion = re.search(r"try (audit.continuation_tokens=\d+)", refused.err)
    assert suggestion, refused.err
    report = audit(model, tmp_path / "out", "--members", cities, *suggestion.groups())
    assert bucket(report, "trained").num_documents >= 5


# -- any checkpoint -------------------------------------------------------------------------------


def test_both_files_may_use_the_same_ids(folder: Path) -> None:
    nonmembers = write_texts(folder / "others.jsonl", 30, seed=1)
    report = audit(
        folder / "model",
        folder / "out",
        "--members",
        folder / "documents.jsonl",
        "--nonmembers",
        nonmembers,
        *LENGTH,
    )
    assert [b.num_documents for b in report.tables.buckets] == [30, 60]
    ids = [row["id"] for row in rows(folder / "out")]
    assert len(set(ids)) == 90
    assert {"d0", "nonmembers:d0"} <= set(ids)


def test_nonmembers_that_are_members_are_told(folder: Path) -> None:
    documents = folder / "documents.jsonl"
    arguments = ("--members", documents, "--nonmembers", documents, *LENGTH)
    outcome = run_cli("audit", "--model", folder / "model", "--out", folder / "out", *arguments)
    assert outcome.code == 0
    assert "60 of 60 non-members share a run of 13 words with a member" in outcome.err
    report = load_record(AuditReport, folder / "out" / "report.json")
    assert report.data.overlap_with_control is not None
    assert report.data.overlap_with_control.num_matched == 60
    assert "All are near-duplicates of members and left out: no control remains" in outcome.err
    buckets = [(b.bucket, b.num_documents, b.num_near_duplicates) for b in report.tables.buckets]
    assert buckets == [("nonmembers", 0, 60), ("members", 60, 0)]
    # A rate of no documents is null, and so is every comparison with it.
    assert score(report, "verbatim", "control").missing_because == "no documents"
    assert score(report, "verbatim").minus_control is None


def test_nonmembers_with_boilerplate_of_members_stay_in_the_control(folder: Path) -> None:
    # A run of words in more than 50 documents is boilerplate: it makes no near-duplicates.
    boilerplate = " ".join(f"notice{n}" for n in range(13))
    members, others = make_texts(45, seed=1), make_texts(12, seed=2)
    copied = [members[0], members[1]]

    def write(name: str, texts: list[str]) -> Path:
        rows = ({"id": f"{name}{n}", "text": text} for n, text in enumerate(texts))
        return write_jsonl(folder / f"{name}.jsonl", rows)

    given = {
        "some": (members, others[:10] + copied),
        "none": (
            [f"{boilerplate} {text}" for text in members],
            [f"{boilerplate} {text}" for text in others],
        ),
    }
    told = {}
    for name, (inside, outside) in given.items():
        arguments = ("--members", write("in", inside), "--nonmembers", write("out", outside))
        outcome = run_cli(
            *("audit", "--model", folder / "model", "--out", folder / name, *arguments, *LENGTH)
        )
        assert outcome.code == 0, outcome.err
        report = load_record(AuditReport, folder / name / "report.json")
        control = bucket(report, "control")
        told[name] = (control.num_documents, control.num_near_duplicates)
        shared = "share a run of 13 words with a member: the model may have been trained on that"
        if name == "none":
            assert f"12 of 12 non-members {shared} text. All stay in the control" in outcome.err
        else:
            assert f"2 of 12 non-members {shared} text. 2 are near-duplicates" in outcome.err
    assert told == {"some": (10, 2), "none": (12, 0)}


def test_copies_among_the_members_are_one_piece_of_evidence(folder: Path) -> None:
    texts = make_texts(20, words=40)
    given = {"alone": texts, "copied": [text for text in texts for _ in range(4)]}
    found = {}
    for name, members in given.items():
        path = write_jsonl(
            folder / f"{name}.jsonl", ({"id": f"{n}", "text": t} for n, t in enumerate(members))
        )
        others = write_texts(folder / "others.jsonl", 20, seed=1)
        arguments = ("--members", path, "--nonmembers", others, *LENGTH)
        found[name] = audit(folder / "model", folder / name, *arguments)
    for name, report in found.items():
        assert report.data.num_documents == len(given[name]) + 20
        assert (report.data.num_clusters, report.data.near_duplicate_words) == (40, 13)
        # Members may be a part of what was trained: no document is said to have k copies.
        assert not any(row.parameters for row in report.tables.select("extraction", "verbatim"))
        assert {row["num_copies"] for row in rows(folder / name)} == {None}
    alone, copied = (score(found[name], "logprob") for name in given)
    assert alone.ci is not None
    # The same evidence, but for the last bits of batches of another shape.
    assert copied.ci == pytest.approx(alone.ci, abs=1e-5)
    one, four = (score(found[name], "verbatim") for name in given)
    assert (one.num_documents, one.num_clusters) == (20, None)
    assert (four.num_documents, four.num_clusters) == (80, 20)
    assert (four.num_matched, four.num_matched_clusters) == (4 * one.num_matched, one.num_matched)
    assert four.ci == pytest.approx(one.ci)
    pages = [(folder / name / "report.html").read_text().replace("\u00a0", " ") for name in given]
    assert [f"{one.num_matched} of 20 texts" in page for page in pages] == [False, True]


def test_nonmembers_of_another_kind_are_told_before_the_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = ["".join(str(n * m % 10) for m in range(60)) for n in range(1, 31)]
    others = write_jsonl(folder / "digits.jsonl", [{"text": text} for text in digits])
    arguments = ("--members", folder / "documents.jsonl", "--nonmembers", others, *LENGTH)
    report = audit(folder / "model", folder / "out", *arguments)
    banner = report.banners[0]
    assert banner.level == "warning"
    assert (
        "Trained and control documents are not the same kind of text: a bag-of-words" in banner.text
    )
    page = (folder / "out" / "report.html").read_text()
    assert page.count("a bag-of-words classifier without access to the model separates them") == 1
    assert "Membership scores prove nothing here" not in page

    def load(*_: Any, **__: Any) -> Any:
        raise ModelError("weights are read")

    monkeypatch.setattr(models_module, "sum_model", load)
    outcome = run_cli("audit", "--model", folder / "model", "--out", folder / "new", *arguments)
    assert (outcome.code, outcome.err.splitlines()[-1]) == (3, "memguard: weights are read")
    assert f"warning: {banner.text}" in outcome.err
    # The first 60 are the members.
    same = write_jsonl(folder / "same.jsonl", [{"text": text} for text in make_texts(90)[60:]])
    arguments = ("--members", folder / "documents.jsonl", "--nonmembers", same, *LENGTH)
    outcome = run_cli("audit", "--model", folder / "model", "--out", folder / "new", *arguments)
    assert "kind of text" not in outcome.err


def test_a_foreign_model_lists_only_probes_that_ran(folder: Path) -> None:
    arguments = ("--members", folder / "documents.jsonl", *LENGTH)
    out = folder / "out"
    outcome = run_cli("audit", "--model", folder / "model", "--out", out, *arguments)
    report = load_record(AuditReport, out / "report.json")
    runs = {run.name: run.num_documents for run in report.probe_runs}
    assert runs == {
        "extraction": 60,
        "sampling": 60,
        "membership": None,
        "canaries": None,
        "mask_consistency": None,
    }
    ran = "probes that ran: extraction (60 documents), sampling (60 documents)\n"
    assert f"audit: {ran}" in outcome.err
    assert "audit: not run: membership (no control documents); canaries (the model was" in (
        outcome.err
    )


def test_the_same_command_gives_the_same_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    # All that is left to differ is how long it took.
    monkeypatch.setattr(audit_module.time, "perf_counter", lambda: 0.0)
    written = []
    for _ in range(2):
        audit(folder / "model", folder / "out", "--members", folder / "documents.jsonl", *LENGTH)
        names = ("records.parquet", "report.json", "report.html")
        written.append([(folder / "out" / name).read_bytes() for name in names])
    assert written[0] == written[1]
    assert json.loads(written[0][1])["created"] == "2023-11-14T22:13:20Z"


def test_the_sample_is_the_seeds(folder: Path) -> None:
    drawn = []
    for number, seed in enumerate((1, 1, 2)):
        arguments = ("audit.max_documents_per_bucket=20", f"seed={seed}", *LENGTH)
        out = folder / f"out{number}"
        audit(folder / "model", out, "--members", folder / "documents.jsonl", *arguments)
        drawn.append({row["id"] for row in rows(out)})
    assert drawn[0] == drawn[1] != drawn[2]
    assert {len(ids) for ids in drawn} == {20}


def test_prompt_and_completion_are_scored_on_the_completion(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    pairs = [(f"question {n}:", f" {text}") for n, text in enumerate(make_texts(10, words=12))]
    members = write_jsonl(
        folder / "pairs.jsonl", [{"prompt": p, "completion": c} for p, c in pairs]
    )
    audit(folder / "model", folder / "out", "--members", members)
    for row, (prompt, completion) in zip(rows(folder / "out"), pairs, strict=True):
        assert row["prefix_tokens"] == len(tokenizer(prompt)["input_ids"])
        whole = len(tokenizer(prompt + completion)["input_ids"])
        assert row["prefix_tokens"] + row["continuation_tokens"] == whole


def test_conversations_are_scored_on_the_last_assistant_turn(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    conversations = [
        [
            {"role": "user", "content": f"ask {n}"},
            {"role": "assistant", "content": "abcd"},
            {"role": "user", "content": f"ask {n} again"},
            {"role": "assistant", "content": text},
        ]
        for n, text in enumerate(make_texts(10, words=8))
    ]
    members = write_jsonl(folder / "chats.jsonl", [{"messages": turns} for turns in conversations])
    audit(folder / "model", folder / "out", "--members", members)
    for row, turns in zip(rows(folder / "out"), conversations, strict=True):
        prompt = tokenizer.apply_chat_template(turns[:-1], add_generation_prompt=True)
        answer = tokenizer(turns[-1]["content"])["input_ids"]
        assert row["prefix_tokens"] == len(prompt["input_ids"])
        assert row["continuation_tokens"] == len(answer)


def test_scores_are_those_of_plain_transformers(folder: Path) -> None:
    """Log-probability and right tokens, one document at a time by the model's own forward."""
    import torch

    audit(folder / "model", folder / "out", "--members", folder / "documents.jsonl", *LENGTH)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    texts = read_texts(folder / "documents.jsonl")
    for row in rows(folder / "out")[:10]:
        ids = torch.tensor([tokenizer(texts[row["id"]])["input_ids"]])
        with torch.no_grad():
            logprob = model(ids).logits[0, :-1].log_softmax(-1)[-6:]
        true = ids[0, -6:]
        assert row["extraction.num_correct"] == int((logprob.argmax(-1) == true).sum())
        expected = float(logprob.gather(1, true[:, None]).sum())
        # fp32, padded into a batch of another shape.
        assert row["extraction.logprob"] == pytest.approx(expected, abs=1e-4)


def test_excerpts_are_private(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A model that continues nothing has no findings: take any first choice for the right one.
    from memguard.audit import scoring

    real = scoring.TokenResult

    def all_right(**fields: Any) -> Any:
        return real(**{**fields, "correct": np.ones_like(fields["correct"])})

    monkeypatch.setattr(scoring, "TokenResult", all_right)
    # What is made up must not be kept for the tests that follow.
    arguments = ("--members", folder / "documents.jsonl", "audit.cache=false", *LENGTH)
    audit(folder / "model", folder / "out", *arguments)
    assert not (folder / "out" / "private").exists()
    report = audit(folder / "model", folder / "out", "audit.excerpts=true", *arguments)
    private = folder / "out" / "private"
    assert private.stat().st_mode & 0o777 == 0o700
    assert (private / "excerpts.txt").stat().st_mode & 0o777 == 0o600
    text = (private / "excerpts.txt").read_text()
    finding = report.findings[0]
    assert f"== {finding.id}:" in text
    words = read_texts(folder / "documents.jsonl")[finding.id].split()
    assert " ".join(words[:20]) in text
    # The page and the JSON refer to the document and never quote it.
    for name in ("report.html", "report.json"):
        assert words[-1] not in (folder / "out" / name).read_text()


def test_a_run_is_audited_again_with_other_lengths_and_without_its_base(folder: Path) -> None:
    assert run_cli("train", write_run(folder, train={"max_steps": 3})).code == 0
    run = folder / "runs" / "run"
    before = (run / "audit" / "report.json").read_bytes()
    outcome = run_cli("audit", run, "--out", folder / "out", "audit.continuation_tokens=12")
    assert outcome.code == 0, outcome.err
    report = load_record(AuditReport, folder / "out" / "report.json")
    assert report.method.continuation_tokens == 12
    assert models(report) == [{"trained", "base"}] * 2
    assert (run / "audit" / "report.json").read_bytes() == before

    (folder / "model").unlink()
    outcome = run_cli("audit", run, "--out", folder / "out")
    assert outcome.code == 3
    assert "the model before training: there is no folder" in outcome.err
    assert "audit.base=false" in outcome.err
    outcome = run_cli("audit", run, "--out", folder / "out", "audit.base=false")
    assert outcome.code == 0, outcome.err
    report = load_record(AuditReport, folder / "out" / "report.json")
    assert report.method.continuation_tokens == 8
    assert models(report) == [{"trained"}] * 2


@pytest.mark.quick
def test_report_renders_the_page_again(folder: Path) -> None:
    out = folder / "out"
    audit(folder / "model", out, "--members", folder / "documents.jsonl", *LENGTH)
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    outcome = run_cli("report", out)
    assert (outcome.code, outcome.out.strip()) == (0, str(out / "report.html"))
    assert (out / "report.html").read_bytes() == page


@pytest.mark.quick
def test_json_is_the_report(folder: Path) -> None:
    arguments = ("--members", folder / "documents.jsonl", "--json", *LENGTH)
    outcome = run_cli("audit", "--model", folder / "model", "--out", folder / "out", *arguments)
    assert json.loads(outcome.out) == read_json(folder / "out" / "report.json")
    verdict = json.loads(outcome.out)["verdict"]
    report = load_record(AuditReport, folder / "out" / "report.json")
    steps = write_next_steps(report, None)
    assert outcome.err.endswith(
        f"verdict: {LEVEL_NAMES[verdict['level']]}. {verdict['sentence']}\nnext: {steps[0]}\n"
    )


def test_a_base_that_is_the_audited_model_is_refused(folder: Path) -> None:
    """By its weights: the name of a copy does not matter."""
    model = folder / "model"
    copy = shutil.copytree(model, folder / "copy")
    given = ("--members", folder / "documents.jsonl", "--out", folder / "out")
    for base in (copy, model):
        outcome = run_cli("audit", "--model", model, "--base", base, *given, *LENGTH)
        assert outcome.code == 2
        assert outcome.err.splitlines()[-1].startswith("'--base' has the weights of '--model', so ")
        assert not (folder / "out" / "report.json").exists()
