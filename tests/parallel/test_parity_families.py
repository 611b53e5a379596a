"""Every compared family has the numbers of one process on meshes; others with shared storage."""

import pytest
from parity import Degrees, case_of, check
from ranks import RankPool
from tiny_families import FAMILIES, MORE_FAMILIES, SIZES_DEPEND, STORED_OTHERWISE

from memguard.parallel.model_sizes import COMPARED_FAMILIES

pytestmark = pytest.mark.slow

MESHES: tuple[Degrees, ...] = ((1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 1, 2), (1, 1, 1, 4))
STORAGE: Degrees = (2, 2, 1, 1)
_UNSPLIT = sorted(
    {*FAMILIES, *MORE_FAMILIES, *STORED_OTHERWISE, *SIZES_DEPEND} - {*COMPARED_FAMILIES}
)


@pytest.mark.parametrize(
    "families", [["phi", "exaone4"], ["gemma", "olmo2"], ["opt", "mixtral"]], ids=str
)
def test_families_equal_one_process(ranks: RankPool, families: list[str]) -> None:
    check(ranks, MESHES[0], [case_of(family) for family in families])


@pytest.mark.mesh
@pytest.mark.parametrize("family", sorted(COMPARED_FAMILIES))
def test_every_compared_family_equals_one_process(ranks: RankPool, family: str) -> None:
    for degrees in (*MESHES, STORAGE):
        check(ranks, degrees, [case_of(family)])


@pytest.mark.parametrize(
    "family",
    [
        family if family == "bitnet" else pytest.param(family, marks=pytest.mark.mesh)
        for family in _UNSPLIT
    ],
)
def test_storage_of_families_without_a_plan_is_shared(ranks: RankPool, family: str) -> None:
    check(ranks, STORAGE, [case_of(family)])
