"""What a plan says of its speeds: the spread of published runs with rows of its length."""

import pytest

from memguard.planner.assumptions import ROW_CLASSES, describe_spread, list_assumptions
from memguard.planner.machine import detect_machine, load_machine


def test_each_length_of_rows_has_one_class() -> None:
    for seq_len in (1, 512, 2048, 2049, 4096, 8192, 8193, 16384, 10**6):
        assert sum(group.has(seq_len) for group in ROW_CLASSES) == 1
    assert ROW_CLASSES[0].has(2048)
    assert not ROW_CLASSES[0].has(2049)


@pytest.mark.parametrize(
    ("seq_len", "spread"),
    [
        (2048, "0.97 to 1.03 of those of 26 published runs on H100s with rows of up to 2,048"),
        (8192, "0.96 to 0.99 of those of 3 published runs on H100s with rows of 4,096 to 8,192"),
        (32768, "0.97 to 1.04 of those of 6 published runs on H100s with rows of 16,384 and more"),
    ],
)
def test_the_spread_is_that_of_rows_of_this_length(seq_len: int, spread: str) -> None:
    phrase = describe_spread(seq_len)
    assert spread in phrase
    # Until figures of a GPU are committed.
    assert phrase.endswith("and never measured by us")
    assumptions = list_assumptions(load_machine("dgx-h100"), has_mask=False, seq_len=seq_len)
    assert phrase in assumptions


def test_no_run_on_a_cpu_was_published() -> None:
    assumptions = list_assumptions(detect_machine(gpus=[]), has_mask=True, seq_len=512)
    assert "speeds of a CPU are assumed, only to order the meshes" in assumptions
    assert not any("published runs" in text for text in assumptions)
