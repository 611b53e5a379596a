"""Check that every page, file and command names the same documents as extracted.

    python scripts/check_findings.py                 50 drawn audits: a minute
    python scripts/check_findings.py --audits 400 --seed 1000

Each audit has random answers of every probe (`finding_audits.py`) and is written as a run with an
audit, which is then read by the readers that users have. The documents that the verdict counts as
extracted, trained or to be forgotten, are compared with those of each reader, by id where it has
ids, else by keyed hash or number. A level without extracted documents must have none anywhere.
Prints a row for each audit; exits with 1 if one differs.
"""

import argparse
import csv
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from finding_audits import DrawnAudit, draw_audit, write_run

from memguard.audit.findings import FindingList
from memguard.config import RunConfig, load_yaml, validate
from memguard.gate.diff import diff_folders
from memguard.gate.gaps import load_audited
from memguard.gate.triage import accept
from memguard.records.audit_files import FINDINGS, PAGE, load_audit_report
from memguard.records.documents import DocumentTable
from memguard.runtime import Console
from memguard.workflows import fix
from memguard.workflows.gate import judge_folder
from memguard.workflows.results import AuditResult

COLUMNS = ("seed", "level (reason)", "documents", "by method", "differs")
_LEVELS = ("memorized", "extracted")
_CANARIES = ("canaries", "canaries-too")


class _Findings(HTMLParser):
    """Reads the heads of the rows of the section of findings, and its first paragraph."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.lead = ""
        self._place = ""
        self._is_section = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Enter the section, its first paragraph or the head of a row."""
        values = dict(attrs)
        if tag == "section":
            self._is_section = values.get("id") == "findings"
        elif self._is_section and tag == "th" and values.get("scope") == "row":
            self._place = "id"
            self.ids.append("")
        elif self._is_section and tag == "p" and not self.lead:
            self._place = "lead"

    def handle_endtag(self, tag: str) -> None:
        """Leave a part."""
        if tag in ("th", "p", "section"):
            self._place = ""
            self._is_section &= tag != "section"

    def handle_data(self, data: str) -> None:
        """Collect text."""
        if self._place == "id":
            self.ids[-1] += data.strip()
        elif self._place == "lead":
            self.lead += data


def read_count(text: str) -> int:
    """Return the number of documents of a sentence such as ``30 documents were extracted``."""
    found = re.search(r"(?<!of )\b([\d,]+) documents? (?:was|were|can be) extracted", text)
    return int(found[1].replace(",", "")) if found else 0


def list_answers(drawn: DrawnAudit, audit: Path) -> Iterator[tuple[str, object, object]]:
    """Yield each reader's name, what it answers, and what the verdict says."""
    ids = sorted(drawn.came_out)
    documents = {document.id: document for document in drawn.shape.documents}
    hashes = sorted({documents[one].text_hmac for one in ids} - {None})
    count = len(ids)
    report = load_audit_report(audit)
    listed = sorted(finding.id for finding in report.findings)
    shown = ids if count <= len(listed) else listed
    yield "report.json", report.num_findings, count
    yield "report.json, worst", (listed, len({*listed} - {*ids})), (shown, 0)
    by_method = sum(len(finding.found_by) for finding in FindingList(drawn.scores))
    yield "by method", report.num_by_method, by_method
    yield "every document has a method", report.num_by_method >= count, True
    yield from _read_page("page", (audit / PAGE).read_text(encoding="utf-8"), shown, count)
    rows = list(csv.DictReader(io.StringIO((audit / FINDINGS).read_text(encoding="utf-8"))))
    yield FINDINGS, sorted(row["id"] for row in rows), ids
    keyed = sorted({row["text_hmac"] for row in rows} - {""})
    yield f"{FINDINGS}, hashes", keyed, hashes
    excerpts = (audit / "private" / "excerpts.txt").read_text(encoding="utf-8")
    yield "excerpts", sorted(re.findall(r"^== (.*?): ", excerpts, re.MULTILINE)), ids
    table = DocumentTable.read(audit)
    yield "records", sorted(table.id_N[table.came_out_N].tolist()), ids
    yield "--fix", _count_for_fix(drawn, audit), count
    card = (audit.parent / "model" / "README.md").read_text(encoding="utf-8")
    yield "model card", read_count(card), count
    yield from _read_gate(audit, shown, count)
    diff = diff_folders(audit, audit)
    kinds = {one.kind for one in diff.documents} - {"unchanged"}
    yield "diff", (sorted(one.text_hmac for one in diff.documents), kinds), (hashes, set())
    yield "diff, number", (diff.old.num_findings, diff.new.num_findings), (count, count)
    frame = AuditResult(folder=audit, report=report).findings
    yield "frame", sorted(frame["id"]), ids
    yield from _read_verdict(drawn, count)


def _read_page(
    name: str, text: str, shown: list[str], count: int
) -> Iterator[tuple[str, object, object]]:
    page = _Findings(text)
    yield name, (sorted(page.ids), read_count(page.lead)), (shown, count)
    if not count:
        yield f"{name}, none", page.lead, "No document was extracted."


def _read_verdict(drawn: DrawnAudit, count: int) -> Iterator[tuple[str, object, object]]:
    """Yield whether level, badge and sentence say that something came out."""
    verdict = drawn.results.verdict
    is_said = verdict.level in _LEVELS and verdict.reason not in _CANARIES
    if verdict.reason not in _CANARIES:
        yield "level", is_said, bool(count)
        state = verdict.badges[0].state
        yield "badge", state in ("Memorized", "Extracted"), bool(count)
    if count:
        sentence = verdict.sentence
        yield "sentence", sentence.startswith(("None", "The only", "No ")), False


def _count_for_fix(drawn: DrawnAudit, audit: Path) -> int:
    """Return how many documents `compare --fix` takes for extracted."""
    document = load_yaml(audit.parent / "config.yaml")
    config = validate(RunConfig, document.values, document)
    # With a sample, copies are not counted.
    report = load_audit_report(audit)
    method = report.method.model_copy(update={"sample_size": None})
    texts = {
        one.id: SimpleNamespace(input_ids=one.input_ids.tolist()) for one in drawn.shape.documents
    }
    with (
        patch.object(fix, "read_texts", lambda *_, **__: texts),
        patch.object(fix, "find_spec", lambda _: None),
    ):
        copies = fix._count_copies(
            audit.parent, config, report.model_copy(update={"method": method}), Console(quiet=True)
        )
    assert copies is not None, "the copies are counted"
    return copies.num_extracted


def _read_gate(audit: Path, shown: list[str], count: int) -> Iterator[tuple[str, object, object]]:
    out = audit.parent / "gate"
    policy = {"gate": [{"metric": "findings", "at_most": 0}]}
    result = judge_folder(audit, policy, out=out)
    judgement = next(one for one in result.judgements if one.rule == 1)
    yield "gate", (result.num_findings, judgement.value), (count, count)
    yield "gate, outcome", judgement.outcome, "fail" if count else "pass"
    yield "gate, gaps", [one.name for one in result.judgements if one.rule == 0], []
    yield from _read_page("gate's page", (out / PAGE).read_text(encoding="utf-8"), shown, count)
    if not count:
        return
    yield "gate, decision", read_count(result.decision), count
    audited = load_audited(audit)
    table = audited.documents
    assert table is not None, "this user wrote it"
    keyed_N = table.came_out_N & [text is not None for text in table.text_hmac_N]
    if not keyed_N.any():
        return
    with tempfile.TemporaryDirectory() as folder:
        triage = Path(folder) / "triage.yaml"
        for name in sorted({*table.text_hmac_N[keyed_N].tolist()}):
            accept(audited, name, triage, by="A", reason="it is public", until=None)
        result = judge_folder(audit, {**policy, "triage": str(triage)})
    left = next(one for one in result.judgements if one.rule == 1).value
    yield "gate, all accepted", left, count - int(keyed_N.sum())
    yield "gate, accepted", result.num_findings, count


def check_audit(seed: int, folder: Path) -> tuple[DrawnAudit, list[str]]:
    """Draw an audit, write it, and return which readers differ from its verdict."""
    drawn = draw_audit(seed)
    audit = write_run(folder / f"run-{seed}", drawn)
    differences = [
        f"{name}: {answer}, not {expected}"
        for name, answer, expected in list_answers(drawn, audit)
        if answer != expected
    ]
    return drawn, differences


def describe(seed: int, drawn: DrawnAudit, differences: list[str]) -> str:
    """Return the row of an audit."""
    results = drawn.results
    level = f"{results.verdict.level} ({results.verdict.reason})"
    cells = (seed, level, len(drawn.came_out), results.num_by_method, "; ".join(differences) or "-")
    return " | ".join(map(str, cells))


def main() -> int:
    """Print a row for each audit; return 1 if a reader differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--audits", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first audit")
    options = parser.parse_args()
    print(" | ".join(COLUMNS))
    num_wrong = 0
    for seed in range(options.seed, options.seed + options.audits):
        with tempfile.TemporaryDirectory() as folder:
            drawn, differences = check_audit(seed, Path(folder))
        num_wrong += bool(differences)
        print(describe(seed, drawn, differences), flush=True)
    print(f"{num_wrong} of {options.audits} audits differ")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
