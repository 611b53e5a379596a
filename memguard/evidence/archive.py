"""The bytes of a bundle: a ZIP archive in one fixed form, and its members read back.

    for each member    local header (30 bytes), name, content
    for each member    entry of the directory (46 bytes), name
    end                22 bytes

No member is compressed, since compressed bytes depend on the version of the library. Times,
versions and attributes are constants, so that names and contents, in their order, determine every
byte.

`read_members` reads the local headers only. `find_difference` compares an archive with the one that
its members make, byte by byte: this covers all that was not read. Nothing is written to a disk, and
sizes are checked before anything is copied, so that an archive of another program does no harm.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from memguard.errors import RecordError, shorten

MAX_BYTES = 2**30
"""Largest archive."""
_MAX_MEMBERS = 64
_MAX_NAME = 200
_LOCAL, _ENTRY, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_LOCAL_FIELDS = struct.Struct("<4s5H3I2H")
_ENTRY_FIELDS = struct.Struct("<4s6H3I5H2I")
_END_FIELDS = struct.Struct("<4s4H2IH")
_NEEDED = 20
"""Version of ZIP that a reader needs: 2.0."""
_MADE_BY = (3 << 8) | _NEEDED
"""Attributes are those of Unix."""
_TIME, _DATE = 0, (1 << 5) | 1
"""1980-01-01 00:00, the first moment that the format has."""
_ATTRIBUTES = 0o100644 << 16
_ENCRYPTED = 1


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive bytes of an archive."""

    what: str
    """For messages."""
    content: bytes


def write_archive(members: Mapping[str, bytes]) -> bytes:
    """Return the archive of members, in their order.

    Args:
        members: contents by name; names are ASCII.

    Raises:
        RecordError: the archive would be larger than `MAX_BYTES`.
    """
    size = sum(len(content) + 2 * len(name) + 76 for name, content in members.items()) + 22
    if size > MAX_BYTES:
        raise RecordError(
            f"the bundle would have {size:,} bytes, more than {MAX_BYTES:,}: leave out "
            "--with-records"
        )
    return b"".join(piece.content for piece in _list_pieces(members))


def _list_pieces(members: Mapping[str, bytes]) -> Iterator[_Piece]:
    directory, position = [], 0
    for name, content in members.items():
        encoded, crc, size = name.encode("ascii"), zlib.crc32(content), len(content)
        shared = (0, 0, _TIME, _DATE, crc, size, size, len(encoded), 0)
        header = _LOCAL_FIELDS.pack(_LOCAL, _NEEDED, *shared) + encoded
        yield _Piece(f"the header of {name}", header)
        yield _Piece(name, content)
        rest = (0, 0, 0, _ATTRIBUTES, position)
        entry = _ENTRY_FIELDS.pack(_ENTRY, _MADE_BY, _NEEDED, *shared, *rest) + encoded
        directory.append(_Piece(f"the directory's entry of {name}", entry))
        position += len(header) + size
    yield from directory
    size = sum(len(piece.content) for piece in directory)
    end = _END_FIELDS.pack(_END, 0, 0, len(members), len(members), size, position, 0)
    yield _Piece("the end of the directory", end)


def read_members(archive: bytes) -> dict[str, bytes]:
    """Return the members of an archive by name, in its order, as far as local headers tell them.

    Args:
        archive: of any origin; `find_difference` compares all of it.

    Raises:
        RecordError: it is no archive in the form of bundles; the message is a predicate.
    """
    members: dict[str, bytes] = {}
    view, position = memoryview(archive), 0
    while archive[position : position + 4] == _LOCAL:
        after = f"after {next(reversed(members))}" if members else "at its beginning"
        if len(archive) < position + _LOCAL_FIELDS.size:
            raise RecordError(f"is cut off {after}")
        fields = _LOCAL_FIELDS.unpack_from(archive, position)
        _, _, flags, method, _, _, _, stored, size, name_size, extra_size = fields
        if flags & _ENCRYPTED:
            raise RecordError(f"has an encrypted member {after}")
        if method or flags or extra_size or stored != size or not 0 < name_size <= _MAX_NAME:
            raise RecordError(
                f"has a member {after} that memguard did not write: another program packed the "
                "archive, or its header is damaged"
            )
        start = position + _LOCAL_FIELDS.size + name_size
        position = start + size
        if len(archive) < position:
            raise RecordError(f"is cut off {after}")
        name = _read_name(view[start - name_size : start], after)
        if name in members:
            raise RecordError(f"has the member {name} twice")
        if len(members) == _MAX_MEMBERS:
            raise RecordError(f"has more than {_MAX_MEMBERS} members")
        members[name] = bytes(view[start:position])
    if not members:
        raise RecordError("does not begin as a bundle does: it is another file, or damaged")
    if archive[position : position + 4] != _ENTRY:
        raise RecordError(f"is damaged after {next(reversed(members))}: no header follows it")
    return members


def _read_name(encoded: memoryview, after: str) -> str:
    try:
        name = str(encoded, "ascii")
    except UnicodeDecodeError:
        name = ""
    if not name.isprintable() or not name:
        raise RecordError(f"has a member {after} whose name is damaged")
    return shorten(name)


def find_difference(archive: bytes, members: Mapping[str, bytes]) -> str | None:
    """Return what in an archive differs from the one that members make; None if nothing does.

    Args:
        archive: of any origin.
        members: contents by name, in the order of a bundle.
    """
    position = 0
    for piece in _list_pieces(members):
        end = position + len(piece.content)
        if archive[position:end] != piece.content:
            return f"{piece.what} is not what memguard wrote"
        position = end
    if len(archive) > position:
        return f"{len(archive) - position:,} bytes follow the end of the archive"
    return None
