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
    TODAY,
    Made,
    compare_made,
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
from memguard.gate.diff_result import diff_audits
from memguard.gate.diff_sides import load_side
from memguard.records.diff import KINDS
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
        return "new" if before == 0 else "new-document" if old is None else "newly-audited"
    return "fixed" if after == 0 else "no-longer-audited"


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
        f"{hash_text(text, 'key')}:{probe}": kind
        for text in {**old, **new}
        for probe in ("extraction", "attacks")
        if (kind := tell(old.get(text), new.get(text), probe)) is not None
    }
    assert {finding.finding: finding.kind for finding in diff.findings} == expected
    assert len(diff.findings) == len(expected)
    order = [list(KINDS).index(finding.kind) for finding in diff.findings]
    assert order == sorted(order)
    for kind in KINDS:
        assert diff.count(kind) == list(expected.values()).count(kind)
    assert (diff.old.num_only_here, diff.new.num_only_here) == (10, 10)
    assert diff.num_texts_in_both == len(old) - 10
    # The ids are those of the new audit, where it has the text.
    ids = {hash_text(made.text, "key"): made.id for made in [*audits[0], *audits[1]]}
    assert all(finding.id == ids[str(finding.finding)[:64]] for finding in diff.findings)


@settings(max_examples=25)
@given(two_audits(), st.integers(1, 10))
def test_with_another_key_nothing_is_fixed_and_line_numbers_match_nothing(
    audits: tuple[list[Made], list[Made]], every: int
) -> None:
    # Every so many texts have an id of the user's own, whose text may have changed since.
    old, new = (
        [
            replace(made, id=f"own-{made.text}", has_own_id=True)
            if int(made.text.split()[1]) % every == 0
            else made
            for made in audit
        ]
        for audit in audits
    )
    if not all(any(made.has_own_id for made in audit) for audit in (old, new)):
        with pytest.raises(RecordError, match="no document of the two audits can be matched"):
            compare_made(old, new, key="another")
        return
    diff = compare_made(old, new, key="another")
    assert diff.matched_by == "id"
    assert diff.count("fixed") == 0
    assert all(paired.difference is None for paired in diff.paired)
    by_id = ({made.id: made for made in audit if made.has_own_id} for audit in (old, new))
    before, after = by_id
    expected = sorted(
        {"fixed": "no-longer-found"}.get(kind, kind)
        for name in {**before, **after}
        for probe in ("extraction", "attacks")
        if (kind := tell(before.get(name), after.get(name), probe)) is not None
    )
    alone = sum(
        made.extracted[probe] == 1
        for audit in (old, new)
        for made in audit
        for probe in made.extracted
        if not made.has_own_id
    )
    assert sorted(f.kind for f in diff.findings if f.kind != "unmatched") == expected
    assert diff.count("unmatched") == alone
    assert diff.old.num_unmatched == len(old) - len(before)
    assert diff.old.num_only_here == len(before.keys() - after.keys())
    assert diff.new.num_only_here == len(after.keys() - before.keys())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("one", "two"), "used different identity keys"),
        (("one", None), "not both audits used an identity key"),
        ((None, None), "not both audits used an identity key"),
    ],
)
def test_without_key_and_own_ids_nothing_can_be_matched(
    keys: tuple[str | None, str | None], said: str
) -> None:
    sides = [make_side([make_row(1, verbatim=1, near=1)], key=key) for key in keys]
    with pytest.raises(RecordError, match=said):
        diff_audits(*sides, today=TODAY)


def test_without_any_key_own_ids_match_and_findings_have_no_id() -> None:
    found = Made(text="a", id="a", has_own_id=True, near=1)
    sides = [make_side([made], key=None) for made in (found, replace(found, near=0))]
    diff = diff_audits(*sides, today=TODAY)
    (finding,) = diff.findings
    assert (finding.kind, finding.finding, finding.id) == ("no-longer-found", None, "a")


def test_an_audit_is_read_as_it_was_written(tmp_path: Path) -> None:
    documents = [
        make_row(1, verbatim=1, near=NOT_ASKED, cluster=3),
        make_row(2, attacks={"fill": 1}, num_tokens=99, has_own_id=True, role="control"),
    ]
    read = load_side(save_audit(tmp_path / "audit", documents))
    made = make_side(documents)
    assert read.report == made.report
    assert read.report_sha256 == sum_file(tmp_path / "audit" / "report.json").sha256
    assert read.windows_N3.tolist() == made.windows_N3.tolist()
    assert repr(read.parts) == repr(made.parts)
    assert read.asked == made.asked
    assert repr(read.answers) == repr(made.answers)


# -- when an answer "no" is no answer to the same question -----------------------------------------


def change_probe(name: str, **changes: Any) -> list[dict[str, Any]]:
    return [{**probe, **changes} if probe["name"] == name else probe for probe in PROBES]


def test_what_both_asked_alike_is_fixed() -> None:
    diff = compare_made([FOUND, *OTHERS], [GONE, *OTHERS])
    assert [(one.kind, one.probe) for one in diff.findings] == [
        ("fixed", "extraction"),
        ("fixed", "attacks"),
    ]


@pytest.mark.parametrize(
    ("new", "changes", "kinds", "reason"),
    [
        (replace(GONE, near=NOT_ASKED), {}, "lost fixed", "not measured in the new .*near_verb"),
        (replace(GONE, attacks={"beam_search": NOT_ASKED}), {}, "fixed lost", "not asked in the"),
        (replace(GONE, attacks={"sampling": 0}), {}, "fixed lost", "not measured in.*beam_search"),
        (replace(GONE, continuation_tokens=40), {}, "lost lost", "other tokens were asked"),
        (replace(GONE, prefix_tokens=50), {}, "lost lost", "other tokens were asked"),
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
    named = {"lost": "no-longer-audited", "fixed": "fixed"}
    diff = compare_made([FOUND, *OTHERS], [new, *OTHERS], **changes)
    told = [find_finding(diff, "text 1", probe) for probe in ("extraction", "attacks")]
    assert [finding.kind for finding in told] == [named[kind] for kind in kinds.split()]
    reasons = " ".join(finding.reason or "" for finding in told)
    assert re.search(reason, reasons), reasons
    # The other way round, what was not asked before is not new.
    back = diff_audits(
        make_side([new, *OTHERS], **changes), make_side([FOUND, *OTHERS]), today=TODAY
    )
    named = {"lost": "newly-audited", "fixed": "new"}
    told = [find_finding(back, "text 1", probe) for probe in ("extraction", "attacks")]
    expected = [named[kind] for kind in kinds.split()]
    if math.isnan(new.near):
        expected[0] = "new"  # Verbatim was asked before, and is found now.
    assert [finding.kind for finding in told] == expected


def test_a_probe_that_one_audit_did_not_run_is_told() -> None:
    old, new = make_side([FOUND, *OTHERS]), make_side([GONE, *OTHERS])
    del new.answers.extracted["attacks"]  # type: ignore[attr-defined]
    runs = [
        run.model_copy(update={"num_documents": None, "reason_not_run": "the GPU is too small"})
        for run in new.report.probe_runs
    ]
    new = replace(new, report=new.report.model_copy(update={"probe_runs": runs}))
    diff = diff_audits(old, new, today=TODAY)
    lost = find_finding(diff, "text 1", "attacks")
    assert lost.kind == "no-longer-audited"
    assert lost.reason == "not run in the new audit: the GPU is too small"
    assert "Only the old audit ran attacks (in the new one the GPU is too small)." in diff.notes
    back = diff_audits(new, old, today=TODAY)
    assert find_finding(back, "text 1", "attacks").kind == "newly-audited"


def test_an_attack_that_only_one_audit_can_try() -> None:
    # Only a goldfish has a mask to fill: the attack is tried where there is one.
    by_fill = replace(GONE, attacks={"beam_search": 0, "fill": 1})
    by_both = replace(GONE, attacks={"beam_search": 1, "fill": 1})
    by_beam = replace(GONE, attacks={"beam_search": 1})

    def kind(old: Made, new: Made) -> str:
        return find_finding(compare_made([old], [new]), "text 1", "attacks").kind

    assert kind(GONE, by_fill) == "newly-audited"
    assert kind(GONE, by_both) == "new"
    assert kind(by_fill, GONE) == "no-longer-audited"
    assert kind(by_both, GONE) == "no-longer-audited"
    assert kind(by_beam, replace(GONE, attacks={"beam_search": 0, "fill": 0})) == "fixed"


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
            find_finding(
                diff_audits(old, make_side(new_documents, cut=cut(used)), today=TODAY), text
            ).kind
            for text in ("text 1", "text 2")
        ]
        for used in (128, 256)
    }
    assert kinds[128] == ["fixed", "fixed"]
    assert kinds[256] == ["no-longer-audited", "fixed"]


# -- equal texts, roles, reused ids ----------------------------------------------------------------


def test_equal_texts_count_once_and_any_yes_is_a_yes() -> None:
    copy = replace(FOUND, id="data.jsonl:7")
    diff = compare_made([FOUND, copy, *OTHERS], [FOUND, replace(GONE, id="b"), *OTHERS])
    assert find_finding(diff, "text 1").kind == "unchanged"
    assert find_finding(diff, "text 1").num_copies == 2
    assert (diff.old.num_documents, diff.old.num_texts, diff.old.num_findings) == (6, 5, 2)
    diff = compare_made([FOUND, replace(GONE, id="b")], [GONE, replace(GONE, id="b")])
    assert diff.count("fixed", "extraction") == 1
    # The copy that is extracted is named.
    diff = compare_made([GONE, replace(FOUND, id="b")], [replace(GONE, id="c"), FOUND])
    assert (find_finding(diff, "text 1").kind, find_finding(diff, "text 1").id) == (
        "unchanged",
        FOUND.id,
    )
    # What was measured of one copy does not answer for other tokens of another one.
    cut = {"continuation_tokens": 40}
    halves = [replace(GONE, near=NOT_ASKED), replace(GONE, id="b", **cut)]
    assert find_finding(compare_made([FOUND], halves), "text 1").kind == "no-longer-audited"
    # One of the copies was not attacked: the other one's answer stands.
    some = [GONE, replace(GONE, id="b", attacks={"beam_search": NOT_ASKED})]
    assert compare_made([FOUND], some).count("fixed", "attacks") == 1


def test_a_document_that_is_no_longer_trained_may_still_be_extracted() -> None:
    as_control = {"role": "control", "bucket": "control"}
    diff = compare_made([FOUND, *OTHERS], [replace(FOUND, **as_control), *OTHERS])
    finding = find_finding(diff, "text 1")
    assert (finding.kind, finding.bucket) == ("unchanged", "control")
    assert finding.reason is not None
    assert "not trained in the new audit (role control)" in finding.reason
    assert (diff.old.num_findings, diff.new.num_findings) == (2, 0)
    diff = compare_made([FOUND, *OTHERS], [replace(GONE, **as_control), *OTHERS])
    assert find_finding(diff, "text 1").kind == "fixed"
    # Extracted and not trained in both audits: a finding of neither.
    control = replace(FOUND, **as_control)
    assert compare_made([control, *OTHERS], [control, *OTHERS]).findings == []


def test_a_text_that_changed_under_its_id_is_not_fixed() -> None:
    old = Made(text="before", id="page-7", has_own_id=True, near=1)
    new = Made(text="after", id="page-7", has_own_id=True)
    diff = compare_made([old], [new])
    finding = find_finding(diff, "before")
    assert finding.kind == "no-longer-audited"
    assert finding.reason == "the new audit has another text under this id"
    back = find_finding(compare_made([new], [old]), "before")
    assert (back.kind, back.reason) == (
        "new-document",
        "the old audit has another text under this id",
    )
