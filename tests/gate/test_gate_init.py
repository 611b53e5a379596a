"""The policy of `--init` passes if nothing came out, and fails with one document; the decision."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gate_audits import make_attacked, write_audit
from gate_checks import expect
from report_examples import make_report
from result_examples import change_tables

from memguard.gate.gaps import Audited, load_audited
from memguard.gate.judge import judge_audit
from memguard.gate.policy import load_policy, read_policy
from memguard.gate.template import render_policy
from memguard.records.gate import GateResult
from memguard.seeds import derive_generator

BASE = make_report()


def audit(folder: Path, sizes: dict[str, int], sample: int | None, matched: int = 0) -> Audited:
    counts = {name: (0, size) for name, size in sizes.items()}
    counts[max(counts)] = (matched, sizes[max(counts)])
    return load_audited(write_audit(folder, make_attacked(counts, sample, BASE)))


def judge_drafted(folder: Path, sizes: dict[str, int], sample: int | None) -> float:
    """Check both exit codes, and that no smaller limit passes; return the limit of the risk."""
    quiet = audit(folder / "quiet", sizes, sample)
    path = folder / "policy.yaml"
    path.write_text(render_policy(quiet.report))
    loaded = load_policy(path)
    passed = judge_audit(quiet, loaded)
    assert (passed.exit_code, quiet.gaps) == (0, ())
    assert passed.decision == "Release is within this policy. Every probe of the suite ran."
    assert "verdict" in loaded.policy.model_fields_set
    failed = judge_audit(audit(folder / "found", sizes, sample, matched=1), loaded)
    assert failed.exit_code == 10
    assert failed.decision == (
        "Do not release: 1 document can be extracted, listed in findings.csv."
    )
    limit = loaded.policy.gate[0].limit
    few = min(min(size, sample or size) for name, size in sizes.items() if name != "control")
    assert expect(0, few, limit)[0] == 0
    assert limit <= 0.01 or expect(0, few, limit - 0.01)[0] == 11
    return limit


@pytest.mark.parametrize(
    ("number", "sample", "limit"), [(30, 20, 0.17), (40, 40, 0.09), (10, None, 0.31)]
)
def test_limits_are_those_that_nothing_extracted_meets(
    tmp_path: Path, number: int, sample: int | None, limit: float
) -> None:
    sizes = {"control": number, "r4": number}
    assert judge_drafted(tmp_path, sizes, sample) == limit
    text = " ".join((tmp_path / "policy.yaml").read_text().replace("#", " ").split())
    size = min(number, sample or number)
    assert f"0 of {size} documents trained 4 times reach" in text
    is_sampled = "'max_documents_per_bucket' of attacks in the file of audit.suite, now 20" in text
    assert is_sampled == (number == 30)
    assert ("verdict: [none-found, inconclusive]" in text) == (number < 30)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(30))
def test_thirty_audits_pass_and_fail(tmp_path: Path, index: int) -> None:
    generator = derive_generator(0, "audits without findings", index)
    numbers = sorted(generator.integers(1, 100, size=int(generator.integers(1, 4))).tolist())
    sizes = {f"r{number}": int(generator.integers(10, 401)) for number in dict.fromkeys(numbers)}
    sample = [None, 20, 40][int(generator.integers(3))]
    judge_drafted(tmp_path, {"control": int(generator.integers(10, 401)), **sizes}, sample)


# -- the decision ---------------------------------------------------------------------------------


def decide(counts: dict[str, tuple[int, int]], sample: int, **rule: Any) -> GateResult:
    report = make_attacked(counts, sample, BASE)
    audited = Audited(folder=Path(), report=report, report_sha256="0" * 64, documents=None, gaps=())
    return judge_audit(audited, read_policy({"gate": [{"metric": "risk", **rule}]}))


def test_what_decides_is_a_setting() -> None:
    result = decide({"r4": (0, 40)}, 20, at_most=0.1)
    assert result.decision == (
        "Not decided: attack 16 more documents a group (audit.suite, attacks: "
        "max_documents_per_bucket: 36). The documents that came out could not be counted."
    )
    # A bucket of 30 has no 36, whatever the setting.
    result = decide({"r4": (0, 30)}, 20, at_most=0.1)
    assert "Not decided: give 36 documents a group in place of 30 (audit.suite, attacks: " in (
        result.decision
    )


def test_a_group_keeps_a_name_that_is_not_its_repetitions() -> None:
    report = make_attacked({"r4": (0, 40)}, 40, BASE)
    (bucket,) = report.tables.buckets
    for name, words in (("r4", "documents trained 4 times"), ("mails", "mails (trained 4 times)")):
        rows = [_rename(row, name) for row in report.tables.results]
        renamed = change_tables(report, results=rows, buckets=[_rename(bucket, name)])
        audited = Audited(
            folder=Path(), report=renamed, report_sha256="0" * 64, documents=None, gaps=()
        )
        result = judge_audit(audited, read_policy({"gate": [{"metric": "risk", "at_most": 0.2}]}))
        assert result.judgements[0].name == f"risk on {words} at most 20 %"


def _rename(row: Any, name: str) -> Any:
    return replace(row, bucket=name)


def test_what_was_not_measured_is_said() -> None:
    result = decide({"r4": (3, 40)}, 20, at_most=0.1, on="r5")
    assert result.decision.startswith("Cannot be judged: the audit has no bucket 'r5'")
