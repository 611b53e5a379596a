"""summary.html: what a person who signs sees; one printed page, and no claim about law."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import evidence_examples as evidence
import pytest
import report_examples as examples
from browser import AXE_PACKAGE, CHROMIUM, Browser, find_axe
from gate_results import make_acceptance, make_judgement, make_mixed, make_result
from page_checks import check_page, words_of
from result_examples import change_rows, change_tables

from memguard import records as r
from memguard.records.gate import GateResult
from memguard.report.attack_classes import CLASSES, NOT_READ, find_worst
from memguard.report.release_page import render_release_page
from memguard.report.release_sections import NO_PROBE

pytestmark = pytest.mark.slow

FOLDERS = "customer-support-tickets-of-the-northern-region/" * 4


def read(report: r.AuditReport, result: GateResult) -> str:
    return words_of(check_page(render_release_page(report, result)))


@pytest.fixture(scope="module")
def full() -> r.AuditReport:
    return evidence.make_full_report()


def test_the_page_is_well_formed_and_the_same_for_equal_inputs(full: r.AuditReport) -> None:
    page = render_release_page(full, make_mixed())
    parser = check_page(page)
    assert page == render_release_page(full.model_copy(deep=True), make_mixed())
    tags = [tag for tag, _ in parser.tags]
    assert [tags.count(tag) for tag in ("header", "main", "footer", "h1")] == [1, 1, 1, 1]
    assert tags.count("h2") == tags.count("section") == 10
    labels = {a["aria-labelledby"] for tag, a in parser.tags if tag == "section"}
    assert labels == {a["id"] for tag, a in parser.tags if tag == "h2"}


def test_gate_and_verdict_are_two_statements(full: r.AuditReport) -> None:
    shown = read(full, make_mixed())
    assert "Gate: fail 7 judgements: 2 fail, 1 cannot be judged, 1 inconclusive, 3 pass" in shown
    assert "Verdict: memorized 6 of 40 documents trained 64 times were extracted" in shown
    assert "The gate passes, but" not in shown
    passed = read(full, make_result(make_judgement("pass")))
    assert "Gate: pass" in passed
    assert "The gate passes, but the verdict of the audit is 'Memorized'" in passed
    page = render_release_page(full, make_result(make_judgement("pass")))
    assert re.findall(r'class="verdict colour-(\w+)"', page) == ["green", "red"]


def test_what_was_trained_and_asked(full: r.AuditReport) -> None:
    shown = read(full, make_mixed())
    for words in (
        "Model quickstart-k4 1,053,440 parameters",
        "Base quickstart-base",
        "Mitigations goldfish (k 4, context_width 13, mode hash)",
        "Training 420 steps, 641,772 supervised tokens",
        "Documents 120 trained ones audited, in 3 groups",
        "Probes extraction 160, grid 160, sampling 160",
        "canaries 32 canaries",
        "Asked for 50 tokens, given the whole true text before",
        "Control 40 documents never trained",
    ):
        assert words in shown


def test_a_model_that_memguard_did_not_train(full: r.AuditReport) -> None:
    adapter = r.AdapterIdentity(
        description="LoRA, r=8, alpha=16",
        weights_sha256="ab" * 32,
        base="org/base",
        base_weights_sha256="cd" * 32,
    )
    model = full.model.model_copy(update={"base": None, "adapter": adapter})
    report = full.model_copy(update={"training": None, "model": model, "run": None})
    buckets = [bucket for bucket in report.tables.buckets if bucket.role != "control"]
    shown = read(change_tables(report, buckets=buckets), make_mixed())
    assert "Training not by memguard: steps and mitigations are not known" in shown
    assert "Base org/base Adapter LoRA, r=8, alpha=16" in shown
    assert "Control none: nothing shows what chance explains" in shown
    assert "There was no control of unseen documents." in shown
    assert "The base model was not scored." in shown


def test_found_is_shown_beside_the_same_method_on_the_control(full: r.AuditReport) -> None:
    shown = read(full, make_mixed())
    # Of r64, 6 of 40 near-verbatim, 38 of 40 by the best attack, 40 of 40 within the queries.
    assert (
        "r64 within 1,000,000 queries 40 of 40 (100 %), 91.2–100 % 0 of 40 (0 %), 0–8.8 %" in shown
    )
    assert (
        "r4 best attack 1 of 40 (2.5 %), 0.06–13.2 % 0 of 40 (0 %), 0–8.8 % not measured" in shown
    )


def test_a_trained_group_without_a_rate_is_said(full: r.AuditReport) -> None:
    unmeasured = change_rows(full, lambda row: None if row.bucket == "r16" else row)
    words = "1 trained group has no rate: nothing was measured of it."
    assert words in read(unmeasured, make_mixed())
    assert words not in read(full, make_mixed())
    nothing = change_rows(full, lambda row: None)
    assert "No trained group has an extraction rate" in read(nothing, make_mixed())


def test_what_was_not_tested(full: r.AuditReport) -> None:
    runs = [*full.probe_runs[:2], examples.make_probe_run("attacks", None)]
    runs[-1] = runs[-1].model_copy(update={"reason_not_run": "no room in /home/ada/cache"})
    report = change_rows(
        full.model_copy(update={"probe_runs": runs}),
        lambda row: None if row.probe in ("attacks", "sampling") else row,
    )
    shown = read(report, make_mixed())
    assert "Probes that did not run: attacks (no room in (local path))." in shown
    assert NO_PROBE in shown
    assert "best attack: not tested (no room in (local path))" in shown
    assert "within 1,000,000 queries: not tested (the suite has no probe 'sampling')" in shown


def test_who_accepted_what(full: r.AuditReport) -> None:
    accepted = [
        make_acceptance("ab" * 32 + ":extraction"),
        make_acceptance("cd" * 32 + ":attacks", "expired", until="2026-10-01"),
    ]
    shown = read(full, make_result(accepted=accepted))
    assert (
        "cdcdcdcdcdcd…:attacks expired: counts again Ada Lovelace 2026-10-01 public text" in shown
    )
    assert shown.index("cdcdcdcdcdcd") < shown.index("abababababab…:extraction accepted Ada")
    assert "None was accepted by a person." in read(full, make_result())


@pytest.mark.parametrize(
    ("release", "heading", "words"),
    [
        ("internal", "Release: internal", "which people with the weights can try"),
        ("api", "Release: API", "which an API does not offer"),
        ("open-weights", "Release: open weights", "which this release lets anyone try"),
        (None, "Release: not declared", "which the release may let anyone try"),
    ],
)
def test_what_depends_on_the_release(
    release: Any, heading: str, words: str, full: r.AuditReport
) -> None:
    shown = read(full, make_result(release=release))
    assert heading in shown
    assert f"Not tested: extraction from weights or gradients, {words}." in shown


def test_attack_classes_quote_what_was_read_and_name_what_was_not(full: r.AuditReport) -> None:
    shown = read(full, make_mixed())
    for attack in CLASSES:
        assert f"{attack.name} “{attack.quote}” {attack.source.short}" in shown
        assert attack.source.address in shown
    for place in NOT_READ:
        assert place in shown
    assert "The table is incomplete" in shown
    assert "near-verbatim: 6 of 40 of 'r64', 95 % CI 5.7–29.8 %" in shown


def test_the_worst_group_has_the_highest_upper_bound(full: r.AuditReport) -> None:
    rows = full.tables.select("extraction", "near_verbatim", model="trained", against=None)
    trained = [row for row in rows if row.bucket in ("r4", "r16", "r64") and row.high is not None]
    worst = find_worst("near_verbatim", full.tables)
    assert worst is not None
    assert worst.high == max(row.high or 0 for row in trained)
    assert find_worst("unknown", full.tables) is None
    # A rate without an interval is bounded by nothing.
    open_ended = change_rows(
        full,
        lambda row: (
            replace(row, low=None, high=None, interval="")
            if (row.metric, row.bucket, row.model) == ("near_verbatim", "r4", "trained")
            else row
        ),
    )
    worst = find_worst("near_verbatim", open_ended.tables)
    assert worst is not None
    assert worst.bucket == "r4"


def test_no_claim_about_law_and_no_document(full: r.AuditReport) -> None:
    for level in ("memorized", "none-found"):
        result = make_result(make_judgement("pass"), level=level, release=None)
        shown = read(full, result).lower()
        for word in ("complian", "compliant", "anonym", "safe", "lawful", "gdpr", "certif"):
            assert word not in shown, word
    page = render_release_page(full, make_mixed())
    for finding in full.findings:
        assert finding.id not in page
        assert (finding.text_hmac or "") not in page


def make_hard(name: str, outcome: Any = "pass") -> tuple[r.AuditReport, GateResult]:
    """Return an audit of twelve groups and a result of 20 judgements with this long name."""
    report = evidence.make_full_report()
    more = range(100, 109)
    names = {f"r{k}": f"{name}{k}" for k in (4, 16, 64, *more)}
    rows = [row for k in more for row in examples.list_scores(k, 3, 5 + k % 7, 0.5)]
    buckets = [*report.tables.buckets, *(examples.make_bucket(k) for k in more)]
    report = change_tables(
        report,
        results=[
            replace(
                row,
                bucket=names.get(row.bucket, row.bucket),
                **({"num_clusters": 39, "num_matched_clusters": 39} if row.num_matched else {}),
            )
            for row in [*report.tables.results, *rows]
        ],
        buckets=[
            replace(b, bucket=names.get(b.bucket, b.bucket), num_too_short=12345) for b in buckets
        ],
    )
    adapter = r.AdapterIdentity(
        description=name, weights_sha256="a" * 64, base=name, base_weights_sha256="b" * 64
    )
    assert report.training is not None
    settings = [{"name": f"{name}{n}", "k": 4, "mode": name} for n in range(9)]
    not_run = examples.make_probe_run(name, None).model_copy(update={"reason_not_run": name * 2})
    membership = report.verdict.membership.model_copy(update={"sentence": name * 2})
    report = report.model_copy(
        update={
            "model": report.model.model_copy(
                update={"name": name, "base": name, "adapter": adapter}
            ),
            "training": report.training.model_copy(
                update={"mitigations": settings, "epsilon": 3.2, "delta": 1e-5}
            ),
            "probe_runs": [*report.probe_runs[:3], *[not_run] * 6],
            "verdict": examples.make_verdict(sentence=name * 3, membership=membership),
        }
    )
    accepted = [
        make_acceptance(f"{n}{name}:{name}", "expired", by=name, reason=name * 2, until=name)
        for n in range(9)
    ]
    judgements = [
        make_judgement(outcome, n, name=f"{n}{name} at most 10 %", rule=n + 1) for n in range(20)
    ]
    return report, make_result(*judgements, accepted=accepted, audit=name, release=None)


def test_long_lists_are_cut_and_the_rest_is_counted() -> None:
    shown = read(*make_hard(FOLDERS))
    assert "And 15 more in gate.json." in shown
    assert "And 9 more groups in report.json, none with a higher upper bound." in shown
    assert "and 4 more in report.json" in shown
    assert "And 6 more in gate.json." in shown


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"needs Debian's chromium ({CHROMIUM})")
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.mark.browser
@pytest.mark.parametrize("name", [FOLDERS, "漢" * 300, "W" * 300], ids=["words", "wide", "widest"])
def test_the_printed_page_is_one_sheet(name: str, chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "summary.html"
    path.write_text(render_release_page(*make_hard(name)), encoding="utf-8")
    page = chromium.open(path)
    page.check_quiet()
    # Each page has a box of its own; A4 in points, to within a pixel.
    (box,) = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", page.print_pdf())
    assert [float(side) for side in box] == pytest.approx([595.3, 841.9], abs=1)


@pytest.mark.browser
@pytest.mark.skipif(find_axe() is None, reason=f"needs {AXE_PACKAGE}")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(
    dark: bool, full: r.AuditReport, chromium: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "summary.html"
    accepted = [make_acceptance("ab:extraction", "expired")]
    result = make_mixed().model_copy(update={"accepted": accepted})
    path.write_text(render_release_page(full, result), encoding="utf-8")
    assert chromium.open(path, dark=dark).list_violations() == []
