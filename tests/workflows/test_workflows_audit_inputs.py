"""What an audit is told of a run's documents."""

import json
from pathlib import Path

import numpy as np
from cli_examples import succeed, write_run

from memguard.config import GoldfishConfig
from memguard.data.corpus import load_corpus
from memguard.mitigation import Goldfish
from memguard.mitigation.k_schedule import build_k_schedule
from memguard.records import IGNORE_LABEL
from memguard.workflows.auditing.target import plan_training
from memguard.workflows.common.folder import RunFolder


def test_the_mask_known_is_that_of_the_planned_dose(folder: Path) -> None:
    """A run that ended early has fed less; it masked labels by what it meant to feed."""
    lines = (folder / "documents.jsonl").read_text().splitlines()
    # Two copies are a dose of 32.
    copy = json.dumps({**json.loads(lines[0]), "id": "copy"})
    (folder / "copied.jsonl").write_text("\n".join([*lines, copy]) + "\n")
    settings = write_run(folder, data={"train": str(folder / "copied.jsonl")}, train={"epochs": 16})
    succeed("prepare", settings)
    corpus = load_corpus(folder / "runs" / "run")
    config = GoldfishConfig(name="goldfish", k=8, k_by_dose={16: 4, 32: 2})
    k_schedule = build_k_schedule([config], corpus.manifest, can_tighten=False, special_ids=[])
    goldfish = Goldfish(config)
    index_of = {entry.id: index for index, entry in enumerate(corpus.manifest)}
    trained = [entry.role in ("trained", "canary") for entry in corpus.manifest]
    # Cut short after 7 of 16 epochs.
    config = RunFolder(folder / "runs" / "run").read_config()
    counts = [7 * is_trained for is_trained in trained]
    documents = plan_training(config, corpus, counts, min_documents=0, size=None).documents
    assert {document.num_repetitions for document in documents} == {0, 7}
    assert {document.dose for document in documents} == {0, 16, 32}
    draw = np.random.default_rng(0)
    for document in documents:
        index = index_of[document.id]
        whole = corpus.document(index)
        labels = whole.input_ids.astype(np.int64)
        masked = k_schedule.mask_labels(index, whole.input_ids, labels, draw)
        known = goldfish.at_dose(document.dose).drop_mask(document.input_ids, None, draw)
        assert ((masked == IGNORE_LABEL)[: len(known)] == known).all()
