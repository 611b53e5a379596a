"""What of an audit's measurements the verdict is given; rates against repetitions and copies."""

from typing import Any

import numpy as np
import pytest
from audit_examples import build_suite
from hypothesis import given
from hypothesis import strategies as st
from made_examples import Made, build_evidence, make, make_bucket, make_control, summarise_made
from probe_examples import count, to_tables
from record_examples import make_outline
from result_examples import rate_row

from memguard.audit.probe import Column, Summary
from memguard.audit.probes.attacks import AttackProbe
from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.statistics import compute_trend
from memguard.records import REFERENCE_SECRETS, SECRETS, AuditResults, Tables, TestRow

QUIET = [*make_control([0] * 10), *make_bucket("x4", [0] * 40)]
NAN = np.nan


def _tabulate(made: list[Made], buckets: Any = None, **fields: Any) -> Tables:
    return to_tables(ExtractionProbe().tabulate(build_evidence(made, buckets, **fields)))


@pytest.mark.parametrize(
    ("correct", "fields", "counts"),
    [
        (50, {}, True),
        (45, {}, True),  # near-verbatim
        (44, {}, False),
        # Known token by token under teacher forcing, but no text comes out.
        (47, {"near": False}, False),
    ],
)
def test_verbatim_and_near_verbatim_count(
    correct: int, fields: dict[str, Any], counts: bool
) -> None:
    made = [*make_control([0] * 10), *make_bucket("x4", [correct] * 40, **fields)]
    verdict = summarise_made(made).verdict
    assert verdict.trained.num_matched == 40 * counts
    assert verdict.level == ("memorized" if counts else "none-found")


def test_what_is_sampled_within_the_queries_counts() -> None:
    matched = {"trained": np.arange(50) >= 10, "base": np.zeros(50)}
    suite = build_suite(ExtractionProbe(), SamplingProbe())
    columns = {"sampling.log10_queries": Column(values=np.full(50, 3.0))}
    others = {"sampling": Summary(num_items=50, matched=matched, columns=columns)}
    results = summarise_made(QUIET, suite=suite, others=others)
    assert results.verdict.trained.num_matched == results.num_findings == 40


@pytest.mark.parametrize(("base", "level"), [(46, "extracted"), (44, "memorized")])
def test_what_the_base_model_produces_does_not_count(base: int, level: str) -> None:
    made = [*make_control([0] * 10, base=0), *make_bucket("x4", [50] * 40, base=base)]
    verdict = summarise_made(made).verdict
    assert verdict.level == level
    assert verdict.base.num_matched == (40 if level == "extracted" else 0)
    assert (verdict.reason == "base-too") == (level == "extracted")


def test_a_document_that_training_never_reached_is_not_trained() -> None:
    made = [
        *make_control([0] * 10),
        *make_bucket("x4", [0] * 29),
        *make_bucket("x64", [50] * 40, num_repetitions=0),
    ]
    verdict = summarise_made(made).verdict
    assert (verdict.level, verdict.reason, verdict.bucket) == ("inconclusive", "too-few", "x4")
    assert verdict.trained.num_documents == 29
    assert verdict.scope.startswith("Audited: 29 of 29 trained documents;")


def test_documents_too_short_are_those_of_trained_buckets() -> None:
    def audit(short: int, sampled: int, role: str = "trained", count: int = 4) -> AuditResults:
        buckets = [
            make_outline("x0", "control", 0),
            make_outline("x4", "trained", 4),
            make_outline("more", role, count, num_too_short=short, num_not_sampled=sampled),
        ]
        return summarise_made(QUIET, buckets)

    assert audit(5, 0).verdict.level == "none-found"
    assert audit(6, 0).verdict.reason == "unaudited"
    # Documents outside of a random sample are like those in it.
    assert audit(5, 90).verdict.level == "none-found"
    assert audit(5, 1).verdict.scope.startswith(
        "Audited: 40 of 46 trained documents (5 too short or not auditable, 1 not in the sample)"
    )
    # Neither were these trained.
    assert audit(99, 0, role="forget").verdict.level == "none-found"
    assert audit(99, 0, count=0).verdict.level == "none-found"
    more = audit(5, 1).tables.find_bucket("more")
    assert (more.num_documents, more.num_too_short, more.num_not_sampled) == (0, 5, 1)


def test_attacks_canaries_and_the_kind_of_the_control_are_given() -> None:
    attacked_N = np.full(50, NAN)
    attacked_N[:5] = 0
    attacked_N[10:20] = 1
    suite = build_suite(ExtractionProbe(), AttackProbe(), CanaryProbe())
    others = {
        "attacks": Summary(num_items=15, matched={"trained": attacked_N}),
        "canaries": Summary(reason="no canaries were given"),
    }
    attacked = summarise_made(QUIET, suite=suite, others=others).verdict
    assert attacked.level == "memorized"
    assert attacked.sentence.startswith("Attacks extracted 10 of 10 attacked training documents")
    other = summarise_made(QUIET, suite=suite, others=others, control="other-kind").verdict
    assert (other.level, other.reason) == ("extracted", "other-kind")
    others["canaries"] = Summary(
        num_items=28,
        rows=[
            rate_row("canaries", "verbatim", SECRETS, 2, 16),
            rate_row("canaries", "verbatim", REFERENCE_SECRETS, 0, 12),
        ],
    )
    told = summarise_made(QUIET, suite=suite, others=others, control="other-kind").verdict
    assert (told.level, told.reason) == ("memorized", "canaries")
    assert "2 of 16 trained canaries" in told.sentence


def test_the_bucket_of_the_test_is_the_verdicts() -> None:
    made = [
        *make_control([3] * 40),
        *make_bucket("x4", [10] * 40, num_repetitions=4),
        *make_bucket("x64", [47] * 37 + [50] + [20] * 2, num_repetitions=64),
    ]
    verdict = summarise_made(made).verdict
    assert (verdict.level, verdict.metric, verdict.bucket) == ("memorized", "near_verbatim", "x64")
    assert verdict.sentence == (
        "38 of 40 documents trained 64 times were extracted, 0 of 40 unseen ones: the model "
        "memorized training text."
    )


def test_base_and_differences_in_the_table() -> None:
    made = [*make_control([0] * 20, base=0), *make_bucket("x4", [50] * 15 + [46] * 5, base=10)]
    tables = summarise_made(made).tables

    def find(metric: str, **key: Any) -> Any:
        row = tables.find("extraction", metric, "x4", **key)
        assert row is not None
        return row

    assert list(tables.risks("x4")) == ["verbatim", "near_verbatim"]
    assert (find("verbatim").num_matched, find("near_verbatim").num_matched) == (15, 20)
    assert (find("verbatim").minus_control, find("near_verbatim").minus_control) == (0.75, 1)
    assert tables.risks("x4", model="base")["near_verbatim"].num_matched == 0
    assert find("verbatim", model="base").num_matched == 0
    assert find("token_accuracy", model="base").value == pytest.approx(0.2)
    assert find("first_divergence", statistic="median").value == 50
    assert find("first_divergence", statistic="median", model="base").value == 10
    assert find("extraction_strength").value == 0.75
    assert {row.minus_control for row in tables.risks("x0").values()} == {None}


@pytest.mark.parametrize("generated", ["model", "base", "model base"])
def test_near_verbatim_is_missing_where_no_text_was_generated(generated: str) -> None:
    tables = _tabulate(make_bucket("x4", [50] * 3, base=50), generated=generated)
    assert ("near_verbatim" in tables.risks("x4")) is ("model" in generated)
    assert ("near_verbatim" in tables.risks("x4", model="base")) is (generated == "model base")
    for model, name in (("trained", "model"), ("base", "base")):
        detail = tables.find_detail("extraction", model)
        assert (detail["reason_not_generated"] is None) is (name in generated)
    if generated == "base":
        row = tables.find("extraction", "near_verbatim", "x4")
        assert (row.value, row.missing_because) == (None, "the weights are offloaded")


def _find_trends(*buckets: tuple[str, Any, int | None, list[int]]) -> list[TestRow]:
    """Return the trends over buckets of (name, role, repetitions, right tokens of each)."""
    counts = [make_outline(name, role, number) for name, role, number, _ in buckets]
    made = [
        each
        for name, role, number, rights in buckets
        for each in make_bucket(name, rights, role=role, num_repetitions=number)
    ]
    return list(ExtractionProbe().tabulate(build_evidence(made, counts)).tests)


def test_a_rate_that_rises_with_the_dose() -> None:
    verbatim, near = _find_trends(
        ("x16", "trained", 16, [50] * 15 + [46] * 5),
        ("x0", "control", 0, [0] * 20),
        ("x4", "trained", 4, [50] * 5 + [0] * 15),
        # None of these says at which dose its rate stands.
        ("mixed", "trained", None, [50] * 20),
        ("rest", "background", 1, [50] * 20),
        ("late", "trained", 0, [50] * 20),
        ("empty", "trained", 64, []),
    )
    assert (verbatim.metric, near.metric) == ("verbatim", "near_verbatim")
    assert (verbatim.doses, verbatim.num_documents) == ((0, 4, 16), 60)
    assert (verbatim.fitted, near.fitted) == ((0, 0.25, 0.75), (0, 0.25, 1))
    expected = compute_trend([0, 5, 15], [20, 20, 20], [0, 4, 16])
    assert (verbatim.statistic, verbatim.p_value) == (expected.z, expected.p_value)
    assert verbatim.statistic > 4


def test_a_rate_that_falls_is_fitted_flat() -> None:
    falling = _find_trends(
        ("x0", "control", 0, [0] * 10),
        ("x4", "trained", 4, [50] * 6 + [0] * 4),
        ("x8", "trained", 8, [50] * 2 + [0] * 8),
    )
    assert falling[0].fitted == pytest.approx((0, 0.4, 0.4))


def test_without_a_rate_that_differs_there_is_no_p_value() -> None:
    control, flat = ("x0", "control", 0, [0] * 9), ("x4", "trained", 4, [0] * 9)
    for trend in _find_trends(control, flat):
        assert (trend.statistic, trend.p_value, trend.fitted) == (None, None, (0, 0))
    assert _find_trends(control) == []
    assert summarise_made(QUIET, tally="missing").tables.tests == ()


def _count_copies(made: list[Made]) -> dict[int, tuple[int | None, int]]:
    rows = _tabulate(made).select("extraction", "verbatim", bucket="(trained)")
    return {int(row.parameters.split("=")[1]): count(row) for row in rows}


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 14), st.booleans(), st.sampled_from([None, 0, 1, 4])), max_size=30
    )
)
def test_copies_are_counted_by_a_plain_loop(rows: list[tuple[int, bool, int | None]]) -> None:
    made = [
        make(f"{n}", 50 if verbatim else 3, num_copies=copies, num_repetitions=number)
        for n, (copies, verbatim, number) in enumerate(rows)
    ]
    found = _count_copies([*made, *make_control([50], num_copies=0)])
    reached = [row for row in rows if row[2] != 0]
    assert list(found) == ([1, 2, 5, 10] if reached else [])
    for k, counts in found.items():
        held = [verbatim for copies, verbatim, _ in reached if copies <= k]
        assert counts == (sum(held), len(held))


def test_unknown_copies_are_not_guessed() -> None:
    assert _count_copies([make("a", 50, num_copies=1), make("b", 50)]) == {}
