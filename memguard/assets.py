"""Find shipped suites, metrics and configurations by name, installed or in a checkout."""

import difflib
from pathlib import Path

from memguard.errors import ConfigError, shorten

_PACKAGE = Path(__file__).parent
# An installed wheel contains them in the package; a checkout (editable install) next to it.
_ROOTS = (_PACKAGE / "_assets", _PACKAGE.parent)


def list_assets(folder: str) -> dict[str, Path]:
    """Return ``{name: path}`` of the YAML files shipped in ``folder`` (e.g. ``eval/suites``)."""
    for root in _ROOTS:
        if (root / folder).is_dir():
            return {path.stem: path for path in sorted((root / folder).glob("*.yaml"))}
    return {}


def find_asset(folder: str, name_or_path: str | Path, *, setting: str) -> Path:
    """Return the path of a file given by an existing path or by the name of a shipped file.

    Args:
        folder: folder of the shipped files, e.g. ``eval/suites`` or ``configs``.
        name_or_path: the user's value.
        setting: name of the setting or argument, for the error.

    Raises:
        ConfigError: neither a file nor a shipped name.
    """
    path = Path(name_or_path)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:  # for example a name that is too long, or a folder without permission
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"'{setting}': '{shorten(str(name_or_path), 200)}' cannot be read: {reason}"
        ) from error
    if is_file:
        return path
    shipped = list_assets(folder)
    if str(name_or_path) in shipped:
        return shipped[str(name_or_path)]
    kind = "a folder, not a file" if is_folder else "neither a file nor a shipped name"
    near = difflib.get_close_matches(str(name_or_path), shipped, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise ConfigError(
        f"'{setting}' must be a YAML file or one of {', '.join(shipped) or '(none found)'}; "
        f"got '{shorten(str(name_or_path), 200)}', which is {kind}{hint}"
    )
