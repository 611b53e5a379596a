"""An audit with every probe and every input: its rows, and that none shows one document."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from audit_examples import (
    CHARACTERS,
    Held,
    audit,
    build_canaries,
    build_documents,
    build_suite,
    build_tiny_layer,
    list_records,
)

from memguard.audit.context import AuditContext
from memguard.audit.decoding import Decoder
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
from memguard.audit.suite import PROBES
from memguard.config import GoldfishConfig
from memguard.config.settings import SamplingScheme
from memguard.mitigation import Goldfish
from memguard.records import ONE_TEXT
from memguard.records.results import load_results, save_results

FULL = build_suite(
    ExtractionProbe(continuation_tokens=8),
    GridProbe(prefix_tokens=(4, 6), continuation_tokens=(5,)),
    SamplingProbe(schemes=(SamplingScheme(), SamplingScheme(top_k=4))),
    MembershipProbe(scores=("loss", "zlib", "min_k_plus_plus", "lowercase", "recall", "reference")),
    CanaryProbe(),
    GenerationProbe(nucleus={"top_p": 0.9}, max_documents_per_bucket=2),
    AttackProbe(width=2, candidates=4, samples=2, max_documents_per_bucket=2),
    MaskConsistencyProbe(),
)
"""Every probe, with little work for each."""


@pytest.fixture(scope="module")
def full() -> AuditOutcome:
    """An audit with every probe and input; one bucket has a single document."""
    documents = build_documents(5, vocab_size=61, size=40)
    alone = replace(documents[5], id="alone", bucket="x9", num_repetitions=9)
    alone = replace(alone, input_ids=alone.input_ids[::-1].copy(), cluster=None)
    documents = [replace(d, cluster=n, num_copies=1) for n, d in enumerate([*documents, alone])]
    secrets = [
        replace(c, document=replace(c.document, input_ids=c.document.input_ids % 61))
        for c in build_canaries()
    ]

    def hold(seed: int) -> Held:
        layer = build_tiny_layer(95, seed=seed)
        return Held(ModelScorer(layer, 2048), writer=Decoder(layer, 2048), max_tokens=64)

    changes = [
        MaskChange(rewriting=name, num_passages=1, num_changed=1, mean_leaked_share=0.123456)
        for name in ("a", "b")
    ]
    return audit(
        documents,
        hold(0),
        hold(1),
        reference=hold(2),
        canaries=secrets,
        suite=FULL,
        context=AuditContext(
            codec=CHARACTERS,
            goldfish=Goldfish(GoldfishConfig(name="goldfish", k=3, context_width=4)),
            compare_masks=lambda *_: changes,
        ),
    )


def test_every_probe_at_once(full: AuditOutcome) -> None:
    tables = full.summary.tables
    assert list(PROBES) == [probe.name for probe in FULL.probes]
    assert {run.name: run.reason_not_run for run in full.summary.probe_runs} == dict.fromkeys(
        PROBES
    )
    assert {row.probe for row in tables.results} == set(PROBES)
    scores = [row.parameters for row in tables.select("membership", "auc")]
    assert scores == [
        f"score={score}"
        for score in (
            *("loss", "zlib", "min_k_plus_plus", "loss_minus_base", "lowercase", "recall"),
            *("reference", "blind"),
        )
    ]
    detail = tables.find_detail("canaries")
    assert (detail["num_trained"], detail["num_references"], len(full.canaries)) == (6, 6, 12)
    assert {row.parameters for row in tables.select("grid", "verbatim")} == {
        f"continuation_tokens=5, offset=0, prefix_tokens={size}" for size in (4, 6)
    }


def test_the_keys_of_rows_are_unique_and_their_metrics_described(full: AuditOutcome) -> None:
    tables = full.summary.tables
    assert len({row.key for row in tables.results}) == len(tables.results)
    described = [(m.probe, m.metric, m.parameters) for m in tables.metrics]
    assert len(set(described)) == len(described)
    assert {(row.probe, row.metric, row.parameters) for row in tables.results} <= set(described)
    for row in tables.results:
        assert (row.value is None) == (row.missing_because is not None), row


def _list_numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _list_numbers(item)
    elif isinstance(value, float):
        yield value


def test_no_number_of_one_document_is_shown(full: AuditOutcome, tmp_path: Path) -> None:
    """Scores of one document or canary would confirm a guess of its text."""
    tables = full.summary.tables
    save_results(tables.results, tmp_path / "results.parquet")
    assert load_results(tmp_path / "results.parquet") == list(tables.results)
    names = ("value", "low", "high", "minus_control", "minus_control_low", "minus_control_high")
    singles = [r for r in tables.results if r.num_documents == 1 or r.statistic in ("min", "max")]
    assert any(row.value not in (None, 0, 1) for row in singles)
    for row in singles:
        for number in (getattr(row, name) for name in names):
            assert number is None or number == float(f"{number:.1e}"), row
    assert tables.find("extraction", "logprob", "x9").missing_because == ONE_TEXT
    scores = [asdict(canary) for canary in full.canaries]
    measured = set(_list_numbers([*list_records(full), *scores]))
    # Numbers with many digits are no shares of a few tokens, which means have too.
    exact = {number for number in measured if number != float(f"{number:.4e}")}
    assert len(exact) > 100
    assert not exact & set(_list_numbers(tables.model_dump(mode="json")))
    ids = {record["id"] for record in list_records(full)} | {canary.id for canary in full.canaries}
    assert not any(f'"{name}"' in tables.model_dump_json() for name in ids)
