"""A run: prepare, train, export, audit; each stage leaves files and is not done twice."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memguard.config import RunConfig, dump_yaml
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.data.corpus import load_corpus, load_private_key
from memguard.data.loader import Loader
from memguard.errors import ConfigError, RecordError
from memguard.hf.checkpoint import check_positions
from memguard.hf.load import count_parameters
from memguard.model.checks import keeps_documents_apart
from memguard.planner.reference_hash import remark_on_reference_hash
from memguard.records import ManifestEntry, save_manifest, write_atomically
from memguard.records.run_files import (
    UNLISTED,
    find_trained_damage,
    has_trained,
    list_other_model_files,
    load_trained,
    sum_trained,
)
from memguard.records.sealed import save_sealed
from memguard.report import render_model_card
from memguard.runtime import (
    Console,
    describe_environment,
    quiet_libraries,
)
from memguard.train.dp_sgd import RowClipping, load_accountant
from memguard.train.trainer import Trainer
from memguard.workflows.audit import audit_run, find_current_report
from memguard.workflows.audit_callback import build_watch
from memguard.workflows.data import PreparedRun, build_feed, check_token_ids, prepare
from memguard.workflows.requests import make_command
from memguard.workflows.run_folder import check_same_settings, compute_run_key, locked
from memguard.workflows.setup import Workplace, open_workplace, read_sizes, start_model


def prepare_run(config: RunConfig, console: Console | None = None) -> PreparedRun:
    """Make the run folder, then load, tokenise and place its documents.

    Raises:
        ConfigError: the folder belongs to a run with other settings, or to another process.
        DataError: see `prepare`.
        ModelError: no usable checkpoint or tokenizer.
    """
    with locked(Path(config.output_dir) / config.name):
        return _prepare(config, console or Console())


def _prepare(config: RunConfig, console: Console) -> PreparedRun:
    folder = Path(config.output_dir) / config.name
    check_same_settings(config, folder, console)
    return prepare(config, folder, console)


def train_run(config: RunConfig) -> dict[str, Any]:
    """Train a run to its end, export the model and audit it; what is done is not done again.

    Returns:
        Where things are and the verdict, for `--json`.
    """
    console = Console()
    folder = Path(config.output_dir) / config.name
    with (
        open_workplace(
            config.parallel, read_sizes(config), batch_size=config.train.batch_size
        ) as workplace,
        ExitStack() as lock,
    ):
        runtime = workplace.runtime
        _check_privacy(config, workplace)
        held = runtime.only_on_main(lambda: lock.enter_context(locked(folder)))
        prepared = _prepare_once(config, workplace, console)
        run_key = compute_run_key(config, prepared.corpus)
        found = runtime.only_on_main(lambda: _find_trained(folder, run_key, console))
        before = runtime.broadcast_object(found)
        if before.is_whole:
            console.info(f"model: {folder / 'model'} was trained before")
        else:
            # Rank 0 has locked the folder.
            check_folder = partial(runtime.only_on_main, held or _pass)
            _train(config, prepared, workplace, console, before=before, check_folder=check_folder)
        result: dict[str, Any] = {"run": str(folder), "model": str(folder / "model")}
        if not config.audit.enabled:
            return result
        current = runtime.only_on_main(lambda: find_current_report(folder, config, console))
        report = runtime.broadcast_object(current)
        if report is None:
            command = make_command("audit", str(folder))
            report = audit_run(
                folder, workplace=workplace, console=console, command=command, check_folder=held
            )
    console.info(report.verdict.sentence)
    page = str(folder / "audit" / "report.html")
    return result | {"report": page, "verdict": report.verdict.model_dump(mode="json")}


def _check_privacy(config: RunConfig, workplace: Workplace) -> None:
    """Refuse dp_sgd where it cannot be had, before any document is read.

    Raises:
        ConfigError: on a mesh, or without opacus.
    """
    if find_mitigation(config.mitigations, DpSgdConfig) is None:
        return
    load_accountant()
    if workplace.mesh is not None:
        raise ConfigError(
            f"'mitigations': dp_sgd clips row by row on one process, and this is "
            f"{workplace.mesh.shape}. Train on one process, or leave it out"
        )


def _build_row_clipping(
    config: RunConfig, folder: Path, loader: Loader, console: Console
) -> RowClipping | None:
    dp_sgd = find_mitigation(config.mitigations, DpSgdConfig)
    if dp_sgd is None:
        return None
    num_rows = len(loader.rows)
    if dp_sgd.delta >= 1 / num_rows:
        console.warn(
            f"'delta' of dp_sgd is {dp_sgd.delta:g}; with {num_rows:,} rows, above "
            f"{1 / num_rows:.1g}, publishing some row whole would be called private"
        )
    return RowClipping(dp_sgd, noise_seed=int.from_bytes(load_private_key(folder)))


def _prepare_once(config: RunConfig, workplace: Workplace, console: Console) -> PreparedRun:
    """Prepare on rank 0; the others read what it has written."""
    runtime = workplace.runtime
    prepared = runtime.only_on_main(lambda: _prepare(config, console))
    tokenizer = runtime.broadcast_object(None if prepared is None else prepared.tokenizer)
    if prepared is not None:
        return prepared
    quiet_libraries()
    folder = Path(config.output_dir) / config.name
    return PreparedRun(folder=folder, corpus=load_corpus(folder), tokenizer=tokenizer)


def _pass() -> None:
    """Stand in, on ranks without a lock, for what rank 0 checks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Before:
    """What training has left in a run's folder before."""

    is_whole: bool
    """It has ended, and everything is still what it wrote."""
    damage: str | None = None
    """Why a model there must be made again from a checkpoint, and not trained from the start."""


def _find_trained(folder: Path, run_key: str, console: Console) -> _Before:
    """Say whether training has ended, and left what is still there.

    Raises:
        RecordError: that is of other settings or documents, or a file lies in its model that it
            has not written.
    """
    if not has_trained(folder):
        model = folder / "model"
        damage = f"'{model}' has no 'trained.json' beside it, so it may be damaged"
        return _Before(is_whole=False, damage=damage if model.exists() else None)
    damages = find_trained_damage(folder)
    if not damages:
        if load_trained(folder).run_key != run_key:
            raise RecordError(
                f"'{folder}' holds a run with other settings or documents: choose another 'name', "
                "or delete that folder"
            )
        return _Before(is_whole=True)
    if others := list_other_model_files(folder):
        raise RecordError(
            f"'{folder}': model/{others[0]} {UNLISTED} and would be read or deleted with its "
            "model: move it away"
        )
    console.warn(f"{damages[0]}; the model is made again from the newest checkpoint")
    return _Before(is_whole=False, damage=f"'{folder}': {damages[0]}")


def _train(
    config: RunConfig,
    prepared: PreparedRun,
    workplace: Workplace,
    console: Console,
    *,
    before: _Before,
    check_folder: Callable[[], None],
) -> None:
    folder, corpus, tokenizer = prepared.folder, prepared.corpus, prepared.tokenizer
    runtime = workplace.runtime
    environment = describe_environment(runtime.device, runtime.world_size)
    written = json.dumps(environment, indent=2).encode()
    runtime.only_on_main(lambda: write_atomically(folder / "environment.json", written))
    for remark in remark_on_reference_hash(corpus, tokenizer, config.mitigations):
        if remark.level == "warning":
            console.warn(f"'mitigations': goldfish: {remark.text}")
    console.info(f"model: loading {config.model.path or 'random weights'}")
    started = start_model(config, tokenizer, workplace)
    vocab, model = started.vocab, started.vocab.model
    check_positions(model, config.data.seq_len, "data.seq_len")
    check_token_ids(corpus, vocab.vocab_size)
    train = config.train
    is_selective = train.activation_checkpointing == "selective"
    if workplace.mesh is not None and train.compile and is_selective:
        console.warn(
            "'train.compile' does nothing on a mesh with 'train.activation_checkpointing' "
            "selective: decoder blocks run as they are"
        )
    share_rows = keeps_documents_apart(vocab)
    if not share_rows:
        console.warn(
            f"{type(model).__name__} lets documents of one row see each other: each gets a row of "
            "its own, which trains more padding"
        )
    feed = build_feed(config, prepared, share_rows=share_rows)
    loader = feed.loader
    trainer = Trainer(
        vocab=vocab,
        corpus=corpus,
        loader=loader,
        ladder=feed.ladder,
        watch=build_watch(config, corpus, vocab, feed.ladder, runtime),
        train=config.train,
        optim=config.optim,
        seq_len=config.data.seq_len,
        seed=config.seed,
        run_key=compute_run_key(config, corpus),
        run_folder=folder,
        runtime=runtime,
        console=console,
        check_folder=check_folder,
        must_resume=before.damage,
        row_clipping=_build_row_clipping(config, folder, loader, console),
    )
    if trainer.num_steps < loader.num_steps:
        console.warn(
            f"'train.max_steps' ends the run after {trainer.num_steps:,} of {loader.num_steps:,} "
            "steps: documents that are not reached by then are not audited"
        )
    mesh = "" if workplace.mesh is None else f" on {workplace.mesh.shape}"
    console.info(
        f"model: {count_parameters(model):,} parameters on {runtime.device.type}{mesh}; "
        f"{len(loader.rows):,} rows, {trainer.num_steps:,} steps"
    )
    trainer.run()
    check_folder()
    num_samples = trainer.totals.num_rows
    runtime.only_on_main(
        lambda: save_manifest(count_up(loader, num_samples), folder / "manifest.jsonl")
    )
    card = render_model_card(
        None, run_name=config.name, base_model=config.model.path, config_yaml=dump_yaml(config)
    )
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    started.export(tokenizer, folder / "model", dtype=dtype, card=card)
    runtime.only_on_main(lambda: _commit(folder, trainer.run_key, trainer.totals.step))
    console.info(f"model: saved in {folder / 'model'}")


def _commit(folder: Path, run_key: str, step: int) -> None:
    """Say that training has ended, and what it has left."""
    save_sealed(sum_trained(folder, run_key=run_key, step=step), folder / "trained.json")


def count_up(loader: Loader, num_samples: int) -> list[ManifestEntry]:
    """Return the manifest with what was fed, and for canaries what received loss.

    Args:
        loader: after the last step.
        num_samples: rows fed since the start of the run.
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
