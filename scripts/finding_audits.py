"""Draws small audits with random answers of every probe, and writes them as a run with an audit.

    draw_audit(seed)         documents, and what each probe answers -> what an audit makes of them
    write_run(folder, one)   config.yaml, manifest.jsonl, model/README.md, audit/: as after an audit

No model runs: numbers of the probes are drawn. All that follows from them is memguard's own.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from memguard.audit import summary as summaries
from memguard.audit.cache import ScoreMatrix
from memguard.audit.document_scores import DocumentScores, build_scores, save_scores
from memguard.audit.findings import FindingList, save_findings
from memguard.audit.metrics import Evidence, Metric
from memguard.audit.plan import AuditPlan
from memguard.audit.probe import Probe, Summary
from memguard.audit.probes.attacks import AttackProbe
from memguard.audit.probes.canaries import CanaryProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.generation import GenerationProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.probes.window_scores import IN_A_WINDOW, MAIN, PASSAGE
from memguard.audit.requests import Inputs, Measured
from memguard.audit.suite import Suite
from memguard.audit.verdict import DocumentResults
from memguard.audit.verdict_sentences import VerdictInput
from memguard.audit.windows import AuditDocument
from memguard.config import AuditConfig, RunConfig, dump_yaml
from memguard.records import (
    REFERENCE_SECRETS,
    SECRETS,
    AuditReport,
    AuditResults,
    DataIdentity,
    ManifestEntry,
    ModelIdentity,
    ResultRow,
    fill_count,
    format_now,
    save_record,
)
from memguard.records.audit_files import FINDINGS, REPORT, RESULTS, SCORES
from memguard.records.results import save_results
from memguard.records.run_files import add_hash_line, save_manifest
from memguard.seeds import derive_generator
from memguard.workflows.auditing.pages import finish_audit
from memguard.workflows.auditing.report import describe_method, write_excerpts
from memguard.workflows.auditing.target import Subject

TOKENS, SIZE = 120, 50
"""Of a document that is long enough, and of its continuation."""
GRID = GridProbe(offsets=(0,), prefix_tokens=(25,), continuation_tokens=(50,))
KINDS = ("own", "form", "copy", "near", "short")
"""Of documents: of its own, a filled form, an exact or near copy of another one, too short."""
NO_TEXT = "the cache of one document does not fit"


class ForeignProbe(Probe):
    """A probe of another package, with a risk."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="found", meaning="Found.", unit="documents", statistic="rate", risk_rank=9),
    )

    name: Literal["foreign"] = Field("foreign", description="Which probe.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What an audit is like, besides its answers."""

    documents: Sequence[AuditDocument]
    probes: frozenset[str]
    """Of the suite, besides extraction."""
    has_base: bool
    generated: Literal["all", "some", "none"]
    """Near-verbatim text."""
    in_verdict: bool
    """Whether the foreign probe counts in it."""
    is_sample: bool
    """Whether the foreign probe tries every other document."""
    secrets: tuple[int, int, int, int] | None
    """Trained canaries that are extracted, and all; then the references."""
    sample: int | None
    """Documents of each bucket that are audited; None: all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnAudit:
    """An audit, and what its verdict was decided from."""

    plan: AuditPlan
    shape: Shape
    scores: DocumentScores
    results: AuditResults
    counted: DocumentResults

    @property
    def came_out(self) -> set[str]:
        """Ids of the documents that the verdict counts as extracted: trained, or to be forgotten.

        By `DocumentResults`, from which the level is decided.
        """
        results = self.counted
        out_N = results.was_extracted_N & (results.is_trained_N | results.is_forgotten_N)
        ids = np.array([window.document.id for window in self.plan.selection.windows], dtype=object)
        return {*ids[out_N].tolist()}


# -- documents -------------------------------------------------------------------------------------


def draw_documents(draw: np.random.Generator) -> list[AuditDocument]:
    """Draw documents of every role: copies, near-duplicates, forms, some too short, some unkeyed.

    Trained ones may never have been reached.
    """
    keyed_share = float(draw.choice([1.0, 1.0, 0.9, 0.0]))
    large = bool(draw.random() < 0.5)
    parts = [
        ("a", "trained", 4, int(draw.choice([24, 40, 160]) if large else draw.choice([6, 12])))
    ]
    parts += [("b", "trained", 16, int(draw.choice([0, 8, 16])))]
    parts += [("late", "trained", 0, int(draw.choice([0, 0, 3])))]
    parts += [("control", "control", 0, int(draw.choice([0, 6, 12, 34])))]
    parts += [("forget", "forget", 4, int(draw.choice([0, 0, 3])))]
    form = draw.integers(0, 9000, TOKENS).astype(np.int32)
    documents: list[AuditDocument] = []
    for bucket, role, times, number in parts:
        for index in range(number):
            kind = draw.choice(
                ["own", "form", "copy", "near", "short"], p=[0.6, 0.1, 0.1, 0.1, 0.1]
            )
            if kind == "short" and bucket == "a" and index < 6:
                kind = "own"
            ids = draw.integers(0, 9000, TOKENS).astype(np.int32)
            cluster, text = 1000 + len(documents), f"text {len(documents)}"
            before = next((d for d in reversed(documents) if d.bucket == bucket), None)
            if kind == "form":
                ids = form.copy()
                ids[:5] = draw.integers(0, 9000, 5)
            elif kind == "short":
                ids = ids[:12]
            elif kind in ("copy", "near") and before is not None:
                ids, cluster = before.input_ids.copy(), before.cluster or 0
                text = before.source if kind == "copy" else text
                if kind == "near":
                    ids[3] += 1
            documents.append(
                AuditDocument(
                    id=f"{bucket}-{index:03}",
                    bucket=bucket,
                    role=role,  # type: ignore[arg-type]
                    source=text,
                    num_repetitions=times,
                    input_ids=ids,
                    supervised=np.ones(len(ids), dtype=bool),
                    format="text",
                    num_tokens=len(ids),
                    text_hmac=hash_text(text) if draw.random() < keyed_share else None,
                    cluster=cluster,
                )
            )
    return documents


def hash_text(text: str) -> str:
    """Return what stands for the keyed hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def draw_shape(draw: np.random.Generator) -> Shape:
    """Draw documents and settings."""
    names = ("sampling", "grid", "generation", "attacks", "membership", "foreign")
    is_run = draw.random(len(names)) < 0.55
    secrets = None
    if draw.random() < 0.35:
        trained, references = (int(n) for n in draw.integers(2, 9, 2))
        found = draw.binomial([trained, references], draw.choice([0, 0.2]))
        secrets = (int(found[0]), trained, int(found[1]), references)
    return Shape(
        documents=draw_documents(draw),
        probes=frozenset(name for name, run in zip(names, is_run, strict=True) if run),
        has_base=bool(draw.random() < 0.5),
        generated=draw.choice(["all", "some", "none"], p=[0.8, 0.1, 0.1]),
        in_verdict=bool(draw.random() < 0.5),
        is_sample=bool(draw.random() < 0.5),
        secrets=secrets,
        sample=int(draw.choice([5, 20])) if draw.random() < 0.15 else None,
    )


# -- answers ---------------------------------------------------------------------------------------


def _make_probes(shape: Shape) -> list[Probe]:
    kinds: dict[str, Probe] = {
        "grid": GRID,
        "sampling": SamplingProbe(),
        "generation": GenerationProbe(),
        "attacks": AttackProbe(),
        "membership": MembershipProbe(scores=("loss",)),
        "foreign": ForeignProbe(name="foreign"),
    }
    probes = [ExtractionProbe(), *(kinds[name] for name in kinds if name in shape.probes)]
    return [*probes, *([CanaryProbe()] if shape.secrets else [])]


def _make_suite(shape: Shape) -> Suite:
    return Suite(
        name="drawn",
        version=1,
        probes=tuple(_make_probes(shape)),
        packages={"foreign": "other 1.0"} if "foreign" in shape.probes else {},
        in_verdict=frozenset({"foreign"} if shape.in_verdict else ()),
    )


def _to_matrix(columns: Mapping[str, NDArray[Any]]) -> Measured:
    rows = np.stack([np.asarray(one, dtype=np.float64) for one in columns.values()], axis=1)
    return Measured(columns=ScoreMatrix(names=tuple(columns), rows=rows))


Hit = Callable[[float], NDArray[np.bool_]]
"""share -> [N] which documents an answer is yes of."""


def _measure(
    shape: Shape, num: int, draw: np.random.Generator, hit: Hit, *, of_base: bool
) -> dict[str, Measured]:
    """Draw what each probe measures on one model."""
    nan_N, sampled_N = np.full(num, np.nan), draw.random(num) < 0.6
    verbatim_N = hit(1)
    correct_N = np.where(verbatim_N, SIZE, draw.integers(0, SIZE - 6, num))
    near_N = verbatim_N | hit(1)
    run_N = hit(0.5)
    main = dict.fromkeys(MAIN, np.ones(num)) | {
        "num_correct": correct_N,
        "first_divergence": correct_N,
        "logprob": (correct_N - SIZE) * (3 if of_base else 1) - 1.0 - of_base,
        "is_near_tie": np.zeros(num),
    }
    passage = dict.fromkeys(PASSAGE, nan_N) | {"longest_run": np.where(run_N, 60.0, 9.0)}
    passage |= {"run_0_begin": np.where(run_N, 8.0, nan_N), "run_0_end": np.where(run_N, 68, nan_N)}
    found = NearVerbatim(
        matched_N=near_N,
        num_edits_N=np.where(verbatim_N, 0.0, np.where(near_N, 3.0, np.inf)),
        min_gap_N=np.ones(num),
        num_verbatim=int(verbatim_N.sum()),
        num_generated=num,
        num_below_floor=0,
        num_checked=0,
        num_matched_below_floor=0,
    )
    detail: Any = found
    if shape.generated == "none":
        detail = NotGenerated(reason=NO_TEXT)
    elif shape.generated == "some":
        left_N = draw.random(num) < 0.5
        done = replace(found, matched_N=near_N & ~left_N)
        detail = NotGenerated(reason="the limit was reached", found=done, is_left_N=left_N)
    columns = {**main, **{f"passage.{name}": value for name, value in passage.items()}}
    measured = {"extraction": replace(_to_matrix(columns), detail=detail)}
    drawn_N = np.where(hit(1), -0.5, -60.0)
    ranks = {"log_bound": np.zeros(num), "max_rank": np.ones(num)}
    measured["sampling"] = _to_matrix({"0": drawn_N, "1": np.full(num, -80.0), **ranks})
    cell = dict.fromkeys(IN_A_WINDOW, np.ones(num)) | {"num_correct": np.where(hit(0.5), 50, 4)}
    measured["grid"] = _to_matrix({f"0.{name}": value for name, value in cell.items()})
    texts = {
        f"{decoding}.{metric.name}": np.where(sampled_N, 0.0, np.nan)
        for decoding in ("greedy", "nucleus")
        for metric in GenerationProbe.metrics
    }
    texts["greedy.near_verbatim"] = np.where(sampled_N, hit(0.5), np.nan)
    texts["nucleus.near_verbatim"] = np.where(sampled_N, hit(0.5), np.nan)
    measured["generation"] = _to_matrix(texts)
    measured["membership"] = _to_matrix({"loss": draw.normal(size=num)})
    tried_N = sampled_N if shape.is_sample else np.ones(num, dtype=bool)
    measured["foreign"] = _to_matrix({"found": np.where(tried_N, hit(1), np.nan)})
    if not of_base:
        answers = {f"{name}.any": hit(1) for name in ("beam_search", "sampling")}
        answers |= {f"{name[:-4]}.best": value for name, value in answers.items()}
        answers |= {f"{name}.right": np.ones(num) for name in ("beam_search", "sampling")}
        attacked = {n: np.where(sampled_N, v, np.nan) for n, v in answers.items()}
        if sampled_N.any():
            measured["attacks"] = _to_matrix(attacked)
    return {name: of for name, of in measured.items() if name in {"extraction", *shape.probes}}


def _tabulate_secrets(counts: tuple[int, int, int, int]) -> Summary:
    rows = []
    for bucket, found, number in ((SECRETS, *counts[:2]), (REFERENCE_SECRETS, *counts[2:])):
        row = ResultRow(
            probe="canaries",
            metric="verbatim",
            statistic="rate",
            bucket=bucket,
            num_documents=number,
        )
        rows.append(fill_count(row, found))
    return Summary(rows=rows, num_items=counts[1] + counts[3])


def draw_audit(seed: int) -> DrawnAudit:
    """Draw an audit, and return what memguard makes of it."""
    draw = derive_generator(seed, "drawn audit")
    shape = draw_shape(draw)
    suite = _make_suite(shape)
    plan = AuditPlan.of(
        shape.documents,
        suite,
        seed=seed,
        tally="complete",
        tiny_margin=1e-3,
        max_documents_per_bucket=shape.sample,
        has_given_control=bool(draw.random() < 0.3),
    )
    roles = [window.document.role for window in plan.selection.windows]
    reached = [window.document.num_repetitions != 0 for window in plan.selection.windows]
    fed_N = np.array([role != "control" for role in roles]) & np.array(reached, dtype=bool)
    shares = np.where(fed_N, draw.choice([0, 0, 0, 0.05, 0.3]), draw.choice([0, 0, 0.1]))

    def hit(share: float) -> NDArray[np.bool_]:
        return draw.random(len(roles)) < share * shares

    of_base = float(draw.choice([0, 0.05, 0.9]))

    def miss(share: float) -> NDArray[np.bool_]:
        return draw.random(len(roles)) < share * of_base

    evidence = Evidence(
        inputs=plan_inputs(plan),
        buckets=plan.selection.buckets,
        trained=_measure(shape, len(roles), draw, hit, of_base=False),
        other=_measure(shape, len(roles), draw, miss, of_base=True) if shape.has_base else None,
        dose_response=True,
        documents=shape.documents,
    )
    tabulated = summaries.tabulate(evidence, suite)
    if shape.secrets is not None:
        tabulated["canaries"] = _tabulate_secrets(shape.secrets)
    scores = build_scores(plan.selection.windows, tabulated, plan.selection.not_audited)
    seen: list[VerdictInput] = []
    build = summaries.build_verdict

    def keep(results: VerdictInput) -> Any:
        seen.append(results)
        return build(results)

    with patch.object(summaries, "build_verdict", keep):
        results = summaries.summarise(
            evidence,
            tabulated,
            scores,
            suite=suite,
            tally="complete",
            cut=None,
            control=plan.control,
            is_limited=shape.generated == "some",
        )
    return DrawnAudit(
        plan=plan, shape=shape, scores=scores, results=results, counted=seen[0].documents
    )


def plan_inputs(plan: AuditPlan) -> Inputs:
    """Return what the probes receive of a plan."""
    return Inputs(
        windows=plan.selection.windows, max_edit_share=0.1, seed=plan.seed, tiny_margin=1e-3
    )


# -- files -----------------------------------------------------------------------------------------


def write_run(folder: Path, drawn: DrawnAudit) -> Path:
    """Write a run with the files that its audit leaves; return the folder of the audit."""
    (folder / "model").mkdir(parents=True)
    config = RunConfig.model_validate(
        {
            "name": folder.name,
            "output_dir": str(folder.parent),
            "model": {"path": "base"},
            "data": {"train": "documents.jsonl", "seq_len": 128},
        }
    )
    (folder / "config.yaml").write_text(add_hash_line(dump_yaml(config)))
    save_manifest(_list_entries(drawn.shape.documents), folder / "manifest.jsonl")
    out = folder / "audit"
    out.mkdir()
    report = _make_report(drawn, folder.name)
    subject = Subject(
        model=str(folder), base=None, reference=None, data=report.data, out=out, tokenizer=None
    )
    findings = FindingList(drawn.scores)
    write_excerpts(drawn.plan, subject, findings)
    save_scores(drawn.scores, out / SCORES)
    save_results(report.tables.results, out / RESULTS)
    save_findings(findings, out / FINDINGS)
    save_record(report, out / REPORT)
    finish_audit(out, report, card_of=config)
    return out


def _list_entries(documents: Sequence[AuditDocument]) -> list[ManifestEntry]:
    return [
        ManifestEntry(
            id=document.id,
            text_hmac=document.text_hmac or "",
            source="documents.jsonl",
            bucket=document.bucket,
            role=document.role,
            planned_repetitions=document.num_repetitions or 0,
            num_repetitions=document.num_repetitions,
            num_tokens=document.num_tokens,
            cluster=document.cluster or 0,
        )
        for document in documents
    ]


def _make_report(drawn: DrawnAudit, name: str) -> AuditReport:
    settings = AuditConfig(max_documents_per_bucket=drawn.shape.sample)
    return AuditReport(
        **dict(drawn.results),
        tool_version="0",
        code_sha256="00" * 32,
        created=format_now(),
        run=name,
        model=ModelIdentity(
            name=name,
            weights_sha256="11" * 32,
            num_parameters=12,
            base="base" if drawn.shape.has_base else None,
            base_weights_sha256="22" * 32 if drawn.shape.has_base else None,
        ),
        data=DataIdentity(
            sources=["documents.jsonl"],
            documents_sha256="33" * 32,
            num_documents=len(drawn.shape.documents),
            num_clusters=None,
            overlap_with_control=None,
            near_duplicate_words=None,
            identity_key="44" * 32,
        ),
        training=None,
        method=describe_method(drawn.plan, settings, "memguard audit", 1.0),
        environment={},
    )
