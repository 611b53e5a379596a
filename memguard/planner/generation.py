"""How long an audit generates text where the weights of a mesh do not fit on a GPU at once.

    gathered     weights / (x y), in the audit's dtype       bytes that a rank has gathered a token
    kept         gathered <= KEPT_SHARE of (memory - own shard)          then once, not each token
    s a token    (z-1)/z gathered / (bandwidth of z LINK_SHARE)
                 + gathered / bandwidth of the GPU's memory + calls (CALL_S + (z-1) ROUND_S)
    steps        batches of a probe x tokens that it adds to each row
    batches      rows x their tokens / (ranks that split a batch x BATCH_TOKENS), rounded up

All rows of a batch share a step, so that the time depends on the number of batches. The audit
itself measures two steps (`audit.generation_time`); this estimate comes before training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.cost import CALL_S, LINK_SHARE, ROUND_S, compute_gb_per_s
from memguard.planner.machine import Machine
from memguard.records.record import Record

KEPT_SHARE = 0.7
"""Share of free memory that gathered weights may take, as in `CausalLM.fits_gathered`."""
BATCH_TOKENS = 16_384
"""Tokens of a rank's batch, as `audit.decoding` takes them; more where memory allows."""
CACHE_CHECKS = 10
"""Forwards that check whether keys and values can be cached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationWork:
    """What one probe generates with all models together."""

    probe: str
    num_tokens: int
    """Generated tokens, beams and samples counted each."""
    num_new: int
    """Tokens that are added to each row."""
    num_models: int = 1
    """Times that it generates: models, or audits during training."""
    row_tokens: int | None = None
    """Tokens of a row at its end; None: those of the audited documents."""


class ProbeGeneration(Record):
    """Time in which one probe generates."""

    probe: str
    num_steps: int
    """Forwards one after the other, with all models together."""
    minutes: float


class GenerationPlan(Record):
    """Generation of a run's audits on a mesh."""

    num_documents: int
    """Audited documents."""
    is_assumed: bool
    """Whether their number is assumed, because the documents were not read."""
    fits: bool
    """Whether all weights are gathered once, so that the rest of the estimate does not count."""
    gathered_gb: float
    """That a rank gathers for each token (GB)."""
    token_s: float
    """Of one token of all rows of a batch (seconds)."""
    probes: tuple[ProbeGeneration, ...]
    """Those that generate."""
    minutes: float
    """Of all probes; 0 if the weights fit."""


def estimate_generation(
    *,
    num_parameters: int,
    num_units: int,
    element_bytes: float,
    mesh: MeshShape,
    machine: Machine,
    works: Sequence[GenerationWork],
    row_tokens: int,
    num_documents: int,
    is_assumed: bool = False,
) -> GenerationPlan:
    """Estimate the time in which an audit generates text.

    Args:
        num_parameters: of the model.
        num_units: parts whose weights are gathered one after the other: blocks, embedding, head.
        element_bytes: bytes of a gathered weight: 4 in fp32, 2 in bf16, 0.5625 in NF4.
        mesh: of the audit.
        machine: with as many nodes as the mesh needs.
        works: of the probes.
        row_tokens: tokens of a row at its end.
        num_documents: audited documents.
        is_assumed: whether their number is assumed.
    """
    gathered = num_parameters * element_bytes / (mesh.x * mesh.y)
    free = machine.usable_bytes - gathered / mesh.z
    fits = mesh.z == 1 or not machine.has_gpus or gathered <= KEPT_SHARE * free
    token_s = gathered / (1e9 * machine.memory_gb_per_s)
    if mesh.z > 1:
        gb_per_s = compute_gb_per_s(machine, mesh, "z", degree=mesh.z)
        token_s += gathered * (mesh.z - 1) / mesh.z / (1e9 * gb_per_s * LINK_SHARE)
        token_s += num_units * (CALL_S + (mesh.z - 1) * ROUND_S)
    probes = tuple(
        _estimate_probe(work, token_s, row_tokens=row_tokens, num_ways=mesh.num_batch_ways)
        for work in works
        if work.num_tokens
    )
    return GenerationPlan(
        num_documents=num_documents,
        is_assumed=is_assumed,
        fits=fits,
        gathered_gb=gathered / 1e9,
        token_s=token_s,
        probes=probes,
        minutes=0.0 if fits else sum(probe.minutes for probe in probes),
    )


def _estimate_probe(
    work: GenerationWork, token_s: float, *, row_tokens: int, num_ways: int
) -> ProbeGeneration:
    num_rows = math.ceil(work.num_tokens / (work.num_new * work.num_models))
    batches = math.ceil(num_rows * (work.row_tokens or row_tokens) / (num_ways * BATCH_TOKENS))
    num_steps = work.num_models * (batches * work.num_new + CACHE_CHECKS)
    return ProbeGeneration(probe=work.probe, num_steps=num_steps, minutes=num_steps * token_s / 60)


def describe_generation(plan: GenerationPlan) -> list[str]:
    """Return lines that say how the audit generates; one if all weights fit at once."""
    number = f"{plan.num_documents:,} documents{' (assumed)' if plan.is_assumed else ''}"
    if plan.fits:
        return [f"the audit of {number} generates text with all weights in memory at once"]
    lines = [
        f"the audit of {number} gathers {plan.gathered_gb:,.0f} GB for each token of all rows: "
        f"{plan.token_s:.2g} s a token"
    ]
    lines += [
        f"{probe.probe}: at most {probe.num_steps:,} tokens one after the other, "
        f"{_format_minutes(probe.minutes)}"
        for probe in plan.probes
    ]
    if len(plan.probes) > 1:
        lines.append(f"all together: {_format_minutes(plan.minutes)}")
    return lines


def _format_minutes(minutes: float) -> str:
    return f"{minutes:.1f} minutes" if minutes < 10 else f"{minutes:,.0f} minutes"


def explain_limit(plan: GenerationPlan, max_minutes: float | None) -> str | None:
    """Return why an audit would generate for too long; None if it would not.

    Args:
        plan: of the audit.
        max_minutes: `audit.max_generation_minutes`.
    """
    if max_minutes is None or plan.minutes <= max_minutes:
        return None
    return (
        f"the audit would generate text for {_format_minutes(plan.minutes)}, and "
        f"'audit.max_generation_minutes' is {max_minutes:g}: it gathers {plan.gathered_gb:,.0f} GB "
        f"for each token ({plan.token_s:.2g} s). Use a larger 'parallel.x', audit fewer documents "
        "('audit.max_documents_per_bucket') or items ('limit' of a task), or raise the limit"
    )
