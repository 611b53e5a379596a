"""What a model is: the hashes of all that is read of its folder. No torch.

    sum_model    config.json, the index where it is used, and every file of weights -> `FileSum`
    hash_sums    those -> `weights_sha256`, also from sums that a record holds

`weights_sha256` is what the shell gives, names in byte order:

    sha256sum config.json model.safetensors | sha256sum
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from memguard.hf.checkpoint_files import CONFIG, INDEX, SINGLE, list_weight_files
from memguard.records.sealed import FileSum, sum_file


def sum_model(folder: Path) -> dict[str, FileSum]:
    """Return size and hash of each file that is read, by its name below the folder.

    Raises:
        ModelError: there are no weights, or some are missing or outside the folder.
    """
    names = list_weight_files(folder, name=str(folder))
    if names != [SINGLE]:
        names.append(INDEX)
    if (folder / CONFIG).is_file():
        names.append(CONFIG)
    return {name: sum_file(folder / name) for name in sorted(names)}


def hash_sums(sums: Mapping[str, FileSum]) -> str:
    """Return the one hash of a model's files.

    Args:
        sums: of the files that `sum_model` returns, by name.
    """
    lines = [f"{each.sha256}  {name}\n" for name, each in sorted(sums.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def hash_weights(path: str | Path) -> str:
    """Return the hash of all that is read of a model's folder.

    Raises:
        ModelError: see `sum_model`; a hub id's files lie in the hub's cache.
    """
    return hash_sums(sum_model(Path(path)))
