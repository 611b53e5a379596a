"""The pool of processes that distributed tests run on."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankFailure, RankPool
from torch import distributed as dist

pytestmark = pytest.mark.slow


def sum_of_ranks() -> tuple[int, int, float]:
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value.item()


def add(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor + number * dist.get_rank()


def describe_process() -> tuple[str | None, int, int]:
    return os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), os.getpid()


def fail_on_one(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("this one is broken")
    dist.barrier()


class Unpicklable(Exception):
    def __init__(self, one: Any, two: Any) -> None:
        super().__init__(f"{one} and {two}")


def fail_unpicklably() -> None:
    raise Unpicklable(1, 2)


def die() -> None:
    os._exit(3)


def wait_for_ever() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_four_ranks_reduce_together(ranks: RankPool) -> None:
    assert ranks(sum_of_ranks, 4) == [(rank, 4, 6.0) for rank in range(4)]


def test_sixteen_ranks_start_and_reduce(ranks: RankPool) -> None:
    assert [total for *_, total in ranks(sum_of_ranks, 16)] == [120.0] * 16


def test_arguments_and_results_travel(ranks: RankPool) -> None:
    results = ranks(add, 2, torch.arange(3), 10)
    assert [result.tolist() for result in results] == [[0, 1, 2], [10, 11, 12]]


def test_each_call_has_fresh_processes_with_one_thread(ranks: RankPool) -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    first, second = ranks(describe_process, 1)[0], ranks(describe_process, 1)[0]
    assert first[:2] == second[:2] == ("1", 1)
    assert len({first[2], second[2], os.getpid()}) == 3
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_kept_ranks_are_the_same_processes_until_one_fails(ranks: RankPool) -> None:
    with ranks.keep() as kept:
        first, second = kept(describe_process, 2), kept(describe_process, 2)
        assert first == second
        assert kept(sum_of_ranks, 2) == [(0, 2, 1.0), (1, 2, 1.0)]
        with pytest.raises(ValueError, match="this one is broken"):
            kept(fail_on_one, 2, 1)
        assert {each[2] for each in kept(describe_process, 2)}.isdisjoint(each[2] for each in first)


def test_what_a_rank_raises_arrives_with_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="this one is broken") as caught:
        ranks(fail_on_one, 3, 2)
    assert "On rank 2 of 3" in caught.value.__notes__[0]
    assert "in fail_on_one" in caught.value.__notes__[0]


def test_an_exception_that_cannot_be_sent_arrives_as_text(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)1 and 2.*in fail_unpicklably"):
        ranks(fail_unpicklably, 1)


def test_a_rank_that_dies_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 0 died"):
        ranks(die, 1)


@pytest.mark.parametrize(("function", "code"), [(die, 3), (sys.exit, 0), (fail_unpicklably, 1)])
def test_a_process_of_its_own_ends_with_its_code(
    ranks: RankPool, function: Callable[[], Any], code: int
) -> None:
    process = ranks.start(function)
    process.join(timeout=60)
    assert process.exitcode == code


def test_ranks_that_take_too_long_are_named_and_killed(ranks: RankPool) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2"):
        ranks(wait_for_ever, 2, timeout_s=1)
