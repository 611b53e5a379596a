"""Real runs of a tiny model sent to a hub on this machine, by a process of its own.

A model and an adapter. The documents have 200 texts, ids, secrets and names that the hub must not
receive, nor the identity key, in whatever form its client sends them.
"""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from cli_examples import run_cli, save_tiny_model, write_jsonl, write_run
from hub_stand_in import TOKEN, HubStandIn, serve_hub

from memguard.data.corpus import load_corpus
from memguard.data.identity_key import load_identity_key

pytestmark = pytest.mark.long
NUM_DOCUMENTS, NUM_WATCHED, NUM_CANARIES = 210, 96, 8
"""There is a canary for 20 documents at most. With the texts and ids of the watched ones: 200."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    folder: Path
    planted: tuple[str, ...]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of a model and one of an adapter, on documents of words of their own."""
    folder = tmp_path_factory.mktemp("acme")
    save_tiny_model(folder / "model")
    draw = np.random.default_rng(3)

    def write(length: int) -> str:
        return "".join(draw.choice(list("klmnopqrst"), length))

    texts = [" ".join(write(7) for _ in range(6)) for _ in range(NUM_DOCUMENTS)]
    ids = [f"patient-{number}-{write(6)}" for number in range(NUM_DOCUMENTS)]
    rows = ({"id": own, "text": text} for own, text in zip(ids, texts, strict=True))
    write_jsonl(folder / "clinic-letters.jsonl", rows)
    for name, changes in (("full-clinic", {}), ("small-clinic", {"adapter": {"r": 4}})):
        changes = {key: {"name": "lora", **value} for key, value in changes.items()}
        settings = write_run(
            folder,
            name=name,
            data={
                "train": str(folder / "clinic-letters.jsonl"),
                "canaries": {"count": NUM_CANARIES},
            },
            train={"batch_size": 32},
            audit={"continuation_tokens": 8, "max_documents_per_bucket": 12},
            **changes,
        )
        ended = run_cli("train", settings)
        assert ended.code == 0, ended.err
    secrets = read_secrets(folder / "runs" / "full-clinic")
    # A text that is cut anywhere still has one of its words.
    words = [text.split()[4] for text in texts]
    planted = (*words[:NUM_WATCHED], *ids[:NUM_WATCHED], *secrets)
    assert len(set(planted)) == 200, len(set(planted))
    places = ("clinic-letters", "full-clinic", "small-clinic", str(folder), folder.name)
    identity = load_identity_key(None)
    return Runs(
        folder=folder, planted=(*planted, *places, identity.key.hex(), identity.fingerprint)
    )


def read_secrets(run: Path) -> list[str]:
    """Return the secrets of all canaries of a run, trained or not."""
    corpus = load_corpus(run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    texts = [
        tokenizer.decode(corpus.document(index).input_ids, skip_special_tokens=True)
        for index, entry in enumerate(corpus.manifest)
        if entry.source == "canaries"
    ]
    return [text.rpartition(" is")[2].strip() for text in texts]


def start(hub: HubStandIn, home: Path, *arguments: object) -> dict[str, Any]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
    }
    command = [sys.executable, "-m", "memguard", "export", *map(str, arguments), "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    values: dict[str, Any] = json.loads(ended.stdout)
    return values


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_run_on_the_hub(runs: Runs, tmp_path: Path, kind: str) -> None:
    run = runs.folder / "runs" / ("full-clinic" if kind == "model" else "small-clinic")
    arguments = [run, "--to", "hub:notes"]
    with serve_hub() as hub:
        # Offline, as the suite is, and without a token.
        planned = run_cli("export", *arguments, "--dry-run", "--json")
        assert planned.code == 0, planned.err
        listed = json.loads(planned.out)
        assert hub.received == []
        sent = start(hub, tmp_path, *arguments)
    files = hub.repos["ada/notes"].files
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert {file["name"]: file["sha256"] for file in listed["files"]} == hashes
    assert sent["files"] == listed["files"]
    texts = list(hub.list_texts())
    assert [text for text in runs.planted if any(text.encode() in body for body in texts)] == []
    for name, content in files.items():
        (tmp_path / "downloaded").mkdir(exist_ok=True)
        (tmp_path / "downloaded" / name).write_bytes(content)
    config = json.loads(files["adapter_config.json" if kind == "adapter" else "config.json"])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "downloaded").eos_token_id == 0
    if kind == "adapter":
        assert config["base_model_name_or_path"] is None
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "downloaded")
    assert model.config.vocab_size == config["vocab_size"]
