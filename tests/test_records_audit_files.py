"""An audit ended when `audit.json` is whole; what it names is what is read."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import cut, flip_byte

from memguard.errors import RecordError
from memguard.records.audit_files import (
    CARDS,
    check_audit_file,
    has_audit,
    load_audit_report,
    save_audit_files,
    save_page_sums,
)
from memguard.records.folders import AuditFolder

NAMES = (
    "report.json",
    "records.parquet",
    "results.parquet",
    "utility.parquet",
    "findings.csv",
    "report.html",
)


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "audit"
    (folder.parent / "model").mkdir(parents=True)
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text(f"this is {name}")
    (folder.parent / CARDS[0]).write_text("# model")
    save_audit_files(folder, has_card=True)
    return folder


def list_names(folder: Path) -> list[str]:
    return [damage.file for damage in AuditFolder(folder).find_damage()]


def test_what_was_written_is_whole(audit: Path) -> None:
    assert has_audit(audit)
    assert list_names(audit) == []
    assert not has_audit(audit.parent)


@pytest.mark.parametrize("change", [flip_byte, cut, Path.unlink])
@pytest.mark.parametrize("name", [*NAMES, "audit.json", CARDS[0]])
def test_each_file_that_is_damaged_is_named(
    audit: Path, name: str, change: Callable[[Path], None]
) -> None:
    change(audit.parent / CARDS[0] if name == CARDS[0] else audit / name)
    assert list_names(audit) == [name]


def test_every_flipped_byte_of_the_sums_is_seen(audit: Path) -> None:
    path = audit / "audit.json"
    content = path.read_bytes()
    for at in range(len(content) - 1):  # The last is the end of the line.
        flip_byte(path, at)
        assert list_names(audit) == ["audit.json"], at
        path.write_bytes(content)


def test_a_report_is_read_only_as_it_was_written(audit: Path) -> None:
    flip_byte(audit / "report.json")
    with pytest.raises(RecordError, match=r"report\.json' is damaged: it is not .*memguard audit"):
        load_audit_report(audit)
    (audit / "audit.json").unlink()
    with pytest.raises(RecordError, match=r"did not end \(no audit\.json\)\. Run 'memguard audit'"):
        load_audit_report(audit)


def test_pages_that_are_rendered_again_leave_the_other_sums(audit: Path) -> None:
    for name in ("report.html", "records.parquet"):
        (audit / name).write_text("other")
    (audit.parent / CARDS[0]).write_text("other")
    save_page_sums(audit)
    assert list_names(audit) == ["records.parquet"]
    check_audit_file(audit, "report.json")
    with pytest.raises(RecordError, match=r"records\.parquet' is damaged"):
        check_audit_file(audit, "records.parquet")


def test_an_audit_without_a_card_has_none_to_damage(audit: Path) -> None:
    save_audit_files(audit, has_card=False)
    (audit.parent / CARDS[0]).unlink()
    assert list_names(audit) == []


def test_an_audit_of_an_earlier_version_is_refused_with_what_to_run(audit: Path) -> None:
    path = audit / "audit.json"
    values = json.loads(path.read_text()) | {"schema": "memguard.audit_files/1"}
    values.pop("sha256")
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    sealed = {**values, "sha256": hashlib.sha256(canonical.encode()).hexdigest()}
    path.write_text(json.dumps(sealed))
    with pytest.raises(RecordError) as refused:
        load_audit_report(audit)
    text = str(refused.value)
    assert "another version of memguard (memguard.audit_files/1)" in text
    assert text.endswith("Run 'memguard audit' again: it reuses the cached scores")
    assert "\n" not in text


def test_a_file_that_the_audit_did_not_write_is_named(audit: Path) -> None:
    check_audit_file(audit, "utility.parquet")
    with pytest.raises(RecordError, match=r"wrote no 'canaries\.parquet'\. Run 'memguard audit'"):
        check_audit_file(audit, "canaries.parquet")
