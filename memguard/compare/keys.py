"""A run's content hash: everything that decides its outcome."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from memguard import __version__
from memguard.config import RunConfig
from memguard.errors import DataError


def compute_key(config: RunConfig, inputs_sha256: str, pretrain_key: str | None = None) -> str:
    """Return the content hash (32 hex digits) of what decides a run's outcome.

    That is every setting but 'output_dir' (a sweep may be moved) and 'parallel' (every mesh trains
    the same), this version of memguard and what the arguments stand for. A checkpoint at
    'model.path' counts by its path.

    Args:
        config: the run.
        inputs_sha256: of the files it reads, from `hash_inputs`.
        pretrain_key: key of the run whose model it starts from; stands in for that model's path.
    """
    content = config.model_dump(mode="json", exclude={"output_dir", "parallel"})
    if pretrain_key is not None:
        content["model"]["path"] = pretrain_key
    text = json.dumps([__version__, content, inputs_sha256], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def hash_inputs(config: RunConfig) -> str:
    """Return the SHA-256 over the local documents, tokenizer and suite that a run reads.

    What is no file or folder here (a hub id, a shipped suite) counts by its name alone, and what is
    missing is reported by the run itself.

    Raises:
        DataError: a file cannot be read.
    """
    data, scratch = config.data, config.model.scratch
    sources = (data.train, data.control, data.background, data.heldout, data.forget)
    inputs = [*(name for names in sources for name in names), config.audit.suite]
    if scratch is not None and scratch.tokenizer is not None:
        inputs.append(scratch.tokenizer)
    digest = hashlib.sha256()
    for name in inputs:
        for file in _list_files(Path(name)):
            try:
                with file.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
            except OSError as error:
                raise DataError(f"'{file}' cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _list_files(path: Path) -> Iterator[Path]:
    path = path.expanduser()
    # os.path says no, where Path raises, to what is no path at all: a hundred packages' docstrings.
    if os.path.isfile(path):
        yield path
    elif os.path.isdir(path):
        yield from sorted(file for file in path.rglob("*") if file.is_file())
