"""Every compared family has the numbers of one process on meshes; others with shared storage."""

from dataclasses import replace

import pytest
from parity import Case, Degrees, case_of, check
from ranks import RankPool
from tiny_families import FAMILIES, MORE_FAMILIES

from memguard.parallel.mesh_shape import COMPARED_FAMILIES

MESHES: tuple[Degrees, ...] = ((1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 1, 2), (1, 1, 1, 4))
STORAGE: Degrees = (2, 2, 1, 1)
_UNSPLIT = sorted({*FAMILIES, *MORE_FAMILIES} - {*COMPARED_FAMILIES})

_TIED = (("tie_word_embeddings", True), ("vocab_size", 131))
_UNTIED = (("tie_word_embeddings", False), ("vocab_size", 97))
# Several projections in one layer: other layouts, with biases, tied and not.
_GROUPED = (("new_decoder_architecture", True), ("num_kv_heads", 2), ("bias", True))
_BY_HEAD = (("multi_query", False), ("bias", True), ("parallel_attn", False))
_FUSED = [
    Case(family="phi3", changes=(*_TIED, ("num_key_value_heads", 1))),
    Case(family="glm4", changes=_TIED),
    Case(family="gpt2", changes=(*_UNTIED, ("n_inner", 40))),
    Case(family="gpt_bigcode", changes=(("multi_query", False),)),
    Case(family="falcon", changes=_GROUPED, packed=False),
    Case(family="falcon", changes=(*_BY_HEAD, *_UNTIED), packed=False),
]


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


def test_layers_of_several_projections_equal_one_process(ranks: RankPool) -> None:
    check(ranks, (1, 1, 1, 4), [_FUSED[0], _FUSED[4]])
    check(ranks, (1, 2, 1, 2), [replace(_FUSED[2], checkpointing="selective")])


@pytest.mark.mesh
@pytest.mark.parametrize("degrees", [*MESHES, STORAGE], ids=str)
def test_layers_of_several_projections_equal_one_process_on_more_meshes(
    ranks: RankPool, degrees: Degrees
) -> None:
    recomputed = [replace(case, checkpointing="full") for case in _FUSED[::2]]
    check(ranks, degrees, [*_FUSED, *recomputed])


@pytest.mark.parametrize(
    "families", [["bitnet"], pytest.param(_UNSPLIT, marks=pytest.mark.mesh)], ids=str
)
def test_storage_of_families_without_a_plan_is_shared(ranks: RankPool, families: list[str]) -> None:
    check(ranks, STORAGE, [case_of(family) for family in families])
