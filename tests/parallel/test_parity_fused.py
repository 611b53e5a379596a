"""Layers of several projections have the numbers of one process: other layouts, biases, tied."""

from dataclasses import replace

import pytest
from parity import Case, Degrees, check
from ranks import RankPool

pytestmark = pytest.mark.slow

_TIED = ("tie_word_embeddings", True)
_UNTIED = ("tie_word_embeddings", False)
_GROUPED = (("new_decoder_architecture", True), ("num_kv_heads", 2), ("bias", True))
_BY_HEAD = (("multi_query", False), ("bias", True), ("parallel_attn", False))
_CASES = [
    # Published ones have a padding token of a high id.
    Case(family="phi3", changes=(_TIED, ("num_key_value_heads", 1), ("pad_token_id", 90))),
    Case(family="glm4", changes=(_TIED,)),
    Case(family="gpt2", changes=(_UNTIED, ("n_inner", 40))),
    Case(family="gpt_bigcode", changes=(("multi_query", False),)),
    Case(family="falcon", changes=_GROUPED, packed=False),
    Case(family="falcon", changes=(*_BY_HEAD, _UNTIED), packed=False),
]


def test_layers_of_several_projections_equal_one_process(ranks: RankPool) -> None:
    check(ranks, (1, 1, 1, 4), [_CASES[0], _CASES[4]])
    check(ranks, (1, 2, 1, 2), [replace(_CASES[2], checkpointing="selective")])


@pytest.mark.mesh
@pytest.mark.parametrize(
    "degrees", [(1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 1, 2), (1, 1, 1, 4), (2, 2, 1, 1)], ids=str
)
def test_layers_of_several_projections_equal_one_process_on_more_meshes(
    ranks: RankPool, degrees: Degrees
) -> None:
    recomputed = [replace(case, checkpointing="full") for case in _CASES[::2]]
    check(ranks, degrees, [*_CASES, *recomputed])
