"""`memguard export RUN OUT --step N` and `memguard audit RUN --step N`: a run's checkpoints."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from cli_examples import (
    read_json,
    run_cli,
    save_tiny_model,
    succeed,
    write_jsonl,
    write_run,
    write_texts,
)
from safetensors.torch import load_file, save_file

from memguard.records import load_manifest

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"train": {"precision": "bf16"}},
    "frozen": {"train": {"trainable_modules": ["model.layers.1"]}},
    "lora": {"adapter": {"name": "lora", "r": 4}},
    "dora": {"adapter": {"name": "lora", "r": 4, "use_dora": True}},
    "nf4": {
        "adapter": {"name": "lora", "r": 4, "quantization": "nf4"},
        "parallel": {"data": 4},
        "train": {"precision": "bf16"},
    },
    "scratch": {"model": {"path": None, "scratch": {"vocab_size": 400}}},
    "frozen scratch": {
        "model": {"path": None, "scratch": {"vocab_size": 400}},
        "train": {"trainable_modules": ["model.layers.1"]},
    },
}


def start(folder: Path, **changes: Any) -> Path:
    """Write a model, documents and a run with a checkpoint at every third step."""
    save_tiny_model(folder / "model")
    write_texts(folder / "documents.jsonl")
    train = {"checkpoint_every_steps": 3, "keep_checkpoints": 9, "epochs": 2}
    changes = {**changes, "train": {**train, **changes.pop("train", {})}}
    return write_run(folder, **changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one process, without its audit."""
    folder = tmp_path_factory.mktemp("run")
    succeed("train", start(folder, data={"control_fraction": 0.1}), "audit.enabled=false")
    return folder / "runs" / "run"


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())


def weights(folder: Path) -> dict[str, bytes]:
    names = ("*.safetensors", "config.json", "*_config.json", "tokenizer*")
    found = {path.name: path.read_bytes() for name in names for path in folder.glob(name)}
    # safetensors writes two entries of metadata in a random order.
    form, other = b'"base_quantization":"nf4"', b'"format":"pt"'
    return {n: text.replace(form + b"," + other, other + b"," + form) for n, text in found.items()}


def test_the_last_step_is_the_model_of_the_run(run: Path, tmp_path: Path) -> None:
    out, middle = tmp_path / "last", tmp_path / "middle"
    result = json.loads(succeed("export", run, out, "--step", steps_of(run)[-1], "--json").out)
    assert result["step"] == steps_of(run)[-1]
    assert weights(out) == weights(run / "model")
    assert f"step {result['step']}" in (out / "README.md").read_text()
    # A run that has not ended has a model too.
    unfinished = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(unfinished / "model")
    (unfinished / "trained.json").unlink()
    succeed("export", unfinished, middle, "--step", 3)
    assert weights(middle).keys() == weights(out).keys()
    assert weights(middle)["model.safetensors"] != weights(out)["model.safetensors"]
    assert not list(tmp_path.glob(".memguard-tmp-*"))


@pytest.mark.mesh
@pytest.mark.parametrize("case", CASES)
def test_the_last_step_of_a_mesh_is_the_model_of_the_run(tmp_path: Path, case: str) -> None:
    path = start(tmp_path, **{"parallel": {"z": 2, "x": 2}, **CASES[case]})
    command = ("-m", "memguard", "train", path, "--nproc", 4, "audit.enabled=false")
    if "scratch" in case:
        fields = read_json(tmp_path / "model" / "config.json")
        values = read_json(path)
        # YAML reads 1e-06 as text.
        fields["rms_norm_eps"] = 0.001
        values["model"]["scratch"]["config"] = {
            name: fields[name] for name in fields if name not in ("dtype", "vocab_size")
        }
        path.write_text(json.dumps(values))
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run, out = tmp_path / "runs" / "run", tmp_path / "out"
    succeed("export", run, out, "--step", steps_of(run)[-1])
    trained = weights(run / ("adapter" if "adapter" in CASES[case] else "model"))
    assert trained == weights(out)


def test_the_audit_of_a_step_is_that_of_its_export(run: Path, tmp_path: Path) -> None:
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    succeed("export", run, out, "--step", 3)
    succeed("audit", run, "--step", 3, "--out", tmp_path / "ours")
    report = read_json(tmp_path / "ours" / "report.json")
    assert report["training"]["num_steps"] == 3
    assert report["dose_response"]
    assert "step 3" in (tmp_path / "ours" / "report.html").read_text()
    ours = read_scores(tmp_path / "ours")
    # By hand: the documents of that audit, as files.
    texts = {
        row["id"]: row
        for row in map(json.loads, (run.parents[1] / "documents.jsonl").read_text().splitlines())
    }
    roles = {row["id"]: row["role"] for row in ours if row["id"] in texts}
    for role in ("trained", "control"):
        rows = [texts[name] for name, own in roles.items() if own == role]
        write_jsonl(tmp_path / f"{role}.jsonl", rows)
    documents = (
        "--members",
        tmp_path / "trained.jsonl",
        "--nonmembers",
        tmp_path / "control.jsonl",
    )
    base = ("--base", run.parents[1] / "model", "audit.continuation_tokens=8")
    succeed("audit", "--model", out, *documents, *base, "--out", theirs)
    assert (
        report["model"]["weights_sha256"]
        == read_json(theirs / "report.json")["model"]["weights_sha256"]
    )
    by_text = {row["text_hmac"]: row for row in read_scores(theirs)}
    # What is known of a document in a run, and of one in a file.
    own = {"id", "bucket", "num_repetitions", "cluster", "source", "num_copies", "num_tokens"}
    for row in ours:
        if row["id"] in texts:
            theirs_of = by_text[row["text_hmac"]]
            # Below the floor of token accuracy a sample of each bucket is generated.
            differing = {
                name
                for name, value in row.items()
                if not (name.endswith("greedy_margin") and None in (value, theirs_of[name]))
                and theirs_of[name]
                != (pytest.approx(value, abs=1e-4) if isinstance(value, float) else value)
            }
            assert differing <= own, differing
    assert len(by_text) == len(roles)


def read_scores(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "records.parquet").to_pylist()
    return rows


def test_the_repetitions_are_those_of_the_step(run: Path, tmp_path: Path) -> None:
    last = steps_of(run)[-1]
    for step in (3, last):
        succeed("audit", run, "--step", step, "--out", tmp_path / str(step))
    counts = {
        step: {row["id"]: row["num_repetitions"] for row in read_scores(tmp_path / str(step))}
        for step in (3, last)
    }
    final = {entry.id: entry.num_repetitions for entry in load_manifest(run / "manifest.jsonl")}
    assert all(final[name] == count for name, count in counts[last].items())
    assert {*counts[3].values()} == {0, 1}
    assert np.mean([count > 0 for count in counts[last].values()]) > 0.5
    assert not list(tmp_path.glob("*/.memguard-tmp-*"))


def test_the_privacy_is_that_of_the_step(tmp_path: Path) -> None:
    noise = {"name": "dp_sgd", "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    path = start(tmp_path, mitigations=[noise], data={"control_fraction": 0.1})
    succeed("train", path, "audit.enabled=false")
    run = tmp_path / "runs" / "run"
    last = steps_of(run)[-1]
    end = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    found = {}
    for step in (3, last):
        succeed("audit", run, "--step", step, "--out", tmp_path / str(step))
        found[step] = read_json(tmp_path / str(step) / "report.json")["training"]
    assert found[last]["epsilon"] == end["epsilon"]
    assert found[last]["num_steps"] == end["step"]
    assert 0 < found[3]["epsilon"] < end["epsilon"]


def test_weights_of_another_base_are_refused(tmp_path: Path) -> None:
    succeed("train", start(tmp_path, **CASES["frozen"]), "audit.enabled=false")
    run, out, base = tmp_path / "runs" / "run", tmp_path / "out", tmp_path / "model"
    succeed("export", run, out, "--step", steps_of(run)[-1])
    assert weights(out) == weights(run / "model")
    shutil.rmtree(out)
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 2
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    for command in (("export", run, out), ("audit", run, "--out", out)):
        ended = run_cli(*command, "--step", 3)
        assert ended.code == 3, ended.err
        assert "belongs to another base model: its model.safetensors" in ended.err.splitlines()[-1]
    assert not (out / "model.safetensors").exists()


def test_what_is_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    file = next((damaged / "checkpoints" / "step-00000003").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for arguments, code, message in (
        (("export", run, out, "--step", 4), 3, "has no checkpoint of step 4: --step takes"),
        (("export", run, out, "--step", 3, "--merge"), 2, "neither --merge nor --dtype"),
        (("export", run, "--step", 3), 2, "OUT, the folder"),
        (("export", run, run / "model", "--step", 3), 2, "'OUT' must not be in model/"),
        (("export", run.parent, out, "--step", 3), 2, "'--step' needs a run"),
        (("export", damaged, out, "--step", 3), 3, f"'{file}' is not what was written"),
        (("audit", run, "--step", 3), 2, "--step needs --out"),
        (("audit", run, "--step", 4, "--out", out), 3, "has no checkpoint of step 4"),
    ):
        ended = run_cli(*arguments)
        assert ended.code == code, (arguments, ended.err)
        assert message in ended.err.splitlines()[-1], ended.err
    assert not out.exists()
