"""The hash of a run's documents: of ids, buckets and tokens, and stored for all of them only."""

import hashlib
from pathlib import Path

import numpy as np
from cli_examples import make_texts, write_texts
from prepare_examples import prepare_as

from memguard.config import RunConfig
from memguard.data.tokenization import train_bpe


def test_documents_are_hashed_together_and_never_one_by_one(tmp_path: Path) -> None:
    write_texts(tmp_path / "documents.jsonl", 30)
    values = {
        "name": "run",
        "model": {"path": "m"},
        "data": {"train": str(tmp_path / "documents.jsonl"), "seq_len": 128},
        "mitigations": [{"name": "deduplicate", "similarity": "exact"}],
    }
    config = RunConfig.model_validate(values)
    corpus, _ = prepare_as(config, tmp_path / "run", train_bpe(make_texts(40), vocab_size=400))
    digest = hashlib.sha256()
    of_one = []
    for index, entry in enumerate(corpus.manifest):
        ids = corpus.document(index).input_ids
        of_one.append(hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest())
        bucket = "trained" if entry.role == "removed" else entry.bucket
        digest.update(f"{entry.id}\0{bucket}\0{of_one[-1]}\n".encode())
    assert corpus.summary.documents_sha256 == digest.hexdigest()
    manifest = (tmp_path / "run" / "manifest.jsonl").read_text()
    assert not [hash for hash in of_one if hash in manifest]
