"""The loss on held-out documents: the whole record is the same on every mesh."""

import numpy as np
import pytest
import torch
from ranks import RankPool
from tiny_families import VOCAB_SIZE, build
from torch import distributed as dist

from memguard.data.corpus import Corpus
from memguard.hf.safetensors import ModuleWeights
from memguard.hf.sharded import Sharding, build_meta_layer, fill_layer
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.records import ManifestEntry
from memguard.records.run_files import PreparedSummary
from memguard.runtime import Runtime
from memguard.train.heldout import measure_heldout
from memguard.train.metrics import HeldoutMetrics

# Three batches of at most 40 tokens, 30 | 16 12 | 9 5: one of two ranks has none of its own at the
# end.
SIZES = (20, 9, 30, 5, 16, 12)
BATCH_TOKENS = 40
# The first document is trained, and its loss is not measured.
ROLES = ("trained", *["control"] * 5)


def make_corpus() -> Corpus:
    offsets = np.cumsum([0, *SIZES])
    size = int(offsets[-1])
    manifest = [
        ManifestEntry(
            id=f"d{index}",
            text_hmac="",
            source="",
            bucket=role,
            role=role,
            planned_repetitions=0,
            num_repetitions=None,
            num_tokens=num_tokens,
            tokens_sha256="",
            cluster=index,
        )
        for index, (num_tokens, role) in enumerate(zip(SIZES, ROLES, strict=True))
    ]
    return Corpus(
        summary=PreparedSummary.model_construct(),
        manifest=manifest,
        input_ids=np.random.default_rng(0).integers(3, VOCAB_SIZE, size).astype(np.int32),
        supervised=np.arange(size) % 5 != 0,
        offsets=offsets,
        content_tokens=np.array(SIZES),
        format=np.zeros(len(SIZES), dtype=np.uint8),
    )


def measure(lm: CausalLM, runtime: Runtime) -> HeldoutMetrics:
    found = measure_heldout(
        lm,
        make_corpus(),
        seq_len=max(SIZES),
        batch_tokens=BATCH_TOKENS,
        step=3,
        runtime=runtime,
    )
    assert found is not None
    return found


def measure_on_mesh(shape: MeshShape) -> HeldoutMetrics:
    mesh = build_mesh(shape, "cpu")
    cpu = torch.device("cpu")
    model = build("llama").double()
    layer = build_meta_layer(
        model.config, Sharding(mesh=mesh, device=cpu, dtype=torch.float64, chunk_tokens=7)
    )
    fill_layer(layer, ModuleWeights(model), name="held out")
    return measure(
        layer.lm, Runtime(device=cpu, rank=dist.get_rank(), world_size=dist.get_world_size())
    )


def test_ranks_that_share_rows_are_counted_once(ranks: RankPool) -> None:
    alone = measure(
        build_causal_lm(build("llama").double()), Runtime(device=torch.device("cpu"))
    ).model_dump()
    # Nothing predicts the first token of a document.
    corpus = make_corpus()
    held_out = [corpus.document(index) for index in range(1, len(SIZES))]
    num_tokens = sum(int(document.supervised[1:].sum()) for document in held_out)
    assert (alone["num_tokens"], alone["num_documents"]) == (num_tokens, 5)
    for found in ranks(measure_on_mesh, 4, MeshShape(z=2, x=2)):
        # float64, but for rotary frequencies, which one side has rounded to fp32.
        expected = {**alone, "nll": pytest.approx(alone["nll"], rel=1e-6)}
        assert found.model_dump() == expected
