"""A tiny checkpoint and documents, made once."""

from pathlib import Path

import pytest
from cli_examples import save_tiny_model, write_texts


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `model/` (random weights) and `documents.jsonl` (60 texts); do not write here."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "model")
    write_texts(folder / "documents.jsonl")
    return folder


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """The same for one test, which may write there."""
    (tmp_path / "model").symlink_to(tiny_folder / "model")
    (tmp_path / "documents.jsonl").symlink_to(tiny_folder / "documents.jsonl")
    return tmp_path
