"""Files with flipped bits, and what is no file, give documents or one line; nothing hangs."""

import csv
import json
import os
import random
import socket
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from memguard.data.documents import load_documents
from memguard.errors import DataError

pytestmark = pytest.mark.slow

IDS = [f"d{number}" for number in range(40)]
TEXTS = [f"some wörds of document {number} {'abc ' * (number % 9)}" for number in range(40)]
NUM_FLIPS = 125


def write(kind: str, folder: Path) -> tuple[Path, Path]:
    """Return the source and the file of it that holds the documents."""
    table = pyarrow.table({"id": IDS, "text": TEXTS})
    path = folder / f"documents.{kind.split()[0]}"
    if kind == "parquet, compressed":
        path = folder / "documents.parquet"
        pyarrow.parquet.write_table(table, path)
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path, use_dictionary=False, compression="none")
    elif kind.startswith("jsonl"):
        rows = (
            json.dumps({"id": i, "text": t}, ensure_ascii=False)
            for i, t in zip(IDS, TEXTS, strict=True)
        )
        content = "".join(f"{row}\n" for row in rows).encode()
        if kind == "jsonl":
            path.write_bytes(content)
        else:
            codec = {"jsonl.gz": "gzip", "jsonl.zst": "zstd"}[kind]
            with pyarrow.CompressedOutputStream(str(path), codec) as file:
                file.write(content)
    elif kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("id", "text"), *zip(IDS, TEXTS, strict=True)])
    elif kind == "npy":
        np.save(path, np.arange(400).reshape(40, 10))
    else:
        datasets.Dataset(table).save_to_disk(str(path))
        return path, next(path.glob("*.arrow"))
    return path, path


@pytest.fixture(autouse=True)
def _no_bars() -> None:
    datasets.disable_progress_bars()


KINDS = ["parquet", "parquet, compressed", "jsonl", "jsonl.gz", "jsonl.zst", "csv", "npy", "arrow"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_one_line_or_documents(kind: str, tmp_path: Path) -> None:
    source, file = write(kind, tmp_path)
    content, draw, told = file.read_bytes(), random.Random(kind), list[str]()
    for _ in range(NUM_FLIPS):
        damaged, place = bytearray(content), draw.randrange(len(content))
        damaged[place] ^= 1 << draw.randrange(8)
        # A new file: an earlier one may still be mapped.
        file.unlink()
        file.write_bytes(damaged)
        try:
            loaded = load_documents([str(source)], setting="data.train", cache_dir=tmp_path)
        except DataError as error:
            told.append(str(error))
        else:
            assert loaded.documents
    assert 0 < len(told) < NUM_FLIPS
    assert not any("\n" in line or len(line) > 500 for line in told)


def test_a_checksum_in_a_parquet_file_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["some words"] * 40})
    for has_checksum in (False, True):
        pyarrow.parquet.write_table(
            table,
            path,
            use_dictionary=False,
            compression="none",
            write_statistics=False,
            write_page_checksum=has_checksum,
        )
        path.write_bytes(path.read_bytes().replace(b"words", b"wards"))
        if not has_checksum:  # nothing tells it from a file that was written so
            loaded = load_documents([str(path)], setting="data.train", cache_dir=tmp_path)
            assert loaded.documents[0].text == "some wards"
    with pytest.raises(DataError, match="is broken"):
        load_documents([str(path)], setting="data.train", cache_dir=tmp_path)


def test_text_that_is_no_utf8_in_a_column(tmp_path: Path) -> None:
    source, file = write("parquet", tmp_path)
    file.write_bytes(file.read_bytes().replace(b"some", b"s\xffme"))
    with pytest.raises(DataError, match=r"documents.parquet' is broken: its columns cannot be"):
        load_documents([str(source)], setting="data.train", cache_dir=tmp_path)


def make_socket(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)  # a socket's whole path must be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_what_may_never_end_is_refused_by_its_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    path = folder / "b.jsonl"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        make_socket(path, monkeypatch)
    for source in (path, folder):
        with pytest.raises(DataError) as error:
            load_documents([str(source)], setting="data.train", cache_dir=tmp_path)
        assert f"'{path}' is a {kind}; documents must be in regular files" in str(error.value)
