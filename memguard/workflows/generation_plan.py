"""How long a run's audits generate text, predicted by `plan` and before training. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from memguard.audit.benchmarks.work import TaskWork
from memguard.audit.bounds import AuditBounds, list_bounds_of_sizes
from memguard.audit.probe import ItemSizes
from memguard.audit.suite import load_audit_suite
from memguard.config import GoldfishConfig, RunConfig
from memguard.config.mitigations import find_mitigation
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

ASSUMED_DOCUMENTS = 1000
"""Audited documents of a run whose documents are not read, half of them control documents."""

_ELEMENT_BYTES = {"fp32": 4.0, "bf16": 2.0}
_NF4_BYTES = 36 / 64
"""Of a weight in NF4 with its scale, which is gathered as it is stored."""
_OTHER_UNITS, _MANY_LAYERS = 3, 100
"""Embedding, last norm and head; blocks of a family whose layers the planner does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOutlook:
    """The audits of a run, as far as they are known before training."""

    work: AuditWork
    """Of the audit after training."""
    num_documents: int
    """That it audits."""
    is_assumed: bool = False
    """Whether their number is assumed."""
    num_looks: int = 0
    """Audits during training whose texts are generated."""
    look_documents: int = 0
    """Documents of each of these."""
    tasks: tuple[TaskWork, ...] = ()
    """Benchmark tasks of the audit after training."""


def list_models(config: RunConfig) -> tuple[Literal["trained", "base", "reference"], ...]:
    """Return the models that a run's audit measures."""
    settings = config.audit
    models: list[Literal["trained", "base", "reference"]] = ["trained"]
    models += ["base"] if settings.base and config.model.path is not None else []
    models += ["reference"] if settings.reference is not None else []
    return tuple(models)


def count_looks(config: RunConfig, num_steps: int | None) -> int:
    """Return the number of audits during training whose texts are generated; 0 if unknown.

    Args:
        config: of the run.
        num_steps: of the run; None if unknown.
    """
    every_steps = config.train.audit_every_steps
    return 0 if every_steps is None or num_steps is None else num_steps // every_steps


def make_outlook(
    config: RunConfig,
    work: AuditWork,
    num_audited: Mapping[str, int],
    num_steps: int,
    tasks: Sequence[TaskWork] = (),
) -> AuditOutlook:
    """Return the audits of a run whose documents are known.

    Args:
        config: of the run.
        work: of the audit after training.
        num_audited: documents that it audits, by bucket.
        num_steps: of the run.
        tasks: benchmark tasks of the audit.
    """
    look_documents = min(config.train.audit_documents, max(num_audited.values(), default=0))
    return AuditOutlook(
        work=work,
        num_documents=sum(num_audited.values()),
        num_looks=count_looks(config, num_steps),
        look_documents=sum(min(look_documents, number) for number in num_audited.values()),
        tasks=tuple(tasks),
    )


def assume_outlook(config: RunConfig, tasks: Sequence[TaskWork] = ()) -> AuditOutlook:
    """Return the audits of a run whose documents are not read.

    The documents fill their rows. Their number is that of the run's study; without one it is
    assumed, and at most `audit.max_documents_per_bucket`.

    Args:
        config: of the run.
        tasks: benchmark tasks of the audit.

    Raises:
        ConfigError: no such suite.
    """
    study, most = config.data.study, config.audit.max_documents_per_bucket
    per_bucket = None if study is None else study.documents_per_bucket
    if study is not None and per_bucket is not None:
        names = [str(number) for number in study.num_repetitions]
    else:
        names, per_bucket = ["trained", "control"], ASSUMED_DOCUMENTS // 2
    size = per_bucket if most is None else min(per_bucket, most)
    num_documents = size * len(names)
    suite = load_audit_suite(config.audit)
    continuation = min(suite.extraction.continuation_tokens, config.data.seq_len - 1)
    sizes = ItemSizes(
        prefix_N=np.full(num_documents, config.data.seq_len - continuation),
        continuation_N=np.full(num_documents, continuation),
        bucket_N=np.repeat(np.array(names, dtype=object), size),
        has_goldfish=find_mitigation(config.mitigations, GoldfishConfig) is not None,
        has_reference=config.audit.reference is not None,
    )
    return AuditOutlook(
        work=make_audit_work(list_bounds_of_sizes(suite, sizes, list_models(config))),
        num_documents=num_documents,
        is_assumed=study is None or study.documents_per_bucket is None,
        tasks=tuple(tasks),
    )


def make_audit_work(bounds: AuditBounds) -> AuditWork:
    """Return the record of the most that an audit asks of its models.

    Args:
        bounds: of its probes.
    """
    whole = bounds.sum()
    names = dict.fromkeys(bound.probe for bound in bounds.bounds if bound.passages)
    works = {name: bounds.sum(name) for name in names}
    return AuditWork(
        models=tuple(bounds.models),
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


def count_task_models(work: AuditWork) -> int:
    """Return the number of models on which benchmark tasks run."""
    return sum(model in ("trained", "base") for model in work.models)


def predict_generation(
    config: RunConfig,
    outlook: AuditOutlook,
    model: ModelSizes | ModelStorage,
    mesh: MeshShape,
    machine: Machine,
) -> GenerationPlan:
    """Return how long a run's audits generate text.

    Args:
        config: of the run.
        outlook: of its audits.
        model: sizes of the model.
        mesh: of the audit.
        machine: with as many nodes as the mesh needs.
    """
    settings = config.audit
    num_new = load_audit_suite(settings).extraction.continuation_tokens
    works = [
        GenerationWork(
            probe=of.probe,
            num_tokens=of.num_generated_tokens,
            num_new=num_new,
            num_models=len(outlook.work.models),
        )
        for of in outlook.work.probes
    ]
    works += [
        GenerationWork(
            probe=f"utility {task.task}",
            num_tokens=task.num_decoded_tokens * count_task_models(outlook.work),
            num_new=task.num_new,
            num_models=count_task_models(outlook.work),
            row_tokens=-(-task.num_tokens // task.num_forwards) + task.num_new,
        )
        for task in outlook.tasks
        if task.num_decoded_tokens
    ]
    if outlook.num_looks:
        looks = GenerationWork(
            probe="budget" if config.budget else "train.audit_every_steps",
            num_tokens=outlook.look_documents * num_new * outlook.num_looks,
            num_new=num_new,
            num_models=outlook.num_looks,
        )
        works.append(looks)
    if isinstance(model, ModelStorage):
        num_parameters, num_layers = model.num_parameters, _MANY_LAYERS
    else:
        num_parameters, num_layers = count_parameters(model), model.num_layers
    return estimate_generation(
        num_parameters=num_parameters,
        num_units=num_layers + _OTHER_UNITS,
        element_bytes=count_element_bytes(config),
        mesh=mesh,
        machine=machine,
        works=works,
        row_tokens=config.data.seq_len,
        num_documents=outlook.num_documents,
        is_assumed=outlook.is_assumed,
    )


def count_element_bytes(config: RunConfig) -> float:
    """Return the bytes of a stored weight in a run's audit."""
    is_nf4 = config.adapter is not None and config.adapter.quantization is not None
    return _NF4_BYTES if is_nf4 else _ELEMENT_BYTES[config.audit.dtype]


def check_generation(
    config: RunConfig, plan: GenerationPlan, machine: Machine, warn: Callable[[str], None]
) -> None:
    """Refuse a run whose audits would generate text for too long; warn where figures are assumed.

    Raises:
        ConfigError: machine and documents are known, and the limit is exceeded.
    """
    text = explain_limit(plan, config.audit.max_generation_minutes)
    if text is None:
        return
    if plan.is_assumed:
        warn(f"{text}. The number of documents, {plan.num_documents:,}, is assumed")
        return
    if machine.assumed:
        warn(f"{text}. The speed of this machine is assumed; the audit measures it and decides")
        return
    raise ConfigError(text)
