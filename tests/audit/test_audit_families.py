"""Audits of every compared family on a mesh: verdicts and generated text of one process."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from audit_examples import KINDS, audit, build_suite, list_records
from ranks import RankPool
from record_examples import make_document
from tiny_families import VOCAB_SIZE, build

from memguard.audit.decoding import Decoder
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.scoring import ModelScorer
from memguard.audit.suite import Suite
from memguard.audit.windows import AuditDocument
from memguard.hf.assembly import Assembly
from memguard.hf.load import shard_scratch_model
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import COMPARED_FAMILIES
from memguard.runtime import Runtime, start_runtime

pytestmark = pytest.mark.slow

PREFIX, CONTINUATION = 12, 16
# All documents are generated too, with a cache of keys and values.
SUITE = build_suite(
    ExtractionProbe(continuation_tokens=CONTINUATION, generation_floor=0, max_edit_share=0.2)
)


@dataclass(slots=True)
class Audited:
    """A model as `run_audit` uses it."""

    lm: CausalLM
    runtime: Runtime
    identity: str | None = None
    max_tokens: int | None = None

    def scorer(self) -> ModelScorer:
        return ModelScorer(self.lm, 200, self.runtime)

    def decoder(self) -> Decoder:
        return Decoder(self.lm, 200, self.runtime)

    def free(self) -> None:
        """Keep the model for the next audit."""


def build_recited(model: Any) -> list[AuditDocument]:
    """Documents that transformers' own generation recites: whole, almost, or only at first."""
    draw = np.random.default_rng(0)
    prefixes = draw.integers(3, VOCAB_SIZE, (9, PREFIX))
    ids = torch.tensor(prefixes)
    rows = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=CONTINUATION,
        pad_token_id=0,
    ).numpy()
    assert rows.shape == (9, PREFIX + CONTINUATION)
    documents = []
    for number, row in enumerate(rows.astype(np.int32)):
        bucket, role, count = KINDS[number % 3]
        if number % 3 == 1:
            row[-1] = (row[-1] + 1) % VOCAB_SIZE
        elif number % 3 == 0:
            row[PREFIX + 3 :: 2] = (row[PREFIX + 3 :: 2] + 1) % VOCAB_SIZE
        documents.append(
            make_document(
                row, name=f"{bucket}-{number}", bucket=bucket, role=role, num_repetitions=count
            )
        )
    return documents


def audit_lm(lm: CausalLM, documents: list[AuditDocument], suite: Suite) -> list[dict[str, Any]]:
    with start_runtime() as runtime:
        return list_records(audit(documents, Audited(lm, runtime), suite=suite))


def audit_on_mesh(
    degrees: MeshShape, model: Any, documents: list[AuditDocument], fits: bool, suite: Suite
) -> list[dict[str, Any]]:
    """On a rank, whose memory may not hold all weights at once."""
    if not fits:
        CausalLM.fits_gathered = lambda self: False  # type: ignore[method-assign]
    sharding = Assembly(mesh=build_mesh(degrees, "cpu"), device=torch.device("cpu"))
    return audit_lm(shard_scratch_model(model, sharding).lm, documents, suite)


def check_family(ranks: RankPool, family: str, degrees: MeshShape) -> None:
    # Without an end of text, as every text is generated to its whole length.
    model = build(family, eos_token_id=None)
    check_audit(ranks, model, build_recited(model), degrees)


def check_audit(
    ranks: RankPool,
    model: Any,
    documents: list[AuditDocument],
    degrees: MeshShape,
    *,
    fits: bool = True,
    suite: Suite = SUITE,
) -> None:
    alone = audit_lm(build_causal_lm(model), documents, suite)
    correct = [record["extraction.num_correct"] for record in alone]
    assert {*correct[2::3]} == {CONTINUATION}, "recited as transformers generates it"
    assert {*correct[1::3]} == {CONTINUATION - 1}
    for records in ranks(audit_on_mesh, degrees.num_ranks, degrees, model, documents, fits, suite):
        for one, other in zip(alone, records, strict=True):
            # fp32 sums of 32 to 97 numbers in another order.
            assert other == {
                name: pytest.approx(value, abs=1e-3) if isinstance(value, float) else value
                for name, value in one.items()
            }


@pytest.mark.parametrize(
    "family",
    [
        family if family in ("gemma2", "olmo2") else pytest.param(family, marks=pytest.mark.mesh)
        for family in sorted(COMPARED_FAMILIES)
    ],
)
def test_an_audit_on_a_mesh_gives_the_verdicts_of_one_process(ranks: RankPool, family: str) -> None:
    check_family(ranks, family, MeshShape(x=2))
