"""Files are hashed by the ranks together; errors are those of rank 0, and no rank waits."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool
from test_runtime_processes import here

from memguard.errors import DataError, OtherRankFailed
from memguard.records.sealed import FileSum, sum_file
from memguard.runtime import Runtime, shared_sums
from memguard.runtime.shared_sums import share_out, sum_ahead


@given(sizes=st.lists(st.integers(0, 100), max_size=12), num_ranks=st.integers(1, 5))
def test_shares_are_even(sizes: list[int], num_ranks: int) -> None:
    files = {Path(f"{index}"): size for index, size in enumerate(sizes)}
    shares = share_out(files, num_ranks)
    assert share_out(dict(reversed(files.items())), num_ranks) == shares
    assert sorted(path for share in shares for path in share) == sorted(files)
    loads = [sum(files[path] for path in share) for share in shares]
    # Largest first onto the smallest share: without its last file no share exceeds another.
    for share, load in zip(shares, loads, strict=True):
        assert not share or load - files[share[-1]] <= min(loads)


def test_one_process_hashes_nothing_ahead() -> None:
    def fail() -> list[Path]:
        raise AssertionError("files are listed")

    assert sum_ahead(fail, Runtime()) is sum_file


def sum_and_note(files: list[Path], blind: tuple[int, ...]) -> dict[str, Any]:
    """On a rank: the sums, and what it read of the files ahead and afterwards.

    Args:
        files: names of files.
        blind: ranks that cannot read.
    """
    runtime = here()
    read: list[str] = []

    def note(path: Path) -> FileSum:
        read.append(path.name)
        if runtime.rank in blind:
            raise PermissionError(13, "no", str(path))
        return sum_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_sums, "sum_file", note)
        get_sum = sum_ahead(lambda: files, runtime)
        ahead = list(read)
        try:
            sums = runtime.only_on_main(lambda: [get_sum(path) for path in files])
            sums = runtime.broadcast_object(sums)
        except (OSError, OtherRankFailed) as error:
            return {"error": type(error).__name__}
    return {"sums": sums, "ahead": ahead, "after": read[len(ahead) :]}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = []
    for index, size in enumerate((10, 500, 30, 200)):
        paths.append(tmp_path / f"{index}")
        paths[-1].write_bytes(bytes([index]) * size)
    return paths


def test_each_rank_reads_its_share(ranks: RankPool, files: list[Path]) -> None:
    found = ranks(sum_and_note, 3, files, ())
    assert [rank["ahead"] for rank in found] == [["1"], ["3"], ["2", "0"]]
    for rank in found:
        assert rank["sums"] == [sum_file(path) for path in files]
        assert rank["after"] == []


def test_rank_0_reads_what_another_cannot(ranks: RankPool, files: list[Path]) -> None:
    found = ranks(sum_and_note, 3, files, (2,))
    assert [rank["after"] for rank in found] == [["0", "2"], [], []]
    assert all(rank["sums"] == [sum_file(path) for path in files] for rank in found)


def test_what_no_rank_can_read_is_an_error_on_all(ranks: RankPool, files: list[Path]) -> None:
    expected = [{"error": "PermissionError"}, *[{"error": "OtherRankFailed"}] * 2]
    assert ranks(sum_and_note, 3, files, (0, 1, 2)) == expected
    # A file that is missing on all ranks is rank 0's to report.
    files[1].unlink()
    expected[0] = {"error": "FileNotFoundError"}
    assert ranks(sum_and_note, 3, files, ()) == expected


def fail_to_list() -> tuple[str, int]:
    runtime = here()

    def fail() -> list[Path]:
        raise DataError("no such folder")

    try:
        sum_ahead(fail, runtime)
    except (DataError, OtherRankFailed) as error:
        return type(error).__name__, error.exit_code
    raise AssertionError("it ends everywhere")


def test_an_error_of_the_list_is_an_error_on_all(ranks: RankPool) -> None:
    assert ranks(fail_to_list, 2) == [("DataError", 3), ("OtherRankFailed", 3)]
