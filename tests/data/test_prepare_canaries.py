"""Canaries beside a run's documents: placed by their coins, and nothing else moved by them."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_examples import write_jsonl
from prepare_examples import CHAT, draw_texts, prepare_as, write_named

from memguard.config import RunConfig
from memguard.data.corpus import Corpus
from memguard.data.tokenization import train_bpe
from memguard.errors import DataError
from memguard.records import ManifestEntry

pytestmark = pytest.mark.slow

Prepare = Callable[..., tuple[Corpus, str]]


@pytest.fixture
def prepared(tmp_path: Path) -> Prepare:
    """Prepares a run; returns its corpus and what was said."""
    tokenizer = train_bpe(draw_texts(40), vocab_size=400)
    tokenizer.chat_template = CHAT

    def work(name: str = "run", count: int = 200, **changes: Any) -> tuple[Corpus, str]:
        source = tmp_path / f"documents-{count}.jsonl"
        if not source.exists():
            write_named(source, draw_texts(count))
        data = {"train": str(source), "seq_len": 128, **changes.pop("data", {})}
        values = {"name": name, "model": {"path": "m"}, **changes, "data": data}
        return prepare_as(RunConfig.model_validate(values), tmp_path / name, tokenizer)

    return work


def split(corpus: Corpus) -> tuple[list[ManifestEntry], list[ManifestEntry]]:
    """Return the documents that were given, and the canaries."""
    given = [entry for entry in corpus.manifest if entry.role != "canary"]
    return given, corpus.manifest[len(given) :]


def secrets(corpus: Corpus) -> set[bytes]:
    indices = [i for i, entry in enumerate(corpus.manifest) if entry.role == "canary"]
    documents = [corpus.document(index) for index in indices]
    return {document.input_ids[document.supervised].tobytes() for document in documents}


def test_canaries_come_last_and_are_placed_by_their_coins(prepared: Prepare) -> None:
    corpus, said = prepared(train={"epochs": 3})
    given, canaries = split(corpus)
    assert len(given) == 200
    # 180 are trained, 20 the control: one in twenty of the trained.
    assert [entry.id for entry in canaries] == [f"canary-{n:04d}" for n in range(8)]
    assert {entry.role for entry in canaries} == {"canary"}
    assert {(e.bucket, e.planned_repetitions) for e in canaries} == {
        ("canary-in", 3),
        ("canary-out", 0),
    }
    buckets = Counter(entry.bucket for entry in corpus.manifest)
    assert f"canary-in {buckets['canary-in']} (" in said
    assert f"canary-out {buckets['canary-out']} (" in said
    assert all(entry.num_loss_tokens is None for entry in corpus.manifest)
    # A cluster of its own for each.
    numbers = Counter(entry.cluster for entry in corpus.manifest)
    assert all(numbers[entry.cluster] == 1 for entry in canaries)
    for index in range(200, 208):
        document = corpus.document(index)
        assert document.format == "prompt_completion"
        assert 0 < document.supervised.sum() < len(document.input_ids) - 5


def test_the_summary_counts_what_was_given(prepared: Prepare) -> None:
    summary = prepared()[0].summary
    bare = prepared("bare", data={"canaries": {"count": 0}})[0].summary
    assert (summary.num_canaries, bare.num_canaries) == (8, 0)
    # Runs on other sources must not seem to share one.
    assert "canaries" not in summary.sources
    counted = {"num_canaries": 0, "arrays": {}, "manifest_sha256": None}
    changed = {"key": "", "settings_key": "", "documents_sha256": "", **counted}
    assert summary.model_copy(update=changed) == bare.model_copy(update=changed)
    # What is trained differs, so a checkpoint of the one is refused by the other.
    assert summary.documents_sha256 != bare.documents_sha256
    assert summary.key != bare.key


STUDY = {"num_repetitions": [0, 2, 5], "documents_per_bucket": 30}


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"heldout_documents": 15},
        {"study": STUDY, "background": ["remainder"], "heldout_documents": 10},
    ],
)
def test_documents_are_placed_as_without_canaries(prepared: Prepare, data: dict[str, Any]) -> None:
    with_them, _ = prepared(count=300, data=data)
    bare, said = prepared("bare", count=300, data={**data, "canaries": {"count": 0}})
    given, canaries = split(with_them)
    assert len(canaries) >= 8
    assert given == bare.manifest
    assert "canar" not in said
    for name in ("input_ids", "supervised", "offsets", "content_tokens", "format"):
        np.testing.assert_array_equal(
            getattr(with_them.without_canaries(), name), getattr(bare, name)
        )
    assert with_them.without_canaries().num_documents == bare.num_documents


def test_a_study_trains_canaries_at_its_largest_dose(prepared: Prepare) -> None:
    data = {"study": STUDY, "background": ["remainder"], "heldout_documents": 10}
    corpus, _ = prepared(count=300, data=data)
    # 60 in buckets, 200 beside them: 13.
    given, canaries = split(corpus)
    assert len(canaries) == 13
    assert {entry.planned_repetitions for entry in canaries} == {0, 5}
    assert Counter(entry.bucket for entry in given) == {
        "control": 30, "x2": 30, "x5": 30, "heldout": 10, "background": 200,
    }  # fmt: skip


def test_the_same_run_is_the_same_bytes(prepared: Prepare, tmp_path: Path) -> None:
    one, _ = prepared("one")
    two, _ = prepared("two")
    assert one.manifest == two.manifest
    assert one.summary == two.summary
    for file in (tmp_path / "one" / "prepared").glob("*.npy"):
        assert file.read_bytes() == (tmp_path / "two" / "prepared" / file.name).read_bytes()


def test_settings_of_a_sweep_share_their_canaries(prepared: Prepare) -> None:
    goldfish = {"mitigations": [{"name": "goldfish"}], "optim": {"lr": 1e-3}}
    one, two = prepared("one")[0], prepared("two", train={"epochs": 9}, **goldfish)[0]
    assert one.summary.documents_sha256 == two.summary.documents_sha256
    assert [entry.bucket for entry in one.manifest] == [entry.bucket for entry in two.manifest]


def test_other_documents_have_other_canaries(prepared: Prepare, tmp_path: Path) -> None:
    one = prepared("one")[0]
    assert len(secrets(one)) == 8
    for name, data in {
        "text": {"train": write_named(tmp_path / "other.jsonl", draw_texts(200, seed=1))},
        "more": {"train": [str(tmp_path / "documents-200.jsonl"), str(tmp_path / "extra.jsonl")]},
    }.items():
        write_named(tmp_path / "extra.jsonl", ["one more"], "extra")
        assert not secrets(one) & secrets(prepared(name, data=data)[0]), name
    assert not secrets(one) & secrets(prepared("seed", seed=1)[0])
    # What is not trained on does not matter.
    own = write_named(tmp_path / "control.jsonl", draw_texts(10, seed=2), "c")
    assert secrets(one) <= secrets(prepared("control", data={"control": own})[0])


def test_lengths_of_documents_do_not_bind_canaries(prepared: Prepare) -> None:
    data = {"min_document_tokens": 30, "max_document_tokens": 30, "append_eos": False}
    corpus, _ = prepared("cut", data=data)
    assert {entry.num_tokens for entry in split(corpus)[0]} == {30}
    assert len(split(corpus)[1]) == 8
    assert secrets(corpus) == {
        # Without the EOS that the others end with.
        np.frombuffer(secret, np.int32)[:-1].tobytes()
        for secret in secrets(prepared("whole")[0])
    }


def test_conversations_have_canaries_too(prepared: Prepare, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": text}]}
        for text in draw_texts(200)
    ]
    source = write_jsonl(tmp_path / "chat.jsonl", rows)
    corpus, _ = prepared("chat", data={"train": str(source)})
    assert len(split(corpus)[1]) == 8
    assert {corpus.document(index).format for index in range(200)} == {"messages"}


def test_no_record_holds_a_secret(prepared: Prepare, tmp_path: Path) -> None:
    corpus, said = prepared()
    tokenizer = train_bpe(draw_texts(40), vocab_size=400)
    texts = [tokenizer.decode(corpus.document(index).input_ids) for index in range(200, 208)]
    parts = [word for text in texts for word in (text.split()[4], text.split("is ")[1][:17])]
    assert len(set(parts)) == 16
    written = [tmp_path / "run" / "manifest.jsonl", tmp_path / "run" / "prepared" / "summary.json"]
    for text in (said, *(path.read_text() for path in written)):
        assert not [part for part in parts if part in text]


def test_tiny_runs_stay_as_they_are(prepared: Prepare) -> None:
    corpus, said = prepared(count=100)
    bare, _ = prepared("bare", count=100, data={"canaries": {"count": 0}})
    assert corpus.manifest == bare.manifest
    assert corpus.summary.documents_sha256 == bare.summary.documents_sha256
    line = "documents: no canaries, which need at least 160 trained documents: there are 80"
    assert said.splitlines().count(line) == 1


def test_short_rows_have_none(prepared: Prepare) -> None:
    corpus, said = prepared(data={"seq_len": 32})
    assert not split(corpus)[1]
    assert "no canaries, which have up to" in said
    assert "'data.seq_len' is 32" in said


def test_ids_of_canaries_are_kept_free(prepared: Prepare, tmp_path: Path) -> None:
    source = write_named(tmp_path / "taken.jsonl", draw_texts(200), "canary-000")
    with pytest.raises(DataError, match=r"ids of canaries \(canary-0000, .*canaries\.count=0"):
        prepared(data={"train": source})
    assert prepared("off", data={"train": source, "canaries": {"count": 0}})[0].num_documents == 200


def test_they_are_prepared_once(prepared: Prepare, tmp_path: Path) -> None:
    before, _ = prepared()
    again, said = prepared()
    assert "200 prepared before, unchanged" in said
    assert again.manifest == before.manifest
    _, said = prepared(data={"canaries": {"secret_digits": 10}})
    assert "preparing again" in said
