"""Batches of any sizes, without a model: order, limit, what a failed batch changes."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from audit_examples import build_tiny_layer
from hypothesis import given
from hypothesis import strategies as st
from memory_errors import OUT_OF_MEMORY

from memguard.audit.batching import Batching, BatchResult, Job
from memguard.errors import ModelError

LAYER = build_tiny_layer(11)
SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(1, 4)), max_size=12)


def make_jobs(sizes: Sequence[tuple[int, int, int]]) -> list[Job]:
    return [
        Job(input_ids=np.ones(num_old, dtype=np.int32), num_new=num_new, num_rows=num_rows)
        for num_old, num_new, num_rows in sizes
    ]


def count(jobs: Sequence[Job]) -> int:
    """Tokens of a padded batch, prompts and continuations padded apart."""
    longest = max(len(job.input_ids) for job in jobs) + max(job.num_new for job in jobs)
    return sum(job.num_rows * longest for job in jobs)


class Recorder:
    """Returns each job's index as its result; runs out of memory above a limit."""

    def __init__(
        self,
        jobs: Sequence[Job],
        limit: int = 10**9,
        num_bad: int = 0,
        error: Exception = OUT_OF_MEMORY["torch"],
    ) -> None:
        self.jobs, self.limit, self.num_bad, self.error = jobs, limit, num_bad, error
        self.batches: list[list[int]] = []
        self.steps: list[int] = []

    def __call__(self, batch: Sequence[int], num_steps: int) -> BatchResult[int]:
        self.batches.append(list(batch))
        self.steps.append(num_steps)
        if count([self.jobs[index] for index in batch]) > self.limit:
            raise self.error
        return BatchResult(results=list(batch), num_bad=self.num_bad, num_tokens=len(batch))


@given(sizes=SIZES, budget=st.integers(1, 120))
def test_batches_are_greedy_longest_first_and_limited(
    sizes: list[tuple[int, int, int]], budget: int
) -> None:
    jobs = make_jobs(sizes)
    recorder = Recorder(jobs)
    assert Batching(LAYER, budget).run(jobs, recorder) == list(range(len(jobs)))
    order = [index for batch in recorder.batches for index in batch]
    assert order == sorted(range(len(jobs)), key=lambda index: (-count([jobs[index]]), index))
    for number, batch in enumerate(recorder.batches):
        chosen = [jobs[index] for index in batch]
        assert len(batch) == 1 or count(chosen) <= budget
        assert recorder.steps[number] == max(job.num_new for job in chosen)
        for following in recorder.batches[number + 1 : number + 2]:
            assert count([*chosen, jobs[following[0]]]) > budget


def test_a_batch_that_did_not_fit_limits_all_that_follow() -> None:
    jobs = make_jobs([(4, 0, 1)] * 8)
    recorder = Recorder(jobs, limit=8)
    batching = Batching(LAYER, 32)
    assert batching.run(jobs, recorder) == list(range(8))
    assert [len(batch) for batch in recorder.batches] == [8, 4, 2, 2, 2, 2]
    later = Recorder(jobs, limit=8)
    batching.run(jobs, later)
    assert [len(batch) for batch in later.batches] == [2, 2, 2, 2]

    with pytest.raises(ModelError, match=r"3 row\(s\) of 6 tokens, does not fit into memory"):
        Batching(LAYER, 32).run(wide := make_jobs([(4, 2, 3)]), Recorder(wide, limit=1))


def test_what_the_first_job_keeps_counts_as_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, allocated = make_jobs([(4, 0, 1)] * 40), [1_000, 1_300]
    recorder = Recorder(jobs)
    known = {
        "reset_peak_memory_stats": lambda _: None,
        # Of the 400 bytes that the first job takes, 300 stay.
        "max_memory_allocated": lambda _: 1_400,
        "memory_allocated": lambda _: allocated[bool(recorder.batches)],
        "memory_reserved": lambda _: 1_300,
        "mem_get_info": lambda _: (8_700, 10_000),
    }
    for name, answer in known.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    Batching(LAYER, 1 << 20, measures_memory=True).run(jobs, recorder)
    # Four fifths of 8,700 bytes are 69 tokens.
    assert [len(batch) for batch in recorder.batches] == [1, 17, 17, 5]


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_memory_that_runs_out_in_any_way_halves_the_batch(error: Exception) -> None:
    jobs = make_jobs([(4, 0, 1)] * 4)
    recorder = Recorder(jobs, limit=8, error=error)
    assert Batching(LAYER, 16).run(jobs, recorder) == [0, 1, 2, 3]
    assert [len(batch) for batch in recorder.batches] == [4, 2, 2]


def test_another_error_is_raised() -> None:
    jobs = make_jobs([(4, 0, 1)] * 4)
    with pytest.raises(RuntimeError, match="shapes differ"):
        Batching(LAYER, 16).run(jobs, Recorder(jobs, 8, error=RuntimeError("shapes differ")))


def test_numbers_that_are_not_finite_are_counted() -> None:
    jobs = make_jobs([(4, 0, 1)] * 3)
    with pytest.raises(ModelError, match="not finite for 2 of 3 tokens"):
        Batching(LAYER, 32).run(jobs, Recorder(jobs, num_bad=2))
