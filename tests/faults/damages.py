"""Damage to one file of a run's folder, drawn by a seed: a flipped bit, a cut, a loss."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["flip", "cut", "lose"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hurt:
    """What was done to which file."""

    file: str
    """Below the folder of the run."""
    kind: Kind
    place: int
    """The bit that was flipped, or the number of bytes that are left."""


def list_files(run: Path) -> list[str]:
    """Return every file of a run; the lock is empty and is left out."""
    paths = sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    return [path.relative_to(run).as_posix() for path in paths]


def draw_hurt(seed: int, run: Path) -> Hurt:
    """Draw what a seed damages: the files in turn, so that none is left out."""
    draw = random.Random(f"damage {seed}")
    files = list_files(run)
    file = files[seed % len(files)]
    num_bytes = (run / file).stat().st_size
    kind = draw.choice(("flip", "flip", "cut", "lose"))
    place = draw.randrange(8 * num_bytes if kind == "flip" else num_bytes)
    return Hurt(file=file, kind=kind, place=place)


def hurt(run: Path, harm: Hurt) -> None:
    """Damage a file."""
    path = run / harm.file
    _DONE[harm.kind](path, harm.place)


def _flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def _lose(path: Path, _place: int) -> None:
    path.unlink()


_DONE: dict[Kind, Callable[[Path, int], None]] = {"flip": _flip, "cut": _cut, "lose": _lose}
