"""`memguard diff`: what a terminal shows of two audits, and what programs read."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import rich.console
from cli_examples import run_cli, succeed, write_jsonl
from damage import flip_byte
from diff_examples import NOT_ASKED, Made, save_audit

from memguard.cli.screens import render_diff
from memguard.gate.diff import diff_folders
from memguard.gate.diffed import KINDS, AuditDiff
from memguard.records.audit_files import save_audit_files
from memguard.workflows.results import AuditResult

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMES = {"new": "New", "unchanged": "Unchanged", "not-audited": "Not audited", "gone": "Gone"}


def make(number: int, **fields: Any) -> Made:
    values = {"text": f"text {number}", "id": f"data/train.jsonl:{number}", **fields}
    attacked = float(number % 2) if number % 3 else NOT_ASKED
    return Made(**{"attacks": {"beam_search": attacked}, **values})


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two audits of 120 documents, of which they share 110: every kind occurs, some often."""
    folder = tmp_path_factory.mktemp("audits")
    old = [make(n, near=float(n % 3 == 0)) for n in range(120)]
    new = [make(n, near=float(n % 4 == 0), verbatim=float(n % 4 == 0)) for n in range(10, 130)]
    new[20:40] = [replace(made, attacks={"beam_search": NOT_ASKED}) for made in new[20:40]]
    new[40:50] = [replace(made, attacks={"beam_search": 1}) for made in new[40:50]]
    return save_audit(folder / "old", old), save_audit(folder / "run" / "audit", new)


@pytest.fixture(scope="module")
def told(audits: tuple[Path, Path]) -> AuditDiff:
    return AuditDiff.model_validate(json.loads(succeed("diff", *audits, "--json").out))


def draw(result: AuditDiff, width: int = 80) -> list[str]:
    text = io.StringIO()
    console = rich.console.Console(file=text, width=width, force_terminal=True, color_system=None)
    render_diff(result, console)
    return text.getvalue().splitlines()


@pytest.mark.quick
def test_the_screen_has_counts_first_then_the_worst(told: AuditDiff) -> None:
    lines = draw(told)
    assert max(map(len, lines)) <= 80
    titles = [line for line in lines if line and not line.startswith((" ", "old ", "new "))]
    assert titles[1] == "Extracted documents"
    heads = [f"{name} ({len(told.select(kind))})" for kind, name in NAMES.items()]
    places = [titles.index(head) for head in heads]
    assert places == sorted(places)
    first = lines.index("Extracted documents")
    for probe in ("extraction", "attacks"):
        (row,) = [x for x in lines[first : first + 5] if x.strip().startswith(probe)]
        expected = [
            told.count("new", probe, "new"),
            told.count("unchanged", probe, "both"),
            told.count("gone", probe, "old"),
            told.count("not-audited", probe, "new"),
            told.count("not-audited", probe, "old"),
        ]
        assert re.findall(r"\d+", row) == [str(number) for number in expected]
        assert sum(expected) == sum(
            one.probe == probe for document in told.documents for one in document.probes
        )


def test_at_most_twenty_findings_of_a_kind_are_listed(told: AuditDiff) -> None:
    lines = draw(told, width=200)
    for kind in KINDS:
        count = len(told.select(kind))
        start = lines.index(f"  {KINDS[kind]}") + 1
        end = next(n for n in range(start, len(lines) + 1) if not lines[n : n + 1] or not lines[n])
        assert lines[start - 2].startswith(NAMES[kind])
        assert end - start == min(count, 20) + (count > 20)
        assert (lines[end - 1].strip() == f"and {count - 20} more") == (count > 20)
    assert max(len(told.select(kind)) for kind in KINDS) > 20


def test_a_pipe_shows_the_same_numbers(audits: tuple[Path, Path], told: AuditDiff) -> None:
    done = succeed("diff", *audits)
    assert done.err == ""
    assert f"Gone ({len(told.select('gone'))})" in done.out
    assert "110 of the new texts are in the old audit" in done.out
    # The run's folder stands for its audit.
    assert succeed("diff", audits[0], audits[1].parent).out == done.out


def test_it_is_told_without_torch(audits: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("torch", "transformers", "datasets"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    done = subprocess.run(
        [sys.executable, "-m", "memguard", "diff", *map(str, audits)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Extracted documents" in done.stdout


def test_python_has_the_same(audits: tuple[Path, Path], told: AuditDiff) -> None:
    old, new = (
        AuditResult(folder=folder, report=None)  # type: ignore[arg-type]
        for folder in audits
    )
    assert new.diff(old) == told
    assert new.diff(str(audits[0])) == told


def test_names_and_ids_of_the_data_cannot_draw_on_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J[red]\u202e" + "x" * 500
    old = save_audit(tmp_path / "old", [make(1, near=1, id=evil, bucket=evil)], run=evil)
    new = save_audit(tmp_path / "new", [make(2, near=1)])
    lines = draw(diff_folders(old, new))
    assert max(map(len, lines)) <= 80
    assert "\x1b[2J" not in "".join(lines)
    assert "\u202e" not in "".join(lines)
    assert "[U+001B][2J[red]" in "".join(lines)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["report.json", "records.parquet", "results.parquet", "findings.csv", "audit.json"]
)
def test_a_damaged_audit_is_refused(name: str, tmp_path: Path) -> None:
    old, new = (save_audit(tmp_path / which, [make(1, near=1)]) for which in ("old", "new"))
    assert run_cli("diff", old, new).code == 0
    flip_byte(new / name)
    done = run_cli("diff", old, new)
    assert (done.code, done.out) == (3, "")
    assert name in done.err
    assert run_cli("diff", new, old).code == 3


def test_what_is_no_audit_is_refused(audits: tuple[Path, Path], tmp_path: Path) -> None:
    done = run_cli("diff", audits[0], tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "is neither the folder of a run" in done.err
    (tmp_path / "config.yaml").touch()
    done = run_cli("diff", tmp_path, audits[0])
    assert done.code == 3
    assert "was not audited" in done.err


def test_two_keys_are_refused(tmp_path: Path) -> None:
    old, new = (save_audit(tmp_path / key, [make(1, near=1)], key=key) for key in "ab")
    done = run_cli("diff", old, new)
    assert (done.code, done.out) == (3, "")
    assert "no identity key in common" in done.err
    assert "'data.identity_key'" in done.err
    assert len(done.err.splitlines()) == 1


def test_a_model_card_that_was_edited_is_no_damage(tmp_path: Path) -> None:
    folders = [tmp_path / "old", tmp_path / "run" / "audit"]
    old, new = (save_audit(folder, [make(1, near=1)]) for folder in folders)
    card = new.parent / "model" / "README.md"
    card.parent.mkdir()
    card.write_text("as written")
    save_audit_files(new, has_card=True)
    card.write_text("edited")
    assert run_cli("diff", old, new).code == 0


# -- two real audits -------------------------------------------------------------------------------


def test_two_real_audits_of_a_model_and_of_the_one_that_forgot(
    shared_data: Path, tmp_path: Path
) -> None:
    models = [shared_data / "checkpoints" / f"arcsf-cities-{name}" for name in ("base", "forget")]
    cities = pq.read_table(models[0] / "train_data" / "dummy_train_data.parquet")
    texts = cities.column("text").to_pylist()
    made_up = [
        f"what is the capital of {land}? the capital of {land} is {city}"
        for land, city in {"poland": "krakow", "norway": "bergen", "greece": "patras"}.items()
    ]
    given = [texts, [*made_up[:2], *reversed(texts[2:]), made_up[2], made_up[2]]]
    answers: list[dict[tuple[str, str], Any]] = []
    for number, (model, listed) in enumerate(zip(models, given, strict=True)):
        data = write_jsonl(tmp_path / f"{number}.jsonl", ({"text": text} for text in listed))
        out = tmp_path / f"audit-{number}"
        options = ("--members", data, "--out", out, "audit.continuation_tokens=6")
        succeed("audit", "--model", model, *options)
        rows = pq.read_table(out / "records.parquet").to_pylist()
        probes = ("extraction", "sampling")
        answers.append(
            {
                (_find_text(row["id"], given), probe): row[f"{probe}.extracted"]
                for row in rows
                for probe in probes
            }
        )
    old, new = answers
    expected = {}
    for place in {**old, **new}:
        before, after = old.get(place), new.get(place)
        if before and after:
            expected[place] = "unchanged"
        elif after:
            expected[place] = "not-audited" if before is None else "new"
        elif before:
            expected[place] = "not-audited" if after is None else "gone"
    result = diff_folders(tmp_path / "audit-0", tmp_path / "audit-1")
    told = {
        (_find_text(document.id, given), one.probe): one.kind
        for document in result.documents
        for one in document.probes
    }
    assert told == expected
    assert {"gone", "not-audited"} <= set(expected.values())
    assert result.new.num_texts == len(texts) + 1


def _find_text(identifier: str, given: list[list[str]]) -> str:
    """Return the text of an id that is made of the file's name and the row: ``1-000005``."""
    file, row = identifier.split("-")
    return given[int(file)][int(row)]
