"""Pages: complete, offline, deterministic, and unmoved by hostile records."""

import hashlib
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import comparison_examples as comparisons
import evidence_examples as evidence
import numpy as np
import pytest
import report_examples as examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_checks import check_page, words_of
from result_examples import change_rows

from memguard import records as r
from memguard.pages import formatting as fmt
from memguard.report import html
from memguard.report.charts import draw_chart
from memguard.report.html import render_comparison, render_report

pytestmark = pytest.mark.slow

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
    # 'probe' decides which sections there are.
    fixed = {
        "schema",
        "role",
        "level",
        "metric",
        "severity",
        "probe",
        "risk_by",
        "model",
        "test",
        "title",
        "colour",
    }
    fixed |= {
        "counted",
        "window",
        "answers",
        "by",
        "reason",
        "documents",
        "texts",
        "statistic",
        "interval",
        "against",
        "kept_by",
        "stopped_by",
    }
    # Without them no row would be found; another package has a section of its own.
    fixed |= {"parameters", "package", "load_as", "texts"}
    if isinstance(record, dict):
        # Keys that are counts of repetitions stay; free keys change too.
        return {
            name if key != "environment" else f"{text}{name}": make_hostile(value, text, key=name)
            for name, value in record.items()
        }
    if isinstance(record, list):
        return [make_hostile(item, text, key=key) for item in record]
    # Groups that are no bucket have names of memguard: (members).
    is_free = isinstance(record, str) and key not in fixed and not record.startswith("(")
    return text if is_free else record


@pytest.mark.parametrize("goldfish", [False, True])
def test_audit_page_is_a_clean_offline_page(goldfish: bool) -> None:
    check_page(render_report(examples.make_report(goldfish)))
    check_page(render_report(evidence.make_full_report(goldfish)))


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_comparison_page_is_a_clean_offline_page(num_seeds: int) -> None:
    check_page(render_comparison(comparisons.make_comparison(num_seeds)))
    check_page(render_comparison(comparisons.make_full_comparison(num_seeds)))


def test_same_record_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    report, comparison = evidence.make_full_report(), comparisons.make_full_comparison()
    first = render_report(report), render_comparison(comparison)
    monkeypatch.setattr(html, "draw_chart", draw_chart)  # The tests draw a chart once.
    assert (render_report(report), render_comparison(comparison)) == first


def test_same_bytes_in_another_process_and_without_torch(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "datasets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not here')\n")
    code = """
        import hashlib
        import sys
        import memguard.report
        assert "matplotlib" not in sys.modules, "a record can be read without matplotlib"
        import comparison_examples as comparisons
        import evidence_examples as evidence
        from memguard.report.html import render_comparison, render_report
        from memguard.report.model_card import render_model_card
        page = render_report(evidence.make_full_report())
        page += render_comparison(comparisons.make_full_comparison())
        render_model_card(
            evidence.make_full_report(), run_name="x", base_model=None, config_yaml=""
        )
        assert not {"torch", "transformers", "datasets"} & set(sys.modules)
        print(hashlib.sha256(page.encode()).hexdigest())
    """
    page = render_report(evidence.make_full_report())
    page += render_comparison(comparisons.make_full_comparison())
    places = (tmp_path, ROOT, Path(__file__).parent, Path(__file__).parents[1])
    there = subprocess.check_output(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(map(str, places))},
        text=True,
    )
    assert there.strip() == hashlib.sha256(page.encode()).hexdigest()


def test_wording_stays_sober() -> None:
    quiet = evidence.make_full_report().model_copy(
        update={
            "verdict": examples.make_green(),
            "findings": [],
            "num_findings": 0,
            "num_by_method": 0,
        }
    )
    pages = (render_report(quiet), render_comparison(comparisons.make_full_comparison()))
    # The verdict's label says what was looked for and against what; nothing else may begin so.
    label = "none found"
    assert label in pages[0].lower()
    for words in (page.lower().replace(label, "") for page in pages):
        for claim in (
            "is safe",
            "no memoriz",
            "no extraction",
            "compliant",
            "no risk",
            "risk-free",
            "gdpr",
        ):
            assert claim not in words


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(" ".join(HOSTILE), id="all"),
        *(pytest.param(text, marks=pytest.mark.long) for text in HOSTILE),
    ],
)
def test_hostile_text_stays_text(text: str) -> None:
    hostile = make_hostile(evidence.make_full_report().model_dump(by_alias=True, mode="json"), text)
    hostile["model"]["load_as"] = "int8"  # The page then says how the weights were made.
    report = r.AuditReport.model_validate(hostile)
    comparison = r.Comparison.model_validate(
        make_hostile(
            comparisons.make_full_comparison().model_dump(by_alias=True, mode="json"), text
        )
    )
    for page in (render_report(report), render_comparison(comparison)):
        assert " ".join(fmt.clean_text(text).split()) in words_of(check_page(page))
        assert "\x00" not in page
        assert "\u202e" not in page
        for tag in ("<script", "<img", "onerror=alert(1)>"):
            assert tag not in page


def check_any_text(text: str) -> None:
    report = r.AuditReport.model_validate(
        make_hostile(evidence.make_full_report().model_dump(by_alias=True, mode="json"), text)
    )
    check_page(render_report(report))


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=40))
def test_any_text_gives_a_clean_page(text: str) -> None:
    check_any_text(text)


@pytest.mark.long
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=40))
def test_more_texts_give_a_clean_page(text: str) -> None:
    check_any_text(text)


def test_lone_surrogates_are_spelled_out() -> None:
    # Pydantic refuses them at the door; a record changed in memory may still hold one.
    report = examples.make_report().model_copy(update={"run": "a\ud800b"})
    assert "a[U+D800]b" in render_report(report)


def test_lines_of_a_megabyte_are_cut() -> None:
    line = "<" * 1_000_000
    report = make_hostile(evidence.make_full_report().model_dump(by_alias=True, mode="json"), line)
    comparison = make_hostile(
        comparisons.make_full_comparison().model_dump(by_alias=True, mode="json"), line
    )
    page = render_report(r.AuditReport.model_validate(report))
    check_page(page)
    # One string of 700 in each finding, four bytes a bracket, and the charts.
    assert len(page) < 500_000
    page = render_comparison(r.Comparison.model_validate(comparison))
    check_page(page)
    assert len(page) < 500_000


def test_numbers_without_bounds_render() -> None:
    comparison = comparisons.make_comparison()
    for nll, base in ((1e308, 1e-308), (1e-308, 1e308), (-1.0, 0.0)):
        losses = {"trained": nll, "base": base}

        def change(row: r.ResultRow, losses: dict[str, float] = losses) -> r.ResultRow:
            is_loss = row.metric == "nll" and row.against is None
            return replace(row, value=losses[row.model]) if is_loss else row

        check_page(render_comparison(change_rows(comparison, change)))
        full = examples.make_report()
        assert full.training is not None
        training = full.training.model_copy(
            update={"heldout_nll": nll, "base_heldout_nll": base, "train_s": 1e12}
        )
        page = render_report(full.model_copy(update={"training": training}))
        assert not {"inf", "nan"} & set(words_of(check_page(page)).split())


def test_extracted_is_as_loud_as_memorized() -> None:
    """The same size and weight, and no less contrast, in both colour schemes."""
    style = (Path(html.__file__).parent / "templates" / "style.css.j2").read_text()
    hexes = re.findall(r"--(red|amber)(-soft)?: #(\w{6});", style)

    def shine(text: str) -> float:
        parts = [int(text[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear)) + 0.05

    ratios: dict[str, list[float]] = {"red": [], "amber": []}
    for (name, _, ink), (_, _, ground) in zip(hexes[::2], hexes[1::2], strict=True):
        ratio = shine(ink) / shine(ground)
        ratios[name].append(max(ratio, 1 / ratio))
    assert len(ratios["red"]) == 2
    assert all(a >= b for a, b in zip(ratios["amber"], ratios["red"], strict=True))

    def list_properties(name: str) -> list[str]:
        return re.findall(r"([\w-]+):", "".join(re.findall(rf".*\.{name}\b.*", style)))

    assert list_properties("colour-red") == list_properties("colour-amber")
    assert list_properties("level-memorized") == list_properties("level-extracted") == ["color"]
