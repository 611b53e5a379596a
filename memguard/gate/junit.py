"""`junit.xml`: the result of a gate for programs that read test results.

    suite       one for each rule of the policy, and one for the verdict's level
    case        one for each judgement
    failure     fail
    error       inconclusive: the case was run and is not decided
    skipped     cannot be judged, with the reason
    properties  of a case: its counts, value, interval and limit; of a suite: the report's hash

Many programs count a skipped case as no problem. If rules could not be judged and nothing else is
red, a suite "gate" with one case, an error, is added: whoever reads only this file sees that the
gate did not pass.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from junitparser import Error, Failure, JUnitXml, Skipped
from junitparser.xunit2 import TestCase, TestSuite

from memguard.pages import formatting as fmt
from memguard.records.gate import GateResult, Judgement

_NAME_LIMIT, _SENTENCE_LIMIT = 1000, 4000
_FIELDS: Final = (
    "probe",
    "metric",
    "parameters",
    "bucket",
    "compared_with",
    "limit",
    "value",
    "low",
    "high",
    "num_documents",
    "num_matched",
    "num_documents_needed",
)


def render_junit(result: GateResult) -> bytes:
    """Render a result as JUnit XML, UTF-8.

    Args:
        result: of the gate.
    """
    xml = JUnitXml("memguard gate")
    suites = list(_build_suites(result))
    if result.outcome != "pass" and not any(suite.failures or suite.errors for suite in suites):
        suites.append(_build_outcome(result))
    for suite in suites:
        xml.add_testsuite(suite)
    xml.update_statistics()  # type: ignore[no-untyped-call]
    rendered: bytes = xml.tostring()  # type: ignore[no-untyped-call]
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + rendered + b"\n"


def _build_suites(result: GateResult) -> Iterator[TestSuite]:
    ordered = sorted(result.judgements, key=lambda judgement: judgement.rule)
    for rule, judgements in groupby(ordered, key=lambda judgement: judgement.rule):
        listed = list(judgements)
        name = _name_suite(rule, listed)
        suite = _start_suite(name, result)
        for judgement in listed:
            suite.add_testcase(_build_case(name, judgement))
        suite.update_statistics()  # type: ignore[no-untyped-call]
        yield suite


def _name_suite(rule: int, judgements: list[Judgement]) -> str:
    if rule == 0:
        return "verdict"
    # What cannot be judged has no metric; other judgements of the rule may have one.
    metrics = sorted({judgement.metric for judgement in judgements if judgement.metric})
    named = f": {', '.join(metrics)}" if metrics else ""
    return fmt.clean_text(f"rule {rule}{named}", _NAME_LIMIT)


def _start_suite(name: str, result: GateResult) -> TestSuite:
    suite = TestSuite(name)  # type: ignore[no-untyped-call]
    suite.timestamp = fmt.clean_name(result.created.removesuffix("Z"), 40)
    for key, value in (
        ("audit", result.audit),
        ("report_sha256", result.report_sha256),
        ("memguard", result.tool_version),
        ("verdict", result.verdict),
        ("outcome", result.outcome),
        ("exit_code", str(result.exit_code)),
    ):
        suite.add_property(key, fmt.clean_text(value, _SENTENCE_LIMIT))
    return suite


def _build_case(suite: str, judgement: Judgement) -> TestCase:
    case = TestCase(fmt.clean_name(judgement.name, _NAME_LIMIT), f"memguard.gate.{suite}", 0)
    sentence = fmt.clean_text(judgement.sentence, _SENTENCE_LIMIT)
    if judgement.outcome == "fail":
        case.result = [Failure(sentence, "fail")]
    elif judgement.outcome == "inconclusive":
        case.result = [Error(sentence, "inconclusive")]
    elif judgement.outcome == "cannot-be-judged":
        case.result = [Skipped(sentence, "cannot-be-judged")]
    case.system_out = sentence
    for field in _FIELDS:
        value = getattr(judgement, field)
        if value is not None:
            # repr is the shortest text that reads back as the same number.
            text = value if isinstance(value, str) else repr(value)
            case.add_property(field, fmt.clean_text(text, _NAME_LIMIT))
    return case


def _build_outcome(result: GateResult) -> TestSuite:
    suite = _start_suite("gate", result)
    case = TestCase("outcome", "memguard.gate", 0)
    skipped = sum(judgement.outcome == "cannot-be-judged" for judgement in result.judgements)
    case.result = [
        Error(
            f"The gate did not pass (exit code {result.exit_code}): {skipped:,} of "
            f"{len(result.judgements):,} judgements cannot be judged.",
            result.outcome,
        )
    ]
    suite.add_testcase(case)
    suite.update_statistics()  # type: ignore[no-untyped-call]
    return suite
