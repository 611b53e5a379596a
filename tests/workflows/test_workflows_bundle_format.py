"""Whatever is changed in a bundle is found, and a hostile file does no harm."""

import hashlib
import io
import json
import os
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle_examples import write_audited_run, write_gate
from hypothesis import given
from hypothesis import strategies as st

from memguard.errors import RecordError, UnreadableError, VersionError
from memguard.workflows import bundle_format
from memguard.workflows.bundle import BundleRequest, write_bundle
from memguard.workflows.bundle_format import (
    MEMBERS,
    Evidence,
    Sources,
    build_statement,
    check_archive,
    check_bundle,
    hash_bytes,
    write_archive,
)

Members = dict[str, bytes]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an audit and a gate."""
    folder = write_audited_run(tmp_path_factory.mktemp("checked") / "run")
    write_gate(folder / "gate", folder / "audit" / "report.json")
    return folder


@pytest.fixture(scope="module")
def bundle(run: Path) -> bytes:
    """A bundle with all members."""
    request = BundleRequest(folder=run, out=run.parent / "out.zip", with_records=True)
    write_bundle(request, lambda name, size: None)
    return request.out.read_bytes()


def find(archive: bytes) -> str | None:
    """Return what is wrong with a bundle; None if it is intact."""
    try:
        check_archive(io.BytesIO(archive))
    except RecordError as error:
        return str(error)
    return None


def read_members(archive: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(archive)) as reader:
        return {name: reader.read(name) for name in reader.namelist()}


def pack(members: Members, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Pack members of any name and order as memguard does."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as writer:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name)
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            writer.writestr(entry, content, compression)
    return buffer.getvalue()


def read_evidence(members: Members) -> Evidence:
    return Evidence.model_validate(json.loads(members["statement.json"])["predicate"])


def seal(members: Members, **changes: Any) -> bytes:
    """Pack members with the statement that they make; ``changes`` are those of its predicate."""
    evidence = read_evidence(members)
    sources = {name: changes.pop(name) for name in Sources.model_fields if name in changes}
    changes["sources"] = evidence.sources.model_copy(update=sources)
    evidence = evidence.model_copy(update=changes)
    return write_archive({**members, "statement.json": build_statement(members, evidence)})


def test_what_was_written_is_intact(bundle: bytes) -> None:
    checked = check_archive(io.BytesIO(bundle))
    assert checked.num_bytes == len(bundle)
    assert checked.sha256 == hash_bytes(bundle)
    assert list(checked.members) == list(MEMBERS)
    # `seal` changes nothing by itself, so that what the tests below change is what is found.
    assert seal(read_members(bundle)) == pack(read_members(bundle)) == bundle


def test_the_bytes_of_an_archive_do_not_depend_on_the_library() -> None:
    """Made by the ZIP writer that memguard had of its own, of 1,107 bytes."""
    written = write_archive(
        {
            "README.txt": b"first page\n",
            "statement.json": b"{}",
            "gate/gate.json": bytes(range(256)) * 3,
        }
    )
    assert hashlib.sha256(written).hexdigest() == (
        "d4f3cc2906392c19a1811d336365fdcfa8b9daa34523c89eaa3178c1e81dbce4"
    )


def list_header_bytes(archive: bytes) -> list[int]:
    """Return the place of every byte that belongs to no content."""
    places, position = [], 0
    for name, content in read_members(archive).items():
        places += range(position, position + 30 + len(name))
        position += 30 + len(name) + len(content)
    return places + list(range(position, len(archive)))


def test_every_flipped_byte_is_found(bundle: bytes) -> None:
    headers = list_header_bytes(bundle)
    assert len(headers) == 22 + sum(76 + 2 * len(name) for name in read_members(bundle))
    # One byte in each 64 of the contents too, at another place in each stretch.
    inside = [min(first + first // 64 % 64, len(bundle) - 1) for first in range(0, len(bundle), 64)]
    changed = bytearray(bundle)
    for number, at in enumerate([*headers, *inside]):
        mask = 1 << number % 8
        changed[at] ^= mask
        found = find(bytes(changed))
        assert found is not None, at
        assert "\n" not in found
        changed[at] ^= mask
    assert bytes(changed) == bundle


def test_what_is_before_between_or_after_members_is_found(bundle: bytes) -> None:
    middle = len(bundle) // 2
    for changed in (
        *(bundle + b"\0", b"\0" + bundle, bundle + bundle, bundle[:-1], bundle[:middle], b""),
        bundle[:middle] + b"\0" + bundle[middle:],
    ):
        assert find(changed) is not None


def change_statement(members: Members, change: Callable[[dict[str, Any]], None]) -> bytes:
    values = json.loads(members["statement.json"])
    change(values)
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return pack({**members, "statement.json": text.encode()})


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["predicate"].update(level="none-found"),
        lambda values: values["predicate"]["model"].update(weights_sha256="0" * 64),
        lambda values: values["predicate"].update(more=1),
        lambda values: values.update(predicateType="https://example.com/other"),
        lambda values: values.update(_type="https://in-toto.io/Statement/v0.1"),
        lambda values: values["subject"].pop(),
        lambda values: values["subject"].reverse(),
        lambda values: values["subject"].append({"name": "x", "digest": {"sha256": "0" * 64}}),
        lambda values: values.update(subject=None),
    ],
)
def test_a_changed_statement_is_found(
    bundle: bytes, change: Callable[[dict[str, Any]], None]
) -> None:
    found = find(change_statement(read_members(bundle), change))
    assert found in (
        "is damaged: statement.json is not the statement of its members",
        "is damaged: statement.json cannot be read",
        "contradicts itself: statement.json is not about its report.json",
    )


def test_a_statement_that_is_only_written_otherwise_is_found(bundle: bytes) -> None:
    members = read_members(bundle)
    spaced = json.dumps(json.loads(members["statement.json"]), sort_keys=True).encode()
    assert find(write_archive({**members, "statement.json": spaced})) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"level": "none-found"}, "statement.json is not about its report.json"),
        ({"verdict": "None found."}, "statement.json is not about its report.json"),
        ({"audit": "other"}, "statement.json is not about its report.json"),
        ({"audited_by_code_sha256": "0" * 64}, "statement.json is not about its report.json"),
        ({"has_private_records": False}, "statement.json is not about its records.parquet"),
        ({"scores_sha256": "0" * 64}, "statement.json is not about its records.parquet"),
        ({"config_sha256": None}, "statement.json is not about its config.yaml"),
    ],
)
def test_a_bundle_that_contradicts_itself_is_found_though_its_hashes_are_right(
    bundle: bytes, changes: dict[str, Any], message: str
) -> None:
    assert find(seal(read_members(bundle), **changes)) == f"contradicts itself: {message}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gate/summary.md", b"all is well", "files of gate/ are not those of its gate.json"),
        ("gate/gate.json", b"{}", "has a gate/gate.json that cannot be read, or none"),
        ("gate/gate.json", b"[" * 99_999, "has a gate/gate.json that cannot be read, or none"),
        ("report.json", b"{}", "has a report that this version cannot read"),
    ],
)
def test_members_that_do_not_belong_together_are_found_though_their_hashes_are_right(
    bundle: bytes, name: str, content: bytes, message: str
) -> None:
    found = find(seal({**read_members(bundle), name: content}))
    assert found is not None
    assert message in found


def test_a_gate_without_a_file_or_of_another_report_is_found(bundle: bytes) -> None:
    members = read_members(bundle)
    values = json.loads(members["gate/gate.json"])
    values["report_sha256"] = "0" * 64
    found = find(seal({**members, "gate/gate.json": json.dumps(values).encode()}))
    assert found == "contradicts itself: gate/gate.json judged another report"
    for name in ("gate/junit.xml", "gate/gate.json"):
        left = {other: content for other, content in members.items() if other != name}
        assert find(seal(left)) is not None, name


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every file")
def test_a_file_of_another_user_is_said_to_be_that(tmp_path: Path) -> None:
    path = tmp_path / "closed.zip"
    path.touch(mode=0)
    with pytest.raises(UnreadableError):
        check_bundle(path)


def test_members_that_are_changed_swapped_missing_or_unknown_are_found(bundle: bytes) -> None:
    members = read_members(bundle)
    for name, content in members.items():
        changed = {**members, name: bytes([content[0] ^ 1]) + content[1:]}
        assert find(pack(changed)) is not None, name
        left = {other: kept for other, kept in members.items() if other != name}
        assert find(pack(left)) is not None, name
    pair = ("report.html", "environment.json")
    contents = {pair[0]: members[pair[1]], pair[1]: members[pair[0]]}
    assert find(pack({**members, **contents})) is not None
    assert find(pack(dict(reversed(members.items())))) is not None
    left = {name: content for name, content in members.items() if name != "report.json"}
    assert find(pack(left)) == "lacks the member report.json"
    for name in ("findings.csv", "../report.json", "gate/other.html", "a\nb"):
        assert find(pack({**members, name: b"x"})) == (
            f"has the member {name!r}, which no bundle has"
        )


def test_a_statement_of_another_version_is_said_to_be_that(bundle: bytes) -> None:
    members = read_members(bundle)
    values = json.loads(members["statement.json"])
    values["predicate"]["schema"] = "memguard.evidence/1"
    members["statement.json"] = json.dumps(values).encode()
    with pytest.raises(VersionError, match="was written by another version of memguard"):
        check_archive(io.BytesIO(pack(members)))


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordError, match="No such file"):
        check_bundle(tmp_path / "none.zip")
    os.mkfifo(tmp_path / "pipe.zip")
    for path in (tmp_path, tmp_path / "pipe.zip", Path("/dev/zero")):
        with pytest.raises(RecordError, match="is no regular file"):
            check_bundle(path)
    members = {"README.txt": bytes(100)}
    size = len(write_archive(members))
    (tmp_path / "large.zip").write_bytes(write_archive(members))
    monkeypatch.setattr(bundle_format, "MAX_BYTES", size - 1)
    with pytest.raises(RecordError, match="is larger than a bundle can be"):
        check_bundle(tmp_path / "large.zip")
    with pytest.raises(RecordError, match=f"would have {size} bytes.*leave out --with-records"):
        write_archive(members)


@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_any_bytes_are_refused_with_one_line(content: bytes, starts: bool, ends: bool) -> None:
    end = b"PK\x05\x06" + bytes(18)
    found = find((b"PK\x03\x04" if starts else b"") + content + (end if ends else b""))
    assert found is not None
    assert "\n" not in found


# -- hostile archives ------------------------------------------------------------------------------


def claim_size(bundle: bytes, draw: random.Random) -> bytes:
    """Let a member claim 4 GB, or 10 GB in the fields of ZIP64, in header and directory."""
    changed = bytearray(bundle)
    entries = [at for at in range(len(bundle) - 4) if bundle[at : at + 4] == b"PK\x01\x02"]
    at = draw.choice(entries)
    struct.pack_into("<2I", changed, at + 20, 0xFFFFFFFF, 0xFFFFFFFF)
    if draw.random() < 0.5:
        return bytes(changed)
    name_bytes = struct.unpack_from("<H", changed, at + 28)[0]
    extra = struct.pack("<2H2Q", 1, 16, 10 * 2**30, 10 * 2**30)
    struct.pack_into("<H", changed, at + 30, len(extra))
    changed[at + 46 + name_bytes : at + 46 + name_bytes] = extra
    sizes = struct.unpack_from("<I", changed, len(changed) - 10)[0]
    struct.pack_into("<I", changed, len(changed) - 10, sizes + len(extra))
    return bytes(changed)


def repeat_name(bundle: bytes, draw: random.Random) -> bytes:
    buffer = io.BytesIO(bundle)
    members = read_members(bundle)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(buffer, "a") as writer:
        writer.writestr(draw.choice(list(members)), draw.randbytes(draw.randrange(100)))
    return buffer.getvalue()


def add_junk(bundle: bytes, draw: random.Random) -> bytes:
    junk, at = draw.randbytes(draw.randrange(1, 1000)), draw.randrange(len(bundle))
    return draw.choice((junk + bundle, bundle + junk, bundle[:at] + junk + bundle[at:]))


def flip_byte(bundle: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(bundle))
    return bundle[:at] + bytes([bundle[at] ^ (1 << draw.randrange(8))]) + bundle[at + 1 :]


def cut(bundle: bytes, draw: random.Random) -> bytes:
    return bundle[: draw.randrange(len(bundle))]


def compress(bundle: bytes, draw: random.Random) -> bytes:
    """Replace a member by 64 MiB of zeros, compressed to 64 kB."""
    name = draw.choice(list(MEMBERS))
    return pack({**read_members(bundle), name: bytes(1 << 26)}, zipfile.ZIP_DEFLATED)


def claim_directory(bundle: bytes, draw: random.Random) -> bytes:
    """Let the end claim up to 65,535 members and a directory of 4 GB."""
    changed = bytearray(bundle)
    struct.pack_into("<2H2I", changed, len(changed) - 14, 65535, 65535, 0xFFFFFFFF, 0)
    return bytes(changed)


TAMPERED = (claim_size, repeat_name, add_junk, flip_byte, cut, compress, claim_directory)


@pytest.mark.parametrize("tamper", TAMPERED)
def test_a_tampered_bundle_is_refused(
    bundle: bytes, tamper: Callable[[bytes, random.Random], bytes]
) -> None:
    changed = tamper(bundle, random.Random(0))
    found = find(changed)
    assert found is not None
    assert "\n" not in found


def test_a_compressed_member_is_not_unpacked(bundle: bytes) -> None:
    found = find(compress(bundle, random.Random(0)))
    assert found == "is damaged: its size is not that of its members"


_CHECK = """
import re, sys, time
from pathlib import Path
from memguard.errors import RecordError
from memguard.workflows.bundle_format import check_bundle
for path in sorted(Path(sys.argv[1]).glob("*.zip")):
    start = time.perf_counter()
    try:
        check_bundle(path)
        said = "INTACT"
    except RecordError as error:
        said = str(error)
    took = time.perf_counter() - start
    peak_kib = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
    print(path.name, f"{took:.3f}", peak_kib, repr(said))
"""


@pytest.mark.long
def test_200_tampered_bundles_cost_neither_time_nor_memory(bundle: bytes, tmp_path: Path) -> None:
    draw = random.Random(1)
    for number in range(200):
        tampered = TAMPERED[number % len(TAMPERED)](bundle, draw)
        (tmp_path / f"{number:03}.zip").write_bytes(tampered)
    done = subprocess.run(
        [sys.executable, "-c", _CHECK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    lines = [line.split(" ", 3) for line in done.stdout.splitlines()]
    assert len(lines) == 200
    for name, _, peak_kib, said in lines:
        assert said != "'INTACT'", name
        assert "\\n" not in said
        assert int(peak_kib) < 200 * 1024, (name, said)
    print(f"longest: {max(float(line[1]) for line in lines)} s, peak {lines[-1][2]} KiB")
