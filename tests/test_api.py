"""memguard from Python: results of the command line, also of a model and documents in memory."""

import hmac
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import matplotlib
import numpy as np
import pandas
import pyarrow.parquet
import pytest
import torch
import transformers
from cli_examples import (
    make_texts,
    read_json,
    run_cli,
    save_tiny_model,
    write_jsonl,
    write_run,
    write_texts,
)

from memguard import api
from memguard.audit.findings import FINDING_COLUMNS
from memguard.data.identity_key import IdentityKey, load_identity_key
from memguard.errors import ConfigError, DataError, ModelError, RecordError
from memguard.records import BLIND, load_manifest
from memguard.records.sealed import sum_file
from memguard.runtime.environment import hash_code

pytestmark = pytest.mark.slow

LENGTHS: dict[str, Any] = {"continuation_tokens": 8, "min_documents": 4}


@pytest.fixture
def members(folder: Path) -> Path:
    return write_texts(folder / "members.jsonl", 24)


@pytest.fixture
def nonmembers(folder: Path) -> Path:
    return write_texts(folder / "nonmembers.jsonl", 24, seed=1)


@pytest.fixture
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder / "model")


def audit_texts(model: Any, tokenizer: Any, **settings: Any) -> api.AuditResult:
    return api.audit(
        model=model,
        tokenizer=tokenizer,
        members=make_texts(8),
        nonmembers=make_texts(8, seed=1),
        **LENGTHS | settings,
    )


@pytest.mark.quick
def test_importing_it_loads_no_torch() -> None:
    script = (
        "import sys, memguard.api; "
        "print({'torch', 'transformers', 'datasets', 'pandas'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


# -- audits ----------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("suite", ["extraction", pytest.param("full", marks=pytest.mark.long)])
def test_a_model_in_memory_has_the_records_of_the_command_line(
    folder: Path, members: Path, nonmembers: Path, model: Any, tokenizer: Any, suite: str
) -> None:
    outcome = run_cli(
        *("audit", "--model", folder / "model", "--members", members),
        *(
            "--nonmembers",
            nonmembers,
            "--out",
            folder / "cli",
            "--suite",
            suite,
            "audit.cache=false",
        ),
        *("audit.continuation_tokens=8", "audit.min_documents=4"),
    )
    assert outcome.code == 0, outcome.err
    result = api.audit(
        model=model,
        tokenizer=tokenizer,
        members=members,
        nonmembers=str(nonmembers),
        suite=suite,
        cache=False,
        **LENGTHS,
    )
    # Bit for bit: the same weights, the same kernels, the same batches.
    expected = pyarrow.parquet.read_table(folder / "cli" / "records.parquet")
    assert pyarrow.parquet.read_table(result.folder / "records.parquet").equals(expected)
    ours, theirs = read_json(result.folder / "report.json"), read_json(folder / "cli/report.json")
    for report in (ours, theirs):
        for field in ("model", "method", "created", "environment"):
            del report[field]
    assert ours == theirs


def test_documents_have_one_identity(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Of the text as it is given, by the key alone; equal texts share it and are counted."""
    members = [*make_texts(23), make_texts(1)[0]]
    unseen = datasets.Dataset.from_dict(
        {"id": [f"u{n}" for n in range(24)], "text": make_texts(24, seed=1)}
    )
    key = tmp_path / "my.key"
    result = api.audit(
        model=model,
        tokenizer=tokenizer,
        members=members,
        nonmembers=unseen,
        identity_key=key,
        **LENGTHS,
    )
    secret = bytes.fromhex(key.read_text())
    rows = pyarrow.parquet.read_table(result.folder / "records.parquet").to_pylist()
    texts = {f"members-{n:06d}": text for n, text in enumerate(members)}
    texts |= {f"nonmembers:u{n}": text for n, text in enumerate(unseen["text"])}
    assert len(rows) == len(texts)
    for row in rows:
        # The form that the guide names: JSON of the fields that were read.
        content = json.dumps({"text": texts[row["id"]]}, separators=(",", ":")).encode()
        assert row["text_hmac"] == hmac.new(secret, content, "sha256").hexdigest()
        assert row["has_own_id"] == row["id"].startswith("nonmembers:")
    assert len({row["text_hmac"] for row in rows}) == 47
    data = result.report.data
    assert (data.num_documents, data.num_texts, data.num_equal) == (48, 47, 1)
    assert data.identity_key == IdentityKey(key=secret, path=key).fingerprint
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    assert "47 different texts: 1 has the text of another" in page
    assert data.identity_key in page
    assert not (result.folder / "private").exists()


def test_an_identity_key_is_refused_where_it_would_be_handed_on(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"'identity_key': the identity key must not be in"):
        audit_texts(model, tokenizer, out=out, identity_key=out / "my.key")
    assert not list(tmp_path.rglob("*.key"))


def test_the_model_is_left_as_it_was(model: Any, tokenizer: Any) -> None:
    model.train()
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    ids = torch.arange(20)[None]
    parameters = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    settings = model.config.to_dict()
    before = model(ids).logits
    classes = [type(module) for module in model.modules()]
    audit_texts(model, tokenizer, suite="full", cache=False)
    assert model.training
    assert all(module.training for module in model.modules())
    assert [type(module) for module in model.modules()] == classes
    assert {name: (id(p), p.requires_grad) for name, p in model.named_parameters()} == parameters
    assert model.config.to_dict() == settings
    calls.clear()
    assert torch.equal(model(ids).logits, before)
    assert calls == ["hook"]
    model(ids).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_it_is_measured_as_it_is_now(model: Any, tokenizer: Any) -> None:
    first = audit_texts(model, tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    changed = audit_texts(model, tokenizer)
    assert changed.report.model.weights_sha256 != first.report.model.weights_sha256
    assert not changed.to_pandas().equals(first.to_pandas())


def test_bf16_is_audited_in_bf16(model: Any, tokenizer: Any) -> None:
    model.to(torch.bfloat16)
    result = audit_texts(model, tokenizer)
    assert result.report.method.dtype == "bf16"
    assert next(model.parameters()).dtype == torch.bfloat16


def as_paths(folder: Path, texts: list[str], name: str) -> Any:
    return [write_jsonl(folder / f"{name}.jsonl", ({"text": text} for text in texts))]


def as_dataset(folder: Path, texts: list[str], name: str) -> Any:
    return datasets.Dataset.from_dict({"text": texts, "other": list(range(len(texts)))})


def as_texts(folder: Path, texts: list[str], name: str) -> Any:
    return texts


def test_documents_may_be_paths_texts_or_a_dataset(
    folder: Path, model: Any, tokenizer: Any
) -> None:
    forms: tuple[Callable[[Path, list[str], str], Any], ...] = (as_paths, as_dataset, as_texts)
    results = [
        api.audit(
            model=model,
            tokenizer=tokenizer,
            members=form(folder, make_texts(24), "members"),
            nonmembers=form(folder, make_texts(24, seed=1), "nonmembers"),
            **LENGTHS,
        )
        for form in forms
    ]
    # The source of a file is its name.
    tables = [result.to_pandas().drop(columns="source") for result in results]
    assert tables[0]["id"].iloc[0] == "members-000000"
    for table in tables[1:]:
        pandas.testing.assert_frame_equal(table, tables[0], check_exact=True)


def draw_guide_plot(result: api.AuditResult) -> set[str]:
    """Draw the plot that the guide shows, and return the labels of its bars."""
    guide = (Path(api.__file__).parents[1] / "eval/README.md").read_text(encoding="utf-8")
    (line,) = (line for line in guide.splitlines() if line.startswith("rows.query("))
    with matplotlib.rc_context({"backend": "agg"}):
        axes = eval(line, {"rows": result.results})
        return {label.get_text() for label in axes.get_xticklabels()}


def is_shown(page: Path, card: str) -> bool:
    """Tell whether a card has a page's path: from the working folder if near, otherwise whole."""
    return str(page) in card or os.path.relpath(page) in card


def test_a_result_is_shown_saved_and_read(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    result = audit_texts(model, tokenizer)
    assert result.verdict.sentence
    shown = result._repr_html_()
    assert is_shown(result.folder / "report.html", shown)
    assert "<script" not in shown
    assert set(result.to_pandas()["role"]) == {"trained", "control"}
    findings = result.findings
    assert tuple(findings.columns) == FINDING_COLUMNS
    assert len(findings) == result.report.num_findings
    assert list(findings["id"])[:100] == [finding.id for finding in result.report.findings]
    assert {"extraction", "sampling", "membership"} == set(result.results["probe"])
    assert draw_guide_plot(result) == {"members", "nonmembers"}
    saved = result.save(tmp_path / "a" / "report")
    names = {"audit.json", "report.json", "report.html", "records.parquet", "findings.csv"}
    names.add("results.parquet")
    assert {path.name for path in saved.iterdir()} == names
    assert run_cli("verify", saved).code == 0
    with pytest.raises(ConfigError, match=r"cannot be created, written or read \(File exists\)"):
        result.save(__file__)
    folder = result.folder
    shutil.rmtree(folder)
    deleted = pytest.raises(RecordError, match=r"was deleted since: make this result again")
    with deleted:
        result.save(tmp_path / "late")
    with deleted:
        result.to_pandas()
    assert "The page was deleted since." in result._repr_html_()
    assert not (tmp_path / "late").exists()
    folder.mkdir()
    del result, deleted
    assert not folder.exists()


def test_base_may_be_in_memory_too(folder: Path, model: Any, tokenizer: Any) -> None:
    # Without the cache, whose numbers may be of other batches and differ in the last bit.
    other = save_tiny_model(folder / "base", initializer_range=0.03)
    base = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    kept = audit_texts(model, tokenizer, base=other, cache=False)
    memory = audit_texts(model, tokenizer, base=base, cache=False)
    assert kept.report.tables == memory.report.tables
    with pytest.raises(ConfigError, match="'--base' has the weights of '--model'"):
        audit_texts(model, tokenizer, base=model)
    assert kept.report.tables.select("extraction", "verbatim", model="base")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": 3}, ModelError, "must be a folder, a hub id or a transformers.PreTrainedModel"),
        ({"tokenizer": None}, ModelError, "'tokenizer' is None"),
        ({"members": []}, ConfigError, "needs --members"),
        ({"members": [None]}, DataError, "'members' must be paths, a list of texts or a data"),
        ({"nonmembers": {}}, DataError, "'nonmembers' must be paths, a list of texts or a data"),
        ({"out": "a\udcff"}, ConfigError, "'out' should be .* unicode string; got the text"),
        ({"out": __file__}, ConfigError, r"test_api\.py' cannot be written to: Not a directory"),
        ({"out": f"{__file__}/a"}, ConfigError, "cannot be written to: Not a directory"),
        ({"out": "a\0"}, ConfigError, "'--out' must not hold a NUL character"),
        ({"members": 3}, DataError, "'members' must be paths, a list of texts or a datasets.Data"),
        (
            {"members": datasets.DatasetDict()},
            DataError,
            "got DatasetDict: choose one of its splits",
        ),
        ({"dtype": "bf16"}, ConfigError, "'dtype' must be fp32, the dtype of the model in memory"),
        ({"continuation_tokens": 0}, ConfigError, "continuation_tokens"),
        ({"continuation": 5}, ConfigError, "is not a setting"),
        ({"suite": "extractoin"}, ConfigError, "extractoin"),
        ({"run": "nowhere"}, ConfigError, "RUN or --model is required; got both"),
    ],
)
def test_errors_are_ours(
    model: Any,
    tokenizer: Any,
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    given = {"model": model, "tokenizer": tokenizer, "members": make_texts(24)}
    with pytest.raises(error, match=message):
        api.audit(**{**given, **arguments})
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(model: Any, tokenizer: Any, dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match="in float32 or all in bfloat16"):
        audit_texts(model.to(dtype), tokenizer)


def write_letters(count: int, *, num_forms: int, seed: int) -> list[str]:
    """Form letters: texts that differ in a name and a number."""
    forms = make_texts(num_forms, words=50, seed=seed)
    return [f"{forms[n % num_forms]} dear number {n}" for n in range(count)]


@pytest.mark.parametrize("is_member", [True, False])
def test_form_letters_are_audited(model: Any, tokenizer: Any, is_member: bool) -> None:
    letters, others = write_letters(12, num_forms=1, seed=2), make_texts(12, words=50, seed=3)
    sides = (letters, others) if is_member else (others, letters)
    result = api.audit(
        model=model, tokenizer=tokenizer, members=sides[0], nonmembers=sides[1], **LENGTHS
    )
    (note,) = (each.text for each in result.report.banners if "bag-of-words" in each.text)
    counts = (1, 12) if is_member else (12, 1)
    assert f"there are {counts[0]} trained and {counts[1]} control documents" in note
    scores = {row.parameters for row in result.report.tables.select("membership", "auc")}
    assert "score=loss" in scores
    assert f"score={BLIND}" not in scores
    assert "bag-of-words classifier" in (result.folder / "report.html").read_text()


# -- runs, comparisons, plans ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> api.TrainResult:
    return train_run(tiny_folder, tmp_path_factory.mktemp("api"), "plain")


@pytest.fixture(scope="module")
def goldfish(trained: api.TrainResult, tiny_folder: Path) -> api.TrainResult:
    mitigations = [{"name": "goldfish", "k": 4}]
    return train_run(tiny_folder, trained.folder.parent, "goldfish", mitigations=mitigations)


def train_run(tiny_folder: Path, folder: Path, name: str, **overrides: Any) -> api.TrainResult:
    settings = json.loads(write_run(tiny_folder, name=name).read_text())
    settings["output_dir"] = str(folder)
    settings["audit"] = LENGTHS
    return api.train(settings, {"optim.lr": 1e-3, **overrides})


@pytest.mark.quick
def test_a_run_is_trained_and_audited(trained: api.TrainResult) -> None:
    assert trained.audit is not None
    assert trained.verdict == trained.audit.report.verdict
    metrics = trained.to_pandas()
    assert metrics["lr"].max() == 1e-3
    assert np.isfinite(metrics.loc[metrics["event"] == "step", "loss"]).all()
    assert "plain" in trained._repr_html_()


def test_a_finished_run_is_not_trained_again(trained: api.TrainResult, tiny_folder: Path) -> None:
    before = sum_file(trained.model / "model.safetensors")
    modified = (trained.model / "model.safetensors").stat().st_mtime_ns
    again = train_run(tiny_folder, trained.folder.parent, "plain")
    assert again.audit is not None
    assert trained.audit is not None
    assert again.audit.report == trained.audit.report
    assert (trained.model / "model.safetensors").stat().st_mtime_ns == modified
    assert sum_file(trained.model / "model.safetensors") == before


def test_a_run_has_the_identities_that_it_was_prepared_with(
    trained: api.TrainResult, session_key: Path, tmp_path: Path
) -> None:
    """Another key would not be that of its manifest."""
    secret = bytes.fromhex(session_key.read_text())
    own = IdentityKey(key=secret, path=session_key).fingerprint
    assert trained.audit is not None
    assert trained.audit.report.data.identity_key == own
    rows = pyarrow.parquet.read_table(trained.audit.folder / "records.parquet").to_pylist()
    entries = {entry.id: entry for entry in load_manifest(trained.folder / "manifest.jsonl")}
    assert rows
    for row in rows:
        entry = entries[row["id"]]
        assert (row["text_hmac"], row["has_own_id"]) == (entry.text_hmac, entry.has_own_id)
    other = load_identity_key(tmp_path / "my.key", say=lambda _: None).fingerprint
    with pytest.raises(ConfigError, match=rf"has the fingerprint {other}, and .* {own}: name"):
        api.audit(trained.folder, out=tmp_path / "out", identity_key=tmp_path / "my.key")


def test_a_run_is_audited_again(trained: api.TrainResult, tmp_path: Path) -> None:
    again = api.audit(trained.folder, out=tmp_path / "again")
    assert trained.audit is not None
    assert again.report.tables == trained.audit.report.tables
    assert again.report.method.command == "memguard.api, called by another program"
    assert again.report.code_sha256 == hash_code()


def test_a_run_is_saved_elsewhere(trained: api.TrainResult, tmp_path: Path) -> None:
    saved = trained.save(tmp_path / "saved")
    assert (saved / "model" / "model.safetensors").is_file()
    assert (saved / "audit" / "report.html").is_file()
    assert (saved / "audit" / "records.parquet").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="exists already"):
        trained.save(saved)


def test_wrong_settings_are_refused_together(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        train_run(tiny_folder, tmp_path, "wrong", **{"optim.lr": -1, "train.batchsize": 3})
    assert len(refused.value.problems) == 2


def test_runs_are_compared(
    trained: api.TrainResult, goldfish: api.TrainResult, tmp_path: Path
) -> None:
    other = shutil.copytree(goldfish.folder, tmp_path / "goldfish")
    for name in ("one", "two"):
        result = api.compare([trained.folder, other], out=tmp_path / name)
        frame = result.to_pandas()
        assert list(frame["name"]) == ["plain", "goldfish"]
        assert [list(frame[name]) for name in ("text", "membership")] == [
            [run.verdict.badges[place].state for run in result.comparison.runs] for place in (0, 1)
        ]
        assert trained.audit is not None
        assert frame["num_findings"][0] == trained.audit.report.num_findings
        assert not any(isinstance(value, list) for value in frame["risk_high"])
        assert result.verdict == result.comparison.recommendation.describe()
        assert is_shown(tmp_path / name / "comparison.html", result._repr_html_())
    saved = result.save(tmp_path / "saved")
    assert (saved / "comparison.html").is_file()
    shutil.rmtree(other / "audit")
    with pytest.raises(RecordError, match="report"):
        api.compare([trained.folder, other], out=tmp_path / "three")


def test_a_plan_is_made(tiny_folder: Path, tmp_path: Path) -> None:
    batch = {"train.batch_size": 8}
    for _ in range(2):
        result = api.plan(model=tiny_folder / "model", gpus=4, machine="dgx-h100", overrides=batch)
        assert "meshes of 4 x" in result.verdict
        table = result.to_pandas()
        assert table["fits"].all()
        assert (table["memory.needed"] > 0).all()
        assert "<table" in result._repr_html_()
        saved = read_json(result.save(tmp_path / "plan") / "plan.json")
        assert saved["num_gpus"] == 4
    with pytest.raises(ConfigError, match="CONFIG"):
        api.plan()


# -- examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [api.audit, api.train, api.compare, api.plan])
def test_the_examples_run(
    function: Callable[..., Any],
    trained: api.TrainResult,
    goldfish: api.TrainResult,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    tokenizer: Any,
) -> None:
    lines = (inspect.getdoc(function) or "").partition("Example:")[2].splitlines()
    code = [line.strip().removeprefix(">>> ") for line in lines if line.strip().startswith(">>>")]
    assert len(code) <= 5
    monkeypatch.chdir(tmp_path)
    shutil.copy(tiny_folder / "model" / "config.json", tmp_path)
    for run in (trained, goldfish):
        shutil.copytree(run.folder, tmp_path / "runs" / run.folder.name)
    names = {
        "model": model,
        "tokenizer": tokenizer,
        # Long enough for the continuations of 50 tokens that are the default.
        "texts": make_texts(64, words=60),
        "unseen": make_texts(64, words=60, seed=1),
        "path": str(save_tiny_model(tmp_path / "longer", max_position_embeddings=1024)),
        "documents": str(write_texts(tmp_path / "mails.jsonl", 60, words=40)),
    }
    exec("\n".join(code), names)
