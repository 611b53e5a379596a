"""Whether a path can be a checkpoint, from the names in its folder. No torch: told in a second."""

import json
from pathlib import Path

from memguard.errors import ModelError


def is_missing(path: str) -> bool:
    """Tell whether ``path`` names a folder that is not there; what may be a hub id passes."""
    looks_local = path.count("/") > 1 or path.startswith((".", "/", "~"))
    return looks_local and not Path(path).exists()


def check_folder(path: str) -> None:
    """Refuse a folder that holds no checkpoint; a hub id passes.

    Raises:
        ModelError: no such folder, no configuration, or no safetensors.
    """
    folder = Path(path)
    if not folder.exists():
        if is_missing(path):
            raise ModelError(f"there is no folder '{path}'; correct the path of the model")
        return
    if not folder.is_dir():
        raise ModelError(f"model '{path}' must be a folder with config.json; it is a file")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model '{path}' has no config.json")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"model '{path}': config.json is not JSON") from error
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        why = "only pickled ones, which are never read" if pickled else "none at all"
        raise ModelError(
            f"model '{path}' must hold its weights as safetensors; it has {why}. Convert it "
            "with save_pretrained in an environment you trust."
        )
