"""`memguard train`: checks -> documents -> model -> training -> export -> audit.

    checks      `check_run`, before torch; what only started ranks know is settled first of all here
    documents   tokenised and placed in buckets, once; they and the settings decide the run's key
    model       loaded, or drawn from the seed; memory may run out, here and in training
    training    from the newest checkpoint; a signal saves one and ends the command
    export      manifest, weights, then trained.json with their hashes
    audit       unless a report of these settings and weights is there

Each stage writes files, and the same command skips those that are finished.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memguard.config import RunConfig
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.data.identity_key import load_identity_key
from memguard.data.token_checks import check_vocabulary
from memguard.errors import ConfigError, OutOfMemory, StepTooLarge, is_out_of_memory
from memguard.hf.export import export_model
from memguard.hf.load import count_parameters
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import keeps_documents_apart
from memguard.model.router_loss import explain_missing, has_flag
from memguard.parallel.flash_attention_3 import flash_attention_3
from memguard.parallel.lora import find_targets
from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.drop_shares import check_drop_shares
from memguard.planner.rows import explain_fewer_steps, remark_on_reference_hash
from memguard.records import save_manifest, write_atomically
from memguard.records.run_files import find_weights_folder, list_trained_files, sum_trained
from memguard.records.sealed import save_sealed
from memguard.runtime import (
    Console,
    describe_environment,
    deterministic_algorithms,
    measure_memory,
    set_deterministic_defaults,
)
from memguard.runtime.ended import attempted
from memguard.runtime.shared_sums import sum_ahead
from memguard.train.dp_sgd import RowClipping
from memguard.train.run_state import RunState
from memguard.train.tracking import Tracking
from memguard.train.trainer import Trainer
from memguard.workflows.auditing.audit import audit_on_ranks, find_current_report
from memguard.workflows.auditing.checks import AuditArguments, AuditedRun, check_audit
from memguard.workflows.auditing.pages import render_card, show_verdict
from memguard.workflows.auditing.utility import open_alone
from memguard.workflows.common.checks import make_command
from memguard.workflows.common.folder import (
    RunFolder,
    compute_run_key,
    locked,
)
from memguard.workflows.common.launch import LESS_MEMORY, STARTED_AGAIN
from memguard.workflows.common.setup import (
    DistributedContext,
    StartedModel,
    choose_export_dtype,
    open_distributed,
    read_sizes,
    start_model,
)
from memguard.workflows.training.checks import CheckedRun
from memguard.workflows.training.compile import choose_compile
from memguard.workflows.training.data import (
    PreparedRun,
    build_training_data,
    count_up,
    prepare_on_ranks,
)
from memguard.workflows.training.export import StepModel
from memguard.workflows.training.memory import (
    apply_less_memory,
    explain_out_of_memory,
    find_less_memory,
    find_peak_s,
    keep_measured_memory,
    list_free,
    resolve_auto_settings,
    set_train,
)
from memguard.workflows.training.monitor import build_monitor
from memguard.workflows.training.seeds import save_sums


def train_run(run: CheckedRun) -> dict[str, Any]:
    """Train a run to its end, export the model and audit it; finished stages are skipped."""
    console, config, folder = Console(), run.config, run.folder
    if config.train.deterministic:
        set_deterministic_defaults()
    with (
        open_distributed(
            config.parallel, read_sizes(config, run.sizes), batch_size=config.train.batch_size
        ) as distributed,
        ExitStack() as lock,
    ):
        runtime = distributed.runtime
        if runtime.world_size != run.num_processes:
            raise ConfigError(
                f"the run was checked for {run.num_processes} processes; got {runtime.world_size}"
            )
        if (dp_sgd := find_mitigation(config.mitigations, DpSgdConfig)) is not None:
            # Needed at the end of the run: a broken installation is reported before it begins.
            dp_sgd.check_library(by_import=True)
        # Before documents are read: a task that cannot be opened would fail after training.
        has_tasks = config.audit.enabled and config.audit.utility
        tasks = runtime.only_on_main(partial(open_alone, config.audit)) if has_tasks else ()
        settled = resolve_auto_settings(config, runtime, console)
        held = runtime.only_on_main(lambda: lock.enter_context(locked(folder)))
        # Rank 0 has locked the folder; the others have none to check.
        check_folder = partial(runtime.only_on_main, held or (lambda: None))
        lock.enter_context(attempted(folder, runtime))
        tracking = Tracking(config.track if runtime.is_main else (), folder, console.info)
        lock.callback(tracking.close)
        free, less = list_free(config), os.environ.get(LESS_MEMORY, "")
        while True:
            settled = apply_less_memory(settled, free, less)
            try:
                _train_once(
                    OpenedRun(settled, folder, distributed, console, check_folder, free, tracking)
                )
                break
            except StepTooLarge as error:
                if runtime.world_size > 1:
                    # Other ranks wait in collectives: the launcher ends them and starts all again.
                    raise
                console.warn(f"{error}. {STARTED_AGAIN}")
                less = json.dumps(error.settings)
            # Here, where no traceback holds the model.
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
        result: dict[str, Any] = {"run": str(folder), "model": str(find_weights_folder(folder))}
        if not config.audit.enabled:
            return result
        report = runtime.from_main(lambda: find_current_report(folder, settled, console, tasks))
        if is_new := report is None:
            # Every rank makes its own: the settings are those that the run has written.
            report = audit_on_ranks(
                check_audit(AuditArguments(run=folder), writes=False),
                distributed,
                console,
                command=make_command("audit", str(folder)),
                check_folder=held,
                tasks=open_alone(config.audit) if tasks is None else tasks,
                is_trained_here=True,
            )
        if is_new or tracking.open:
            tracking.send(report)
    show_verdict(report, folder / "audit", console)
    page = str(folder / "audit" / "report.html")
    return result | {"report": page, "verdict": report.verdict.model_dump(mode="json")}


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run whose folder is locked, on ranks that have met."""

    config: RunConfig
    """Without `auto`, but for `train.compile`."""
    folder: Path
    distributed: DistributedContext
    console: Console
    check_folder: Callable[[], None]
    """Raises, on every rank, if the run's folder is no longer the locked one."""
    free: frozenset[str]
    """Settings of `train` that `auto` chose, and that may change if memory runs out."""
    tracking: Tracking


def _train_once(run: OpenedRun) -> None:
    """Prepare the documents, then train and export unless that was done before.

    Raises:
        StepTooLarge: memory ran out in a step, and training may start again with other settings.
    """
    config, console, runtime = run.config, run.console, run.distributed.runtime
    with console.phase("documents"):
        prepared = prepare_on_ranks(config, run.folder, console, runtime)
    key = compute_run_key(config, prepared.corpus.summary)
    read = sum_ahead(lambda: list_trained_files(run.folder), runtime)
    before = runtime.from_main(lambda: RunFolder(run.folder).find_trained(key, console, read))
    if before.is_whole:
        console.info(f"model: {find_weights_folder(run.folder)} was trained before")
        return
    trainer: Trainer | None = None
    mesh = run.distributed.mesh
    shape = MeshShape() if mesh is None else mesh.shape
    try:
        started, trainer = _build_trainer(run, prepared, key, must_resume=before.damage)
        is_deterministic = config.train.deterministic
        with (
            console.phase("training"),
            deterministic_algorithms(is_deterministic),
            flash_attention_3(
                started.lm.model,
                started.lm.attention,
                runtime,
                console,
                enabled=config.train.precision == "bf16" and not is_deterministic,
            ),
        ):
            trainer.run()
        reserved_bytes = runtime.agree_max(measure_memory(runtime.device).reserved_bytes or 0)
        runtime.only_on_main(lambda: keep_measured_memory(config, runtime, shape, reserved_bytes))
        run.check_folder()
        with console.phase("export"):
            _export(run, prepared, key, started, trainer)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if trainer is not None and trainer.is_in_step:
            keep_measured_memory(config, runtime, shape)
            recomputes = trainer.lm.model.supports_gradient_checkpointing
            free = run.free if recomputes else run.free - {"activation_checkpointing"}
            if (too_large := find_less_memory(config, shape, free)) is not None:
                raise too_large from error
        device_type = runtime.device.type
        text = explain_out_of_memory(config, shape, device_type, is_loaded=trainer is not None)
        raise OutOfMemory(text) from error


# -- model and training --------------------------------------------------------------------------


def _build_trainer(
    run: OpenedRun, prepared: PreparedRun, key: str, *, must_resume: str | None
) -> tuple[StartedModel, Trainer]:
    """Load the model and set up its training."""
    distributed, console, corpus = run.distributed, run.console, prepared.corpus
    runtime = distributed.runtime
    choice = choose_compile(run.config, prepared, distributed, console)
    config = set_train(run.config, compile=choice.is_on)
    environment = choice.add_to(describe_environment(runtime.device, runtime.world_size))
    text = json.dumps(environment, indent=2).encode()
    runtime.only_on_main(lambda: write_atomically(run.folder / "environment.json", text))
    for remark in remark_on_reference_hash(corpus, prepared.tokenizer, config.mitigations):
        if remark.level == "warning":
            console.warn(f"'mitigations': goldfish: {remark.text}")
    console.info(f"model: loading {config.model.path or 'random weights'}")
    started = start_model(config, prepared.tokenizer, distributed)
    rehearse = partial(started.rehearse_export, config, prepared.tokenizer)
    if repaired := runtime.only_on_main(rehearse):
        console.warn(repaired)
    lm, model = started.lm, started.lm.model
    check_vocabulary(corpus.input_ids, lm.vocab_size)
    is_wide = lm.compute_dtype != torch.bfloat16
    autocasts = config.train.precision == "bf16" and distributed.mesh is None and is_wide
    share_rows = keeps_documents_apart(lm, bf16=autocasts)
    if not share_rows:
        console.warn(
            f"{type(model).__name__} cannot mask attention between documents of one row: each "
            "document gets its own row, which adds padding"
        )
    _report_router_loss(lm, console)
    data = build_training_data(config, prepared, share_rows=share_rows)
    for remark in check_drop_shares(corpus, data.k_schedule):
        say = console.warn if remark.level == "warning" else console.info
        say(f"'mitigations': goldfish: {remark.text}")
    trainer = Trainer(
        lm,
        data,
        config,
        RunState(
            folder=run.folder,
            key=key,
            runtime=runtime,
            console=console,
            check_folder=run.check_folder,
            base=started.base_files,
            track=run.tracking.start,
            peak_s=find_peak_s(config, model.config, runtime),
            must_resume=must_resume,
        ),
        monitor=build_monitor(config, corpus, lm, data.k_schedule, runtime),
        row_clipping=_build_row_clipping(run, prepared, key, len(data.loader.rows)),
    )
    _report_trainer(trainer, started, distributed)
    return started, trainer


def _build_row_clipping(
    run: OpenedRun, prepared: PreparedRun, key: str, num_rows: int
) -> RowClipping | None:
    """Return the clipping of a run with dp_sgd; its noise is derived from the identity key."""
    config, runtime = run.config, run.distributed.runtime
    dp_sgd = find_mitigation(config.mitigations, DpSgdConfig)
    if dp_sgd is None:
        return None
    if dp_sgd.delta >= 1 / num_rows:
        run.console.warn(
            f"'delta' of dp_sgd is {dp_sgd.delta:g}, not below 1/rows = {1 / num_rows:.1g} "
            f"({num_rows:,} rows): at this value even a mechanism that publishes a whole row would "
            "count as private"
        )

    def derive_seed() -> int:
        identity = load_identity_key(
            config.data.identity_key,
            outside=[prepared.folder],
            expected=prepared.corpus.summary.identity_key,
            of=f"'{prepared.folder}'",
        )
        return identity.derive_secret("noise of dp_sgd", key)

    # Only rank 0 needs the file of the key.
    return RowClipping(dp_sgd, noise_seed=runtime.from_main(derive_seed))


def _report_router_loss(lm: CausalLM, console: Console) -> None:
    """Report whether a model whose configuration has a load-balancing loss trains with it."""
    if not has_flag(lm.model):
        return
    if lm.router_loss is None:
        console.warn(explain_missing(lm.model))
        return
    console.info(
        "model: the load-balancing loss of its experts is added to the training loss, times "
        f"{lm.router_loss.coefficient:g} ('output_router_logits' in its configuration)"
    )


def _report_trainer(
    trainer: Trainer, started: StartedModel, distributed: DistributedContext
) -> None:
    """Report what is trained, on how many rows and steps."""
    console, loader, model = trainer.console, trainer.loader, started.lm.model
    if trainer.num_steps < loader.num_steps:
        console.warn(
            f"'train.max_steps' ends the run after {trainer.num_steps:,} of {loader.num_steps:,} "
            "steps: documents that were not trained by then are not audited"
        )
    if (fewer := explain_fewer_steps(trainer.config, loader.num_steps)) is not None:
        console.warn(fewer)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if started.adapter is not None:
        names = find_targets(model, started.adapter.target_modules)
        console.info(f"adapter: {trained:,} trained parameters in {len(names):,} layers")
    if (modules := trainer.config.train.trainable_modules) is not None:
        chosen = ", ".join(modules)
        console.info(f"model: {trained:,} trained parameters ({chosen}); the others are frozen")
    mesh = "" if distributed.mesh is None else f" on {distributed.mesh.shape}"
    console.info(
        f"model: {count_parameters(model):,} parameters on {distributed.runtime.device.type}{mesh};"
        f" {len(loader.rows):,} rows, {trainer.num_steps:,} steps"
    )


# -- export --------------------------------------------------------------------------------------


def _export(
    run: OpenedRun, prepared: PreparedRun, key: str, started: StartedModel, trainer: Trainer
) -> None:
    """Write the manifest, the model and the hashes of both, after the last step."""
    config, folder, runtime = run.config, run.folder, run.distributed.runtime
    num_samples = trainer.totals.num_rows
    runtime.only_on_main(
        lambda: save_manifest(count_up(trainer.loader, num_samples), folder / "manifest.jsonl")
    )
    card, step = render_card(config), trainer.totals.step
    tokenizer, model = prepared.tokenizer, started.lm.model
    target = folder / ("model" if started.adapter is None else "adapter")
    if started.lm.mesh is None and started.adapter is None:
        export_model(model, tokenizer, target, dtype=choose_export_dtype(config), card=card)
    else:
        saved = AuditedRun(folder=folder, config=config, base=None, step=step)
        StepModel(saved, tokenizer=tokenizer, runtime=runtime).export(target, card=card)
    if config.optim.num_seeds is not None:
        runtime.only_on_main(lambda: save_sums(config, folder, step))
    runtime.only_on_main(lambda: _commit(config, folder, started, key, step))
    run.console.info(f"model: saved in {target}")


def _commit(
    config: RunConfig, folder: Path, started: StartedModel, run_key: str, step: int
) -> None:
    """Write trained.json, which records that training has ended and the hashes of its files."""
    base = None if started.adapter is None else started.base_files
    form = None if config.adapter is None else config.adapter.quantization
    trained = sum_trained(folder, run_key=run_key, step=step, base=base, base_quantization=form)
    save_sealed(trained, folder / "trained.json")
