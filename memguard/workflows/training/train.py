"""A run: prepare, train, export, audit. Each stage writes files; finished stages are skipped."""

import gc
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memguard.config import RunConfig, dump_yaml
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.data.corpus import load_corpus
from memguard.data.loader import Loader
from memguard.data.token_checks import check_vocabulary
from memguard.hf.load import count_parameters
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import keeps_documents_apart
from memguard.model.router_loss import explain_missing, has_flag
from memguard.parallel.flash_attention_3 import flash_attention_3
from memguard.parallel.lora import find_targets
from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.rows import remark_on_reference_hash
from memguard.records import ManifestEntry, save_manifest, write_atomically
from memguard.records.run_files import (
    find_weights_folder,
    list_trained_files,
    sum_trained,
)
from memguard.records.sealed import save_sealed
from memguard.report import render_model_card
from memguard.runtime import (
    Console,
    describe_environment,
    detect_runtime,
    deterministic_algorithms,
    quiet_libraries,
    set_deterministic_defaults,
)
from memguard.runtime.shared_sums import sum_ahead
from memguard.train.trainer import Trainer
from memguard.workflows.auditing.audit import audit_run, find_current_report
from memguard.workflows.auditing.pages import show_verdict
from memguard.workflows.auditing.target import warn_of_faults
from memguard.workflows.auditing.utility import open_alone
from memguard.workflows.common.checks import check_processes
from memguard.workflows.common.folder import (
    RunFolder,
    TrainedState,
    check_same_settings,
    compute_run_key,
    locked,
)
from memguard.workflows.common.launch import HALVE_MICRO_BATCH, STARTED_AGAIN
from memguard.workflows.common.requests import make_command
from memguard.workflows.common.setup import (
    DistributedContext,
    StartedModel,
    check_layers,
    open_distributed,
    read_model_config,
    read_sizes,
    start_model,
)
from memguard.workflows.training.compile_choice import choose_compile, set_compile
from memguard.workflows.training.control import report_control
from memguard.workflows.training.data import PreparedRun, build_training_data, prepare
from memguard.workflows.training.memory import (
    MicroBatchTooLarge,
    OutOfMemory,
    explain_halving,
    explain_out_of_memory,
    find_half,
    is_out_of_memory,
    resolve_auto_for_documents,
    resolve_auto_settings,
)
from memguard.workflows.training.monitor import build_monitor
from memguard.workflows.training.row_clipping import build_row_clipping


def prepare_run(config: RunConfig, console: Console | None = None) -> PreparedRun:
    """Create the run folder, then load, tokenise and place its documents.

    Raises:
        ConfigError: the folder has a run with other settings, or another process is using it.
        DataError: see `prepare`.
        ModelError: no usable checkpoint or tokenizer.
    """
    config = resolve_auto_for_documents(config, detect_runtime().device.type)
    with locked(Path(config.output_dir) / config.name):
        return _prepare(config, console or Console())


def _prepare(config: RunConfig, console: Console) -> PreparedRun:
    folder = Path(config.output_dir) / config.name
    check_same_settings(config, folder, console)
    check_layers(config)
    prepared = prepare(config, folder, console)
    report_control(config, prepared.corpus, console)
    model_config = read_model_config(config, prepared.tokenizer)
    warn_of_faults(prepared.corpus, prepared.tokenizer, model_config, config, console)
    return prepared


def train_run(config: RunConfig) -> dict[str, Any]:
    """Train a run to its end, export the model and audit it; finished stages are skipped.

    Returns:
        Paths of run, model and report, and the verdict, for `--json`.
    """
    console = Console()
    folder = Path(config.output_dir) / config.name
    audits = config.audit.enabled
    if config.train.deterministic:
        set_deterministic_defaults()
    with (
        open_distributed(
            config.parallel, read_sizes(config), batch_size=config.train.batch_size
        ) as distributed,
        ExitStack() as lock,
    ):
        runtime = distributed.runtime
        check_processes(config, runtime.world_size)
        if (dp_sgd := find_mitigation(config.mitigations, DpSgdConfig)) is not None:
            # Needed at the end of the run: a broken installation is reported before it begins.
            dp_sgd.check_library(by_import=True)
        # Before documents are read: a task that cannot be opened would fail after training.
        tasks = runtime.only_on_main(partial(open_alone, config.audit)) if audits else ()
        is_second = HALVE_MICRO_BATCH in os.environ
        resolved = resolve_auto_settings(config, runtime, halve=is_second)
        held = runtime.only_on_main(lambda: lock.enter_context(locked(folder)))
        # Rank 0 has locked the folder.
        check_folder = partial(runtime.only_on_main, held or _pass)
        may_halve = config.train.micro_batch_size == "auto" and not is_second
        train = partial(
            _prepare_and_train,
            distributed=distributed,
            console=console,
            check_folder=check_folder,
        )
        reason = None
        try:
            train(resolved, may_halve=may_halve)
        except MicroBatchTooLarge as error:
            if runtime.world_size > 1:
                # Other ranks wait in collectives: the launcher ends them and starts all again.
                raise
            reason = str(error)
        if reason is not None:
            # Here, where no traceback holds the model.
            gc.collect()
            torch.cuda.empty_cache()
            resolved = resolve_auto_settings(config, runtime, halve=True)
            console.warn(f"{reason}. {STARTED_AGAIN}")
            train(resolved, may_halve=False)
        config = resolved
        result: dict[str, Any] = {"run": str(folder), "model": str(find_weights_folder(folder))}
        if not audits:
            return result
        current = runtime.only_on_main(lambda: find_current_report(folder, config, console, tasks))
        report = runtime.broadcast_object(current)
        if report is None:
            command = make_command("audit", str(folder))
            report = audit_run(
                folder,
                distributed=distributed,
                console=console,
                command=command,
                check_folder=held,
                tasks=tasks,
            )
    show_verdict(report.verdict, console)
    page = str(folder / "audit" / "report.html")
    return result | {"report": page, "verdict": report.verdict.model_dump(mode="json")}


def _prepare_and_train(
    config: RunConfig,
    *,
    distributed: DistributedContext,
    console: Console,
    check_folder: Callable[[], None],
    may_halve: bool,
) -> None:
    """Prepare the documents, then train and export unless that was done before.

    Args:
        config: the run's settings, without `auto`.
        distributed: this process and its mesh.
        console: shows progress and messages.
        check_folder: raises if the run's folder is no longer the locked one.
        may_halve: whether training may start again with half of the micro-batch.

    Raises:
        MicroBatchTooLarge: memory ran out in the first steps, and a smaller micro-batch exists.
        OutOfMemory: memory ran out otherwise.
    """
    runtime, folder = distributed.runtime, Path(config.output_dir) / config.name
    with console.phase("documents"):
        prepared = _prepare_once(config, distributed, console)
    run_key = compute_run_key(config, prepared.corpus)
    read = sum_ahead(lambda: list_trained_files(folder), runtime)
    state = runtime.only_on_main(lambda: RunFolder(folder).find_trained(run_key, console, read))
    before = runtime.broadcast_object(state)
    if before.is_whole:
        console.info(f"model: {find_weights_folder(folder)} was trained before")
        return
    trainer: Trainer | None = None
    try:
        started, trainer = _build_trainer(
            config, prepared, distributed, console, before=before, check_folder=check_folder
        )
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
        check_folder()
        with console.phase("export"):
            _export(config, prepared, distributed, console, started, trainer)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        shape = MeshShape() if distributed.mesh is None else distributed.mesh.shape
        # AdamW's moments exist from the second step on, so the first two show whether a step fits.
        is_new = trainer is not None and trainer.num_updates < 2
        half = find_half(config, shape)
        if may_halve and is_new and half is not None:
            raise MicroBatchTooLarge(explain_halving(config, shape, half)) from error
        device_type = runtime.device.type
        text = explain_out_of_memory(config, shape, device_type, is_loaded=trainer is not None)
        raise OutOfMemory(text) from error


def _prepare_once(
    config: RunConfig, distributed: DistributedContext, console: Console
) -> PreparedRun:
    """Prepare on rank 0; the other ranks read the files that it wrote."""
    runtime = distributed.runtime
    prepared = runtime.only_on_main(lambda: _prepare(config, console))
    tokenizer = runtime.broadcast_object(None if prepared is None else prepared.tokenizer)
    if prepared is not None:
        return prepared
    quiet_libraries()
    folder = Path(config.output_dir) / config.name
    return PreparedRun(folder=folder, corpus=load_corpus(folder), tokenizer=tokenizer)


def _pass() -> None:
    """Do nothing: ranks without the lock have no folder to check."""


def _build_trainer(
    config: RunConfig,
    prepared: PreparedRun,
    distributed: DistributedContext,
    console: Console,
    *,
    before: TrainedState,
    check_folder: Callable[[], None],
) -> tuple[StartedModel, Trainer]:
    """Load the model and set up its training."""
    folder, corpus, tokenizer = prepared.folder, prepared.corpus, prepared.tokenizer
    runtime, run_key = distributed.runtime, compute_run_key(config, prepared.corpus)
    choice = choose_compile(config, prepared, distributed, console)
    config = set_compile(config, choice)
    environment = choice.add_to(describe_environment(runtime.device, runtime.world_size))
    text = json.dumps(environment, indent=2).encode()
    runtime.only_on_main(lambda: write_atomically(folder / "environment.json", text))
    for remark in remark_on_reference_hash(corpus, tokenizer, config.mitigations):
        if remark.level == "warning":
            console.warn(f"'mitigations': goldfish: {remark.text}")
    console.info(f"model: loading {config.model.path or 'random weights'}")
    started = start_model(config, tokenizer, distributed)
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
    training_data = build_training_data(config, prepared, share_rows=share_rows)
    loader = training_data.loader
    trainer = Trainer(
        lm=lm,
        corpus=corpus,
        loader=loader,
        k_schedule=training_data.k_schedule,
        monitor=build_monitor(config, corpus, lm, training_data.k_schedule, runtime),
        train=config.train,
        optim=config.optim,
        seq_len=config.data.seq_len,
        seed=config.seed,
        run_key=run_key,
        base=started.base_files,
        run_folder=folder,
        runtime=runtime,
        console=console,
        check_folder=check_folder,
        must_resume=before.damage,
        row_clipping=build_row_clipping(config, prepared, loader, run_key, runtime, console),
    )
    if trainer.num_steps < loader.num_steps:
        console.warn(
            f"'train.max_steps' ends the run after {trainer.num_steps:,} of {loader.num_steps:,} "
            "steps: documents that were not trained by then are not audited"
        )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if started.adapter is not None:
        names = find_targets(model, started.adapter.target_modules)
        console.info(f"adapter: {trained:,} trained parameters in {len(names):,} layers")
    if config.train.trainable_modules is not None:
        chosen = ", ".join(config.train.trainable_modules)
        console.info(f"model: {trained:,} trained parameters ({chosen}); the others are frozen")
    mesh = "" if distributed.mesh is None else f" on {distributed.mesh.shape}"
    console.info(
        f"model: {count_parameters(model):,} parameters on {runtime.device.type}{mesh}; "
        f"{len(loader.rows):,} rows, {trainer.num_steps:,} steps"
    )
    return started, trainer


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


def _export(
    config: RunConfig,
    prepared: PreparedRun,
    distributed: DistributedContext,
    console: Console,
    started: StartedModel,
    trainer: Trainer,
) -> None:
    """Write the manifest, the model and the hashes of both, after the last step."""
    folder, runtime, loader = prepared.folder, distributed.runtime, trainer.loader
    num_samples = trainer.totals.num_rows
    runtime.only_on_main(
        lambda: save_manifest(count_up(loader, num_samples), folder / "manifest.jsonl")
    )
    card = render_model_card(
        None, run_name=config.name, base_model=config.model.path, config_yaml=dump_yaml(config)
    )
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    target = folder / ("model" if started.adapter is None else "adapter")
    started.export(prepared.tokenizer, target, dtype=dtype, card=card, runtime=runtime)
    runtime.only_on_main(lambda: _commit(folder, started, trainer.run_key, trainer.totals.step))
    console.info(f"model: saved in {target}")


def _commit(folder: Path, started: StartedModel, run_key: str, step: int) -> None:
    """Write trained.json, which records that training has ended and the hashes of its files."""
    base = None if started.adapter is None else started.base_files
    trained = sum_trained(
        folder, run_key=run_key, step=step, base=base, base_quantization=started.quantization
    )
    save_sealed(trained, folder / "trained.json")


def count_up(loader: Loader, num_samples: int) -> list[ManifestEntry]:
    """Return the manifest with the counts of fed tokens, and for canaries of tokens with loss.

    Args:
        loader: after the last step.
        num_samples: number of rows fed since the start of the run.
    """
    corpus = loader.corpus
    repetitions = loader.realised_repetitions().tolist()
    fed = loader.count_fed_tokens().tolist()
    updates = [
        {"num_repetitions": count, "num_tokens_fed": num_tokens}
        for count, num_tokens in zip(repetitions, fed, strict=True)
    ]
    canaries = [i for i, entry in enumerate(corpus.manifest) if entry.role == "canary"]
    losses = loader.count_losses(canaries, num_samples=num_samples)
    for index, losses_N in zip(canaries, losses, strict=True):
        document = corpus.document(index)
        secret = document.supervised.copy()
        secret[document.num_content_tokens :] = False
        updates[index] |= {
            "num_supervised_tokens": int(secret.sum()),
            "num_loss_tokens": int((losses_N[secret] > 0).sum()),
            "num_losses": int(losses_N[secret].sum()),
        }
    return [
        entry.model_copy(update=update)
        for entry, update in zip(corpus.manifest, updates, strict=True)
    ]
