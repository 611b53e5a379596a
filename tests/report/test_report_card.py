"""Results in Python: one line as `repr`, a card in a notebook."""

import base64
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import comparison_examples
import evidence_examples
import pytest
import report_examples as examples

from memguard import api
from memguard.audit.findings import save_findings
from memguard.errors import ConfigError, RecordError
from memguard.report.html import render_report

PICTURE = re.compile(r'src="data:image/svg\+xml;base64,([^"]*)"')
LIMIT = 30_000
"""Characters of a card without its picture: a notebook is kept in git and sent around."""


class _Reader(HTMLParser):
    """Collects texts, links and open elements."""

    def __init__(self, card: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(card)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> api.AuditResult:
    monkeypatch.chdir(tmp_path)
    report = evidence_examples.make_full_report()
    folder = Path("runs/mails/audit")
    folder.mkdir(parents=True)
    (folder / "report.html").write_text(render_report(report))
    return api.AuditResult(folder=folder, report=report)


def test_the_card_of_an_audit_has_verdict_tiles_chart_and_link(result: api.AuditResult) -> None:
    card = result._repr_html_()
    assert len(PICTURE.sub("", card)) < LIMIT
    read = _Reader(card)
    text = " ".join(read.texts).replace("\xa0", " ")
    verdict = result.verdict
    assert verdict.sentence in text
    for term, counts in (("Trained", verdict.trained), ("Control", verdict.control)):
        at = text.index(term)
        assert f"{counts.num_matched} of {counts.num_documents}" in text[at : at + 80]
    assert read.links == ["runs/mails/audit/report.html"]
    assert not read.tags & {"script", "style", "iframe", "svg", "link"}
    (picture,) = PICTURE.findall(card)
    drawn = base64.b64decode(picture).decode()
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(--" not in drawn, "an image has no style sheet of a page"


def test_findings_are_a_frame_whose_names_stay_text(result: api.AuditResult) -> None:
    names = ["NA", "007", "=1+1", "two\nlines\r", "", "1e5"]
    finding = examples.make_finding(0)
    save_findings(
        [finding.model_copy(update={"id": name, "bucket": f"-{name}"}) for name in names],
        result.folder / "findings.csv",
    )
    frame = result.findings
    assert list(frame["id"].fillna("")) == names
    assert list(frame["bucket"]) == [f"-{name}" for name in names]
    assert set(frame["num_correct"]) == {finding.num_correct}


def test_a_page_elsewhere_is_linked_by_its_full_path(
    result: api.AuditResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path.resolve() / "runs/mails/audit/report.html"
    elsewhere = tmp_path / "a" / "b" / "c"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    moved = api.AuditResult(folder=page.parent, report=result.report, is_temporary=True)
    card = moved._repr_html_()
    assert _Reader(card).links == [page.as_uri()]
    assert "is deleted with this result" in card
    shutil.rmtree(page.parent)
    gone = moved._repr_html_()
    assert _Reader(gone).links == []
    assert "The page was deleted since." in gone
    # The numbers are in memory.
    assert result.verdict.sentence in gone
    with pytest.raises(RecordError, match="was deleted since: make this result again"):
        moved.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_names_of_documents_and_models_are_escaped(result: api.AuditResult) -> None:
    hostile = result.report.model_copy(update={"run": "<script>alert(1)</script>\n\x1b[31m"})
    made = api.AuditResult(folder=result.folder, report=hostile)
    assert "<script" not in made._repr_html_()
    assert "\n" not in repr(made)


def test_a_run_shows_its_training_and_its_model(result: api.AuditResult) -> None:
    run = api.TrainResult(folder=Path("runs/mails"), model=Path("runs/mails/model"), audit=result)
    text = " ".join(_Reader(run._repr_html_()).texts)
    training = result.report.training
    assert training is not None
    assert f"{training.num_steps:,} steps" in text
    assert f"held-out NLL {training.heldout_nll:.4f}" in text
    assert "runs/mails/model" in text
    plain = api.TrainResult(folder=run.folder, model=run.model, audit=None)
    assert repr(plain) == "<TrainResult mails: not audited; runs/mails>"
    assert "runs/mails/model" in plain._repr_html_()


def test_results_are_one_line(result: api.AuditResult) -> None:
    trained, control = result.verdict.trained, result.verdict.control
    counts = f"{trained.num_matched} of {trained.num_documents} trained and "
    counts += f"{control.num_matched} of {control.num_documents} control documents extracted"
    run = api.TrainResult(folder=Path("runs/mails"), model=Path("runs/mails/model"), audit=result)
    for shown in (repr(result), repr(run), f"{result}"):
        assert counts in shown
        assert len(shown.splitlines()) == 1
        assert len(shown) < 300
    assert "runs/mails/audit/report.html" in repr(result)
    nothing = examples.make_report()
    without = nothing.verdict.model_copy(update={"control": examples.make_counts(0, 0)})
    alone = api.AuditResult(
        folder=result.folder, report=nothing.model_copy(update={"verdict": without})
    )
    assert "trained documents extracted" in repr(alone)


def test_the_card_of_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    comparison = comparison_examples.make_full_comparison(2)
    page = Path("comparison.html")
    page.write_text("page")
    made = api.CompareResult(page=page, comparison=comparison)
    card = made._repr_html_()
    assert len(PICTURE.sub("", card)) < LIMIT
    read = _Reader(card)
    text = "".join(read.texts)
    assert all(": ".join(pair) in text for pair in comparison.recommendation.list_sentences())
    assert all(point.name in text for point in comparison.front)
    assert {"#b3261e", "#6d3fb0", "#0b6e69"} <= set(re.findall("#[0-9a-f]{6}", card))
    assert read.links == ["comparison.html"]
    assert len(PICTURE.findall(card)) == 1
    assert len(repr(made).splitlines()) == 1
    assert len(repr(made)) < 500


def test_a_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16,'
        '"num_hidden_layers": 1, "intermediate_size": 8, "num_key_value_heads": 2}'
    )
    made = api.plan(model=tmp_path / "config.json", gpus=2, machine="dgx-h100")
    assert len(repr(made).splitlines()) == 1
    card = made._repr_html_()
    assert len(card) < LIMIT
    text = " ".join(_Reader(card).texts)
    assert made.verdict in text
    assert "(data=2, z=1, y=1, x=1)" in text
    with pytest.raises(ConfigError, match="cannot be created, written or read"):
        made.save(tmp_path / "config.json")
