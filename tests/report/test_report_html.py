"""Pages: complete, offline, deterministic, and unmoved by hostile records."""

import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import report_examples as examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_checks import check_page, words_of

from memguard import records as r
from memguard.report import render_comparison, render_report
from memguard.report.comparison_figures import build_trends
from memguard.report.page import LineChart
from memguard.report.text import clean_text

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = [
    "<script>alert(1)</script>",
    '"></style></title><img src=x onerror=alert(1)>',
    "\x00\x07\x1b[2J",
    "\u202ereversed\u2066\u2069\u200f",
    "$x^2$ $\\frac{1}{",
    "{{ 7 * 7 }} {% raw %}",
    "]]> <!-- &amp; -->",
    "語 עברית 🜁",
]


def make_hostile(record: Any, text: str, *, key: str = "") -> Any:
    """Put ``text`` into every free string of a record's JSON."""
    fixed = {"schema", "status", "role", "level", "metric", "severity"}
    if isinstance(record, dict):
        # Keys that are counts of repetitions stay; free keys change too.
        return {
            name if key != "environment" else f"{text}{name}": make_hostile(value, text, key=name)
            for name, value in record.items()
        }
    if isinstance(record, list):
        return [make_hostile(item, text, key=key) for item in record]
    return text if isinstance(record, str) and key not in fixed else record


@pytest.mark.parametrize("goldfish", [False, True])
def test_audit_page_is_a_clean_offline_page(goldfish: bool) -> None:
    check_page(render_report(examples.make_report(goldfish)))


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_comparison_page_is_a_clean_offline_page(num_seeds: int) -> None:
    check_page(render_comparison(examples.make_comparison(num_seeds)))


def test_same_record_same_bytes() -> None:
    report, comparison = examples.make_report(), examples.make_comparison()
    first = render_report(report), render_comparison(comparison)
    assert (render_report(report), render_comparison(comparison)) == first


def run_elsewhere(code: str, *path: Path, **environment: str) -> str:
    """Run Python in a fresh process that finds memguard and this folder after ``path``."""
    places = (*path, ROOT, Path(__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, places))
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        check=True,
    )
    return process.stdout.decode()


def test_same_bytes_in_another_process() -> None:
    code = """
        import hashlib
        import report_examples as examples
        from memguard.report import render_comparison, render_report
        page = render_report(examples.make_report())
        page += render_comparison(examples.make_comparison())
        print(hashlib.sha256(page.encode()).hexdigest())
    """
    page = render_report(examples.make_report()) + render_comparison(examples.make_comparison())
    there = run_elsewhere(code, PYTHONHASHSEED="1").strip()
    assert there == hashlib.sha256(page.encode()).hexdigest()


def test_all_numbers_of_an_audit_appear() -> None:
    report = examples.make_report()
    words = words_of(check_page(render_report(report)))
    for bucket in report.buckets:
        for rate in (bucket.model.verbatim, bucket.model.near_verbatim):
            low, high = rate.ci or (0, 0)
            assert f"{rate.num_matched} of {rate.num_documents}" in words
            if low > 0.01 and high < 0.9995:
                share = f"{100 * (rate.rate or 0):.1f} % ({100 * low:.1f}–{100 * high:.1f} %)"
                assert share in words
        accuracy = bucket.model.mean_token_accuracy
        assert accuracy is not None
        assert f"{accuracy.value:.3f}" in words
        assert f"{bucket.mean_extraction_strength:.3f}" in words
        assert f"{bucket.model.median_first_divergence:.1f}" in words
        logprob = bucket.model.mean_logprob
        assert logprob is not None
        assert f"{logprob.value:.3f}".replace("-0.000", "0.000") in words
        difference = bucket.near_verbatim_minus_control
        assert difference is None or f"{100 * difference.value:.1f} pp" in words
    for number in ("0.713", "0.655", "0.934", "0.957", "1,053,440", "853,440", "4.372", "5.012"):
        assert number in words
    for finding in report.findings:
        assert finding.id in words
        assert f"{finding.logprob:.2f}" in words
        assert (finding.text_hmac or "")[:12] in words
    for text in (report.method.command, report.verdict.sentence, report.banners[0].text):
        assert text in words
    for name, value in report.environment.items():
        assert name in words
        assert value in words
    assert report.model.weights_sha256 in words
    assert "12.8 % below the base model's 5.012" in words
    assert "0 of 40 near-verbatim" in words
    assert "below 7.2 % with 95 % confidence" in words


def test_all_numbers_of_a_comparison_appear() -> None:
    comparison = examples.make_comparison()
    words = words_of(check_page(render_comparison(comparison)))
    for setting in comparison.settings:
        assert setting.name in words
        assert setting.run in words
        assert f"{setting.utility.heldout_nll:.3f}" in words
        difference = setting.utility.heldout_nll - setting.utility.base_heldout_nll
        assert f"{difference:.3f}" in words
        assert f"{setting.cost.num_supervised_tokens:,}" in words
        for cell in setting.extraction.values():
            assert f"{cell.num_matched} of {cell.num_documents}" in words
            assert f"{cell.near_verbatim.num_matched} of {cell.num_documents}" in words
            accuracy = cell.mean_token_accuracy
            assert accuracy == 1 or f"{100 * (accuracy or 0):.1f} %" in words
    for text in ("+4.8 %", "+11.0 %", "+14.6 %", "24.8 %", "49.8 %", comparison.command):
        assert text in words
    assert "One dropped token breaks a verbatim match" in words


def test_wording_stays_sober() -> None:
    quiet = examples.make_report().model_copy(
        update={
            "verdict": r.Verdict(
                level="not-above-control",
                metric="near_verbatim",
                bucket="r4",
                sentence="0 of 40; control 0 of 40.",
            ),
            "findings": [],
            "num_findings": 0,
        }
    )
    pages = (render_report(quiet), render_comparison(examples.make_comparison()))
    for words in map(str.lower, pages):
        for claim in ("is safe", "no memoriz", "compliant", "no risk", "risk-free", "gdpr"):
            assert claim not in words


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text: str) -> None:
    report = r.AuditReport.model_validate(
        make_hostile(examples.make_report().model_dump(by_alias=True, mode="json"), text)
    )
    comparison = r.Comparison.model_validate(
        make_hostile(examples.make_comparison().model_dump(by_alias=True, mode="json"), text)
    )
    for page in (render_report(report), render_comparison(comparison)):
        assert " ".join(clean_text(text).split()) in words_of(check_page(page))
        assert "\x00" not in page
        assert "\u202e" not in page
        for tag in ("<script", "<img", "onerror=alert(1)>"):
            assert tag not in page


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=40))
def test_any_text_gives_a_clean_page(text: str) -> None:
    report = r.AuditReport.model_validate(
        make_hostile(examples.make_report().model_dump(by_alias=True, mode="json"), text)
    )
    check_page(render_report(report))


def test_lone_surrogates_are_spelled_out() -> None:
    # Pydantic refuses them at the door; a record changed in memory may still hold one.
    report = examples.make_report().model_copy(update={"run": "a\ud800b"})
    assert "a[U+D800]b" in render_report(report)


def test_lines_of_a_megabyte_are_cut() -> None:
    line = "<" * 1_000_000
    report = make_hostile(examples.make_report().model_dump(by_alias=True, mode="json"), line)
    comparison = make_hostile(
        examples.make_comparison().model_dump(by_alias=True, mode="json"), line
    )
    page = render_report(r.AuditReport.model_validate(report))
    check_page(page)
    # One string of 700 in each finding, four bytes a bracket, and the charts.
    assert len(page) < 500_000
    page = render_comparison(r.Comparison.model_validate(comparison))
    check_page(page)
    assert len(page) < 500_000


def test_a_thousand_findings_render() -> None:
    findings = [examples.make_finding(number) for number in range(1000)]
    report = examples.make_report().model_copy(update={"findings": findings, "num_findings": 2345})
    page = render_report(report)
    words = words_of(check_page(page))
    assert "The first 1,000 of 2,345 findings" in words
    assert findings[-1].id in words
    assert len(page) < 2_000_000


def make_empty_scores() -> r.ModelScores:
    return r.ModelScores(
        verbatim=examples.make_rate(0, 0),
        near_verbatim=examples.make_rate(0, 0),
        mean_token_accuracy=None,
        median_first_divergence=None,
        mean_logprob=None,
    )


def test_a_bare_record_renders() -> None:
    """No control, no base, no training, no membership, no documents, nothing known."""
    full = examples.make_report()
    bucket = full.buckets[1].model_copy(
        update={
            "num_repetitions": None,
            "num_documents": 0,
            "model": make_empty_scores(),
            "base": None,
            "mean_extraction_strength": None,
            "mean_type_token_ratio": None,
            "mean_argmax_type_token_ratio": None,
            "verbatim_minus_control": None,
            "near_verbatim_minus_control": None,
        }
    )
    report = full.model_copy(
        update={
            "status": "partial",
            "run": None,
            "training": None,
            "buckets": [bucket],
            "dose_response": False,
            "membership": [],
            "findings": [],
            "num_findings": 0,
            "banners": [],
            "environment": {},
            "model": full.model.model_copy(update={"base": None, "base_weights_sha256": None}),
            "data": full.data.model_copy(
                update={"sources": [], "num_clusters": None, "overlap_with_control": None}
            ),
            "method": full.method.model_copy(update={"probes": [], "command": ""}),
            "verdict": full.verdict.model_copy(update={"level": "no-control", "bucket": "gone"}),
        }
    )
    words = words_of(check_page(render_report(report)))
    assert "No chart is shown: how often each document was really trained is not known" in words
    assert "No membership score" in words
    assert "No base model was scored" in words
    assert "memguard did not train this model" in words
    assert "This audit ended before all documents were scored" in words
    check_page(render_report(report.model_copy(update={"buckets": []})))


def test_one_dose_gives_no_chart_but_a_reason() -> None:
    full = examples.make_report()
    report = full.model_copy(update={"buckets": [full.buckets[2]]})
    parser = check_page(render_report(report))
    assert not [a for tag, a in parser.tags if a.get("class") == "chart"]
    assert "needs at least two different numbers of repetitions" in words_of(parser)


def test_limits_follow_the_record() -> None:
    full = examples.make_report()
    sampled = [b.model_copy(update={"num_not_sampled": 60}) for b in full.buckets]
    method = full.method.model_copy(update={"prefix_tokens": 32, "dtype": "bf16"})
    report = full.model_copy(update={"buckets": sampled, "method": method})
    words = words_of(check_page(render_report(report)))
    assert "A random sample was scored: 160 of 400 documents" in words
    assert "the 32 true tokens before the continuation" in words
    assert "Scored in bf16: 1 verdict hangs on a gap of less than 0.001 logits" in words


def test_a_comparison_with_holes_renders() -> None:
    comparison = examples.make_comparison()
    empty = r.ComparisonCell(
        num_documents=0,
        num_matched=0,
        rate=None,
        ci=None,
        near_verbatim=r.NearVerbatim(num_matched=0, rate=None, ci=None),
        mean_token_accuracy=None,
    )
    first = comparison.settings[0].model_copy(update={"extraction": {"64": empty, "x": empty}})
    none = comparison.settings[1].model_copy(
        update={
            "extraction": {},
            "utility": r.Utility(
                heldout_nll=0.0, base_heldout_nll=0.0, num_documents=0, num_tokens=0
            ),
        }
    )
    for chosen in ([first, none], [none, first], [none]):
        hole = comparison.model_copy(
            update={"settings": chosen, "base_extraction": {}, "environment": {}}
        )
        check_page(render_comparison(hole))


def test_runs_that_differ_by_seed_share_a_look_and_are_told_apart() -> None:
    comparison = examples.make_comparison(3)
    parser = check_page(render_comparison(comparison))
    words = words_of(parser)
    assert "goldfish-k4, seed 2" in words
    first, *_ = build_trends(comparison)
    assert isinstance(first.chart, LineChart)
    named = [line.label for line in first.chart.lines if line.label]
    assert named == ["plain", "goldfish-k4", "goldfish-k2", "Base model"]


def test_numbers_without_bounds_render() -> None:
    comparison = examples.make_comparison()
    for nll, base in ((1e308, 1e-308), (1e-308, 1e308), (-1.0, 0.0)):
        utility = r.Utility(heldout_nll=nll, base_heldout_nll=base, num_documents=1, num_tokens=1)
        first = comparison.settings[0].model_copy(update={"utility": utility})
        wild = comparison.model_copy(update={"settings": [first, *comparison.settings[1:]]})
        check_page(render_comparison(wild))
        full = examples.make_report()
        assert full.training is not None
        training = full.training.model_copy(
            update={"heldout_nll": nll, "base_heldout_nll": base, "train_s": 1e12}
        )
        page = render_report(full.model_copy(update={"training": training}))
        assert not {"inf", "nan"} & set(words_of(check_page(page)).split())


def test_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "datasets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not here')\n")
    code = """
        import sys
        import memguard.report
        assert "matplotlib" not in sys.modules, "a record can be read without matplotlib"
        import report_examples as examples
        memguard.report.render_report(examples.make_report())
        memguard.report.render_comparison(examples.make_comparison())
        memguard.report.render_model_card(
            examples.make_report(), run_name="x", base_model=None, config_yaml=""
        )
        assert not {"torch", "transformers", "datasets"} & set(sys.modules)
    """
    run_elsewhere(code, tmp_path)
