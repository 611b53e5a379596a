"""Judgements of made-up audits, against a second implementation on SciPy's beta."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evidence_examples import make_full_report
from gate_audits import make_rates
from gate_checks import CODES, LIMITS, expect
from report_examples import drop_near_verbatim, make_green, make_report
from result_examples import change_rows, change_tables, make_interval, rate_row, value_row
from scipy.stats import beta

from memguard import records as r
from memguard.errors import ConfigError
from memguard.gate.gaps import Audited
from memguard.gate.judge import judge_audit
from memguard.gate.policy import read_policy
from memguard.records.gate import GateResult, Judgement

PLAIN = make_report()
FULL = make_full_report(goldfish=False)


def judge(report: r.AuditReport, *rules: Mapping[str, Any], **others: Any) -> GateResult:
    """Judge a report without a folder."""
    audited = Audited(
        folder=Path("audit"), report=report, report_sha256="0" * 64, documents=None, gaps=()
    )
    return judge_audit(audited, read_policy({"gate": list(rules), **others}))


def judge_one(report: r.AuditReport, **rule: Any) -> Judgement:
    (judgement,) = judge(report, rule).judgements
    return judgement


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("report", [PLAIN, make_report(goldfish=True)], ids=["plain", "goldfish"])
def test_every_rate_is_judged_as_scipy_does_from_its_counts(
    report: r.AuditReport, limit: float
) -> None:
    for metric in ("verbatim", "near_verbatim", "teacher_forced_90"):
        result = judge(report, {"metric": metric, "on": "trained", "at_most": limit})
        expected = [
            expect(row.num_matched or 0, row.num_documents, limit)
            for bucket in ("r4", "r16", "r64")
            if (row := report.tables.find("extraction", metric, bucket)) is not None
        ]
        judged = [(judgement.bucket, CODES[judgement.outcome]) for judgement in result.judgements]
        assert judged == list(zip(("r4", "r16", "r64"), [c for c, _ in expected], strict=True))
        assert [j.num_documents_needed for j in result.judgements] == [n for _, n in expected]
        codes = {code for code, _ in expected}
        assert result.exit_code == next(code for code in (10, 12, 11, 0) if code in codes)


def test_a_judgement_has_the_row_that_it_is_of() -> None:
    judgement = judge_one(PLAIN, metric="near_verbatim", on="r4", at_most=0.1)
    row = PLAIN.tables.find("extraction", "near_verbatim", "r4")
    assert row is not None
    assert judgement.name == "near_verbatim on documents trained 4 times at most 10 %"
    assert (judgement.rule, judgement.probe, judgement.metric, judgement.bucket) == (
        *(1, "extraction"),
        *("near_verbatim", "r4"),
    )
    assert (judgement.value, judgement.low, judgement.high) == (row.value, row.low, row.high)
    assert (judgement.num_matched, judgement.num_documents) == (1, 40)
    assert judgement.num_documents_needed == expect(1, 40, 0.1)[1] == 70
    assert judgement.sentence == (
        "1 of 40 documents: 2.5 %, 95 % interval 0.0633 % to 13.2 %. It contains the limit of "
        "10 %: 70 documents would decide at this rate."
    )


def test_a_bound_that_rounds_to_the_limit_is_written_out() -> None:
    sentence = judge_one(
        make_rates({"r4": (0, 35)}, PLAIN), metric="verbatim", at_most=0.1
    ).sentence
    assert "0 % to 10 %." not in sentence
    assert f"{100 * beta.ppf(0.975, 1, 35):.9g} %" in sentence


def test_every_parameter_and_probe_is_judged() -> None:
    result = judge(FULL, {"metric": "near_verbatim", "on": "r64", "at_most": 0.1})
    assert [(j.probe, j.parameters) for j in result.judgements] == [
        ("extraction", ""),
        ("generation", "decoding=greedy"),
        ("generation", "decoding=T=1, top-p 0.95"),
    ]
    one = judge_one(FULL, metric="within_queries", parameters="queries=10", on="r4", at_most=0.5)
    assert (one.probe, one.parameters) == ("sampling", "queries=10")
    assert len({judgement.name for judgement in result.judgements}) == 3


def test_groups_are_no_buckets() -> None:
    pooled = judge(FULL, {"metric": "verbatim", "on": "(trained)", "at_most": 0.1})
    assert {j.parameters for j in pooled.judgements} == {
        *("copies_at_most=1", "copies_at_most=2"),
        *("copies_at_most=5", "copies_at_most=10"),
    }
    each = judge(FULL, {"metric": "verbatim", "probe": "extraction", "at_most": 0.1})
    assert [j.bucket for j in each.judgements] == ["r4", "r16", "r64"]
    secrets = judge(FULL, {"metric": "verbatim", "on": "(secrets)", "at_most": 0.1})
    assert [(j.probe, j.bucket) for j in secrets.judgements] == [("canaries", "(secrets)")]


def test_the_control_and_the_base_model_are_judged_too() -> None:
    control = judge_one(PLAIN, metric="verbatim", on="control", at_most=0.1)
    assert (control.outcome, control.num_matched) == ("pass", 0)
    base = judge_one(PLAIN, metric="verbatim", on="r64", model="base", at_most=0.1)
    assert (base.outcome, base.num_matched) == ("pass", 0)


def test_the_difference_from_the_control_is_judged_on_its_interval() -> None:
    for limit, outcome in ((0.2, "pass"), (0.05, "inconclusive"), (-0.1, "fail")):
        judgement = judge_one(PLAIN, metric="near_verbatim", on="r4", above_control=limit)
        row = PLAIN.tables.find("extraction", "near_verbatim", "r4")
        assert row is not None
        assert (judgement.value, judgement.low, judgement.high) == (
            *(row.minus_control, row.minus_control_low),
            row.minus_control_high,
        )
        assert (judgement.outcome, judgement.compared_with) == (outcome, "control")


def test_the_difference_from_the_base_model_is_judged_on_its_interval() -> None:
    result = judge(PLAIN, {"metric": "near_verbatim", "on": "trained", "above_base": 0.1})
    # The example's intervals are 3 percentage points on either side of 2.5, 62.5 and 100.
    assert [j.outcome for j in result.judgements] == ["pass", "fail", "fail"]
    assert {j.compared_with for j in result.judgements} == {"base"}


def test_another_estimate_than_a_rate_needs_about_so_many() -> None:
    row = value_row("extraction", "token_accuracy", "r4", make_interval(0.3, 0.2), 50)
    report = change_rows(PLAIN, lambda one: None if one.key == row.key else one, [row])
    judgement = judge_one(report, metric="token_accuracy", on="r4", at_most=0.4)
    assert (judgement.outcome, judgement.num_documents_needed) == ("inconclusive", 200)
    assert "about 200 documents would decide" in judgement.sentence
    least = judge_one(report, metric="token_accuracy", on="r4", at_least=0.05)
    assert least.outcome == "pass"


# -- risk -----------------------------------------------------------------------------------------


def test_the_risk_is_the_one_with_the_highest_upper_end() -> None:
    report = make_rates({"r4": (0, 100)}, PLAIN)
    few = rate_row("extraction", "near_verbatim", "r4", 0, 20)
    report = change_rows(report, lambda row: None if row.key == few.key else row, [few])
    judgement = judge_one(report, metric="risk", at_most=0.1)
    # 0 of 100 passes; 0 of 20 reaches 16.8 %.
    assert (judgement.metric, judgement.num_documents) == ("near_verbatim", 20)
    assert (judgement.outcome, judgement.num_documents_needed) == ("inconclusive", 36)
    assert judgement.name == "risk on r4 at most 10 %"


def test_a_risk_that_surely_fails_decides_before_a_wider_interval() -> None:
    report = make_rates({"r4": (30, 100)}, PLAIN)
    few = rate_row("extraction", "verbatim", "r4", 0, 5)
    report = change_rows(report, lambda row: None if row.key == few.key else row, [few])
    judgement = judge_one(report, metric="risk", at_most=0.1)
    assert (judgement.outcome, judgement.metric) == ("fail", "near_verbatim")


def test_a_risk_that_was_not_measured_is_not_within_the_limit() -> None:
    report = drop_near_verbatim(make_report(goldfish=True))
    judgement = judge_one(report, metric="risk", on="r4", at_most=0.1)
    assert judgement.outcome == "cannot-be-judged"
    assert "key-value cache" in judgement.sentence


# -- what cannot be judged ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"metric": "personal_data", "at_most": 0.1}, "no metric 'personal_data'"),
        ({"metric": "near_verbatm", "at_most": 0.1}, "did you mean 'near_verbatim'?"),
        ({"metric": "risks", "at_most": 0.1}, "did you mean 'risk'?"),
        ({"metric": "verbatim", "probe": "extractoin", "at_most": 0.1}, "mean 'extraction'?"),
        ({"metric": "verbatim", "probe": "grid", "at_most": 0.1}, "no probe 'grid'"),
        ({"metric": "verbatim", "on": "r65", "at_most": 0.1}, "no bucket 'r65'; it has control"),
        ({"metric": "verbatim", "on": "controll", "at_most": 0.1}, "did you mean 'control'?"),
        ({"metric": "verbatim", "on": "(trained)", "at_most": 0.1}, "no bucket '(trained)'"),
        ({"metric": "auc", "on": "trained", "at_most": 0.6}, "it has rows of (members)"),
        (
            {"metric": "auc", "parameters": "score=los", "on": "(members)", "at_most": 0.6},
            "mean 's",
        ),
        ({"metric": "verbatim", "model": "reference", "at_most": 0.1}, "the model 'reference'"),
        ({"metric": "verbatim", "statistic": "median", "at_most": 0.1}, "no row of extraction"),
        (
            {"metric": "first_divergence", "on": "r4", "statistic": "median", "at_most": 3},
            "interval",
        ),
    ],
)
def test_what_the_audit_lacks_is_never_a_pass(rule: dict[str, Any], said: str) -> None:
    result = judge(PLAIN, rule)
    assert result.exit_code == 12
    for judgement in result.judgements:
        assert judgement.outcome == "cannot-be-judged"
        assert said in judgement.sentence
        assert (judgement.probe, judgement.metric, judgement.bucket) == (None, None, None)


def test_a_control_or_a_base_that_the_audit_lacks_cannot_be_judged() -> None:
    report = make_report(doses=((4, 0, 0, 0.3),))
    for rule in (
        {"metric": "verbatim", "on": "control", "at_most": 0.1},
        {"metric": "verbatim", "on": "r4", "above_control": 0.1},
    ):
        (judgement,) = judge(report, rule).judgements
        assert judgement.outcome == "cannot-be-judged"
        assert "the audit has no control" in judgement.sentence.replace("The", "the")
    unscored = report.model_copy(
        update={
            "model": report.model.model_copy(update={"base": None, "base_weights_sha256": None})
        }
    )
    judgement = judge_one(unscored, metric="verbatim", on="r4", above_base=0.1)
    assert (judgement.outcome, judgement.sentence) == (
        "cannot-be-judged",
        "The audit scored no base model.",
    )


def test_a_trained_bucket_without_a_row_is_no_pass() -> None:
    report = make_rates({"r4": (0, 40), "r16": (0, 40)}, PLAIN)
    assert judge(report, {"metric": "verbatim", "at_most": 0.1}).exit_code == 0
    lost = change_rows(report, lambda row: None if row.bucket == "r16" else row)
    result = judge(lost, {"metric": "verbatim", "at_most": 0.1})
    assert [j.outcome for j in result.judgements] == ["pass", "cannot-be-judged"]
    assert result.exit_code == 12


def test_a_rate_that_contradicts_its_counts_is_not_judged() -> None:
    report = make_rates({"r4": (20, 40)}, PLAIN)
    for changes, said in (
        ({"low": 0.0, "high": 0.05, "value": 0.01}, "not that of its counts"),
        ({"num_matched": 0, "value": 0.0, "low": 0.0, "high": 0.05}, "not that of its counts"),
        ({"num_matched": None}, "without its counts"),
        ({"low": None, "high": None, "interval": ""}, "has no interval"),
        ({"low": 0.6, "high": 0.7}, "does not contain"),
    ):
        changed = change_rows(report, lambda row, changes=changes: replace(row, **changes))
        judgement = judge_one(changed, metric="verbatim", at_most=0.1)
        assert judgement.outcome == "cannot-be-judged"
        assert said in judgement.sentence


@pytest.mark.parametrize(
    "rule",
    [
        {"metric": "verbatim", "at_most": 10},
        {"metric": "verbatim", "at_most": 1},
        {"metric": "verbatim", "at_least": 0},
        {"metric": "risk", "at_most": -0.1},
        {"metric": "verbatim", "above_control": 1},
        {"metric": "auc", "on": "(members)", "at_most": 60},
    ],
)
def test_a_limit_that_no_audit_breaks_or_none_keeps_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'gate\[0\]\.\w+' of \w+ must be .* 10 % is 0\.10"):
        judge(PLAIN, rule)


# -- the verdict ----------------------------------------------------------------------------------


def test_the_level_of_the_verdict_is_a_rule_only_where_the_policy_says_so() -> None:
    rule = {"metric": "verbatim", "on": "control", "at_most": 0.1}
    silent = judge(PLAIN, rule)
    assert (silent.exit_code, silent.level) == (0, "memorized")
    assert silent.verdict == PLAIN.verdict.describe()
    asked = judge(PLAIN, rule, verdict=["none-found"])
    assert asked.exit_code == 10
    assert asked.judgements[0].name == "verdict none-found"
    assert "memorized" in asked.judgements[0].sentence
    green = PLAIN.model_copy(update={"verdict": make_green()})
    assert judge(green, verdict=["none-found", "inconclusive"]).exit_code == 0
    grey = make_green().model_copy(update={"level": "inconclusive", "reason": "too-few"})
    undecided = PLAIN.model_copy(update={"verdict": grey})
    # An audit that could not tell has not shown that nothing is extracted.
    assert judge(undecided, verdict=["none-found"]).exit_code == 10
    assert judge(undecided, verdict=["none-found", "inconclusive"]).exit_code == 0


def test_of_several_outcomes_the_worst_decides() -> None:
    rules = {
        0: {"metric": "verbatim", "on": "control", "at_most": 0.1},
        11: {"metric": "near_verbatim", "on": "r4", "at_most": 0.1},
        12: {"metric": "personal_data", "at_most": 0.1},
        10: {"metric": "verbatim", "on": "r64", "at_most": 0.1},
    }
    for codes, expected in (
        ((0,), 0), ((0, 11), 11), ((0, 11, 12), 12), ((0, 11, 12, 10), 10), ((11, 10), 10),
    ):  # fmt: skip
        assert judge(PLAIN, *(rules[code] for code in codes)).exit_code == expected


def test_copies_are_judged_at_their_effective_number() -> None:
    row = r.ResultRow(
        probe="extraction", metric="verbatim", bucket="r4", statistic="rate", num_documents=40,
        num_matched=0, num_clusters=20, num_matched_clusters=0, value=0.0, low=0.0,
        high=float(beta.ppf(0.975, 1, 20)), interval="clopper-pearson",
    )  # fmt: skip
    report = make_rates({"r4": (0, 40)}, PLAIN)
    report = change_tables(
        report, results=[row if one.key == row.key else one for one in report.tables.results]
    )
    judgement = judge_one(report, metric="verbatim", at_most=0.1)
    assert (judgement.outcome, judgement.num_documents_needed) == ("inconclusive", 71)
    assert "0 of 40 documents (0 of 20 texts)" in judgement.sentence
