"""The names and contents of members determine every byte of an archive, and any change is found."""

import io
import struct
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.errors import RecordError
from memguard.evidence import archive as archives
from memguard.evidence.archive import find_difference, read_members, write_archive
from memguard.evidence.statement import hash_bytes

MEMBERS = {"README.txt": b"first page\n", "gate/gate.json": b"{}", "empty.json": b""}


def describe(content: bytes) -> str | None:
    """Return what is wrong with an archive of `MEMBERS`; None if nothing is found."""
    try:
        members = read_members(content)
    except RecordError as error:
        return str(error)
    return find_difference(content, members)


def test_another_reader_reads_the_same() -> None:
    written = write_archive(MEMBERS)
    with zipfile.ZipFile(io.BytesIO(written)) as reader:
        assert reader.testzip() is None
        assert {name: reader.read(name) for name in reader.namelist()} == MEMBERS
        assert reader.comment == b""
        for info in reader.infolist():
            assert info.date_time == (1980, 1, 1, 0, 0, 0)
            assert (info.compress_type, info.flag_bits, info.extra) == (0, 0, b"")
            assert (info.create_system, info.external_attr >> 16) == (3, 0o100644)
    assert read_members(written) == MEMBERS
    assert find_difference(written, MEMBERS) is None


def test_the_standard_library_writes_the_same_bytes() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as writer:
        for name, content in MEMBERS.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o100644 << 16
            writer.writestr(info, content)
    assert write_archive(MEMBERS) == buffer.getvalue()


def test_the_form_does_not_change() -> None:
    # Bundles that were handed on must verify with later versions too.
    assert hash_bytes(write_archive(MEMBERS)) == (
        "de8b18c9a453e92670c2bbed1b188eb345e81cac15788ccb89459c4794c65d5b"
    )


def test_every_flipped_bit_is_found() -> None:
    written = write_archive(MEMBERS)
    for at in range(len(written)):
        for bit in range(8):
            changed = bytearray(written)
            changed[at] ^= 1 << bit
            assert describe(bytes(changed)) is not None, (at, bit)


def test_every_cut_is_found() -> None:
    written = write_archive(MEMBERS)
    for size in range(len(written)):
        assert describe(written[:size]) is not None, size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda written: written + b"\n", "1 bytes follow the end of the archive"),
        (lambda written: b"\n" + written, "does not begin as a bundle does"),
        (lambda written: b"", "does not begin as a bundle does"),
        (lambda written: written + written, "bytes follow the end"),
        (lambda written: written[:-22], "the end of the directory is not what memguard wrote"),
    ],
)
def test_what_was_added_or_taken_away_is_named(change, message: str) -> None:  # type: ignore[no-untyped-def]
    found = describe(change(write_archive(MEMBERS)))
    assert found is not None
    assert message in found


def test_the_order_of_members_is_part_of_the_form() -> None:
    swapped = dict(reversed(MEMBERS.items()))
    found = find_difference(write_archive(swapped), MEMBERS)
    assert found == "the header of README.txt is not what memguard wrote"


def pack(compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    """Return the archive of another program."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as writer:
        for name, content in members.items():
            writer.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, compression)
    return buffer.getvalue()


def test_a_compressed_member_is_not_unpacked() -> None:
    # 64 MiB of zeros in 64 kB: unpacking would need the memory.
    bomb = pack(zipfile.ZIP_DEFLATED, bomb=bytes(1 << 26))
    assert len(bomb) < 1 << 17
    with pytest.raises(RecordError, match="another program packed the archive"):
        read_members(bomb)


def set_field(written: bytes, offset: int, kind: str, value: int) -> bytes:
    changed = bytearray(written)
    struct.pack_into(f"<{kind}", changed, offset, value)
    return bytes(changed)


@pytest.mark.parametrize(
    ("offset", "kind", "value", "message"),
    [
        (6, "H", 1, "encrypted member at its beginning"),
        (6, "H", 1 << 3, "memguard did not write"),
        (8, "H", 8, "memguard did not write"),
        (18, "I", 0xFFFFFFFF, "memguard did not write"),
        (26, "H", 0xFFFF, "memguard did not write"),
        (26, "H", 0, "memguard did not write"),
        (28, "H", 0xFFFF, "memguard did not write"),
        (30, "B", 0xFF, "whose name is damaged"),
        (30, "B", 0x0A, "whose name is damaged"),
    ],
)
def test_a_header_that_lies_is_refused(offset: int, kind: str, value: int, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_members(set_field(write_archive(MEMBERS), offset, kind, value))


def test_a_size_beyond_the_end_is_refused() -> None:
    written = write_archive(MEMBERS)
    for size in (len(written), 0xFFFFFFFE):
        lying = set_field(set_field(written, 18, "I", size), 22, "I", size)
        with pytest.raises(RecordError, match="is cut off at its beginning"):
            read_members(lying)


def test_names_are_not_paths_to_write_to() -> None:
    # They are compared with those of bundles, and nothing is extracted.
    members = read_members(write_archive({"../../etc/passwd": b"x", "/etc/passwd": b"y"}))
    assert list(members) == ["../../etc/passwd", "/etc/passwd"]


def test_a_member_that_is_there_twice_is_refused() -> None:
    one = write_archive({"a": b"1"})
    local = one[: 30 + 1 + 1]
    with pytest.raises(RecordError, match="has the member a twice"):
        read_members(local + one)


def test_the_number_of_members_is_bounded() -> None:
    with pytest.raises(RecordError, match="more than 64 members"):
        read_members(write_archive({f"{number}": b"" for number in range(65)}))


def test_an_archive_that_is_too_large_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(write_archive(MEMBERS))
    monkeypatch.setattr(archives, "MAX_BYTES", size)
    write_archive(MEMBERS)
    monkeypatch.setattr(archives, "MAX_BYTES", size - 1)
    with pytest.raises(RecordError, match=f"would have {size} bytes.*leave out --with-records"):
        write_archive(MEMBERS)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_refused_with_one_line(content: bytes, has_start: bool) -> None:
    found = describe((b"PK\x03\x04" if has_start else b"") + content)
    assert found is not None
    assert "\n" not in found
