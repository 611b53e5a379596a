"""`triage.yaml` accepts documents by their keyed hash, with a reason and a last day."""

from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.errors import ConfigError
from memguard.gate.triage import AcceptedDocument, Triage, apply_triage, load_triage

TEXTS = [digit * 64 for digit in "abcdef"]
TEXT = TEXTS[0]


def write(folder: Path, text: str) -> Path:
    path = folder / "triage.yaml"
    path.write_text(text)
    return path


def accept(**changes: object) -> str:
    values = {"document": TEXT, "by": "A. Writer", "reason": "public", "until": "null"}
    lines = [f"{name}: {value}" for name, value in {**values, **changes}.items() if value]
    return "accepted:\n  - " + "\n    ".join(lines) + "\n"


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    text = accept(until="2027-01-31") + "\n".join(
        ["  # the second", f"  - {{document: '{TEXTS[1]}', by: B, reason: why, until: null}}"]
    )
    triage = load_triage(write(tmp_path, text))
    first, second = triage.accepted
    assert (first.document, first.by, first.reason) == (TEXT, "A. Writer", "public")
    assert (first.until, second.until) == (date(2027, 1, 31), None)
    assert triage.text == text
    assert load_triage(write(tmp_path, "accepted: []\n")).accepted == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            accept(untill="null"),
            r"triage.yaml:6:5 'accepted\[0\].untill' is not a setting; did you",
        ),
        (accept(until=None), r"triage.yaml:2:5 'accepted\[0\].until' is missing: last day"),
        (accept(by=None), r"triage.yaml:2:5 'accepted\[0\].by' is missing: who accepted"),
        (accept(reason="'  '"), r"triage.yaml:4:5 'accepted\[0\].reason': must not be empty"),
        (accept(until="2026-02-30"), r"triage.yaml:5:12 is not valid YAML: day is out of range"),
        (accept(until="'2026-02-30'"), r"triage.yaml:5:5 'accepted\[0\].until': must be a day"),
        (accept(until="20270131"), r"triage.yaml:5:5 'accepted\[0\].until': must be a day"),
        (accept(until="2027-01-31 10:00:00"), r"5:5 'accepted\[0\].until': must be a day"),
        (accept(until="2026-W05-6"), r"5:5 'accepted\[0\].until': must be a day, as 2027-01-31"),
        (accept(document="document-7"), r"2:5 'accepted\[0\].document': must be the keyed hash"),
        (accept(document=f"{TEXT}:extraction"), r"2:5 'accepted\[0\].document': must be the keyed"),
        (accept() + accept()[10:], r"6:5 'accepted\[1\].document' is the same as at .*yaml:2:5"),
        ("- finding: x\n", "must hold settings as 'key: value' lines"),
        ("accept: []\n", r"triage.yaml:1:1 'accept' is not a setting; did you mean 'accepted'"),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_triage(write(tmp_path, text))


def test_a_file_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        load_triage(tmp_path / "none.yaml")


def test_it_must_not_be_sealed_with_what_it_accepts(tmp_path: Path) -> None:
    run, audit, free = tmp_path / "run", tmp_path / "audit", tmp_path / "project"
    (run / "prepared").mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / "audit").mkdir()
    audit.mkdir()
    (audit / "audit.json").touch()
    free.mkdir()
    (free / "config.yaml").touch()  # Another program's.
    link = tmp_path / "link"
    link.symlink_to(run)
    for folder, kind in ((run, "a run"), (run / "audit", "a run"), (audit, "an audit")):
        with pytest.raises(ConfigError, match=f"must not be inside the folder of {kind}"):
            load_triage(write(folder, accept()))
    with pytest.raises(ConfigError, match="must not be inside the folder of a run"):
        load_triage(link / "triage.yaml")
    assert load_triage(write(free, accept())).accepted
    (free / "linked.yaml").symlink_to(audit / "triage.yaml")
    with pytest.raises(ConfigError, match="must not be inside the folder of an audit"):
        load_triage(free / "linked.yaml")
    inside = audit / "linked.yaml"
    inside.symlink_to(free / "triage.yaml")
    with pytest.raises(ConfigError, match="must not be inside the folder of an audit"):
        load_triage(inside)


def make_triage(*entries: tuple[str, date | None]) -> Triage:
    accepted = tuple(
        AcceptedDocument(document=text, by="A", reason="why", until=until)
        for text, until in entries
    )
    return Triage(accepted=accepted, text="")


def test_the_last_day_is_included() -> None:
    day = date(2027, 1, 31)
    states = [
        apply_triage(make_triage((TEXT, day)), TEXTS, day + timedelta(days=later))[0].state
        for later in (-1, 0, 1)
    ]
    assert states == ["accepted", "accepted", "expired"]


@given(
    present=st.sets(st.sampled_from(TEXTS)),
    named=st.dictionaries(st.sampled_from(TEXTS), st.none() | st.dates()),
    today=st.dates(),
)
def test_documents_are_accepted_until_their_last_day(
    present: set[str], named: dict[str, date | None], today: date
) -> None:
    acceptances = apply_triage(make_triage(*named.items()), sorted(present), today)
    assert [entry.document for entry in acceptances] == list(named)
    unexpired = {
        text
        for text, until in named.items()
        if until is None or until.toordinal() + 1 > today.toordinal()
    }
    accepted = {entry.document for entry in acceptances if entry.state == "accepted"}
    assert accepted == present & unexpired
    for entry in acceptances:
        assert (entry.state == "not-found") == (entry.document not in present)
        until = named[entry.document]
        assert entry.until == (None if until is None else str(until))
