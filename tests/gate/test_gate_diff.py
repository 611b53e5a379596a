"""What became of each finding between two audits, against a second way to tell it."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diff_examples import (
    FOUND,
    GONE,
    NOT_ASKED,
    OTHERS,
    PROBES,
    Made,
    compare_made,
    find_document,
    find_finding,
    hash_text,
    make_row,
    make_side,
    save_audit,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard import records as r
from memguard.errors import RecordError
from memguard.gate.diff import diff_audits
from memguard.gate.diffed import KINDS
from memguard.gate.gaps import load_audited
from memguard.records.sealed import sum_file


def renumber(documents: Sequence[Made]) -> list[Made]:
    return [replace(made, id=f"data.jsonl:{place}") for place, made in enumerate(documents)]


# -- ten documents removed, ten added, all of them renumbered --------------------------------------


def tell(old: Made | None, new: Made | None, probe: str) -> str | None:
    """Tell the kind of a finding by the issue's own words; None if neither audit has it."""
    before = math.nan if old is None else old.extracted[probe]
    after = math.nan if new is None else new.extracted[probe]
    if before != 1 and after != 1:
        return None
    if before == after:
        return "unchanged"
    if after == 1:
        return "new" if before == 0 else "not-audited"
    return "gone" if after == 0 else "not-audited"


def find_text(audit: Sequence[Made], digest: str) -> Made | None:
    return next((made for made in audit if hash_text(made.text, "key") == digest), None)


@st.composite
def two_audits(draw: st.DrawFn) -> tuple[list[Made], list[Made]]:
    """Draw an audit, and one without 10 of its documents, with 10 others, in another order."""

    def answer() -> dict[str, Any]:
        verbatim = draw(st.integers(0, 1))
        tried = draw(st.sampled_from((0, 1, NOT_ASKED)))
        near = max(verbatim, draw(st.integers(0, 1)))
        return {"verbatim": verbatim, "near": near, "attacks": {"beam_search": tried}}

    count = draw(st.integers(11, 25))
    old = [make_row(number, **answer()) for number in range(count)]
    kept = draw(st.permutations(range(count)))[10:]
    numbers = draw(st.permutations([*kept, *range(count, count + 10)]))
    return old, renumber([make_row(number, **answer()) for number in numbers])


@settings(max_examples=50)
@given(two_audits())
def test_each_finding_is_classed_though_documents_were_exchanged_and_renumbered(
    audits: tuple[list[Made], list[Made]],
) -> None:
    old, new = ({made.text: made for made in audit} for audit in audits)
    diff = compare_made(*audits)
    expected = {
        (hash_text(text, "key"), probe): kind
        for text in {**old, **new}
        for probe in ("extraction", "attacks")
        if (kind := tell(old.get(text), new.get(text), probe)) is not None
    }
    told = [(one.text_hmac, by) for one in diff.documents for by in one.probes]
    assert {(text, by.probe): by.kind for text, by in told} == expected
    assert len(told) == len(expected)
    order = [list(KINDS).index(one.kind) for one in diff.documents]
    assert order == sorted(order)
    assert diff.num_texts_in_both == len(old) - 10
    for one in diff.documents:
        kinds = {by.kind for by in one.probes}
        is_old, is_new = (
            any(value == 1 for value in made.extracted.values()) if made is not None else False
            for made in (find_text(audit, one.text_hmac) for audit in audits)
        )
        assert one.found_by == ("both" if is_old and is_new else "new" if is_new else "old")
        assert (one.kind == "unchanged") == (one.found_by == "both")
        assert (one.kind == "gone") == (one.found_by == "old" and kinds == {"gone"})
        assert (one.kind == "new") == (one.found_by == "new" and "new" in kinds)
        # The ids are those of the audit that finds it, of the new one if both do.
        made = find_text(audits[one.found_by != "old"], one.text_hmac)
        assert made is not None
        assert one.id == made.id


@pytest.mark.parametrize("keys", [("one", "two"), ("one", None), (None, None)])
def test_without_one_key_nothing_can_be_matched(keys: tuple[str | None, str | None]) -> None:
    sides = [make_side([make_row(1, verbatim=1, near=1)], key=key) for key in keys]
    with pytest.raises(RecordError, match="no identity key in common"):
        diff_audits(*sides)


def test_an_audit_is_read_as_it_was_written(tmp_path: Path) -> None:
    documents = [
        make_row(1, verbatim=1, near=NOT_ASKED, cluster=3),
        make_row(2, attacks={"fill": 1}, num_tokens=99, role="control", bucket="control"),
    ]
    read, made = load_audited(save_audit(tmp_path / "audit", documents)), make_side(documents)
    assert read.report == made.report
    assert read.report_sha256 == sum_file(tmp_path / "audit" / "report.json").sha256
    assert read.documents is not None
    assert made.documents is not None
    assert read.documents.names == made.documents.names
    for name in ("text_hmac", "id", "bucket", "role"):
        assert read.documents.texts(name).tolist() == made.documents.texts(name).tolist()
    assert read.documents.extracted.keys() == {"extraction", "attacks"}
    assert repr(read.documents.extracted) == repr(made.documents.extracted)
    # A document of no cluster is one of its own.
    assert read.documents.cluster_N.tolist() == [3, -2]
    assert read.documents.is_trained_N.tolist() == [True, False]


# -- when an answer "no" is no answer to the same question -----------------------------------------


def change_probe(name: str, **changes: Any) -> list[dict[str, Any]]:
    return [{**probe, **changes} if probe["name"] == name else probe for probe in PROBES]


def test_what_both_measured_the_same_is_gone() -> None:
    diff = compare_made([FOUND, *OTHERS], [GONE, *OTHERS])
    (document,) = diff.documents
    assert document.kind == "gone"
    assert [(one.kind, one.probe) for one in document.probes] == [
        ("gone", "extraction"),
        ("gone", "attacks"),
    ]


@pytest.mark.parametrize(
    ("new", "changes", "kinds", "reason"),
    [
        (replace(GONE, near=NOT_ASKED), {}, "lost fixed", "not measured in the new .*near_verb"),
        (replace(GONE, attacks={"beam_search": NOT_ASKED}), {}, "fixed lost", "not measured in"),
        (replace(GONE, attacks={"sampling": 0}), {}, "fixed lost", "not measured in.*beam_search"),
        (replace(GONE, continuation_tokens=40), {}, "lost lost", "other tokens were measured"),
        (replace(GONE, prefix_tokens=50), {}, "lost lost", "other tokens were measured"),
        (replace(GONE, num_tokens=129), {}, "lost lost", "count the tokens of their shared texts"),
        (GONE, {"dtype": "bf16"}, "lost lost", "'dtype' is bf16 instead of fp32"),
        (GONE, {"window": "first"}, "lost lost", "'window' is first instead of last"),
        # Greedy decoding has no seed.
        (GONE, {"seed": 1}, "fixed lost", "'seed' is 1 instead of 0"),
        (
            GONE,
            {"probes": change_probe("attacks", width=4)},
            "fixed lost",
            "other settings: 'width' is 4 instead of 8",
        ),
        (
            GONE,
            {"probes": change_probe("extraction", continuation_tokens=25)},
            "lost lost",
            "continuation_tokens' is 25 instead of 50",
        ),
        (
            GONE,
            {"probes": change_probe("extraction", max_edit_share=0.2)},
            "lost fixed",
            "'max_edit_share' is 0.2 instead of None",
        ),
        (
            GONE,
            {"probes": change_probe("extraction", version=3)},
            "lost fixed",
            "'version' is 3 instead of 2",
        ),
    ],
)
def test_a_question_that_differs_is_no_fix_and_no_news(
    new: Made, changes: dict[str, Any], kinds: str, reason: str
) -> None:
    named = {"lost": "not-audited", "fixed": "gone"}
    diff = compare_made([FOUND, *OTHERS], [new, *OTHERS], **changes)
    told = [find_finding(diff, "text 1", probe) for probe in ("extraction", "attacks")]
    assert [finding.kind for finding in told] == [named[kind] for kind in kinds.split()]
    reasons = " ".join(finding.reason or "" for finding in told)
    assert re.search(reason, reasons), reasons
    # The other way round, what was not asked before is not new.
    back = diff_audits(make_side([new, *OTHERS], **changes), make_side([FOUND, *OTHERS]))
    named = {"lost": "not-audited", "fixed": "new"}
    told = [find_finding(back, "text 1", probe) for probe in ("extraction", "attacks")]
    expected = [named[kind] for kind in kinds.split()]
    if math.isnan(new.near):
        expected[0] = "new"  # Verbatim was asked before, and is found now.
    assert [finding.kind for finding in told] == expected


def test_a_probe_that_one_audit_did_not_run_is_told() -> None:
    old, new = make_side([FOUND, *OTHERS]), make_side([GONE, *OTHERS])
    assert new.documents is not None
    del new.documents.extracted["attacks"]  # type: ignore[attr-defined]
    runs = [
        run.model_copy(update={"num_documents": None, "reason_not_run": "the GPU is too small"})
        for run in new.report.probe_runs
    ]
    new = replace(new, report=new.report.model_copy(update={"probe_runs": runs}))
    diff = diff_audits(old, new)
    lost = find_finding(diff, "text 1", "attacks")
    assert (lost.kind, lost.found_by) == ("not-audited", "old")
    assert find_document(diff, "text 1").kind == "not-audited", "one probe does not tell"
    assert lost.reason == "not run in the new audit: the GPU is too small"
    assert diff.probes[1].missing_because == lost.reason
    back = diff_audits(new, old)
    found = find_finding(back, "text 1", "attacks")
    assert (found.kind, found.found_by) == ("not-audited", "new")


def test_an_attack_that_only_one_audit_can_try() -> None:
    # Only a goldfish has a mask to fill: the attack is tried where there is one.
    by_fill = replace(GONE, attacks={"beam_search": 0, "fill": 1})
    by_both = replace(GONE, attacks={"beam_search": 1, "fill": 1})
    by_beam = replace(GONE, attacks={"beam_search": 1})

    def kind(old: Made, new: Made) -> str:
        return find_finding(compare_made([old], [new]), "text 1", "attacks").kind

    assert kind(GONE, by_fill) == "not-audited"
    assert kind(GONE, by_both) == "new"
    assert kind(by_fill, GONE) == "not-audited"
    assert kind(by_both, GONE) == "not-audited"
    assert kind(by_beam, replace(GONE, attacks={"beam_search": 0, "fill": 0})) == "gone"


def test_documents_that_were_cut_elsewhere_were_asked_for_other_text() -> None:
    def cut(used: int) -> r.CutDocuments:
        return r.CutDocuments(
            num_documents=1,
            num_given=2,
            longest_tokens=900,
            used_tokens=used,
            window="last",
            by="training",
            num_inside_completion=0,
        )

    short = make_row(2, near=1)
    long = replace(FOUND, num_tokens=900)
    old = make_side([long, short], cut=cut(128))
    new_documents = [replace(GONE, num_tokens=900), replace(short, near=0)]
    kinds = {
        used: [
            find_finding(diff_audits(old, make_side(new_documents, cut=cut(used))), text).kind
            for text in ("text 1", "text 2")
        ]
        for used in (128, 256)
    }
    assert kinds[128] == ["gone", "gone"]
    assert kinds[256] == ["not-audited", "gone"]


# -- equal texts, roles, reused ids ----------------------------------------------------------------


def test_equal_texts_count_once_and_any_yes_is_a_yes() -> None:
    copy = replace(FOUND, id="data.jsonl:7")
    diff = compare_made([FOUND, copy, *OTHERS], [FOUND, replace(GONE, id="b"), *OTHERS])
    assert find_finding(diff, "text 1").kind == "unchanged"
    assert (diff.old.num_texts, diff.old.num_findings) == (5, 2), "both copies"
    diff = compare_made([FOUND, replace(GONE, id="b")], [GONE, replace(GONE, id="b")])
    assert diff.count("gone", "extraction", "old") == len(diff.select("gone")) == 1
    # The copy that is extracted is named.
    diff = compare_made([GONE, replace(FOUND, id="b")], [replace(GONE, id="c"), FOUND])
    document = find_document(diff, "text 1")
    assert (document.kind, document.id) == ("unchanged", FOUND.id)
    # What was measured of one copy does not answer for other tokens of another one.
    cut = {"continuation_tokens": 40}
    halves = [replace(GONE, near=NOT_ASKED), replace(GONE, id="b", **cut)]
    assert find_finding(compare_made([FOUND], halves), "text 1").kind == "not-audited"
    # One of the copies was not attacked: the other one's answer stands.
    some = [GONE, replace(GONE, id="b", attacks={"beam_search": NOT_ASKED})]
    assert compare_made([FOUND], some).count("gone", "attacks", "old") == 1


def test_a_document_that_is_no_longer_trained_may_still_be_extracted() -> None:
    as_control = {"role": "control", "bucket": "control"}
    diff = compare_made([FOUND, *OTHERS], [replace(FOUND, **as_control), *OTHERS])
    document = find_document(diff, "text 1")
    assert (document.kind, document.bucket) == ("unchanged", "control")
    assert (diff.old.num_findings, diff.new.num_findings) == (1, 0)
    diff = compare_made([FOUND, *OTHERS], [replace(GONE, **as_control), *OTHERS])
    assert find_finding(diff, "text 1").kind == "gone"
    # Extracted and not trained in both audits: a finding of neither.
    control = replace(FOUND, **as_control)
    assert compare_made([control, *OTHERS], [control, *OTHERS]).documents == []


def test_a_text_that_changed_under_its_id_is_not_gone() -> None:
    old, new = Made(text="before", id="page-7", near=1), Made(text="after", id="page-7")
    finding = find_finding(compare_made([old], [new]), "before")
    assert (finding.kind, finding.reason) == ("not-audited", "not audited in the new audit")
    back = find_finding(compare_made([new], [old]), "before")
    assert (back.kind, back.reason) == ("not-audited", "not audited in the old audit")


# -- rates, notes ----------------------------------------------------------------------------------


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
    (paired, attacks) = compare_made(old, new).probes
    both = range(6, 20)
    assert (paired.num_texts, paired.num_old) == (14, sum(n < 12 for n in both))
    assert paired.num_new == sum(n % 3 == 0 for n in both)
    assert paired.difference is not None
    assert paired.difference.value == pytest.approx((paired.num_new - paired.num_old) / 14)
    assert attacks.difference is None
    assert attacks.missing_because is not None
    assert attacks.missing_because.startswith("no trained text was measured by both")


def test_copies_widen_the_interval_of_the_difference() -> None:
    def compare_in(clusters: int) -> float:
        old, new = (
            [make_row(n, near=float(n % 5 < most), cluster=n % clusters) for n in range(20)]
            for most in (3, 1)
        )
        difference = compare_made(old, new).probes[0].difference
        assert difference is not None
        assert difference.ci is not None
        assert difference.value == pytest.approx(-0.4)
        return difference.ci[1] - difference.ci[0]

    assert compare_in(5) > compare_in(20)


def test_notes_say_what_was_not_compared() -> None:
    notes = compare_made([FOUND], [GONE], created="2026-11-01T00:00:00Z", dtype="bf16").notes
    assert any("are they in the wrong order" in note for note in notes)
    assert any(note.startswith("Not compared: membership (no yes or no") for note in notes)
    sampled = r.BucketRow(bucket="r4", role="trained", num_documents=1, num_not_sampled=1200)
    side = make_side([GONE])
    tables = side.report.tables.model_copy(update={"buckets": (sampled,)})
    side = replace(side, report=side.report.model_copy(update={"tables": tables}))
    diff = diff_audits(make_side([FOUND]), side)
    assert "The new audit scored a sample: 1,200 documents were left out." in diff.notes
