"""Hashes files on all ranks, each file on one of them. No torch.

    rank 0      lists the files; the largest go to the rank with the least to read
    each rank   hashes its share, and sends it to all others
    rank 0      compares, and hashes what another rank could not read

A model of hundreds of gigabytes is then read in the time of the largest share. Every rank sees the
same folders, as it loads its weights from them. An error is always that of rank 0, as if it had
read everything: other ranks leave out what they cannot read.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from memguard.records.sealed import FileSum, SumFile, sum_file

if TYPE_CHECKING:
    from memguard.runtime.processes import Runtime


def sum_ahead(list_files: Callable[[], Iterable[Path]], runtime: "Runtime") -> SumFile:
    """Hash files, each rank its share; every rank calls this and gets the same sums.

    ``list_files`` is called on rank 0; a file that cannot be read is skipped. On one process
    nothing is hashed ahead. Returns `sum_file`, which has the sums of these files without reading
    them again.

    Raises:
        OtherRankFailed: ``list_files`` raised an error on rank 0.
    """
    if runtime.world_size == 1:
        return sum_file
    shares = runtime.from_main(lambda: share_out(_measure(list_files()), runtime.world_size))
    own: dict[Path, FileSum] = {}
    for path in shares[runtime.rank]:
        try:
            own[path] = sum_file(path)
        except Exception:  # Raised here, it would leave the others waiting: rank 0 reads the file.
            continue
    known: dict[Path, FileSum] = {}
    for part in runtime.gather_objects(own):
        known.update(part)
    return lambda path: known[path] if path in known else sum_file(path)


def share_out(sizes: Mapping[Path, int], num_ranks: int) -> list[list[Path]]:
    """Return the files of each rank, largest first, so that the largest share is small.

    Some ranks get no file if there are fewer files than ranks.
    """
    shares: list[list[Path]] = [[] for _ in range(num_ranks)]
    least = [(0, rank) for rank in range(num_ranks)]
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        num_bytes, rank = heapq.heappop(least)
        shares[rank].append(path)
        heapq.heappush(least, (num_bytes + sizes[path], rank))
    return shares


def _measure(paths: Iterable[Path]) -> dict[Path, int]:
    sizes = {}
    for path in paths:
        try:
            sizes[path] = path.stat().st_size
        except OSError:  # Read, and reported, by rank 0.
            continue
    return sizes
