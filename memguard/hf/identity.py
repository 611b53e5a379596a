"""Identifies a model by the hashes of all files that are read from its folder. No torch.

    sum_model    config.json, the index if it is used, and every weights file -> `FileSum`
    hash_sums    these sums, or those stored in a record -> `weights_sha256`

`weights_sha256` equals the output of this shell command, with names in byte order:

    sha256sum config.json model.safetensors | sha256sum

For an adapter these are its own two files and those of its base, named `base/config.json` and so
on, as if the base were a folder in the adapter's.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from memguard.errors import ModelError
from memguard.hf.adapter_config import say_where_base_is
from memguard.hf.adapter_files import ADAPTER_WEIGHTS, is_adapter, read_adapter
from memguard.hf.checkpoint_files import ADAPTER_CONFIG, CONFIG, INDEX, SINGLE, list_weight_files
from memguard.records.run_files import has_trained, load_trained
from memguard.records.sealed import FileSum, SumFile, find_damage, sum_file

BASE = "base/"
"""Prefix of the names of a base's files in the sums of an adapter."""


def list_model_files(folder: Path, *, base: str | None = None) -> dict[str, Path]:
    """Return the path of each file that is read, by its name in the folder.

    ``base`` is the folder or hub id of an adapter's base; None locates it, as for all functions
    here.

    Raises:
        ModelError: there are no weights, or weights files are missing or outside the folder.
    """
    if is_adapter(folder):
        own = {name: folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
        adapter = read_adapter(folder, base=base)
        base_folder = Path(adapter.base)
        if not base_folder.is_dir():
            # Imports transformers; the base's files may have to be downloaded first.
            from memguard.hf.checkpoint import get_base_folder

            base_folder = get_base_folder(adapter)
        files = list_model_files(base_folder)
        return {**own, **{f"{BASE}{name}": path for name, path in files.items()}}
    names = list_weight_files(folder, name=str(folder))
    if names != [SINGLE]:
        names.append(INDEX)
    if (folder / CONFIG).is_file():
        names.append(CONFIG)
    return {name: folder / name for name in sorted(names)}


def sum_model(
    folder: Path, *, base: str | None = None, read: SumFile = sum_file
) -> dict[str, FileSum]:
    """Return the size and hash of each file that is read, by its name in the folder.

    See `list_model_files`; ``read`` sums a file, e.g. as `sum_ahead` does.
    """
    return {name: read(path) for name, path in list_model_files(folder, base=base).items()}


def find_base_folder(folder: Path, names: Iterable[str], *, base: str | None = None) -> Path | None:
    """Return the folder of an adapter's base without downloading it; None if that is necessary.

    A base from the hub has the files ``names`` once it is downloaded.

    Raises:
        ModelError: the adapter cannot be read, or its base is missing.
    """
    adapter = read_adapter(folder, base=base)
    if Path(adapter.base).is_dir():
        return Path(adapter.base)
    import huggingface_hub

    download = huggingface_hub.snapshot_download
    try:
        place = Path(download(adapter.base, revision=adapter.revision, local_files_only=True))
    except Exception:  # The hub's client raises errors of several kinds for what is not cached.
        return None
    return place if all((place / name).is_file() for name in names) else None


def hash_sums(sums: Mapping[str, FileSum]) -> str:
    """Return a single hash of a model's files, of the sums by file name from `sum_model`."""
    lines = [f"{file_sum.sha256}  {name}\n" for name, file_sum in sorted(sums.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_base(folder: Path, base_folder: Path, *, read: SumFile = sum_file) -> None:
    """Refuse a base that differs from the one that a run of memguard trained an adapter on.

    All its files are read. Nothing is known about the base of an adapter outside its run folder.

    Raises:
        ModelError: names the first file that differs.
        RecordError: trained.json of the run is damaged.
    """
    if damages := find_damage(base_folder, load_base_sums(folder), read=read):
        raise ModelError(
            f"adapter '{folder}': its base model '{base_folder}' was changed since training: "
            f"{damages[0]}. Restore it, or {say_where_base_is(folder)}"
        )


def load_base_sums(folder: Path) -> Mapping[str, FileSum]:
    """Return the sums that a run recorded of an adapter's base; none outside of a run."""
    run_folder = folder.resolve().parent
    is_in_run = folder.resolve().name == "adapter" and has_trained(run_folder)
    return load_trained(run_folder).base if is_in_run else {}


def split_sums(sums: Mapping[str, FileSum]) -> tuple[dict[str, FileSum], dict[str, FileSum]]:
    """Return the sums of an adapter's own files, and those of its base, by name in its folder."""
    own = {name: item for name, item in sums.items() if not name.startswith(BASE)}
    base = {name.removeprefix(BASE): sums[name] for name in sums.keys() - own.keys()}
    return own, base


def hash_weights(path: str | Path) -> str:
    """Return the hash of all files that are read from a model's folder; see `list_model_files`.

    For a hub id, ``path`` must be its folder in the hub's cache.
    """
    return hash_sums(sum_model(Path(path)))
