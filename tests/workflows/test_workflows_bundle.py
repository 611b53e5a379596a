"""The answers tell no id, no score and no order; settings tell no path of the machine."""

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from bundle_examples import make_report, make_rows, write_audit

import memguard
from memguard.records.documents import DocumentTable
from memguard.runtime.environment import hash_code
from memguard.workflows.bundle import shorten_config, write_answers


def write(folder: Path, rows: Sequence[dict[str, Any]]) -> bytes:
    """Return the answers of an audit with these records."""
    return write_answers(DocumentTable.read(write_audit(folder, make_report("ab" * 32), rows)))


def read(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def test_each_document_has_its_answers_and_nothing_else(tmp_path: Path) -> None:
    rows = make_rows()
    written = read(write(tmp_path, rows))
    assert len(written) == len(rows)
    assert {tuple(row) for row in written} == {("bucket", "cluster", "extracted", "id", "role")}
    by_id = {row["id"]: row for row in written}
    for row in rows:
        answer = by_id[row["text_hmac"]]
        assert (answer["bucket"], answer["role"]) == (row["bucket"], row["role"])
        assert answer["extracted"] == {
            "extraction": row["extraction.extracted"],
            "attacks": row["attacks.extracted"],
        }
    text = json.dumps(written)
    for secret in ("own-id", "1.234", "2.345", "base"):
        assert secret not in text


def test_clusters_are_those_of_the_records_by_other_numbers(tmp_path: Path) -> None:
    rows = make_rows()
    written = {row["id"]: row["cluster"] for row in read(write(tmp_path, rows))}
    # One number there for each number here, and the other way round.
    pairs = {(row["cluster"], written[row["text_hmac"]]) for row in rows}
    assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
    assert sorted(set(written.values())) == list(range(len(pairs)))


def test_a_document_without_a_cluster_is_one_of_its_own(tmp_path: Path) -> None:
    rows = [{**row, "cluster": None} for row in make_rows()[:-1]] + make_rows()[-1:]
    clusters = Counter(row["cluster"] for row in read(write(tmp_path, rows)))
    assert set(clusters.values()) == {1}


def test_the_order_of_the_source_does_not_show(tmp_path: Path) -> None:
    # Equal texts, which share an id, and documents without an id are among them.
    rows = make_rows(12)
    rows += [{**rows[2], "cluster": 41}, {**rows[2], "cluster": 45}]
    rows += [{**rows[4], "text_hmac": None, "cluster": 60 + n} for n in range(3)]
    expected = write(tmp_path / "first", rows)
    draw = np.random.default_rng(0)
    for number in range(5):
        renumbered = dict(zip(range(100), draw.permutation(100).tolist(), strict=True))
        shuffled = [
            {**rows[index], "cluster": renumbered[rows[index]["cluster"]], "id": f"other-{index}"}
            for index in draw.permutation(len(rows)).tolist()
        ]
        assert write(tmp_path / f"{number}", shuffled) == expected


def test_absolute_paths_are_shortened() -> None:
    values = {
        "name": "run",
        "data": {"train": ["/home/ada/secret/a.jsonl", "docstrings:json", "b/c.jsonl"]},
        "model": {"path": "/models/private/llama"},
        "share": "a=/home/ada/x y/z.npy",
        "rate": 0.5,
    }
    written, shortened = shorten_config(yaml.safe_dump(values).encode())
    assert sorted(shortened) == ["a=x y/z.npy", "private/llama", "secret/a.jsonl"]
    assert b"ada" not in written
    assert b"/home" not in written
    assert yaml.safe_load(written) == {
        **values,
        "data": {"train": ["secret/a.jsonl", "docstrings:json", "b/c.jsonl"]},
        "model": {"path": "private/llama"},
        "share": "a=x y/z.npy",
    }


def test_settings_without_absolute_paths_do_not_change() -> None:
    content = b"name: run\ndata: {train: a/b.jsonl}\n# sha256: 00\n"
    assert shorten_config(content) == (content, [])


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_the_hash_of_the_code_is_that_of_a_shell_command() -> None:
    command = (
        r"find * \( -name '*.py' -o -name '*.j2' \) | LC_ALL=C sort | xargs sha256sum | sha256sum"
    )
    package = Path(memguard.__file__).parent
    done = subprocess.run(
        command, shell=True, cwd=package, capture_output=True, text=True, check=True
    )
    assert hash_code() == done.stdout.split()[0]
