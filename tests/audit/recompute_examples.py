"""An audit of a tiny model with every probe, and its files as a reader without memguard has them.

The model is trained until some documents of each kind match and some do not; a third of the
documents are copies; one bucket has a single document.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from audit_examples import (
    CHARACTERS,
    Held,
    audit,
    build_canaries,
    build_documents,
    build_suite,
    build_tiny_layer,
    build_tiny_llama,
)
from numpy.typing import NDArray
from pyarrow import parquet

from memguard.audit.context import AuditContext
from memguard.audit.decoding import Decoder
from memguard.audit.document_scores import save_scores
from memguard.audit.probes.attacks import AttackProbe
from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.generation import GenerationProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.mask_consistency import MaskConsistencyProbe
from memguard.audit.probes.masks import MaskChange
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.run import AuditOutcome
from memguard.audit.scoring import ModelScorer
from memguard.audit.windows import AuditDocument
from memguard.config import GoldfishConfig
from memguard.config.settings import SamplingScheme
from memguard.mitigation import Goldfish
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.records.row_files import save_canaries

SIZE, GRID_SIZE = 6, 5
"""Tokens of the continuations."""
SUITE = build_suite(
    ExtractionProbe(continuation_tokens=SIZE),
    GridProbe(prefix_tokens=(4, 6), continuation_tokens=(GRID_SIZE,)),
    SamplingProbe(schemes=(SamplingScheme(), SamplingScheme(top_k=4))),
    MembershipProbe(
        scores=("loss", "zlib", "min_k_plus_plus", "lowercase", "recall", "reference"),
        fpr=(0.01, 0.1, 0.25),
    ),
    CanaryProbe(),
    GenerationProbe(nucleus={"top_p": 0.9}, max_documents_per_bucket=12),
    AttackProbe(width=2, candidates=4, samples=2, max_documents_per_bucket=12),
    MaskConsistencyProbe(),
)


def _train(documents: list[AuditDocument]) -> CausalLM:
    """Return a tiny model that has learned one bucket well and another one partly."""
    llama = build_tiny_llama(95, seed=0)
    by_bucket = {
        bucket: torch.tensor(
            np.stack([d.input_ids for d in documents if d.bucket == bucket]), dtype=torch.long
        )
        for bucket in ("x4", "x64")
    }
    rows = torch.cat([by_bucket["x4"], by_bucket["x64"].repeat(4, 1)])
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(0)
    llama.train()
    for _ in range(45):
        batch = rows[torch.randperm(len(rows), generator=draw)[:32]]
        llama(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return build_causal_lm(llama.eval())


def _hold(layer: CausalLM) -> Held:
    return Held(ModelScorer(layer, 2048), writer=Decoder(layer, 2048), max_tokens=64)


@dataclass(frozen=True, kw_only=True)
class Audited:
    """An audit, and its files as a reader without memguard sees them."""

    outcome: AuditOutcome
    records: Mapping[str, NDArray[Any]]
    canaries: Mapping[str, NDArray[Any]]

    def read(self, name: str) -> NDArray[np.float64]:
        """Return a column of numbers, NaN where missing."""
        return np.array(self.records[name], dtype=np.float64)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    columns = parquet.read_table(path).to_pydict()
    return {name: np.array(values, dtype=object) for name, values in columns.items()}


def make_audited(folder: Path) -> Audited:
    """Train and audit a tiny model, and read the files that an audit writes."""
    documents = build_documents(24, vocab_size=24, size=20)
    alone = replace(documents[-1], id="alone", bucket="x9", num_repetitions=9)
    documents = [
        replace(
            document,
            input_ids=(document.input_ids + 33).astype(np.int32),
            # In threes: two copies of one text, and another text.
            cluster=number - (number % 3 == 1),
            num_copies=1 + (number % 3 < 2) if document.role == "trained" else None,
        )
        for number, document in enumerate([*documents, alone])
    ]
    secrets = [
        replace(c, document=replace(c.document, input_ids=c.document.input_ids % 61))
        for c in build_canaries()
    ]
    changes = [MaskChange(rewriting="a", num_passages=1, num_changed=1, mean_leaked_share=0.1)]
    outcome = audit(
        documents,
        _hold(_train(documents)),
        _hold(build_tiny_layer(95, seed=1)),
        reference=_hold(build_tiny_layer(95, seed=2)),
        canaries=secrets,
        suite=SUITE,
        context=AuditContext(
            codec=CHARACTERS,
            goldfish=Goldfish(GoldfishConfig(name="goldfish", k=3, context_width=4)),
            compare_masks=lambda *_: changes,
        ),
    )
    save_scores(outcome.scores, folder / "records.parquet")
    save_canaries(outcome.canaries, folder / "canaries.parquet")
    return Audited(
        outcome=outcome,
        records=_read(folder / "records.parquet"),
        canaries=_read(folder / "canaries.parquet"),
    )
