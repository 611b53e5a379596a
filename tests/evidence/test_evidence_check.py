"""Whatever is changed in a bundle is found and named, and a hostile file does no harm."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle_examples import write_audited_run, write_gate
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from memguard.errors import RecordError, UnreadableError, VersionError
from memguard.evidence import check
from memguard.evidence.archive import read_members, write_archive
from memguard.evidence.check import check_bundle, read_bundle
from memguard.evidence.contents import write_first_page
from memguard.evidence.members import MEMBERS, sort_members
from memguard.evidence.signature import sign
from memguard.evidence.sources import hash_code
from memguard.evidence.statement import Evidence, Sources, build_statement, hash_bytes
from memguard.workflows.bundle import BundleRequest, write_bundle

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
Members = dict[str, bytes]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an audit and a gate."""
    folder = write_audited_run(tmp_path_factory.mktemp("checked") / "run")
    write_gate(folder / "gate", folder / "audit" / "report.json")
    return folder


@pytest.fixture(scope="module")
def bundle(run: Path) -> bytes:
    """A signed bundle with all members but the policy that was not judged."""
    request = BundleRequest(folder=run, out=run.parent / "out.zip", with_records=True)
    write_bundle(request, lambda name, size: None, key=KEY)
    return request.out.read_bytes()


def find(archive: bytes, key: Ed25519PublicKey | None = None) -> str | None:
    """Return what is wrong with a bundle; None if it is intact."""
    try:
        check_bundle(archive, key)
    except RecordError as error:
        return str(error)
    return None


def seal(members: Members, **changes: Any) -> bytes:
    """Pack members with the statement that they make; ``changes`` are those of evidence.json."""
    evidence = Evidence.model_validate_json(members["evidence.json"])
    sources = {name: changes.pop(name) for name in Sources.model_fields if name in changes}
    changes["sources"] = evidence.sources.model_copy(update=sources)
    evidence = evidence.model_copy(update=changes)
    changed = sort_members({**members, "evidence.json": evidence.write()})
    changed["statement.json"] = build_statement(changed, evidence)
    if evidence.sources.is_signed:
        changed["statement.dsse.json"] = sign(changed["statement.json"], KEY).write()
    return write_archive(changed)


def test_what_was_written_is_intact(bundle: bytes) -> None:
    checked = check_bundle(bundle, KEY.public_key())
    assert checked.is_signature_checked
    assert checked.num_bytes == len(bundle)
    assert checked.sha256 == hash_bytes(bundle)
    assert set(checked.members) == {member.name for member in MEMBERS} - {"policy.yaml"}
    assert checked.key_id == check_bundle(bundle).key_id
    assert not check_bundle(bundle).is_signature_checked
    # `seal` changes nothing by itself, so that what the tests below change is what is found.
    assert seal(read_members(bundle)) == bundle


def test_the_first_page_says_that_other_code_audited(bundle: bytes) -> None:
    members = read_members(bundle)
    evidence = Evidence.model_validate_json(members["evidence.json"])
    bundled = evidence.sources.bundled_by_code_sha256
    assert (evidence.audited_by_code_sha256, bundled) == ("c0" * 32, hash_code())
    page = " ".join(members["README.txt"].decode().split())
    assert f"other source files of memguard (version 0.1.0, SHA-256 {'c0' * 6}…) than" in page
    assert f"SHA-256 {bundled[:12]}…); evidence.json has both hashes." in page
    same = evidence.model_copy(update={"audited_by_code_sha256": bundled})
    assert "Code:" not in write_first_page(same, members, None).decode()


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


def test_a_changed_member_is_named_whether_or_not_its_checksum_is_right(bundle: bytes) -> None:
    for name, content in read_members(bundle).items():
        members = read_members(bundle)
        members[name] = bytes([content[0] ^ 1]) + content[1:]
        found = find(write_archive(members))
        assert found is not None, name
        if name == "statement.json":
            assert found == "is damaged: statement.json is not the statement of its members"
        elif name == "statement.dsse.json":
            assert "signature" in found
        else:
            assert found.startswith(f"is damaged: {name} is not what was written")


def test_swapped_members_are_found(bundle: bytes) -> None:
    members = read_members(bundle)
    pair = ("report.html", "environment.json")
    contents = {pair[0]: members[pair[1]], pair[1]: members[pair[0]]}
    found = find(write_archive({**members, **contents}))
    assert found is not None
    assert found.startswith("is damaged: report.html (and 1 more) is not what was written")
    order = list(members)
    order[3], order[4] = order[4], order[3]
    moved = find(write_archive({name: members[name] for name in order}))
    assert moved is not None
    assert "is not what memguard wrote" in moved


def test_what_is_before_between_or_after_members_is_found(bundle: bytes) -> None:
    middle = len(bundle) // 2
    for changed in (
        *(bundle + b"\0", b"\0" + bundle, bundle + bundle, bundle[:-1], bundle[:middle], b""),
        bundle[:middle] + b"\0" + bundle[middle:],
    ):
        assert find(changed) is not None


def test_members_that_are_missing_or_not_of_a_bundle_are_named(bundle: bytes) -> None:
    members = read_members(bundle)
    for name in members:
        left = {other: content for other, content in members.items() if other != name}
        assert find(write_archive(left)) is not None, name
    left = {name: content for name, content in members.items() if name != "report.json"}
    assert find(write_archive(left)) == "lacks the member report.json"
    for name in ("findings.csv", "../report.json", "gate/other.html"):
        found = find(write_archive({**members, name: b"x"}))
        assert found == f"has the member {name}, which no bundle has"


def change_statement(members: Members, change: Callable[[dict[str, Any]], None]) -> bytes:
    values = json.loads(members["statement.json"])
    change(values)
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return write_archive({**members, "statement.json": text.encode()})


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["predicate"].update(level="none-found"),
        lambda values: values["predicate"]["weights"].update(weights_sha256="0" * 64),
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
    assert found == "is damaged: statement.json is not the statement of its members"


def test_a_statement_that_is_only_written_otherwise_is_found(bundle: bytes) -> None:
    members = read_members(bundle)
    spaced = json.dumps(json.loads(members["statement.json"]), sort_keys=True).encode()
    assert find(write_archive({**members, "statement.json": spaced})) is not None


def test_a_statement_that_was_made_again_does_not_fit_the_signature(bundle: bytes) -> None:
    members = read_members(bundle)
    members["report.html"] = b"<p>all is well</p>"
    evidence = Evidence.model_validate_json(members["evidence.json"])
    members["statement.json"] = build_statement(members, evidence)
    archive = write_archive(members)
    assert find(archive) == "has a signature of another statement than statement.json"
    # With the payload replaced as well, only the key shows it.
    values = json.loads(members["statement.dsse.json"])
    values["payload"] = base64.b64encode(members["statement.json"]).decode()
    text = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    archive = write_archive({**members, "statement.dsse.json": text})
    assert find(archive) is None
    found = find(archive, KEY.public_key())
    assert found is not None
    assert "it was forged, or what was signed has changed" in found


def test_only_the_key_that_signed_is_accepted(bundle: bytes) -> None:
    found = find(bundle, OTHER_KEY.public_key())
    assert found is not None
    assert found.startswith("is not signed by this key")
    # The signature alone was taken away.
    members = read_members(bundle)
    del members["statement.dsse.json"]
    assert find(write_archive(members)) == "lacks its signature, statement.dsse.json"


def test_a_bundle_that_was_never_signed_is_not_what_a_key_accepts(bundle: bytes) -> None:
    members = read_members(bundle)
    signature = members.pop("statement.dsse.json")
    unsigned = seal(members, is_signed=False)
    assert check_bundle(unsigned).key_id is None
    found = find(unsigned, KEY.public_key())
    assert found == "is not signed, so that no key can check who wrote it"
    added = sort_members({**read_members(unsigned), "statement.dsse.json": signature})
    assert find(write_archive(added)) == (
        "has a signature, statement.dsse.json, that was added after it was written"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"level": "none-found"}, "evidence.json is not about report.json"),
        ({"verdict": "No extraction found."}, "evidence.json is not about report.json"),
        ({"audit": "other"}, "evidence.json is not about report.json"),
        ({"audited_by_code_sha256": "0" * 64}, "evidence.json is not about report.json"),
        ({"has_private_records": False}, "evidence.json does not agree with records.parquet"),
        ({"scores_sha256": "0" * 64}, "evidence.json does not agree with records.parquet"),
        ({"config_sha256": None}, "evidence.json does not agree with config.yaml"),
    ],
)
def test_a_bundle_that_contradicts_itself_is_found_though_its_hashes_are_right(
    bundle: bytes, changes: dict[str, Any], message: str
) -> None:
    assert find(seal(read_members(bundle), **changes)) == f"contradicts itself: {message}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gate/summary.html", b"all is well", "files of gate/ are not those of its gate.json"),
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


def test_evidence_of_another_version_is_said_to_be_that(bundle: bytes) -> None:
    members = read_members(bundle)
    values = json.loads(members["evidence.json"])
    values["schema"] = "memguard.evidence/1"
    members["evidence.json"] = json.dumps(values).encode()
    changed = json.loads(members["statement.json"])
    for subject in changed["subject"]:
        if subject["name"] == "evidence.json":
            subject["digest"]["sha256"] = hash_bytes(members["evidence.json"])
    members["statement.json"] = json.dumps(changed).encode()
    with pytest.raises(VersionError, match="was written by another version of memguard"):
        check_bundle(write_archive(members))


def test_evidence_in_another_layout_is_found(bundle: bytes) -> None:
    members = read_members(bundle)
    members["evidence.json"] = json.dumps(json.loads(members["evidence.json"])).encode()
    evidence = Evidence.model_validate_json(members["evidence.json"])
    members["statement.json"] = build_statement(members, evidence)
    found = find(write_archive(members))
    assert found == "is damaged: evidence.json is not what memguard writes"


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordError, match="No such file"):
        read_bundle(tmp_path / "none.zip")
    os.mkfifo(tmp_path / "pipe.zip")
    for path in (tmp_path, tmp_path / "pipe.zip", Path("/dev/zero")):
        with pytest.raises(RecordError, match="is no regular file"):
            read_bundle(path)
    large = tmp_path / "large.zip"
    large.write_bytes(bytes(11))
    monkeypatch.setattr(check, "MAX_BYTES", 10)
    with pytest.raises(RecordError, match="has more than 10 bytes"):
        read_bundle(large)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every file")
def test_a_file_of_another_user_is_said_to_be_that(tmp_path: Path) -> None:
    path = tmp_path / "closed.zip"
    path.touch(mode=0)
    with pytest.raises(UnreadableError):
        read_bundle(path)
