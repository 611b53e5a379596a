"""A mesh on the command line: `z=2,x=2`."""

from typing import Any, get_args

from memguard.config import AxisName, Document, ParallelConfig, validate
from memguard.errors import ConfigError


def read_mesh(text: str, *, command: str) -> ParallelConfig:
    """Return the mesh that was written; axes that are left out have one rank.

    Args:
        text: degrees of axes, ``z=2,x=2``.
        command: whose option it is, for messages.

    Raises:
        ConfigError: no such axis, or no number.
    """
    names: tuple[str, ...] = get_args(AxisName)
    parts = [part.partition("=") for part in text.split(",")]
    degrees: dict[str, Any] = {axis.strip(): degree.strip() for axis, _, degree in parts}
    unknown = [axis for axis in degrees if axis not in names]
    if unknown or len(degrees) < len(parts):
        raise ConfigError(
            f"'--mesh' must give each of {', '.join(names)} at most once, as in z=2,x=2; "
            f"got '{text}'"
        )
    place = Document(path=f"memguard {command} --mesh", values={}, places={})
    return validate(ParallelConfig, {"data": 1} | degrees, place)
