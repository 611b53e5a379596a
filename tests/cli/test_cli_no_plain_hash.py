"""No file of a run, its audit, its export or a comparison holds an unkeyed hash of one document.

`audit/private/` and `prepared/` hold texts and tokens themselves. The score cache, which keeps
unkeyed hashes of tokens, is no part of a run and is for its owner alone.
"""

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from cli_examples import make_texts, run_cli, succeed, write_jsonl, write_run
from numpy.typing import NDArray
from plain_digests import find_digests, hash_contents, list_contents

from memguard.data.corpus import load_corpus

pytestmark = pytest.mark.slow

NUM_TEXTS = 200


@pytest.fixture(scope="module")
def told(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two audited runs of 200 texts, their comparison, and a merged export."""
    folder = tmp_path_factory.mktemp("told")
    (folder / "model").symlink_to(tiny_folder / "model")
    texts = make_texts(NUM_TEXTS, words=24)
    write_jsonl(
        folder / "documents.jsonl",
        ({"id": f"d{n}", "text": text.replace(" ", "\n", 1)} for n, text in enumerate(texts)),
    )
    for name, changes in (
        ("run", {"mitigations": [{"name": "ngram_penalty"}], "audit": {"excerpts": True}}),
        ("other", {}),
    ):
        settings = write_run(
            folder,
            name=name,
            adapter={"name": "lora", "r": 2},
            train={"batch_size": 32, "audit_every_steps": 4, "checkpoint_every_steps": 4},
            **changes,
        )
        trained = run_cli("train", settings, "audit.continuation_tokens=8")
        assert trained.code == 0, trained.err
    runs = folder / "runs"
    for words in (
        ("compare", runs / "run", runs / "other", "--out", runs / "comparison"),
        ("export", runs / "run", runs / "merged", "--merge"),
    ):
        ended = run_cli(*words)
        assert ended.code == 0, ended.err
    return runs


def list_hashes(runs: Path) -> NDArray[np.uint64]:
    rows = [json.loads(line) for line in (runs.parent / "documents.jsonl").read_text().splitlines()]
    texts = {row["id"]: row["text"] for row in rows}
    corpus = load_corpus(runs / "run")
    contents = []
    for index, entry in enumerate(corpus.manifest):
        if entry.role != "canary":
            ids = corpus.document(index).input_ids.tolist()
            contents += list_contents(texts[entry.id], ids)
    assert len(contents) > 15 * NUM_TEXTS
    return hash_contents(contents)


def test_no_file_holds_an_unkeyed_hash_of_one_document(told: Path, tmp_path: Path) -> None:
    shutil.copytree(told, tmp_path / "runs")
    for run in ("run", "other"):
        for private in ("audit/private", "prepared"):
            shutil.rmtree(tmp_path / "runs" / run / private, ignore_errors=True)
    known = list_hashes(told)
    assert find_digests(tmp_path / "runs", known) == []
    # The same search finds one hash of each kind, whole or cut, among as many files.
    text = json.loads((told.parent / "documents.jsonl").read_text().splitlines()[7])["text"]
    ids = load_corpus(told / "run").document(3).input_ids
    sha256 = hashlib.sha256(text.encode())
    (tmp_path / "runs" / "upper.json").write_text(f'{{"a": "x{sha256.hexdigest().upper()}"}}')
    (tmp_path / "runs" / "cut.jsonl").write_text(f"0{hashlib.md5(text.encode()).hexdigest()[:16]}")
    (tmp_path / "runs" / "raw.bin").write_bytes(b"abc" + hashlib.blake2b(ids.tobytes()).digest())
    first = hashlib.sha1(text.splitlines()[0].encode()).hexdigest()
    table = pyarrow.table({"line": [*map(str, range(500)), first]})
    pyarrow.parquet.write_table(table, tmp_path / "runs" / "rows.parquet", compression="zstd")
    assert find_digests(tmp_path / "runs", known) == [
        "cut.jsonl", "raw.bin", "rows.parquet", "upper.json",
    ]  # fmt: skip


def test_no_bundle_holds_a_text_or_an_unkeyed_hash_of_one_document(
    told: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (told.parent / "documents.jsonl").read_text().splitlines()]
    # The first word of a text, which is a line of its own, may be in a hash by chance.
    lines = {part for row in rows for part in (row["text"], row["text"].splitlines()[1])}
    parts = lines | {" ".join(row["text"].split()[at : at + 6]) for row in rows for at in (2, 10)}
    assert len(parts) >= 4 * NUM_TEXTS
    for run in ("run", "other"):
        succeed("bundle", told / run, tmp_path / f"{run}.zip")
        with zipfile.ZipFile(tmp_path / f"{run}.zip") as reader:
            reader.extractall(tmp_path / "unpacked" / run)
        content = (tmp_path / f"{run}.zip").read_text(encoding="latin-1")
        assert [part for part in parts if part in content] == []
    assert find_digests(tmp_path / "unpacked", list_hashes(told)) == []
    # The source holds what is looked for.
    source = (told.parent / "documents.jsonl").read_text()
    assert sum(part in source for part in parts) >= 3 * NUM_TEXTS


def test_no_file_holds_the_identity_key(told: Path, session_key: Path) -> None:
    """With it a guess can be tested against the manifest: it is never part of a run."""
    digits = session_key.read_text().strip()
    paths = [path for path in told.rglob("*") if path.is_file()]
    assert len(paths) > 40
    for path in paths:
        content = path.read_bytes()
        assert digits.encode() not in content, path
        assert bytes.fromhex(digits) not in content, path
