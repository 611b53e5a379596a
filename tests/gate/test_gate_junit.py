"""junit.xml, read back by junitparser, which did not write the counts that it reads."""

import pytest
from gate_results import SENTENCES, make_judgement, make_mixed, make_result, make_unjudged
from junitparser import Error, Failure, JUnitXml, Skipped
from junitparser.xunit2 import JUnitXml as PropertyXml

from memguard.gate.rendered import render_junit
from memguard.records.gate import GateResult, Judgement

HOSTILE = 'a"b<c>&]]>\x00\x1b[31m\ud800\u202e|`dé'


def read(result: GateResult) -> JUnitXml:
    return JUnitXml.fromstring(render_junit(result))


def test_counts_are_read_back() -> None:
    read_back = read(make_mixed())
    counts = (read_back.tests, read_back.failures, read_back.errors, read_back.skipped)
    assert counts == (7, 2, 1, 1)
    # The attributes are written; the cases are counted here.
    cases = [case for suite in read_back for case in suite]
    kinds = [type(case.result[0]) if case.result else None for case in cases]
    assert [kinds.count(kind) for kind in (Failure, Error, Skipped, None)] == [2, 1, 1, 3]
    assert [suite.name for suite in read_back] == [
        "rule 1: near_verbatim",
        "rule 2",
        "rule 3: near_verbatim",
        "rule 4: epsilon",
    ]


@pytest.mark.parametrize(
    ("judgement", "kind", "passes"),
    [
        (make_judgement("pass"), None, True),
        (make_judgement("fail", 40), Failure, False),
        (make_judgement("inconclusive", 2), Error, False),
        (make_unjudged(), Skipped, False),
    ],
    ids=["pass", "fail", "inconclusive", "unjudged"],
)
def test_only_a_pass_looks_like_a_pass(judgement: Judgement, kind: type, passes: bool) -> None:
    read_back = read(make_result(judgement))
    case = next(iter(next(iter(read_back))))
    assert case.name == judgement.name
    assert [type(result) for result in case.result] == ([kind] if kind else [])
    if kind is not None:
        assert case.result[0].message == judgement.sentence
        assert case.result[0].type == judgement.outcome
    # Many programs ignore skipped cases: what they count must not be zero.
    assert (read_back.failures + read_back.errors == 0) is passes


def test_what_cannot_be_judged_makes_the_file_red_once() -> None:
    only = read(make_result(make_judgement("pass"), make_unjudged()))
    assert (only.tests, only.skipped, only.failures, only.errors) == (3, 1, 0, 1)
    case = next(iter(list(only)[-1]))
    assert case.result[0].message == (
        "The gate did not pass (exit code 12): 1 of 2 judgements cannot be judged. Do not release: "
        "65 documents can be extracted, listed in findings.csv."
    )
    beside = read(make_result(make_judgement("fail", 40), make_unjudged()))
    assert (beside.tests, beside.skipped, beside.failures, beside.errors) == (2, 1, 1, 0)


def test_properties_give_the_numbers_and_the_hash_of_the_report() -> None:
    judgement = make_judgement("inconclusive", 2)
    result = make_result(judgement)
    suite = next(iter(PropertyXml.fromstring(render_junit(result))))
    of_suite = {one.name: one.value for one in suite.properties()}
    assert of_suite["report_sha256"] == result.report_sha256
    assert (of_suite["outcome"], of_suite["exit_code"]) == ("inconclusive", "11")
    assert of_suite["verdict"] == result.verdict
    case = {one.name: one.value for one in next(iter(suite)).properties()}
    for name in ("value", "low", "high", "limit"):
        assert float(case[name]) == getattr(judgement, name)  # repr reads back exactly
    for name in ("num_documents", "num_matched", "num_documents_needed"):
        assert int(case[name]) == getattr(judgement, name)
    assert case["bucket"] == "r64"
    passed = next(
        iter(next(iter(PropertyXml.fromstring(render_junit(make_result(make_judgement("pass")))))))
    )
    assert "num_documents_needed" not in {one.name for one in passed.properties()}


def test_hostile_names_are_well_formed_and_equal_results_equal_bytes() -> None:
    judgements = [
        make_judgement(outcome, name=f"{HOSTILE} {outcome}", bucket=HOSTILE, sentence=HOSTILE)
        for outcome in SENTENCES
    ]
    result = make_result(*judgements, audit=HOSTILE, verdict=HOSTILE)
    rendered = render_junit(result)
    assert rendered == render_junit(result.model_copy(deep=True))
    read_back = JUnitXml.fromstring(rendered)
    assert (read_back.tests, read_back.failures) == (4, 1)
    first = next(iter(next(iter(read_back))))
    assert first.name == 'a"b<c>&]]>[U+0000][U+001B][31m[U+D800][U+202E]|`dé pass'
    assert rendered.startswith(b'<?xml version="1.0" encoding="UTF-8"?>\n')
