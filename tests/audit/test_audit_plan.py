"""What an audit measures is fixed before a model is loaded, and the same on every rank."""

from dataclasses import replace
from typing import Any

import pytest
from audit_examples import build_documents
from ranks import RankPool
from torch import distributed

from memguard.audit.plan import AuditPlan
from memguard.audit.suite import load_suite
from memguard.errors import DataError
from memguard.runtime import Runtime


def make_plan(seed: int = 0, **fields: Any) -> AuditPlan:
    documents = build_documents(8)
    return AuditPlan.of(documents, load_suite("extraction"), seed=seed, **fields)


def test_a_fingerprint_is_of_what_is_measured() -> None:
    plan = make_plan()
    assert plan.fingerprint() == make_plan().fingerprint()
    first, *rest = plan.selection.windows
    other_ids = replace(first.document, input_ids=first.document.input_ids + 1)
    other_tokens = (replace(first, document=other_ids), *rest)
    others = [
        replace(plan, selection=replace(plan.selection, windows=other_tokens)),
        make_plan(seed=1),
        make_plan(tally="complete"),
        make_plan(max_documents_per_bucket=3),
        replace(plan, suite=load_suite("attacks")),
        replace(plan, selection=replace(plan.selection, windows=plan.selection.windows[1:])),
    ]
    assert len({plan.fingerprint(), *(other.fingerprint() for other in others)}) == 7


def compare_plans(seeds: list[int]) -> str:
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    try:
        make_plan(seeds[rank]).check_same(Runtime(rank=rank, world_size=world_size))
    except DataError as error:
        return str(error)
    return "same"


@pytest.mark.parametrize(("seeds", "differing"), [([0, 0], ""), ([0, 1], "rank 1")])
def test_ranks_with_other_plans_end_with_an_error_instead_of_waiting(
    ranks: RankPool, seeds: list[int], differing: str
) -> None:
    results = ranks(compare_plans, 2, seeds)
    if not differing:
        assert results == ["same", "same"]
        return
    assert results[0] == results[1]
    assert f"{differing} read other documents or settings than rank 0" in results[0]
    assert all(document.id not in results[0] for document in make_plan().documents)
