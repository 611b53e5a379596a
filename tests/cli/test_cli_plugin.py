"""A probe of another package, that of eval/README.md: in every file, page and comparison."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from cli_examples import run_cli, save_tiny_model, succeed, write_run, write_texts
from guide_blocks import list_blocks
from plugin_examples import PACKAGE, installed, read_example, write_package, write_suite

from memguard.audit.suite import PROBES, load_suite
from memguard.records import AuditReport, load_record

pytestmark = pytest.mark.slow

ALONE = "{name: first_word, tokens: 2}"
LENGTH = ("audit.continuation_tokens=6",)


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    folder = write_package(tmp_path / "site")
    with installed(folder):
        yield folder


def audit(
    folder: Path, out: str, *probes: str, base: bool = True, options: tuple[object, ...] = ()
) -> AuditReport:
    """Audit the tiny model with the extraction probe and others."""
    suite = write_suite(folder / f"{out}.yaml", *probes)
    others = folder / "others.jsonl"
    if not others.exists():
        write_texts(others, 20, seed=1)
    given = ("--members", folder / "documents.jsonl", "--nonmembers", others, "--suite", suite)
    with_base: tuple[object, ...] = ()
    if base:
        with_base = ("--base", save_tiny_model(folder / "base", initializer_range=0.03))
    succeed(
        *("audit", "--model", folder / "model", "--out", folder / out),
        *(*given, *with_base, *LENGTH, *options),
    )
    return load_record(AuditReport, folder / out / "report.json")


def test_the_example_is_short() -> None:
    assert len(read_example().splitlines()) <= 40


def test_it_is_in_every_file_like_a_probe_of_memguard(folder: Path, package: Path) -> None:
    report = audit(folder, "out", ALONE)
    tables = report.tables
    (metric,) = tables.list_metrics("first_word")
    assert (metric.package, metric.heading, metric.risk_rank) == (PACKAGE, "Right", None)
    (run,) = (run for run in report.probe_runs if run.name == "first_word")
    assert run.num_documents == 80
    described = next(p for p in report.method.probes if p["name"] == "first_word")
    assert described["package"] == PACKAGE
    assert described["tokens"] == 2
    assert described["in_verdict"] is False

    records = pq.read_table(folder / "out" / "records.parquet").to_pandas()
    for bucket, of in records.groupby("bucket"):
        row = tables.find("first_word", "right", bucket)
        base = tables.find("first_word", "right", bucket, model="base")
        change = tables.find("first_word", "right", bucket, against="base")
        assert row is not None
        assert base is not None
        assert change is not None
        # The first two tokens are right exactly if the first divergence comes after them.
        expected = (of["extraction.first_divergence"] >= 2).sum()
        assert row.num_matched == of["first_word.right"].sum() == expected
        assert base.num_matched == of["base.first_word.right"].sum()
        assert row.ci is not None
        assert change.value == row.value - base.value
        assert (row.minus_control_ci is None) == (bucket == "nonmembers")
    results = pq.read_table(folder / "out" / "results.parquet").to_pandas()
    assert set(results[results.probe == "first_word"].bucket) == set(records.bucket)

    page = (folder / "out" / "report.html").read_text()
    assert "Whether the first word is predicted." in page
    assert "The details need this package" not in page


def test_json_on_the_terminal_has_its_rows(folder: Path, package: Path) -> None:
    suite = write_suite(folder / "mine.yaml", ALONE)
    outcome = succeed(
        *("audit", "--model", folder / "model", "--out", folder / "out", "--suite", suite),
        *("--members", folder / "documents.jsonl", *LENGTH, "--json"),
    )
    tables = json.loads(outcome.out)["tables"]
    assert PACKAGE in tables["metrics"]["package"]
    assert "first_word" in tables["results"]["probe"]


def test_its_page_is_drawn_where_it_is_not_installed(folder: Path, tmp_path: Path) -> None:
    with installed(write_package(tmp_path / "site")):
        audit(folder, "out", ALONE, base=False)
        with_package = (folder / "out" / "report.html").read_text()
    succeed("report", folder / "out")
    page = (folder / "out" / "report.html").read_text()
    assert page != with_package
    assert f"Probe &#39;first_word&#39; of package {PACKAGE}." in page
    assert "The details need this package, which is not installed." in page
    assert "The model predicts the first tokens of the continuation." in page
    with installed(tmp_path / "site"):
        succeed("report", folder / "out")
    assert (folder / "out" / "report.html").read_text() == with_package


def test_the_guide_names_the_entry_point_of_its_probe(tmp_path: Path) -> None:
    (block,) = list_blocks("eval/README.md", "toml")
    points = tomllib.loads(block)["project"]["entry-points"]["memguard.probes"]
    ((probe, place),) = points.items()
    module, kind = place.split(":")
    folder = write_package(tmp_path / "site", probe=probe, module=module, kind=kind)
    with installed(folder, module):
        assert (probe, "my-package") in list_probes()
        suite = load_suite(write_suite(tmp_path / "mine.yaml", ALONE))
    assert suite.packages == {"first_word": "my-package 1.2"}


@pytest.mark.parametrize("unit", ["words", "letters"])
def test_a_probe_of_the_guide_compares_text(folder: Path, tmp_path: Path, unit: str) -> None:
    code = read_example("SameWordsProbe")
    if unit == "letters":  # The tiny model knows no word.
        code = code.replace(".split()", "")
    site = write_package(tmp_path / "site", code, probe="same_words", kind="SameWordsProbe")
    with installed(site):
        report = audit(folder, "out", "{name: same_words}", options=("audit.cache=false",))
    (metric,) = report.tables.list_metrics("same_words")
    assert metric.bounds == (0.0, 1.0)
    records = pq.read_table(folder / "out" / "records.parquet").to_pandas()
    for bucket, of in records.groupby("bucket"):
        row = report.tables.find("same_words", "share", bucket)
        change = report.tables.find("same_words", "share", bucket, against="base")
        assert row is not None
        assert change is not None
        assert row.value == pytest.approx(of["same_words.share"].mean())
        assert row.ci is not None
        assert 0 <= row.ci[0] <= row.value <= row.ci[1] <= 1
        assert change.value == pytest.approx(row.value - of["base.same_words.share"].mean())
    assert (0 < records["same_words.share"].mean() < 1) == (unit == "letters")


def test_a_value_outside_the_bounds_ends_the_probe(folder: Path, tmp_path: Path) -> None:
    code = read_example("SameWordsProbe").replace("[len(true", "[2 + len(true")
    site = write_package(tmp_path / "site", code, probe="same_words", kind="SameWordsProbe")
    with installed(site):
        given = {"base": False, "options": ("audit.cache=false",)}
        report = audit(folder, "out", "{name: same_words}", **given)
    (run,) = (run for run in report.probe_runs if run.name == "same_words")
    assert run.reason_not_run is not None
    assert run.reason_not_run.startswith(f"the probe of package {PACKAGE} failed (")
    assert report.tables.find("extraction", "verbatim", "members") is not None


# -- errors ---------------------------------------------------------------------------------------

_IN_REDUCE = "[[r.no_such_number] for r in results]"
BROKEN = {
    "measure": ("windows = inputs.windows", "windows = inputs.no_such_thing"),
    "request": ("parameters={", "parameters={'text': object(), "),
    "lengths": ("keys=[key_of", "keys=[*['']] + [key_of"),
    "reduce": ("[[r.correct[: self.tokens].all()] for r in results]", _IN_REDUCE),
    "result": ("return Measured(columns=numbers)", "return numbers"),
}
TABULATE = """
    def tabulate(self, evidence):
        raise RuntimeError("no table")
"""


def _break(where: str) -> str:
    code = read_example()
    if where == "tabulate":
        return code + TABULATE
    before, after = BROKEN[where]
    assert before in code
    return code.replace(before, after)


@pytest.mark.parametrize("where", [*BROKEN, "tabulate"])
def test_its_error_is_the_reason_why_it_did_not_run(
    folder: Path, tmp_path: Path, where: str
) -> None:
    with installed(write_package(tmp_path / "site", _break(where))):
        with_base = where in ("reduce", "tabulate")
        # Other tests have cached numbers of this package.
        report = audit(folder, "out", ALONE, base=with_base, options=("audit.cache=false",))
    (run,) = (run for run in report.probe_runs if run.name == "first_word")
    assert run.num_documents is None
    reason = run.reason_not_run or ""
    assert reason.startswith(f"the probe of package {PACKAGE} failed ("), reason
    page = (folder / "out" / "report.html").read_text()
    assert f"the probe of package {PACKAGE} failed" in page
    assert not report.tables.list_metrics("first_word")
    row = report.tables.find("extraction", "verbatim", "members")
    assert row is not None
    assert row.num_documents == 60


@pytest.mark.parametrize("code", ["raise RuntimeError('no section')", "return 'a section'"])
def test_an_error_of_its_section_leaves_the_table(folder: Path, tmp_path: Path, code: str) -> None:
    before = "        table = bucket_table("
    broken = read_example().replace(before, f"        {code}\n{before}")
    with installed(write_package(tmp_path / "site", broken)):
        report = audit(folder, "out", ALONE, base=False)
    assert report.tables.list_metrics("first_word")
    page = (folder / "out" / "report.html").read_text()
    assert f"Probe &#39;first_word&#39; of package {PACKAGE}." in page
    assert "The details need this package" not in page


# -- verdict --------------------------------------------------------------------------------------


def test_its_risk_counts_in_the_verdict_only_if_the_suite_says_so(
    folder: Path, tmp_path: Path
) -> None:
    # Every document of the model matches, which no probe of memguard finds.
    always = read_example().replace("[r.correct[: self.tokens].all()]", "[1.0]")
    with installed(write_package(tmp_path / "site", always)):
        without = audit(folder, "without", base=False)
        ignored = audit(folder, "ignored", ALONE, base=False)
        counted = audit(folder, "counted", "{name: first_word, in_verdict: true}", base=False)
    assert ignored.verdict.level == without.verdict.level == "none-found"
    assert ignored.verdict.trained == without.verdict.trained
    (metric,) = ignored.tables.list_metrics("first_word")
    assert metric.risk_rank is None
    assert counted.verdict.level == "extracted"
    assert (counted.verdict.trained.num_matched, counted.verdict.control.num_matched) == (60, 20)
    assert "first_word.right" in counted.tables.risks("members")
    assert next(p for p in counted.method.probes if p["name"] == "first_word")["in_verdict"]


# -- runs and comparisons -------------------------------------------------------------------------


def test_a_comparison_has_its_rows(folder: Path, package: Path) -> None:
    suite = write_suite(folder / "mine.yaml", ALONE)
    for name, lr in (("one", 1e-3), ("two", 1e-4)):
        changes: dict[str, Any] = {"train": {"max_steps": 1}, "audit": {"suite": str(suite)}}
        succeed("train", write_run(folder, name=name, optim={"lr": lr}, **changes))
    succeed("compare", folder / "runs/one", folder / "runs/two", "--out", folder / "compared")
    rows = pq.read_table(folder / "compared" / "comparison.parquet").to_pandas()
    rows = rows[rows.probe == "first_word"]
    assert set(rows.setting) == {"one", "two"}
    assert rows.value.notna().any()


# -- suites and the list --------------------------------------------------------------------------


def list_probes() -> dict[tuple[str, str], dict[str, Any]]:
    listed = json.loads(succeed("audit", "--list-probes", "--json").out)
    return {(probe["name"], probe["package"].split()[0]): probe for probe in listed}


def test_the_list_has_probes_of_memguard_and_of_packages(tmp_path: Path, package: Path) -> None:
    write_package(package, "raise ImportError('no such library')", probe="bad", module="broken")
    write_package(package, probe="extraction", module="thief")
    listed = list_probes()
    assert [name for name, owner in listed if owner == "memguard"] == list(PROBES)
    assert listed["canaries", "memguard"]["needs"] == ["canaries"]
    assert listed["first_word", "first-word"]["package"] == PACKAGE
    assert listed["first_word", "first-word"]["metrics"] == ["right"]
    assert "cannot be imported (no such library)" in listed["bad", "broken"]["reason"]
    assert listed["extraction", "thief"]["reason"].startswith("refused")
    table = succeed("audit", "--list-probes").out
    assert max(map(len, table.splitlines())) <= 80
    for name in (*PROBES, "first_word", "bad", "thief"):
        assert re.search(rf"\b{name}\b", table), name


def test_the_list_imports_no_torch(bare: Any) -> None:
    outcome = bare("audit", "--list-probes")
    assert outcome.returncode == 0, outcome.stderr
    assert "mask_consistency" in outcome.stdout


def test_an_unknown_probe_is_refused_with_the_names_of_all(folder: Path, package: Path) -> None:
    suite = write_suite(folder / "mine.yaml", "{name: first_wrod}")
    outcome = run_cli(
        *("audit", "--model", folder / "model", "--out", folder / "out", "--suite", suite),
        *("--members", folder / "documents.jsonl"),
    )
    assert outcome.code == 2
    assert f"one of {', '.join(PROBES)}" in outcome.err
    assert "a probe of an installed package (first_word); got 'first_wrod'" in outcome.err


@pytest.mark.long
def test_on_two_ranks_its_numbers_and_its_error_are_those_of_one(
    folder: Path, tmp_path: Path
) -> None:
    on_two = ("--nproc", 2, "audit.cache=false")
    with installed(write_package(tmp_path / "site")):
        one = audit(folder, "one", ALONE, base=False, options=("audit.cache=false",))
        two = audit(folder, "two", ALONE, base=False, options=on_two)
    found = [[row for row in r.tables.results if row.probe == "first_word"] for r in (one, two)]
    assert found[0] == found[1]
    assert found[0]
    # It fails on the second process alone.
    alone = "import os\n" + read_example().replace(
        "windows = inputs.windows", "windows = inputs.windows if os.environ['RANK'] == '0' else 1/0"
    )
    with installed(write_package(tmp_path / "broken", alone)):
        report = audit(folder, "failed", ALONE, base=False, options=on_two)
    (run,) = (run for run in report.probe_runs if run.name == "first_word")
    assert run.reason_not_run == f"the probe of package {PACKAGE} failed"
