"""What a command was given, looked for before torch is imported and anything is read.

    documents   --members, --nonmembers, data.train, data.control, ...
    models      --model, --base, --reference, model.path, ...
    suite       --suite, audit.suite

One message lists all missing paths. Hub ids pass: whether the hub has them is said when they are
fetched.
"""

from collections.abc import Mapping, Sequence

from memguard.audit.suite import load_audit_suite
from memguard.compare import Sweep
from memguard.config import AuditConfig, RunConfig
from memguard.data import sources
from memguard.errors import DataError, ModelError
from memguard.hf import checkpoint_files
from memguard.workflows.requests import AuditRequest


def check_audit(request: AuditRequest, settings: AuditConfig) -> None:
    """Look for the documents, models and suite of `memguard audit`.

    Raises:
        ConfigError: there is no such suite, or it is wrong.
        DataError: documents are missing.
        ModelError: a folder is missing, or holds no checkpoint.
    """
    documents = {"--members": request.members, "--nonmembers": request.nonmembers}
    # Of a run, only what was given here: where its own model and base are is the run's to say.
    given = {"--model": request.model, "--base": request.base}
    _check(documents, {**given, "--reference": request.settings.get("reference")}, {})
    load_audit_suite(settings)


def check_run(config: RunConfig, *, has_model: bool = True) -> None:
    """Look for the documents, models and suite of a run.

    Args:
        config: the run's settings.
        has_model: False where 'model.path' is trained first, by the same command.

    Raises:
        ConfigError: there is no such suite, or it is wrong.
        DataError: documents are missing.
        ModelError: a folder is missing, or holds no checkpoint.
    """
    documents = {f"data.{name}": given for name, given in config.data.list_sources().items()}
    models = {"model.path": config.model.path if has_model else None}
    if config.audit.enabled:
        models["audit.reference"] = config.audit.reference
    scratch = config.model.scratch
    _check(
        documents,
        models,
        {"model.scratch.tokenizer": None if scratch is None else scratch.tokenizer},
    )
    load_audit_suite(config.audit)


def check_sweep(sweep: Sweep) -> None:
    """Look for what each run of a sweep needs; see `check_run`."""
    for run in sweep.in_order:
        # With 'pretrain' the settings start from a model that the sweep trains first.
        check_run(run.config, has_model=run is sweep.pretrain or not sweep.pretrain)


def _check(
    documents: Mapping[str, Sequence[str]],
    models: Mapping[str, str | None],
    tokenizers: Mapping[str, str | None],
) -> None:
    """Raise one error that names everything missing; then look into the models' folders."""
    no_documents = [
        f"'{setting}': there is no file or folder '{source}'"
        for setting, given in documents.items()
        for source in given
        if sources.is_missing(source)
    ]
    no_models = [
        f"'{setting}': there is no folder '{path}'"
        for setting, path in {**models, **tokenizers}.items()
        if path is not None and checkpoint_files.is_missing(path)
    ]
    missing = [*no_documents, *no_models]
    if missing:
        kind = DataError if no_documents else ModelError
        way_out = "Correct the path." if len(missing) == 1 else "Correct the paths."
        raise kind(f"{'; '.join(missing)}. {way_out}")
    for path in models.values():
        if path is not None:
            checkpoint_files.check_folder(path)
