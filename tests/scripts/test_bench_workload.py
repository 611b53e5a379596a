"""Rows that the benchmarks train on are those of packed documents."""

from types import ModuleType

import numpy as np
import pytest
from script_calls import load_script

pytestmark = pytest.mark.slow

workload: ModuleType = load_script("bench/workload")


def test_rows_are_packed_documents() -> None:
    batches = workload.draw_batches(500, (4, 300), document_tokens=(40, 90), num_batches=3)
    assert not np.array_equal(batches[0].input_ids, batches[1].input_ids)
    for batch in batches:
        for ids, labels, places, documents in zip(
            batch.input_ids, batch.labels, batch.position_ids, batch.document_ids, strict=True
        ):
            _, sizes = np.unique(documents, return_counts=True)
            assert all(40 <= size <= 90 for size in sizes[:-1])
            assert sizes[-1] <= 90
            assert places.tolist() == [place for size in sizes for place in range(size)]
            assert np.array_equal(labels, np.where(places == 0, -100, ids))
        assert batch.num_kept == batch.num_supervised == (batch.labels >= 0).sum()


def test_goldfish_ignores_half_of_the_same_labels() -> None:
    settings = {"document_tokens": (40, 90), "num_batches": 1}
    (plain,) = workload.draw_batches(500, (8, 1000), **settings)
    (batch,) = workload.draw_batches(500, (8, 1000), goldfish=True, **settings)
    assert np.array_equal(batch.input_ids, plain.input_ids)
    assert batch.num_supervised == plain.num_supervised
    is_kept = batch.labels >= 0
    assert np.array_equal(batch.labels[is_kept], plain.labels[is_kept])
    # 8,000 draws of 1/2; 5 standard deviations are 0.03.
    assert abs(batch.num_kept / batch.num_supervised - 0.5) < 0.03


def test_ranks_share_out_the_rows() -> None:
    (batch,) = workload.draw_batches(500, (4, 64), document_tokens=(64, 64), num_batches=1)
    parts = [workload.take_rows(batch, part, 2) for part in range(2)]
    assert [part.input_ids.shape for part in parts] == [(2, 64)] * 2
    assert sum(part.num_kept for part in parts) == batch.num_kept == 4 * 63
