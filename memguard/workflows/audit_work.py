"""The work of a run's audit, predicted before training, and the time in which it generates text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from memguard.audit.bounds import list_bounds
from memguard.audit.extraction import TINY_MARGINS
from memguard.audit.requests import Inputs
from memguard.audit.selection import Selection, select_windows
from memguard.audit.suite import load_audit_suite
from memguard.config import RunConfig
from memguard.data.corpus import Corpus
from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.dry_run import AuditWork, ProbeWork
from memguard.planner.fit import count_parameters
from memguard.planner.generation import (
    GenerationPlan,
    GenerationWork,
    estimate_generation,
    explain_limit,
)
from memguard.planner.machine import Machine
from memguard.planner.storage import ModelStorage
from memguard.workflows.audit_context import build_codec, build_known_goldfish
from memguard.workflows.audit_inputs import list_audited, list_canaries

_ELEMENT_BYTES = {"fp32": 4.0, "bf16": 2.0}
_NF4_BYTES = 36 / 64
"""Of a weight in NF4 with its scale, which is gathered as it is stored."""
_OTHER_UNITS, _MANY_LAYERS = 3, 100
"""Embedding, last norm and head; blocks of a family whose layers the planner does not know."""


def select_audited(config: RunConfig, corpus: Corpus, counts: Sequence[int]) -> Selection | None:
    """Return what a run's audit will measure; None if the run has no audit.

    Args:
        config: of the run.
        corpus: its documents.
        counts: times each document will have been trained in full.
    """
    if not config.audit.enabled:
        return None
    return select_windows(
        list_audited(corpus, counts, config.audit, seq_len=config.data.seq_len),
        load_audit_suite(config.audit).extraction,
        seed=config.seed,
        min_documents=0,
        max_documents_per_bucket=config.audit.max_documents_per_bucket,
    )


def predict_generation(
    config: RunConfig,
    work: AuditWork,
    model: ModelSizes | ModelStorage,
    mesh: MeshShape,
    machine: Machine,
    *,
    num_looks: int = 0,
) -> GenerationPlan:
    """Return how long a run's audit generates text.

    Args:
        config: of the run.
        work: of its audit.
        model: sizes of the model.
        mesh: of the audit.
        machine: with as many nodes as the mesh needs.
        num_looks: audits during training whose texts are generated.
    """
    settings, adapter = config.audit, config.adapter
    is_nf4 = adapter is not None and adapter.quantization is not None
    num_new = load_audit_suite(settings).extraction.continuation_tokens
    num_models = len(work.models)
    works = [
        GenerationWork(
            probe=of.probe,
            num_tokens=of.num_generated_tokens,
            num_new=num_new,
            num_models=num_models,
        )
        for of in work.probes
    ]
    if num_looks:
        # A look audits at most the documents of the final audit.
        own = next((one for one in works if one.probe == "extraction"), None)
        if own is not None:
            tokens = own.num_tokens // num_models * num_looks
            works.append(replace(own, probe="budget", num_tokens=tokens, num_models=num_looks))
    if isinstance(model, ModelStorage):
        num_parameters, num_layers = model.num_parameters, _MANY_LAYERS
    else:
        num_parameters, num_layers = count_parameters(model), model.num_layers
    return estimate_generation(
        num_parameters=num_parameters,
        num_units=num_layers + _OTHER_UNITS,
        element_bytes=_NF4_BYTES if is_nf4 else _ELEMENT_BYTES[settings.dtype],
        mesh=mesh,
        machine=machine,
        works=works,
        row_tokens=config.data.seq_len,
    )


def check_generation(
    config: RunConfig, plan: GenerationPlan, machine: Machine, warn: Callable[[str], None]
) -> None:
    """Refuse a run whose audit would generate text for too long; warn on an unknown machine.

    Raises:
        ConfigError: the machine's figures are known, and the limit is exceeded.
    """
    text = explain_limit(plan, config.audit.max_generation_minutes)
    if text is None:
        return
    if machine.assumed:
        warn(f"{text}. The speed of this machine is assumed; the audit measures it and decides")
        return
    raise ConfigError(text)


def predict_audit_work(
    config: RunConfig, corpus: Corpus, selection: Selection, tokenizer: Any
) -> AuditWork:
    """Return the most that a run's audit asks of its models.

    Args:
        config: of the run.
        corpus: its documents.
        selection: windows that the audit measures if the run goes as planned.
        tokenizer: of the model.
    """
    settings = config.audit
    suite = load_audit_suite(settings)
    models: list[Literal["trained", "base", "reference"]] = ["trained"]
    models += ["base"] if settings.base and config.model.path is not None else []
    models += ["reference"] if settings.reference is not None else []
    inputs = Inputs(
        windows=selection.windows,
        max_edit_share=suite.extraction.max_edit_share,
        seed=config.seed,
        tiny_margin=TINY_MARGINS[settings.dtype],
        canaries=list_canaries(corpus, seq_len=config.data.seq_len),
        codec=build_codec(tokenizer),
        goldfish=build_known_goldfish(config.mitigations, tokenizer),
        has_reference=settings.reference is not None,
    )
    bounds = list_bounds(suite, inputs, models)
    whole = bounds.sum()
    names = dict.fromkeys(bound.probe for bound in bounds.bounds if bound.passages)
    works = {name: bounds.sum(name) for name in names}
    return AuditWork(
        models=tuple(models),
        probes=tuple(
            ProbeWork(
                probe=name,
                num_passages=work.passages,
                num_tokens=work.tokens,
                num_generated_tokens=work.decoded,
            )
            for name, work in works.items()
        ),
        num_passages=whole.passages,
        num_tokens=whole.tokens,
        num_generated_tokens=whole.decoded,
        not_counted=dict(bounds.unknown),
    )
