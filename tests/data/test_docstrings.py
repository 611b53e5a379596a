import json
import shutil
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memguard.data import sources
from memguard.data.sources import build_docstring_file
from memguard.errors import DataError

LONG = "Words that explain something at some length. " * 5 + "End."


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that fails when it is imported."""
    folder = tmp_path / "site" / "strange_one"
    for inside in ("tests", "_vendor", "sub"):
        (folder / inside).mkdir(parents=True)
        (folder / inside / "__init__.py").write_text(f'"""{inside} {LONG}"""\n')
    (folder / "__init__.py").write_text(f'"""Top. {LONG}"""\nraise SystemExit\n')
    (folder / "broken.py").write_text(f'"""{LONG}\n')
    (folder / "latin.py").write_bytes(b'# coding: latin-1\n"""\xe9 ' + LONG.encode() + b'"""\n')
    (folder / "mod.py").write_text(
        f"""
class Thing:
    '''Class.

        {LONG}
    '''

    def size(self):
        '''Size. {LONG}'''

    def size(self, other):
        '''Other size. {LONG}'''

    def copy(self):
        '''Size. {LONG}'''

    def small(self):
        '''Too short.'''

def bad_escape():
    '''\\w {LONG}'''

def half_a_pair():
    '''\\ud800 {LONG}'''
"""
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    return "strange_one"


def test_documents_of_a_package_that_is_never_imported(package, tmp_path):
    path = build_docstring_file([package], tmp_path / "cache")
    rows = read(path)
    assert [row["id"] for row in rows] == [
        "strange_one",
        "strange_one.latin",
        "strange_one.mod.Thing",
        "strange_one.mod.Thing.size",
        "strange_one.mod.Thing.size#2",
        "strange_one.mod.bad_escape",
        "strange_one.sub",
    ]
    assert {row["source"] for row in rows} == {package}
    assert rows[1]["text"].startswith("é Words")
    assert rows[2]["text"] == f"Class.\n\n{LONG}"
    assert package not in sys.modules


def test_built_once_and_named_for_its_content(package, tmp_path, monkeypatch):
    path = build_docstring_file([package], tmp_path)
    monkeypatch.setattr(sources, "_walk_package", lambda *a: pytest.fail("parsed again"))
    assert build_docstring_file([package], tmp_path) == path
    monkeypatch.undo()
    assert build_docstring_file(["topics"], tmp_path) != path
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert build_docstring_file(["topics"], tmp_path).name != path.name
    assert list(tmp_path.glob(".*")) == []


def check_topics_and_standard_library(tmp_path):
    rows = read(build_docstring_file([" topics", "stdlib "], tmp_path))
    ids = [row["id"] for row in rows]
    assert len(set(ids)) == len(ids)
    assert {"topics.assert", "textwrap.TextWrapper", "json"} <= set(ids)
    assert not any(id_.startswith(("test.", "idlelib.", "lib2to3.")) for id_ in ids)
    assert len({row["text"] for row in rows}) == len(rows)
    assert min(len(row["text"]) for row in rows) >= 200
    return rows


@pytest.mark.slow
def test_runs_that_start_together_read_a_package_once(package, tmp_path, monkeypatch):
    calls = []
    walk = sources._walk_package

    def slowly(name, root):
        calls.append(name)
        time.sleep(0.2)
        return walk(name, root)

    monkeypatch.setattr(sources, "_walk_package", slowly)
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(3) as threads:
        paths = set(threads.map(lambda _: build_docstring_file([package], cache), range(3)))
    assert calls == [package]
    assert len(paths) == 1
    assert read(paths.pop())
    assert list(cache.glob(".*")) == []


def test_topics_and_a_part_of_the_standard_library(tmp_path, monkeypatch):
    whole, part = Path(sysconfig.get_path("stdlib")), tmp_path / "lib"
    part.mkdir()
    for name in ("textwrap.py", "argparse.py"):
        shutil.copy(whole / name, part)
    # A module found twice, under names of which one is left out.
    for name in ("json", "test", "idlelib"):
        shutil.copytree(whole / "json", part / name)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(part)}.get)
    rows = check_topics_and_standard_library(tmp_path / "cache")
    assert sum(row["id"].startswith("json") for row in rows) > 3


@pytest.mark.long
def test_topics_and_the_whole_standard_library(tmp_path):
    rows = check_topics_and_standard_library(tmp_path)
    assert sum(len(row["text"]) for row in rows) > 1e6


def test_single_module(tmp_path, monkeypatch):
    (tmp_path / "strange_two.py").write_text(f'def go():\n    """{LONG}"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    [row] = read(build_docstring_file(["strange_two"], tmp_path))
    assert row == {"id": "strange_two.go", "text": LONG, "source": "strange_two"}


def test_version_of_a_package_that_is_installed_under_another_name():
    assert sources._find_version("yaml").startswith("PyYAML=")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_package", "is not installed"),
        ("", "is not installed"),
        ("json.decoder", "is not installed"),
        ("__main__", "is not installed"),
        ("math", "has no Python source"),
    ],
)
def test_names_that_cannot_be_read(tmp_path, monkeypatch, name, reason):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as in a script
    with pytest.raises(DataError, match=f"'docstrings:{name}': '{name}' {reason}"):
        build_docstring_file([name], tmp_path)


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"the docstrings cannot be saved in .* Set MEMGUARD_CACHE"):
        build_docstring_file(["topics"], tmp_path / "file")
