"""Identifies a model by the hashes of all files that are read from its folder. No torch.

    sum_model    config.json, the index if it is used, and every weights file -> `FileSum`
    hash_sums    these sums, or those stored in a record -> `weights_sha256`

`weights_sha256` equals the output of this shell command, with names in byte order:

    sha256sum config.json model.safetensors | sha256sum
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from memguard.hf.checkpoint_files import CONFIG, INDEX, SINGLE, list_weight_files
from memguard.records.sealed import FileSum, sum_file


def sum_model(folder: Path) -> dict[str, FileSum]:
    """Return the size and hash of each file that is read, by its name in the folder.

    Raises:
        ModelError: there are no weights, or weights files are missing or outside the folder.
    """
    names = list_weight_files(folder, name=str(folder))
    if names != [SINGLE]:
        names.append(INDEX)
    if (folder / CONFIG).is_file():
        names.append(CONFIG)
    return {name: sum_file(folder / name) for name in sorted(names)}


def hash_sums(sums: Mapping[str, FileSum]) -> str:
    """Return a single hash of a model's files.

    Args:
        sums: by file name, as returned by `sum_model`.
    """
    lines = [f"{file_sum.sha256}  {name}\n" for name, file_sum in sorted(sums.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def hash_weights(path: str | Path) -> str:
    """Return the hash of all files that are read from a model's folder.

    Raises:
        ModelError: see `sum_model`; for a hub id, ``path`` must be its folder in the hub's cache.
    """
    return hash_sums(sum_model(Path(path)))
