"""Rates, acceptances and notes of a comparison of two audits."""

from dataclasses import replace
from datetime import date

import pytest
from diff_examples import (
    FOUND,
    GONE,
    OTHERS,
    TODAY,
    compare_made,
    find_finding,
    hash_text,
    make_diff_report,
    make_row,
    make_side,
)

from memguard import records as r
from memguard.gate.diff_rates import list_rates
from memguard.gate.diff_result import diff_audits
from memguard.gate.triage import AcceptedFinding, Triage


def test_rates_are_paired_on_the_texts_that_both_asked_alike() -> None:
    old = [make_row(n, near=float(n < 12)) for n in range(20)]
    new = [
        *(make_row(n, near=float(n % 3 == 0)) for n in range(5, 20)),
        *(make_row(n, near=1.0) for n in range(20, 25)),  # Only here.
    ]
    new[0] = replace(new[0], continuation_tokens=40)  # 5: other tokens.
    # Trained for one of the audits only.
    once, never = make_row(30, near=1.0), make_row(31, near=1.0)
    old += [replace(once, role="control", bucket="control"), never]
    new += [once, replace(never, role="control", bucket="control")]
    (paired, attacks) = compare_made(old, new).paired
    both = range(6, 20)
    assert (paired.num_texts, paired.num_old) == (14, sum(n < 12 for n in both))
    assert paired.num_new == sum(n % 3 == 0 for n in both)
    assert paired.num_only_old == sum(n < 12 and n % 3 > 0 for n in both)
    assert paired.num_only_new == sum(n >= 12 and n % 3 == 0 for n in both)
    assert paired.difference is not None
    assert paired.difference.value == pytest.approx((paired.num_new - paired.num_old) / 14)
    assert attacks.difference is None
    assert attacks.missing_because is not None
    assert attacks.missing_because.startswith("no trained text was measured with the same parts")


def test_copies_widen_the_interval_of_the_difference() -> None:
    def compare_in(clusters: int) -> float:
        old, new = (
            [make_row(n, near=float(n % 5 < most), cluster=n % clusters) for n in range(20)]
            for most in (3, 1)
        )
        difference = compare_made(old, new).paired[0].difference
        assert difference is not None
        assert difference.ci is not None
        assert difference.value == pytest.approx(-0.4)
        return difference.ci[1] - difference.ci[0]

    assert compare_in(5) > compare_in(20)


def test_rates_are_those_of_the_reports() -> None:
    old = [make_row(n, near=float(n < 3)) for n in range(8)]
    new = [make_row(n, near=float(n < 2), bucket="r4" if n < 5 else "r16") for n in range(8)]
    control = make_row(9, role="control", bucket="control")
    reports = [make_diff_report([*listed, control], "key") for listed in (old, new)]
    rates = {(rate.risk, rate.bucket): rate for rate in list_rates(*reports)}
    assert set(rates) == {(m, b) for m in ("verbatim", "near_verbatim") for b in ("r4", "r16")}
    for place, name in enumerate(("old", "new")):
        for (risk, bucket), rate in rates.items():
            row = reports[place].tables.find("extraction", risk, bucket)
            assert getattr(rate, name) == row
    assert rates["near_verbatim", "r16"].old is None


def test_accepted_findings_stay_in_every_count() -> None:
    old, new = [FOUND, *OTHERS], [FOUND, *(replace(made, near=1) for made in OTHERS)]
    names = [f"{hash_text(f'text {n}', 'key')}:extraction" for n in (1, 2, 3, 99)]
    untils = [None, date(2026, 11, 26), date(2026, 11, 25), None]
    triage = Triage(
        accepted=tuple(
            AcceptedFinding(finding=name, by="A", reason="why", until=until)
            for name, until in zip(names, untils, strict=True)
        ),
        text="",
    )
    plain = compare_made(old, new)
    diff = diff_audits(make_side(old), make_side(new), triage=triage, today=TODAY)
    assert [e.state for e in diff.accepted] == ["accepted", "accepted", "expired", "not-found"]
    states = [find_finding(diff, f"text {n}").acceptance for n in (1, 2, 3, 4)]
    assert states == ["accepted", "accepted", "expired", None]
    assert find_finding(diff, "text 1", "attacks").acceptance is None
    assert (diff.rates, diff.paired) == (plain.rates, plain.paired)
    assert [c.num_findings for c in diff.counts] == [c.num_findings for c in plain.counts]
    accepted = {(c.kind, c.probe): c.num_accepted for c in diff.counts if c.num_accepted}
    assert accepted == {("new", "extraction"): 1, ("unchanged", "extraction"): 1}


def test_what_only_the_old_audit_finds_cannot_be_accepted() -> None:
    name = f"{hash_text('text 1', 'key')}:extraction"
    accepted = AcceptedFinding(finding=name, by="A", reason="why", until=None)
    triage = Triage(accepted=(accepted,), text="")
    diff = diff_audits(make_side([FOUND]), make_side([GONE]), triage=triage, today=TODAY)
    assert [entry.state for entry in diff.accepted] == ["not-found"]
    assert find_finding(diff, "text 1").acceptance is None


def test_notes_say_what_was_not_compared() -> None:
    notes = compare_made([FOUND], [GONE], created="2026-11-01T00:00:00Z", dtype="bf16").notes
    assert notes[0] == "Documents are matched by the keyed hash of their text."
    assert any("are they in the wrong order" in note for note in notes)
    assert any(note.startswith("extraction was run with other settings") for note in notes)
    assert any(note.startswith("Not compared: membership (no yes or no") for note in notes)
    sampled = r.BucketRow(bucket="r4", role="trained", num_documents=1, num_not_sampled=1200)
    side = make_side([GONE])
    tables = side.report.tables.model_copy(update={"buckets": (sampled,)})
    side = replace(side, report=side.report.model_copy(update={"tables": tables}))
    diff = diff_audits(make_side([FOUND]), side, today=TODAY)
    assert "The new audit scored a sample: 1,200 documents were left out." in diff.notes
    assert diff.new.num_not_sampled == 1200
