"""What the page says first: colour, tiles, membership, and what to do next."""

import re
from pathlib import Path
from typing import Any

import pytest
import report_examples as examples
from page_checks import check_page, words_of

from memguard import records as r
from memguard.report.audit_facts import collect_facts
from memguard.report.html import render_report
from memguard.report.model_card import render_model_card


def make_report(verdict: r.Verdict, **changes: Any) -> r.AuditReport:
    return examples.make_report().model_copy(update={"verdict": verdict, **changes})


TOLD = examples.make_verdict().membership
AMBER = examples.make_verdict(level="extracted", reason="too-few")
GREY = examples.make_green(level="inconclusive", reason="too-few")


@pytest.mark.parametrize(
    ("verdict", "colours"),
    [
        (examples.make_verdict(), "red violet"),
        (AMBER, "amber violet"),
        (examples.make_green(), "green green"),
        (examples.make_green(membership=TOLD), "green violet"),
        (GREY, "grey green"),
    ],
)
def test_two_badges_each_with_its_own_colour(verdict: r.Verdict, colours: str) -> None:
    page = collect_facts(make_report(verdict))
    assert " ".join(badge.colour for badge in page.badges) == colours
    html = render_report(make_report(verdict))
    assert f'class="verdict colour-{colours.split()[0]}"' in html
    keep = any("Keep this page" in step for step in page.next_steps)
    assert keep == colours.startswith("green")


def test_the_same_words_on_page_card_and_in_the_terminal() -> None:
    verdict = examples.make_verdict()
    words = words_of(check_page(render_report(make_report(verdict))))
    card = render_model_card(make_report(verdict), run_name="x", base_model=None, config_yaml="")
    card = card.replace("\\", "")
    for text in (verdict.sentence, verdict.membership.sentence, verdict.scope):
        assert text in words
        assert text in card
    assert verdict.describe() == f"Memorized. {verdict.sentence}"
    assert verdict.describe() in card


def test_nothing_is_read_before_the_result() -> None:
    banner = r.Banner(level="warning", text="A long warning.")
    report = make_report(examples.make_verdict(), banners=[banner] * 3)
    words = words_of(check_page(render_report(report)))
    start = words.index("Extraction-risk report")
    before = words[start : words.index(report.verdict.sentence)]
    assert before == "Extraction-risk report Run 'quickstart-plain' Text: Memorized "
    assert words.index(report.verdict.sentence) < words.index("A long warning.")
    assert "Notes 3 warnings" in words


def test_tiles_count_documents_and_texts() -> None:
    copies = examples.make_counts(26, 39, copies=6)
    tiles = collect_facts(make_report(examples.make_verdict(trained=copies))).counts
    trained, control, base = tiles
    assert trained.value.replace("\u00a0", " ") == "26 of 39"
    assert trained.detail.replace("\u00a0", " ").startswith("20 of 33 texts; 66.7 %, 95 % CI ")
    assert control.value.replace("\u00a0", " ") == "0 of 40"
    assert (base.term, base.value.replace("\u00a0", " ")) == ("Base model", "0 of 40")
    none = make_report(examples.make_verdict(control=examples.make_counts(0, 0), base=None))
    # The base ran and gave nearly the same losses; and it did not run.
    for base, said in (("org/base", "not used"), (None, "not scored")):
        model = none.model.model_copy(update={"base": base})
        tiles = collect_facts(none.model_copy(update={"model": model})).counts
        assert [tile.value for tile in tiles[1:]] == ["none", said]


@pytest.mark.parametrize(
    ("verdict", "has_fix", "step"),
    [
        (examples.make_verdict(), True, "Train again with goldfish loss"),
        (
            examples.make_verdict(level="extracted", reason="no-control"),
            True,
            "Train again with 30 documents in 'data.control'",
        ),
        (AMBER, True, "are too few to blame training"),
        (
            examples.make_verdict(level="extracted", reason="other-kind"),
            True,
            "give 30 unseen documents of the same source",
        ),
        (
            examples.make_verdict(level="extracted", reason="base-too"),
            False,
            "Decide on each extracted document: the base model produces it too",
        ),
        (GREY, False, "copies count once (40 texts)"),
        (examples.make_green(membership=TOLD), False, "Keep the weights confidential, or retrain"),
    ],
    ids=["red", "no control", "too few", "other kind", "base too", "grey", "told apart"],
)
def test_next_steps_follow_the_verdict(
    verdict: r.Verdict, has_fix: bool, step: str, tmp_path: Path
) -> None:
    audit = tmp_path / "quickstart-plain" / "audit"
    audit.mkdir(parents=True)
    words = words_of(check_page(render_report(make_report(verdict), audit)))
    words = re.sub(r"\s+", " ", words)
    assert ("--fix" in words) == has_fix == verdict.may_be_fixed
    assert step.replace("'", "") in words


def test_a_finding_is_one_line() -> None:
    report = examples.make_report()
    table = collect_facts(report).find("findings").tables[0]
    assert table.one_line
    cells = [cell for row in table.rows for cell in (row.head, *row.cells)]
    assert not any(cell.detail or cell.note for cell in cells)
    assert all(finding.sentence in {cell.text for cell in cells} for finding in report.findings[:9])
    many = report.model_copy(update={"num_findings": 2345})
    words = words_of(check_page(render_report(many)))
    assert "The worst 31 are listed; 'findings.csv' has all." in words
