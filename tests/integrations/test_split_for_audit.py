"""`split_for_audit` draws the control that a run of memguard draws from the same documents."""

import io
from pathlib import Path
from typing import Any

import datasets
import pytest
import rich.console
import trainer_program as program
from cli_examples import write_jsonl

from memguard.config import AuditConfig, DataConfig, RunConfig
from memguard.data.prepare import AuditNeeds, prepare
from memguard.errors import ConfigError, DataError
from memguard.integrations.split import split_for_audit
from memguard.runtime import Console
from memguard.workflows.training.data import list_audit_needs


def draw_of_run(folder: Path, rows: list[dict[str, Any]], seed: int, *, needs: bool) -> set[str]:
    """The ids of the control that a run draws, by its audit's lengths or from all documents."""
    config = RunConfig.model_validate(
        {
            "name": "run",
            "model": {"path": "model"},
            "data": {"train": [str(write_jsonl(folder / "rows.jsonl", rows))]},
        }
    )
    audit = list_audit_needs(config)
    if not needs:
        audit = AuditNeeds(key="", is_auditable=lambda _: True, min_documents=audit.min_documents)
    corpus = prepare(
        config.data,
        folder / "run",
        seed=seed,
        epochs=1,
        deduplicate=None,
        audit=audit,
        load_tokenizer=lambda _: program.build_tokenizer(),
        cache_dir=folder,
        console=Console(rich.console.Console(file=io.StringIO())),
    )
    return {entry.id for entry in corpus.manifest if entry.role == "control"}


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_the_control_is_that_of_a_run(tmp_path: Path, has_tokenizer: bool) -> None:
    texts = program.draw_words(0, 90, 70)
    # Near-duplicates: the second half of other texts. Short texts: below the audit's 55 tokens.
    texts += [" ".join([*text.split()[35:], "w2"]) for text in texts[:30]]
    rows = [{"id": f"d{number}", "text": text} for number, text in enumerate(texts)]
    dataset = datasets.Dataset.from_list(rows)
    tokenizer = program.build_tokenizer() if has_tokenizer else None
    split = split_for_audit(dataset, 7, tokenizer=tokenizer)
    expected = draw_of_run(tmp_path, rows, 7, needs=has_tokenizer)
    assert set(split.control["id"]) == expected
    # A fifth of the 120, or of the 90 that are long enough, whose clusters have two documents.
    assert len(expected) > 10
    assert split.train["id"] == [row["id"] for row in rows if row["id"] not in expected]
    assert split.control.column_names == split.train.column_names == ["id", "text"]
    # Never one of a pair of near-duplicates.
    numbers = {int(id[1:]) for id in expected}
    assert all((number in numbers) == (number + 90 in numbers) for number in range(30))


def test_the_seed_decides() -> None:
    dataset = datasets.Dataset.from_dict({"text": program.draw_words(0, 60, 70)})
    one, same, other = (split_for_audit(dataset, seed) for seed in (1, 1, 2))
    assert one.control["text"] == same.control["text"] != other.control["text"]
    # A fifth of a small dataset.
    assert len(one.control) == 12
    assert len(one.train) + len(one.control) == 60


def test_the_fraction_of_a_large_dataset() -> None:
    dataset = datasets.Dataset.from_dict({"text": [f"w{n} w{n + 1}" for n in range(4000)]})
    assert len(split_for_audit(dataset).control) == 200
    assert len(split_for_audit(dataset, fraction=0.1).control) == 400


def make_rows(kind: str) -> list[dict[str, Any]]:
    texts = program.draw_words(0, 20, 70)
    if kind == "messages":
        return [
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": t}]}
            for t in texts
        ]
    if kind == "prompt and completion":
        return [{"prompt": "say", "completion": text} for text in texts]
    if kind == "input_ids":
        return [{"input_ids": [int(word[1:]) for word in text.split()]} for text in texts]
    return [{"content": text} for text in texts]


@pytest.mark.parametrize("kind", ["messages", "prompt and completion", "input_ids", "content"])
def test_columns_are_those_that_memguard_reads(kind: str) -> None:
    rows = make_rows(kind)
    # A row without text is no document and stays in the part that is trained.
    empty = {name: [] if isinstance(value, list) else "" for name, value in rows[0].items()}
    dataset = datasets.Dataset.from_list([*rows[:10], empty, *rows[10:]])
    split = split_for_audit(
        dataset, format={"columns": {"text": "content"}} if kind == "content" else None
    )
    assert (len(split.train), len(split.control)) == (17, 4)
    assert empty in split.train.to_list()
    assert sorted(map(str, [*split.train, *split.control])) == sorted(map(str, dataset))


def test_what_cannot_be_split_is_refused() -> None:
    def refuse(kind: Any, message: str, dataset: Any, **settings: Any) -> None:
        with pytest.raises(kind, match=message):
            split_for_audit(dataset, **settings)

    texts = program.draw_words(0, 30, 70)
    dataset = datasets.Dataset.from_dict({"text": texts})
    refuse(ConfigError, "'fraction' should be above 0 and at most 0.1; got 0", dataset, fraction=0)
    refuse(ConfigError, "got 0.2", dataset, fraction=0.2)
    few = dataset.select(range(5))
    refuse(DataError, "has 5 documents, too few for a control and 5 to train on", few)
    refuse(DataError, "has no documents", datasets.Dataset.from_dict({"text": [""]}))
    refuse(DataError, "must be a datasets.Dataset; got list", texts)
    refuse(DataError, "choose one of its splits", datasets.DatasetDict(train=dataset))
    refuse(DataError, "without streaming", dataset.to_iterable_dataset())
    other = dataset.rename_column("text", "body")
    refuse(
        DataError,
        "columns are body. The nearest .*format={'format': 'text', 'columns': {'text': 'body'}}",
        other,
    )
    both = dataset.add_column("input_ids", [[2, 3]] * 30)
    refuse(
        DataError, "the columns 'text' and 'input_ids'.*format='text' or format='input_ids'", both
    )
    copies = datasets.Dataset.from_dict({"text": texts[:1] * 30})
    refuse(DataError, "30 documents in clusters of near-duplicates", copies)
    short = datasets.Dataset.from_dict({"text": program.draw_words(0, 30, 20)})
    assert len(split_for_audit(short).control) == 6
    refuse(
        DataError,
        "has 0 documents that are long enough to audit",
        short,
        tokenizer=program.build_tokenizer(),
    )


def test_the_default_is_that_of_a_run() -> None:
    assert DataConfig(train=("a",)).control_fraction == 0.02
    assert AuditConfig().min_documents == 5
