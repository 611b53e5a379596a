"""Increases since an earlier audit: paired where documents are the same, and said where not."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from gate_audits import make_rates, write_audit
from report_examples import make_report
from result_examples import change_rows, make_interval, value_row

from memguard import records as r
from memguard.audit.statistics import compute_difference, compute_paired_interval
from memguard.errors import ConfigError, RecordError
from memguard.gate.gaps import load_audited
from memguard.gate.judge import judge_audit
from memguard.gate.policy import load_policy
from memguard.records.gate import Judgement

PLAIN = make_report()
Yes = Callable[[str, int], bool]


def write(folder: Path, yes: Yes, num_documents: int = 40, **changes: Any) -> Path:
    """Write an audit of r4 with these near-verbatim answers, which its rates count."""
    matched = sum(yes("r4", number) for number in range(num_documents))
    report = changes.pop("report", lambda report: report)(
        make_rates({"control": (0, 40), "r4": (matched, num_documents)}, PLAIN)
    )
    columns = {
        f"extraction.{metric}": lambda bucket, number: float(
            bucket.bucket != "control" and yes(bucket.bucket, number)
        )
        for metric in ("verbatim", "near_verbatim")
    }
    return write_audit(folder, report, columns=columns, **changes)


def judge(now: Path, before: Path, limit: float = 0.1, **rule: Any) -> Judgement:
    """Judge with a policy beside the folders, which names the earlier one as it is there."""
    policy = now.parent / "policy.yaml"
    values: Mapping[str, Any] = {"metric": "near_verbatim", "on": "r4", **rule}
    listed = ", ".join(f"{name}: {value}" for name, value in values.items())
    policy.write_text(f"gate: [{{{listed}, than: {before.name}, at_most: {limit}}}]\n")
    (judgement,) = judge_audit(load_audited(now), load_policy(policy)).judgements
    return judgement


def test_the_same_documents_are_paired(tmp_path: Path) -> None:
    now = write(tmp_path / "now", lambda bucket, n: n < 12)
    before = write(tmp_path / "before", lambda bucket, n: 4 <= n < 14)
    # 4 only now, 2 only before, of 40.
    expected = compute_paired_interval(4, 2, 40, 40)
    assert expected is not None
    judgement = judge(now, before)
    assert (judgement.value, judgement.low, judgement.high) == (2 / 40, *expected)
    assert "paired, on the same documents" in judgement.sentence
    assert "12 of 40 documents, minus 10 of 40 documents of" in judgement.sentence
    assert judgement.compared_with == PLAIN.run
    assert judgement.name == "near_verbatim on r4 at most 10 % more than before"
    assert judge(now, before, 0.3).outcome == "pass"
    assert judge(now, before, -0.1).outcome == "fail"
    inconclusive = judge(now, before, 0.06)
    assert inconclusive.outcome == "inconclusive"
    assert inconclusive.num_documents_needed is not None
    assert "about" in inconclusive.sentence


def test_documents_in_another_order_are_the_same_documents(tmp_path: Path) -> None:
    now = write(tmp_path / "now", lambda bucket, n: n < 12)
    before = write(
        *(tmp_path / "before", lambda bucket, n: n >= 30),
        text=lambda bucket, n: f"{bucket} {39 - n}",
    )
    judgement = judge(now, before)
    # Reversed: the ten that the earlier audit has are among the twelve.
    assert (judgement.value, judgement.low, judgement.high) == (
        *(2 / 40,),
        *(compute_paired_interval(2, 0, 40, 40) or ()),
    )


def test_copies_are_paired_at_their_effective_number(tmp_path: Path) -> None:
    now = write(tmp_path / "now", lambda bucket, n: n < 4, clusters=lambda bucket, n: n // 2)
    before = write(tmp_path / "before", lambda bucket, n: False)
    judgement = judge(now, before)
    assert (judgement.low, judgement.high) == compute_paired_interval(4, 0, 40, 20)


def subtract(now: tuple[int, int], before: tuple[int, int]) -> tuple[float, float]:
    ones, others = (
        r.Rate(num_documents=n, num_matched=k, rate=k / n, ci=None) for k, n in (now, before)
    )
    difference = compute_difference(ones, others)
    assert difference is not None
    assert difference.ci is not None
    return difference.ci


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_documents": 50}, "40 texts are in both audits, of 40 here and 50 there"),
        ({"text": lambda bucket, n: f"other {n}"}, "no text in common"),
        (
            {
                "report": lambda report: report.model_copy(
                    update={"data": report.data.model_copy(update={"identity_key": "other"})}
                )
            },
            "different identity keys",
        ),
    ],
)
def test_other_documents_are_two_independent_rates(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    now = write(tmp_path / "now", lambda bucket, n: n < 12)
    before = write(tmp_path / "before", lambda bucket, n: n < 10, **changes)
    judgement = judge(now, before)
    size = changes.get("num_documents", 40)
    assert (judgement.low, judgement.high) == pytest.approx(subtract((12, 40), (10, size)))
    assert "not paired:" in judgement.sentence
    assert said in judgement.sentence


def test_answers_that_do_not_give_the_counts_are_not_paired(tmp_path: Path) -> None:
    now = write(tmp_path / "now", lambda bucket, n: n < 12)
    report = make_rates({"control": (0, 40), "r4": (10, 40)}, PLAIN)
    wrong = {"extraction.near_verbatim": lambda bucket, n: 0.0}
    before = write_audit(tmp_path / "before", report, columns=wrong)
    judgement = judge(now, before)
    assert "the records do not tell the answer of each document" in judgement.sentence


def test_a_mean_is_not_paired(tmp_path: Path) -> None:
    row = value_row("extraction", "token_accuracy", "r4", make_interval(0.5, 0.04))
    lower = value_row("extraction", "token_accuracy", "r4", make_interval(0.4, 0.03))
    now, before = (
        write(
            *(tmp_path / name, lambda bucket, n: False),
            report=lambda report, row=one: change_rows(report, add=[row]),
        )
        for name, one in (("now", row), ("before", lower))
    )
    judgement = judge(now, before, metric="token_accuracy")
    # Independent intervals of 0.04 and 0.03 on either side: hypot is 0.05.
    assert (judgement.value, judgement.low, judgement.high) == pytest.approx((0.1, 0.05, 0.15))
    assert "the metric is not yes or no by document" in judgement.sentence


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda report: change_rows(report, lambda row: None if row.bucket == "r4" else row),
            "has no row of extraction near_verbatim on r4",
        ),
        (
            lambda report: report.model_copy(
                update={"method": report.method.model_copy(update={"continuation_tokens": 20})}
            ),
            "another 'continuation_tokens' of the probe extraction: 20 there, 50 here",
        ),
    ],
)
def test_what_cannot_be_compared_cannot_be_judged(
    tmp_path: Path, change: Callable[[r.AuditReport], r.AuditReport], said: str
) -> None:
    now = write(tmp_path / "now", lambda bucket, n: n < 12)
    before = write(tmp_path / "before", lambda bucket, n: n < 10, report=change)
    judgement = judge(now, before)
    assert judgement.outcome == "cannot-be-judged"
    assert said in judgement.sentence


def test_an_earlier_audit_that_is_damaged_or_not_there_is_refused(tmp_path: Path) -> None:
    now = write(tmp_path / "now", lambda bucket, n: n < 12)
    before = write(tmp_path / "before", lambda bucket, n: n < 10)
    (before / "report.html").write_text("changed")
    with pytest.raises(RecordError, match=r"before' is damaged and is not judged: report\.html"):
        judge(now, before)
    with pytest.raises(ConfigError, match=r"policy.yaml:1:\d+ 'gate\[0\]\.than': .* is neither"):
        judge(now, tmp_path / "nowhere")
