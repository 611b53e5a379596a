"""gate/report.html: the decision at the head of the audit's page, for whoever signs."""

import re
from typing import Any

import evidence_examples as evidence
import pytest
from gate_results import make_acceptance, make_judgement, make_mixed, make_result
from page_checks import check_page, words_of

from memguard import records as r
from memguard.pages.judgements import build_gate_head
from memguard.records.gate import GateResult
from memguard.report.html import render_report


def render(report: r.AuditReport, result: GateResult) -> str:
    return render_report(report, gate=build_gate_head(result, report, "policy.yaml"))


def read(report: r.AuditReport, result: GateResult) -> str:
    return words_of(check_page(render(report, result)))


@pytest.fixture(scope="module")
def full() -> r.AuditReport:
    return evidence.make_full_report()


def test_it_is_the_page_of_the_audit_after_the_decision(full: r.AuditReport) -> None:
    page = render(full, make_mixed())
    assert page == render(full.model_copy(deep=True), make_mixed())
    without = re.sub(
        r'<section class="verdict.*?</section>\n\n<section id="judged">.*?</section>\n\n',
        "",
        page,
        count=1,
        flags=re.DOTALL,
    )
    assert without != page
    renamed = without.replace("Decision of a gate, and extraction", "Extraction")
    assert renamed.replace(": gate and extraction", ": extraction") == render_report(full)


def test_gate_and_verdict_are_two_statements(full: r.AuditReport) -> None:
    shown = read(full, make_mixed())
    decision = "Gate: fail Do not release: 65 documents can be extracted, listed in findings.csv."
    counts = "7 judgements: 2 fail, 1 cannot be judged, 1 inconclusive, 3 pass"
    assert f"{decision} {counts}" in shown
    # The head names ten documents, and where the others are.
    named = [finding.id for finding in full.findings[:10]]
    assert f"{', '.join(named)}, and " in shown
    assert "Verdict of the audit: Memorized. 40 of 40 documents" in shown
    assert "Policy policy.yaml" in shown
    assert "Memorized 6 of 40 documents trained 64 times were extracted" in shown
    assert "The gate passes, but" not in shown
    passed = make_result(make_judgement("pass"))
    assert "The gate passes, but the verdict of the audit is 'Memorized'" in read(full, passed)
    colours = re.findall(r'class="verdict colour-(\w+)"', render(full, passed))
    assert colours == ["green", "red", "violet"]


def test_what_decides_comes_first_with_its_reason(full: r.AuditReport) -> None:
    shown = read(full, make_mixed())
    names = ("near_verbatim on r16", "near_verbatm on trained", "attack on r4", "epsilon")
    places = [shown.index(f"{name} at most") for name in names]
    assert places == sorted(places)
    assert "The audit has no metric 'near_verbatm'; did you mean 'near_verbatim'? Cannot" in shown
    assert "not corrected for the number of rules" in shown
    many = make_result(*(make_judgement("fail", rule=n, name=f"rule {n}") for n in range(1, 76)))
    assert "rule 75" in read(full, many)
    hidden = make_judgement("cannot-be-judged", sentence="No room in /home/ada/cache.")
    assert "/home/ada" not in read(full, make_result(hidden))


def test_who_accepted_what(full: r.AuditReport) -> None:
    accepted = [
        make_acceptance("ab" * 32),
        make_acceptance("cd" * 32, "expired", until="2026-10-01"),
    ]
    shown = read(full, make_result(accepted=accepted))
    assert "cdcdcdcdcdcd… expired: counts again Ada Lovelace 2026-10-01 public text" in shown
    assert shown.index("cdcdcdcdcdcd") < shown.index("abababababab… accepted Ada")
    assert "None was accepted by a person." in read(full, make_result())


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("internal", "Release internal Attackers are the people who can reach the model."),
        ("api", "Release API Attackers send queries"),
        ("open-weights", "Release open weights Anyone can query the model without limit"),
        (None, "Read the results as if anyone had the weights."),
    ],
)
def test_what_depends_on_the_release(release: Any, words: str, full: r.AuditReport) -> None:
    assert words in read(full, make_result(release=release))


def test_no_claim_about_law_and_what_no_probe_tests(full: r.AuditReport) -> None:
    for level in ("memorized", "none-found"):
        shown = read(full, make_result(make_judgement("pass"), level=level, release=None)).lower()
        for word in ("complian", "compliant", "anonym", "lawful", "gdpr", "certif"):
            assert word not in shown, word
        assert "no probe of memguard tests attribute inference" in shown
