"""The work of a run's audit, predicted from its documents before training."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memguard.audit.bounds import list_bounds
from memguard.audit.extraction import TINY_MARGINS
from memguard.audit.requests import Inputs
from memguard.audit.selection import Selection, select_windows
from memguard.audit.suite import load_audit_suite
from memguard.config import RunConfig
from memguard.data.corpus import Corpus
from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.dry_run import AuditWork
from memguard.planner.generation import describe_generation
from memguard.planner.machine import THIS_MACHINE, load_machine
from memguard.runtime import Console, Runtime
from memguard.workflows.audit_context import build_codec, build_known_goldfish
from memguard.workflows.audit_inputs import list_audited, list_canaries
from memguard.workflows.data import PreparedRun, build_training_data
from memguard.workflows.generation_plan import (
    check_generation,
    list_models,
    make_audit_work,
    make_outlook,
    predict_generation,
)
from memguard.workflows.plan import read_run_model
from memguard.workflows.plan_tasks import count_tasks
from memguard.workflows.setup import read_model_config

if TYPE_CHECKING:
    from memguard.audit.benchmarks.tasks import OpenedTask


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


def predict_audit_work(
    config: RunConfig,
    corpus: Corpus,
    selection: Selection,
    tokenizer: Any,
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
    return make_audit_work(list_bounds(suite, inputs, list_models(config)))


def check_run_generation(
    config: RunConfig,
    prepared: PreparedRun,
    mesh: MeshShape,
    runtime: Runtime,
    console: Console,
    tasks: "Sequence[OpenedTask]" = (),
) -> None:
    """Refuse a run on GPUs whose audits would generate text for too long.

    Args:
        config: of the run.
        prepared: its documents.
        mesh: on which it trains and is audited.
        runtime: of the calling rank.
        console: shows how the audit will generate.
        tasks: benchmark tasks of the audit.

    Raises:
        ConfigError: see `check_generation`.
    """
    if mesh.z == 1:
        return
    corpus = prepared.corpus
    counts = [entry.planned_repetitions for entry in corpus.manifest]
    selection = select_audited(config, corpus, counts)
    if selection is None:
        return
    num_steps = 0
    if config.train.audit_every_steps is not None:
        loader = build_training_data(config, prepared, share_rows=True).loader
        num_steps = min(loader.num_steps, config.train.max_steps or loader.num_steps)
    machine = load_machine(THIS_MACHINE, num_processes=runtime.world_size)
    generating = [task for task in tasks if task.kind == "generate_until"]
    model = read_model_config(config, prepared.tokenizer) if generating else None
    counted = count_tasks(generating, prepared.tokenizer, model)
    outlook = make_outlook(
        config,
        predict_audit_work(config, corpus, selection, prepared.tokenizer),
        Counter(window.document.bucket for window in selection.windows),
        num_steps,
        counted,
    )
    plan = predict_generation(config, outlook, read_run_model(config), mesh, machine)
    if not plan.fits:
        for line in describe_generation(plan):
            console.info(f"audit: {line}")
    check_generation(config, plan, machine, console.warn)
