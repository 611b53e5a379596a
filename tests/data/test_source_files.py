"""Files, patterns and folders: everything is read, or what is left out is said."""

import gzip
import json
import os
import random
import uuid
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from memguard.config import DataConfig
from memguard.data.documents import LoadedDocuments, load_documents, load_settings
from memguard.data.source_files import name_files
from memguard.data.table_files import NamedFile, find_suffix
from memguard.errors import DataError
from memguard.workflows.auditing.arguments import take_documents

NUM = 3


def write(path: Path, *, texts: list[str] | None = None) -> Path:
    """Write a file of three documents, whose texts name it, in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text} for text in texts or [f"{path.name} {n}" for n in range(NUM)]]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    match path.suffix:
        case ".gz":
            path.write_bytes(gzip.compress(lines[:20]) + gzip.compress(lines[20:]))
        case ".zst":
            with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
                file.write(lines)
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".csv":
            path.write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
        case _:
            path.write_bytes(lines)
    return path


def load(*sources: object, say: Any = lambda _: None) -> LoadedDocuments:
    names = [str(source) for source in sources]
    folder = Path("unused")
    return load_documents(names, setting="data.train", cache_dir=folder, say=say)


def list_ids(*sources: object) -> list[str]:
    return [document.id for document in load(*sources).documents]


NAMES = ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.NDJSON", "e.json", "f.parquet", "g.csv")


def test_a_folder_is_read_whole_whatever_its_files_are_packed_in(tmp_path: Path) -> None:
    for name in NAMES:
        write(tmp_path / name)
    (tmp_path / "linked").symlink_to(write(tmp_path.with_name("other") / "h.jsonl").parent)
    (tmp_path / "linked" / "loop").symlink_to(tmp_path)
    (tmp_path / "LICENSE.txt").write_text("about")
    (tmp_path / "README").write_text("about")
    documents = load(tmp_path).documents
    assert [d.id for d in documents if d.id.endswith("-000000")] == [
        *(f"{name[0]}-000000" for name in NAMES),
        "linked/h-000000",
    ]
    assert len(documents) == NUM * (len(NAMES) + 1)
    assert [d.text for d in load(tmp_path / "c.jsonl.zst").documents] == [
        f"c.jsonl.zst {n}" for n in range(NUM)
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("b.tsv", "holds 1 file (.tsv 1) that would not be read beside its tables"),
        ("b.jsonl.xz", r"holds 1 file (.xz 1) that"),
        ("sub/b.txt", "name the files you mean, for example '{}/*.jsonl'."),
        ("b.md", "holds 1 file (.md 1) that"),
    ],
)
def test_a_folder_with_documents_that_would_be_lost_is_refused(
    tmp_path: Path, name: str, said: str
) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / name)
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert said.format(tmp_path) in str(caught.value)
    assert len(load(tmp_path / "*.jsonl").documents) == NUM


def test_other_files_of_a_folder_are_named_once(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.html", "d.html", "e.png", "README", ".hidden.html"):
        (tmp_path / name).write_text("text")
    told: list[str] = []
    assert len(load(tmp_path, say=told.append).documents) == 2
    line = f"documents: not read in {tmp_path.name}: 3 files (.html 2, .png 1)"
    assert told == [line]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match=r"has no file that ends in .*, but 3 files \(.html 2,"):
        load(tmp_path)


def test_patterns_are_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("d/b.jsonl", "d/a.jsonl", "d/sub/c.jsonl", "d/a.csv"):
        write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    documents = load("d/*.jsonl").documents
    assert [d.id for d in documents][::NUM] == ["a-000000", "b-000000"]
    assert {d.source for d in documents} == {"*.jsonl"}
    assert list_ids("d/**/c*")[::NUM] == ["c-000000"]
    # A folder that matches is read whole, and once.
    expected = ["a.csv-000000", "a.jsonl-000000", "b-000000"]
    assert list_ids("d/*")[::NUM] == [*expected, "c-000000"]
    assert list_ids("d/**")[::NUM] == [*expected, "sub/c-000000"]
    with pytest.raises(DataError, match=r"no file matches the pattern 'd/\*\.txt'\. Correct"):
        load("d/*.txt")


def test_made_ids_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("2023/p.jsonl", "2024/p.jsonl", "d/a.jsonl", "d/a.parquet", "d/b.csv"):
        write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert list_ids("2023/p.jsonl", "2024/p.jsonl")[::NUM] == ["2023/p-000000", "2024/p-000000"]
    assert list_ids("2024/p.jsonl")[0] == "p-000000"
    assert list_ids("d")[::NUM] == ["a.jsonl-000000", "a.parquet-000000", "b-000000"]
    # A row of one file, and another file with that name.
    (tmp_path / "t.txt").write_text("one<|endoftext|>two")
    (tmp_path / "t-000001.txt").write_text("three")
    assert list_ids("t.txt", "t-000001.txt") == ["t-000000", "t-000001", "t-000001.txt"]
    data = DataConfig(train=("2023/p.jsonl",), control=("2024/*.jsonl",), identity_key=None)
    ids = {name: loaded.documents[0].id for name, loaded in load_settings(data, Path("unused"))}
    assert ids == {"train": "2023/p-000000", "control": "2024/p-000000"}


def test_names_of_any_files_and_the_ids_of_their_rows_differ() -> None:
    draw = random.Random(0)
    folders, ends = ["a", "b", "a.jsonl", "a-000000"], [".jsonl", ".csv", ".txt", ".jsonl.gz", ""]
    for _ in range(500):
        files = []
        for _ in range(draw.randrange(1, 9)):
            path = "/".join(draw.choices(folders, k=draw.randrange(1, 5))) + draw.choice(ends)
            stem = path[: len(path) - len(find_suffix(path))]
            name = draw.choice([path, stem, Path(stem).name])  # of a folder's files, or one alone
            made = {"name": name, "origin": "o", "shown": "s", "setting": "t"}
            files.append(NamedFile(path=Path("/", path), **made))
        names = name_files(files)
        assert len(set(names.values())) == len(names) == len({file.place for file in files})
        ids = [f"{name}-000000" for name in names.values()]
        ids += [name for place, name in names.items() if place.endswith(".txt")]
        assert len(set(ids)) == len(ids)


def test_a_file_that_is_named_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "d/a.jsonl")
    monkeypatch.chdir(tmp_path)
    for other in ("d", "./d/../d/a.jsonl", "d/*"):
        with pytest.raises(DataError, match=r"'data\.train' names 'd/a\.jsonl' twice"):
            load("d/a.jsonl", other)


def test_line_ends_of_text_are_kept(tmp_path: Path) -> None:
    texts = ["one\r\ntwo\r\n", "a\rb\n"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    rows = write(tmp_path / "rows.jsonl", texts=texts)
    files = [tmp_path / "0.txt", tmp_path / "1.txt"]
    assert [d.text for d in load(*files).documents] == [d.text for d in load(rows).documents]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("is_list", [False, True])
def test_one_value_over_many_lines(tmp_path: Path, indent: int | None, is_list: bool) -> None:
    row = {"text": "one", "more": {"n": [1, 2]}}
    path = tmp_path / "x.json"
    path.write_text("\n" + json.dumps([row] if is_list else row, indent=indent))
    assert [d.text for d in load(path).documents] == ["one"]


def test_columns_that_nobody_needs_do_not_hinder_a_parquet_file(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "a.b": ["x"],
            "a": pyarrow.array([{"b": "y"}]),
            "text": ["one"],
            "map": pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
            "uuid": pyarrow.array([uuid.uuid4().bytes], pyarrow.uuid()),
        }
    )
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(table, path)
    assert [d.text for d in load(path).documents] == ["one"]
    os.truncate(path, 100)
    with pytest.raises(DataError, match=r"is broken: it is not a parquet file"):
        load(path)


def test_a_list_with_a_pattern_is_one_of_files_and_a_text_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert take_documents(["*.jsonl"], "members") == ("*.jsonl",)
    for text in ("*.csv", "/**/ int x; // or?", "a*"):
        (table,) = take_documents([text], "members")
        assert list(table.read(["text"])) == [(text,)]


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.csv.zst"])
def test_a_damaged_compressed_file_is_one_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(DataError, match=r"is broken: it is no whole (gzip|zstd) file \(OSError\)"):
        load(path)
