"""What the benchmarks share: verdicts, ratios of rounds, ranks and their memory."""

import os
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
from ranks import RankPool
from script_calls import load_script

pytestmark = pytest.mark.slow

harness: ModuleType = load_script("bench/harness")


def test_a_verdict_fails_by_a_bar_or_by_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = harness.Verdict()
    assert verdict.check("speed", 2.0, at_least=2.0) == ">= 2x ok"
    assert verdict.check("share", 0.5, below=1, unit=" %") == "< 1 % ok"
    assert verdict.check("near", 1.0, at_least=0.85, at_most=1.15) == ">= 0.85x and <= 1.15x ok"
    assert verdict.check("no bar", 9.0) == ""
    assert verdict.end() == 0
    assert capsys.readouterr().out == "\nPASS: 3 limits met\n"
    assert verdict.check("share", 1.0, below=1, unit=" %") == "< 1 % MISSED"
    # A figure that is none meets no bar.
    assert verdict.check("speed", float("nan"), at_least=2.0) == ">= 2x MISSED"
    verdict.fail("losses differ")
    assert verdict.end() == 1
    said = "\nFAIL: share: 1 %, not < 1 %; speed: nanx, not >= 2x; losses differ\n"
    assert capsys.readouterr().out == said


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # A machine four times slower in the second round; the first call of a side is not counted.
    ours, theirs = iter([99.0, 1.0, 4.0, 1.0]), iter([1.0, 3.0, 12.0, 2.0])
    sides = {"ours": lambda: next(ours), "theirs": lambda: next(theirs)}
    rounds = harness.take_turns(sides, rounds=3)
    assert rounds.seconds == {"ours": [1.0, 4.0, 1.0], "theirs": [3.0, 12.0, 2.0]}
    assert rounds.ratio("ours", "theirs") == 3.0
    assert rounds.median_s("theirs") == 3.0


def test_a_side_that_fails_is_left_out() -> None:
    def fail() -> float:
        raise harness.Failed("no such collective")

    rounds = harness.take_turns({"ours": lambda: 1.0, "theirs": fail}, rounds=2)
    assert rounds.seconds == {"ours": [1.0, 1.0], "theirs": []}
    assert rounds.failures == {"theirs": "no such collective"}


def grow(num_bytes: int, rank: "harness.Rank") -> int:
    """Report, then hold so many bytes until every rank does."""
    message: int = rank.report("ready")
    held = np.ones(num_bytes, dtype=np.uint8)
    rank.report()
    return message * int(held[0])


def fail_alone(rank: "harness.Rank") -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has\nno such file")
    rank.report()


@pytest.fixture
def ranks_of(ranks: RankPool) -> Iterator[type]:
    """`Ranks`; what it puts into the environment ends with the test.

    The pool has started the server that processes are forks of.
    """
    with mock.patch.dict(os.environ):
        yield harness.Ranks


def test_ranks_answer_and_their_memory_is_seen(ranks_of: type) -> None:
    with ranks_of(grow, 200_000_000, num_ranks=2) as ranks:
        assert ranks.hear() == ["ready", "ready"]
        before = ranks.anonymous_bytes()
        _, peaks = ranks.monitor(7)
        assert ranks.go() == [7, 7]
    grown = [peak - level for peak, level in zip(peaks, before, strict=True)]
    # RssAnon is what was written, with what the interpreter and gloo take beside it.
    assert all(200_000_000 <= each <= 230_000_000 for each in grown), grown


def test_a_rank_that_fails_ends_the_wait_for_the_others(ranks_of: type) -> None:
    with (
        ranks_of(fail_alone, num_ranks=2) as ranks,
        pytest.raises(harness.Failed, match=r"^ValueError: rank 1 has no such file$"),
    ):
        ranks.hear()
