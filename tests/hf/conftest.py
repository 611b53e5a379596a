"""Small folders that tests of checkpoints read, damage and write."""

import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from memguard.data.tokenization import train_bpe

    return train_bpe(["a cat and a dog"], vocab_size=300)


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint folder; do not write here."""
    from tiny_families import build

    folder = tmp_path_factory.mktemp("original")
    build("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "model"))
