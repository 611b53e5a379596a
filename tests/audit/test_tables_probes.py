"""Tables of the extraction probe, the grid and buckets, against windows asked one by one."""

from collections.abc import Callable

import numpy as np
import pytest
from audit_examples import (
    Scripted,
    build_evidence,
    build_rows,
    build_suite,
    say_by_context,
    say_known,
    score_together,
)
from record_examples import make_outline

from memguard.audit.document_scores import ModelResults, build_scores
from memguard.audit.extraction import AuditDocument, Window, list_clusters
from memguard.audit.metrics import METRICS
from memguard.audit.near_verbatim import NotGenerated
from memguard.audit.probabilistic import QUERY_BOUNDS
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.suite import Suite
from memguard.audit.tables import build_attack_cost, list_tables
from memguard.config.settings import SamplingScheme
from memguard.records import DocumentScore

MakeDocument = Callable[..., AuditDocument]


PROBE = ExtractionProbe(continuation_tokens=6)


def _ask(scorer: Scripted, suite: Suite, windows: list[Window]) -> ModelResults:
    return ModelResults(
        teacher_forced=score_together(suite.probes, scorer, windows, tiny_margin=1.0),
        near_verbatim=NotGenerated(reason="it is not tested here"),
    )


@pytest.fixture
def windows(make_document: MakeDocument) -> list[Window]:
    draw = np.random.default_rng(0)
    cut = [
        PROBE.window(
            make_document(draw.integers(0, 90, size), name=f"d{size}", bucket=f"x{size % 2}")
        )
        for size in range(14, 26)
    ]
    return [window for window in cut if window is not None]


def test_a_table_for_the_window_and_one_for_each_cell(windows: list[Window]) -> None:
    grid = GridProbe(offsets=(0, 4), prefix_tokens=(3, 8), continuation_tokens=(4,))
    suite = build_suite(PROBE, grid)
    model = _ask(Scripted(say_by_context), suite, windows)
    base = _ask(Scripted(say_known(lambda ids: True)), suite, windows)
    tables = list_tables(windows, suite, model, base)
    assert [table.probe for table in tables] == ["extraction", *["grid"] * 4]
    assert tables[0].parameters["continuation_tokens"] == 6
    assert "name" not in tables[0].parameters
    assert [table.parameters for table in tables[1:]] == [
        {"offset": o, "prefix_tokens": p, "continuation_tokens": 4} for o in (0, 4) for p in (3, 8)
    ]
    for index, table in enumerate(tables):
        assert set(table.model) <= set(METRICS)
        assert table.base is not None
        assert set(table.base) == set(table.model)
        size = 6 if index == 0 else 4
        for number, window in enumerate(windows):
            requested = window if index == 0 else grid.cells[index - 1].window(window.document)
            if requested is None:
                assert all(np.isnan(value_N[number]) for value_N in table.model.values())
                continue
            ids = requested.input_ids
            said = [say_by_context(ids[: place + 1]) for place in range(len(ids))][-size:]
            num_right = sum(each.right for each in said)
            found = {name: value_N[number] for name, value_N in table.model.items()}
            assert found["verbatim"] == (num_right == size)
            # 0.9 of 6 is 5.4 and of 4 it is 3.6: nothing short of all will do.
            assert found["teacher_forced_90"] == (num_right == size)
            assert found["token_accuracy"] == num_right / size
            assert found["logprob"] == sum(each.logprob for each in said) / size
            assert table.base["verbatim"][number] == 1
            assert table.base["logprob"][number] == -0.125
    assert list_tables(windows, suite, model, None)[0].base is None


def test_attack_cost_of_each_bucket(windows: list[Window]) -> None:
    sampling = SamplingProbe(schemes=(SamplingScheme(), SamplingScheme(top_k=40)))
    suite = build_suite(PROBE, sampling)
    outlines = [make_outline(name, num_repetitions=1) for name in ("x0", "x1", "empty")]
    odd = {tuple(w.input_ids.tolist()) for w in windows if w.document.bucket == "x1"}
    knows = say_known(lambda ids: any(row[: len(ids)] == ids for row in odd))
    model = _ask(Scripted(knows), suite, windows)
    base = _ask(Scripted(say_known(lambda ids: False)), suite, windows)
    cluster_N = list_clusters([window.document for window in windows])
    scores = build_scores(windows, sampling.schemes, model, base)
    even, known, empty = build_attack_cost(scores, outlines, cluster_N)
    assert (even.bucket, known.bucket, empty.bucket) == ("x0", "x1", "empty")
    assert (even.model.num_documents, even.model.num_never, even.model.median) == (6, 6, None)
    # No quantiles of six documents: one of them would be a single document.
    assert (known.model.num_documents, known.model.num_never, known.model.median) == (6, 0, None)
    assert known.base.num_never == 6
    assert tuple(known.model.within) == QUERY_BOUNDS
    assert known.model.within[1].num_matched == 6
    assert even.model.within[QUERY_BOUNDS[-1]].num_matched == 0
    assert (empty.model.num_documents, empty.model.median) == (0, None)
    alone = build_scores(windows, sampling.schemes, model, None)
    assert build_attack_cost(alone, outlines, cluster_N)[0].base is None


def test_no_attack_cost_where_no_way_to_draw_was_asked_for(windows: list[Window]) -> None:
    model = _ask(Scripted(say_by_context), build_suite(PROBE), windows)
    scores = build_scores(windows, (), model, None)
    assert build_attack_cost(scores, [], np.arange(len(windows))) == []


@pytest.mark.parametrize(("num_with_base", "is_shown"), [(0, False), (2, False), (3, True)])
def test_a_base_that_scored_only_some_documents_is_not_shown(
    make_score: Callable[..., DocumentScore], num_with_base: int, is_shown: bool
) -> None:
    """Rates over other documents than the model's would be compared with them."""
    scores = [
        make_score(f"d{index}", 50, base=10 if index < num_with_base else None)
        for index in range(3)
    ]
    (row,) = build_rows(build_evidence(scores))
    assert row.model.verbatim.num_documents == 3
    assert (row.base is not None) is is_shown
    assert bool(row.base_risks) is is_shown
    if row.base is not None:
        assert row.base.verbatim.num_documents == 3


@pytest.mark.parametrize("generated", ["model", "base", "both"])
def test_near_verbatim_is_missing_where_no_text_was_generated(
    make_score: Callable[..., DocumentScore], generated: str
) -> None:
    """Of the base only beside the model's: alone it would be compared with nothing."""
    missing = {"model": {"base_near_verbatim": None}, "base": {"near_verbatim": None}, "both": {}}
    scores = [
        make_score(f"d{index}", 50, base=50).model_copy(update=missing[generated])
        for index in range(3)
    ]
    (row,) = build_rows(build_evidence(scores))
    assert ("near_verbatim" in row.risks) is (generated != "base")
    assert (row.model.near_verbatim is not None) is (generated != "base")
    assert ("near_verbatim" in row.base_risks) is (generated == "both")
    assert (row.base.near_verbatim is not None) is (generated == "both")
