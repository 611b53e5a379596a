"""The policy that `--init` writes: valid as it is, and with any line of it uncommented."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from evidence_examples import make_full_report
from report_examples import make_report
from result_examples import make_tables

from memguard import records as r
from memguard.gate.gaps import Audited
from memguard.gate.judge import judge_audit
from memguard.gate.policy import load_policy, read_policy
from memguard.gate.template import render_policy

REPORTS = {"plain": make_report(), "full": make_full_report(goldfish=False)}
_RULE = re.compile(r"^  # - (\{.*\})$", re.MULTILINE)


def wrap(report: r.AuditReport) -> Audited:
    return Audited(folder=Path(), report=report, report_sha256="0" * 64, documents=None, gaps=())


@pytest.mark.parametrize("name", REPORTS)
def test_it_loads_and_judges(tmp_path: Path, name: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(render_policy(REPORTS[name]))
    loaded = load_policy(path)
    assert [rule.metric for rule in loaded.policy.gate] == ["risk", "findings"]
    assert loaded.policy.verdict == ("none-found",)
    assert judge_audit(wrap(REPORTS[name]), loaded).exit_code == 10


@pytest.mark.parametrize("name", REPORTS)
def test_every_commented_line_is_a_rule_that_finds_its_row(tmp_path: Path, name: str) -> None:
    text = render_policy(REPORTS[name], every=True)
    rules = _RULE.findall(text)
    named = {(m.probe, m.metric, m.parameters) for m in REPORTS[name].tables.metrics}
    found = set()
    for rule in rules:
        values: dict[Any, Any] = yaml.safe_load(rule)
        values = {"on" if key is True else key: value for key, value in values.items()}
        (*_, judgement) = judge_audit(
            wrap(REPORTS[name]), read_policy({"gate": [values]})
        ).judgements
        if values["metric"] not in ("findings", "epsilon"):
            assert judgement.bucket is not None, rule
            found.add((values["probe"], values["metric"], values.get("parameters", "")))
    with_interval = {
        (row.probe, row.metric, row.parameters)
        for row in REPORTS[name].tables.results
        if row.ci is not None and row.against is None and row.model == "trained"
    }
    # The examples have no metric of held-out documents as a rate, which it claims to be.
    assert found == (named & with_interval) - {("heldout", "nll", "")}
    path = tmp_path / "all.yaml"
    path.write_text(text.replace("  # - {", "  - {"))
    assert len(load_policy(path).policy.gate) == len(rules) + 2


def test_an_audit_without_trained_documents_still_gives_a_policy(tmp_path: Path) -> None:
    report = REPORTS["plain"].model_copy(update={"tables": make_tables([])})
    path = tmp_path / "policy.yaml"
    path.write_text(render_policy(report))
    assert [rule.metric for rule in load_policy(path).policy.gate] == ["findings"]


def test_a_name_cannot_leave_its_comment(tmp_path: Path) -> None:
    report = REPORTS["plain"].model_copy(update={"run": "run\ngate: []\n# \u2028verdict: x"})
    path = tmp_path / "policy.yaml"
    path.write_text(render_policy(report))
    assert [rule.metric for rule in load_policy(path).policy.gate] == ["risk", "findings"]
