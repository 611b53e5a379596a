"""The loss on held-out documents: the whole record is the same on every mesh."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPool
from record_examples import make_entry
from run_examples import make_run, run_folder, train_checked
from step_examples import make_step
from tiny_families import VOCAB_SIZE, build
from torch import distributed as dist

from memguard.data.corpus import Corpus
from memguard.hf.assembly import Assembly, build_meta_layer, fill_layer
from memguard.hf.safetensors import ModuleWeights
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.records.run_files import PreparedSummary
from memguard.runtime import Runtime
from memguard.train.heldout import HeldoutLoss
from memguard.train.metrics import HeldoutMetrics, read_metrics

pytestmark = pytest.mark.slow

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
        make_entry(f"d{index}", role=role, num_tokens=num_tokens, cluster=index)
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


def measure(lm: CausalLM, runtime: Runtime, **settings: Any) -> HeldoutMetrics:
    heldout = HeldoutLoss(
        lm=lm,
        corpus=make_corpus(),
        seq_len=max(SIZES),
        batch_tokens=BATCH_TOKENS,
        runtime=runtime,
        **settings,
    )
    found = heldout.measure(step=3)
    assert found is not None
    return found


def measure_bf16_on_mesh(shape: MeshShape) -> float:
    cpu, model = torch.device("cpu"), build("llama")
    sharding = Assembly(mesh=build_mesh(shape, "cpu"), device=cpu, compute_dtype=torch.bfloat16)
    layer = build_meta_layer(model.config, sharding)
    fill_layer(layer, ModuleWeights(model), name="held out")
    runtime = Runtime(device=cpu, rank=dist.get_rank(), world_size=dist.get_world_size())
    return measure(layer.lm, runtime).nll


def measure_on_mesh(shape: MeshShape) -> HeldoutMetrics:
    mesh = build_mesh(shape, "cpu")
    cpu = torch.device("cpu")
    model = build("llama").double()
    layer = build_meta_layer(
        model.config, Assembly(mesh=mesh, device=cpu, dtype=torch.float64, chunk_tokens=7)
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


def test_one_process_has_the_precision_of_training_and_of_every_mesh(ranks: RankPool) -> None:
    lm = build_causal_lm(build("llama"))
    plain, fp32, bf16 = (
        measure(lm, Runtime(), **settings).nll
        for settings in (
            {},
            {"precision": make_step(lm, precision="fp32").precision},
            {"precision": make_step(lm, precision="bf16").precision},
        )
    )
    assert fp32 == plain
    assert bf16 != fp32
    (on_mesh, *_) = ranks(measure_bf16_on_mesh, 2, MeshShape(x=2))
    # Means of 50 losses of about 4.6, each with some roundings of 2^-9 that differ in place.
    assert bf16 == pytest.approx(fp32, rel=2**-9)
    assert on_mesh == pytest.approx(bf16, rel=2**-9)


def test_a_run_measures_in_its_precision(tmp_path: Path) -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        train = {"precision": precision, "max_steps": 1}
        config = make_run(tmp_path, name=precision, train=train, audit={"enabled": False})
        train_checked(config)
        lines = read_metrics(run_folder(config) / "metrics.jsonl")
        losses.append(next(line.nll for line in lines if isinstance(line, HeldoutMetrics)))
    fp32, bf16 = losses
    assert fp32 != bf16 == pytest.approx(fp32, rel=2**-9)
