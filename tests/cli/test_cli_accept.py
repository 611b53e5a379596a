"""`memguard accept` writes the entry of a document that came out, and nothing else."""

import json
from pathlib import Path

import pyarrow
import pytest
import yaml
from bundle_examples import make_report, seal_audit
from cli_examples import run_cli
from gate_audits import hash_text, make_attacked, write_audit
from pyarrow import parquet

from memguard.gate.triage import load_triage
from memguard.records.audit_files import load_audit_files, load_audit_report

BY = ("--by", "A. Writer", "--reason", "a licence, which is public")


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An audit of which r4-0, r4-1 and r4-2 came out; the first two have one text."""
    monkeypatch.chdir(tmp_path)
    report = make_attacked({"control": (0, 40), "r4": (3, 40)}, 40, make_report("7a" * 32))
    return write_audit(
        Path("audit"), report, text=lambda bucket, number: f"{bucket} {max(number, 1)}"
    )


def judge(audit: Path) -> tuple[int, str]:
    Path("policy.yaml").write_text("gate: [{metric: findings, at_most: 0}]\ntriage: triage.yaml\n")
    done = run_cli("gate", audit, "--policy", "policy.yaml", "--out", "gate")
    return done.code, " ".join(done.out.split())


def test_accepted_one_by_one_until_the_gate_passes(audit: Path) -> None:
    done = run_cli("accept", audit, "r4-0", *BY, "--until", "2999-12-31")
    assert done.code == 0, done.err
    shown = " ".join(done.out.split())
    assert shown.startswith("accepted: r4-0 and 1 more with its text, until 2999-12-31, by A.")
    assert "next: memguard gate audit --policy policy.yaml" in shown
    code, shown = judge(audit)
    assert (code, "3 documents came out (2 accepted): 1 open" in shown) == (10, True)
    # By its hash; what a person wrote in the file stays.
    path = Path("triage.yaml")
    path.write_text(path.read_text().replace("- document", "# the licence\n- document"))
    done = run_cli("accept", audit, hash_text("r4 2"), *BY, "--json")
    assert json.loads(done.out) == {
        "entry": {
            "document": hash_text("r4 2"),
            "by": "A. Writer",
            "reason": "a licence, which is public",
            "until": None,
        },
        "ids": ["r4-2"],
        "is_replaced": False,
        "triage": "triage.yaml",
    }
    assert "# the licence" in path.read_text()
    assert judge(audit)[0] == 0
    # Again, with another day: one entry for a document.
    assert "accepted again: r4-0 and" in run_cli("accept", audit, "r4-1", *BY).out
    entries = load_triage(path).accepted
    assert [entry.document for entry in entries] == [hash_text("r4 2"), hash_text("r4 1")]
    assert [entry.until for entry in entries] == [None, None]


@pytest.mark.parametrize("form", ["", "  ", "flow"])
def test_a_file_of_any_form_gets_one_entry_more(audit: Path, form: str) -> None:
    entry = {"document": "f" * 64, "by": "B", "reason": "- why\n- not", "until": None}
    path = Path("triage.yaml")
    text = yaml.safe_dump({"accepted": [entry]}, default_flow_style=form == "flow")
    first, *others = text.splitlines()
    indent = form.strip("flow")
    path.write_text("\n".join([first, *(f"{indent}{line}" for line in others)]))
    assert run_cli("accept", audit, "r4-2", *BY).code == 0
    old, new = load_triage(path).accepted
    assert old.model_dump() == entry
    assert new.document == hash_text("r4 2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["r4-7", *BY], "'r4-7' is none of the 3 documents that came out; findings.csv of"),
        ([hash_text("r4 7"), *BY], "is none of the 3 documents that came out"),
        ([hash_text("r4 2")[-8:], *BY], "is none of the 3 documents that came out"),
        (["00000000", *BY], "2 keyed hashes begin with '00000000': give more of it"),
        (["r4-2", *BY, "--until", "2020-01-31"], "'until' must not have passed: 2020-01-31"),
        (["r4-2", *BY, "--until", "soon"], "accept: 'until': must be a day, as 2027-01-31"),
        (["r4-2", "--by", " ", "--reason", "x"], "accept: 'by': must not be empty"),
        (["r4-2", *BY, "--triage", "audit/triage.yaml"], "must not be inside the folder of an"),
    ],
)
def test_what_cannot_be_accepted_is_refused(audit: Path, arguments: list[str], said: str) -> None:
    before = load_audit_files(audit)
    done = run_cli("accept", audit, *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1
    assert not Path("triage.yaml").exists()
    assert not (audit / "triage.yaml").exists()
    assert load_audit_files(audit) == before


def test_an_id_of_two_texts_and_a_document_without_a_hash_are_refused(audit: Path) -> None:
    table, report = parquet.read_table(audit / "records.parquet"), load_audit_report(audit)

    def rewrite(name: str, values: list[str | None]) -> Path:
        place = table.column_names.index(name)
        column = pyarrow.array(values, pyarrow.string())
        return seal_audit(Path(name), report, table.set_column(place, name, column))

    ids = ["same" if one in ("r4-1", "r4-2") else one for one in table["id"].to_pylist()]
    done = run_cli("accept", rewrite("id", ids), "same", *BY)
    assert (done.code, "the id of 2 different texts" in done.err) == (2, True)
    done = run_cli("accept", rewrite("text_hmac", [None] * len(table)), "r4-1", *BY)
    assert (done.code, "'r4-1' has no keyed hash" in done.err) == (2, True)
