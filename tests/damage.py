"""Damage as a disk or a kill leaves it."""

from pathlib import Path


def flip_byte(path: Path, at: int | None = None) -> None:
    """Change one bit of a file; by default in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Take the second half of a file away."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
