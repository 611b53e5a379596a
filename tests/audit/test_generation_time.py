"""Text is generated where the weights do not fit at once, for as long as a limit allows."""

from typing import Any

import numpy as np
import pytest
import torch
from audit_examples import build_suite
from ranks import RankPool
from test_audit_families import SUITE, build_recited, check_audit
from test_decoding import decode_all
from tiny_families import build
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.tensor import DTensor

from memguard.audit.beams import BeamRequest, search_beams
from memguard.audit.decoding import Decoder, GenerationLimit
from memguard.audit.probes.attacks import AttackProbe
from memguard.audit.requests import LimitReached, Prompt
from memguard.config.settings import SamplingScheme
from memguard.hf.assembly import Assembly
from memguard.hf.load import shard_scratch_model
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.model.kv_cache import GrowingRows
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.runtime import start_runtime

pytestmark = pytest.mark.slow

SCHEME = SamplingScheme()
ATTACKED = build_suite(*SUITE.probes, AttackProbe(width=3, samples=3))


def decode_block_by_block(model: Any, max_minutes: float | None) -> dict[str, Any]:
    """On a rank of two along z whose memory does not hold all weights at once."""
    layer = shard_scratch_model(
        model, Assembly(mesh=build_mesh(MeshShape(z=2), "cpu"), device=torch.device("cpu"))
    )
    num_gathers = num_forwards = most = 0
    gather, forward = param_group.foreach_all_gather, CausalLM.forward

    def count_gather(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_gathers
        num_gathers += 1
        return gather(*args, **kwargs)

    def count_forward(self: CausalLM, work: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        return forward(self, work)

    def note_memory(module: Any, *_: Any) -> None:
        nonlocal most
        whole = [p for p in layer.lm.model.parameters() if not isinstance(p, DTensor)]
        most = max(most, sum(p.numel() for p in whole))

    for module in layer.lm.model.modules():
        module.register_forward_pre_hook(note_memory)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch, start_runtime() as runtime:
        patch.setattr(param_group, "foreach_all_gather", count_gather)
        patch.setattr(CausalLM, "forward", count_forward)
        patch.setattr(CausalLM, "fits_gathered", lambda self: False)
        limit = GenerationLimit(max_minutes=max_minutes, say=lines.append)
        decoder = Decoder(layer.lm, 150, runtime, limit)
        try:
            texts = decode_all(decoder)
        except LimitReached as reason:
            return {"reason": str(reason), "lines": lines}
    parameters = list(layer.lm.model.parameters())
    return {
        "texts": texts,
        "lines": lines,
        "gathers": num_gathers,
        "forwards": num_forwards,
        "most": most,
        "is_sharded": all(isinstance(one, DTensor) for one in parameters),
    }


def test_weights_that_do_not_fit_are_gathered_for_each_token(ranks: RankPool) -> None:
    model = build("llama")
    expected = decode_all(Decoder(build_causal_lm(model), 150))
    # Blocks, embedding, head, last norm.
    num_units = model.config.num_hidden_layers + 3
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    ends = sum(p.numel() for p in model.parameters()) - block * model.config.num_hidden_layers
    for found in ranks(decode_block_by_block, 2, model, None):
        assert found["texts"] == expected
        # A forward whose result is not read by the head gathers one unit less.
        assert (num_units - 1) * found["forwards"] <= found["gathers"]
        assert found["gathers"] <= num_units * found["forwards"]
        assert found["is_sharded"]
        assert found["most"] <= 2 * block + ends
        # One line for each decoding of at least three steps.
        assert 1 <= len(found["lines"]) <= 4
        assert "gathered for each token" in found["lines"][0]


def test_generation_ends_at_the_limit_on_all_ranks(ranks: RankPool) -> None:
    for found in ranks(decode_block_by_block, 2, build("llama"), 1e-9):
        assert found["lines"] == []
        assert "for 1e-09 minutes, which is 'audit.max_generation_minutes'" in found["reason"]
        assert "Raise it, or use a larger x or y" in found["reason"]


def test_the_limit_is_that_of_all_models_together() -> None:
    lm = build_causal_lm(build("llama"))
    lines: list[str] = []
    limit = GenerationLimit(max_minutes=1e-9, say=lines.append)
    request = [Prompt(input_ids=torch.arange(3, 8).numpy(), num_new=6, document="a")]
    # Where all weights fit, no time is taken.
    Decoder(lm, 100, limit=limit).continue_greedily(request)
    assert (limit.spent_s, lines) == (0.0, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalLM, "fits_gathered", lambda self: False)
        roomy = GenerationLimit(max_minutes=1.0, say=lines.append)
        Decoder(lm, 100, limit=roomy).continue_greedily(request)
        first_s = roomy.spent_s
        Decoder(lm, 100, limit=roomy).continue_greedily(request)
        assert roomy.spent_s > first_s > 0
        assert lines[0].endswith("s a token; it ends after 60 s in all")
        roomy.max_minutes = roomy.spent_s / 60
        with pytest.raises(LimitReached, match="what is cached is not generated again"):
            Decoder(lm, 100, limit=roomy).continue_greedily(request)


def limit_batches(patch: pytest.MonkeyPatch, number: int) -> GenerationLimit:
    """Return a limit that is reached in the second step of the batch after so many batches."""
    patch.setattr(CausalLM, "fits_gathered", lambda self: False)
    limit, start = GenerationLimit(max_minutes=1.0), GrowingRows.start
    num_begun = 0

    def count(self: GrowingRows, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_begun
        # The check for keys and values also grows rows, untimed.
        num_begun += self._on_step is not None
        limit.spent_s = 61.0 if num_begun > number else 0.0
        return start(self, *args, **kwargs)

    patch.setattr(GrowingRows, "start", count)
    return limit


def test_batches_before_the_limit_are_kept() -> None:
    lm = build_causal_lm(build("llama"))
    requests = [
        Prompt(input_ids=torch.arange(3, 9 - n).numpy(), num_new=6, document=str(n))
        for n in range(4)
    ]
    whole = Decoder(lm, 1).continue_greedily(requests)
    sampled = Decoder(lm, 1).sample(requests, SCHEME, 2, seed=0)
    beams = [BeamRequest(prompt_ids=one.input_ids, num_new=6) for one in requests]
    with pytest.MonkeyPatch.context() as patch:
        limit = limit_batches(patch, 2)
        with pytest.raises(LimitReached) as greedy:
            # Batches of one text, the longest first.
            Decoder(lm, 1, limit=limit).continue_greedily(requests)
        assert list(greedy.value.finished) == [0, 1]
        for index, (text,) in greedy.value.finished.items():
            assert text.token_ids.tolist() == whole[index].token_ids.tolist()
    with pytest.MonkeyPatch.context() as patch:
        limit = limit_batches(patch, 3)
        with pytest.raises(LimitReached) as drawn:
            Decoder(lm, 1, limit=limit).sample(requests, SCHEME, 2, seed=0)
        # The second document has one sample of two.
        assert list(drawn.value.finished) == [0]
        found = [text.token_ids for text in drawn.value.finished[0]]
        np.testing.assert_array_equal(np.stack(found), sampled[0])
    with pytest.MonkeyPatch.context() as patch:
        limit = limit_batches(patch, 1)
        with pytest.raises(LimitReached) as searched:
            search_beams(Decoder(lm, 1, limit=limit), beams, 2)
        assert list(searched.value.finished) == [0]


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "olmo2", "bloom"])
def test_an_audit_on_eight_ranks_generates_what_one_process_does(
    ranks: RankPool, family: str
) -> None:
    """Also beams and samples of attacks; of nine texts, ranks have other numbers of rows."""
    model = build(family, eos_token_id=None)
    check_audit(ranks, model, build_recited(model), MeshShape(z=8), fits=False, suite=ATTACKED)
