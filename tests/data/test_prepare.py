"""What `prepare` leaves out and counts: supervised tokens cut off, a forget list; its hash."""

import copy
import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_examples import make_texts, write_jsonl, write_texts
from prepare_examples import CHAT, draw_texts, make_run, prepare_as

from memguard.config import RunConfig
from memguard.data.corpus import Corpus
from memguard.data.tokenization import train_bpe
from memguard.errors import DataError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe(make_texts(30), vocab_size=400)


def make_config(folder: Path, num_short: int, num_long: int, **data: Any) -> RunConfig:
    """Return a run of pairs: prompts of a few tokens, and prompts longer than what is kept."""
    short, long = make_texts(num_short, words=4, seed=1), make_texts(num_long, words=200, seed=2)
    rows = [
        {"id": f"{name}{number}", "prompt": prompt, "completion": " and an answer to it"}
        for name, prompts in (("short", short), ("long", long))
        for number, prompt in enumerate(prompts)
    ]
    source = write_jsonl(folder / "pairs.jsonl", rows)
    cut = {"seq_len": 64, "max_document_tokens": 60}
    return make_run(source, audit={"enabled": False}, **cut, **data)


def test_they_are_left_out_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    config = make_config(tmp_path, 20, 7)
    corpus, said = prepare_as(config, tmp_path / "run", tokenizer)
    summary = corpus.summary
    assert (summary.num_cut_off, summary.num_shorter, summary.num_documents) == (7, 0, 20)
    assert all(entry.id.startswith("short") for entry in corpus.without_canaries().manifest)
    assert "7 of 27 documents are left out: their supervised tokens are beyond" in said
    assert "'data.max_document_tokens' = 60" in said
    corpus, said = prepare_as(make_config(tmp_path, 20, 0), tmp_path / "other", tokenizer)
    assert (corpus.summary.num_cut_off, "left out" in said) == (0, False)


def test_a_run_of_nothing_else_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    config = make_config(tmp_path, 0, 7)
    with pytest.raises(DataError) as error:
        prepare_as(config, tmp_path / "run", tokenizer)
    assert str(error.value) == (
        "'data.train': all 7 documents have fewer than 'data.min_document_tokens' = 2 tokens, or "
        "no supervised token before 'data.max_document_tokens' = 60"
    )


def test_documents_are_hashed_together_and_never_one_by_one(tmp_path: Path) -> None:
    write_texts(tmp_path / "documents.jsonl", 30)
    exact = [{"name": "deduplicate", "similarity": "exact"}]
    config = make_run(tmp_path / "documents.jsonl", seq_len=128, mitigations=exact)
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


TEXTS = draw_texts(120)


def write(path: Path, texts: Sequence[tuple[str, str]]) -> str:
    return str(write_jsonl(path, ({"id": name, "text": text} for name, text in texts)))


def work(
    folder: Path, train: Sequence[tuple[str, str]], forget: Sequence[tuple[str, str]], **data: Any
) -> tuple[Corpus, str]:
    tokenizer = train_bpe(TEXTS[:40], vocab_size=400)
    config = make_run(
        write(folder / "train.jsonl", train),
        mitigations=[{"name": "npo"}],
        forget=write(folder / "forget.jsonl", forget),
        **{"seq_len": 128, "control_fraction": 0, **data},
    )
    return prepare_as(config, folder / "run", tokenizer)


def named(start: int, stop: int, prefix: str = "d") -> list[tuple[str, str]]:
    return [(f"{prefix}{n}", TEXTS[n]) for n in range(start, stop)]


def test_a_list_cut_from_the_documents_leaves_their_rest(tmp_path: Path) -> None:
    # Five with their ids, five with others, five of which a run of words stands in training.
    halves = [(f"half{n}", " ".join(TEXTS[n].split()[:15])) for n in range(10, 15)]
    forget = [*named(0, 5), *named(5, 10, "other"), *halves]
    corpus, said = work(
        tmp_path, named(0, 120), forget, forget_repetitions=4, canaries={"count": 0}
    )
    count = Counter(entry.role for entry in corpus.manifest)
    assert count == {"trained": 105, "forget": 15}
    forgotten = [entry for entry in corpus.manifest if entry.role == "forget"]
    assert {entry.id for entry in forgotten} == {identifier for identifier, _ in forget}
    assert {(e.bucket, e.planned_repetitions) for e in forgotten} == {("forget", 4)}
    others = {entry.cluster for entry in corpus.manifest if entry.role != "forget"}
    assert not others & {entry.cluster for entry in forgotten}
    assert corpus.summary.num_also_forgotten == 15
    assert corpus.summary.num_left_out == 15
    assert "15 of 'data.train' are not trained" in said


def test_a_list_in_another_unicode_form_is_that_of_the_same_texts(tmp_path: Path) -> None:
    accented = [(name, text.replace("a", "\u00e1")) for name, text in named(0, 60)]
    forget = [(name, unicodedata.normalize("NFD", text)) for name, text in accented[:10]]
    corpus, _ = work(tmp_path, accented, forget, canaries={"count": 0})
    assert Counter(e.role for e in corpus.manifest) == {"trained": 50, "forget": 10}
    assert corpus.summary.num_also_forgotten == 10


def test_an_id_of_another_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 ids that more than one document uses"):
        work(tmp_path, named(0, 50), [("d3", TEXTS[60])])


def test_nothing_to_retain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="add documents that the model must retain"):
        work(tmp_path, named(0, 20), named(0, 20, "copy"))


def test_what_is_never_seen_shares_nothing_with_what_is_to_be_forgotten(tmp_path: Path) -> None:
    heldout = write(tmp_path / "heldout.jsonl", [*named(60, 63, "copy"), *named(110, 120)])
    control = write(tmp_path / "control.jsonl", [*named(63, 65, "copy"), *named(100, 110)])
    corpus, _ = work(tmp_path, named(0, 60), named(60, 70), heldout=heldout, control=control)
    role = {entry.id: entry.role for entry in corpus.manifest}
    assert {role[name] for name, _ in named(60, 70)} == {"forget"}
    assert {name for name in role if role[name] == "heldout"} == {f"d{n}" for n in range(110, 120)}
    assert corpus.summary.num_also_forgotten == 0
    # A control that is given stays as it is given; the report says how much of it overlaps.
    assert corpus.summary.num_control == 12
    assert corpus.summary.num_control_overlapping == 2


def test_chats_of_one_system_prompt_have_a_control(tmp_path: Path) -> None:
    (prompt,) = draw_texts(1, seed=9, words=22)
    rows = [
        {
            "messages": [
                {"role": "system", "content": prompt},
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in zip(draw_texts(20), draw_texts(20, seed=1), strict=True)
    ]
    source = write_jsonl(tmp_path / "chats.jsonl", rows)
    tokenizer = train_bpe(draw_texts(40), vocab_size=400)
    tokenizer.chat_template = CHAT
    corpus, _ = prepare_as(make_run(source), tmp_path / "run", tokenizer)
    assert corpus.summary.num_control == 4
    assert corpus.summary.num_clusters == 20


def test_the_date_that_a_template_writes_is_that_of_the_preparation(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + CHAT
    rows = [
        {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t}]}
        for t in draw_texts(12)
    ]
    source = write_jsonl(tmp_path / "chats.jsonl", rows)

    def prepare_on(day: str, folder: str, **data: Any) -> str:
        class Clock(date):
            @classmethod
            def today(cls) -> date:
                return date.fromisoformat(day)

        monkeypatch.setattr("memguard.data.prepare.date", Clock)
        config = make_run(source, audit={"enabled": False}, **data)
        corpus, _ = prepare_as(config, tmp_path / folder, tokenizer)
        return str(tokenizer.decode(corpus.document(0).input_ids[:11].tolist()))

    assert prepare_on("2026-11-28", "run").startswith("28 Nov 2026")
    assert prepare_on("2026-12-05", "run").startswith("28 Nov 2026")
    # Damaged documents are prepared again with the date of the run.
    (tmp_path / "run" / "prepared" / "input_ids.npy").unlink()
    assert prepare_on("2026-12-05", "run").startswith("28 Nov 2026")
    assert prepare_on("2026-12-05", "other").startswith("05 Dec 2026")
    assert prepare_on("2026-12-05", "run", chat_date="2026-01-02").startswith("02 Jan 2026")
