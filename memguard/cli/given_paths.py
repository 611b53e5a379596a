"""Every path that a command was given, looked for before anything is loaded or read.

    documents   --members, --nonmembers, data.train, data.control, ...
    models      --model, --base, --reference, model.path, ...

One message lists all missing paths. Hub ids pass: whether the hub has them is told when
they are fetched. No torch is imported here.
"""

from collections.abc import Iterator, Mapping, Sequence

from memguard.config import RunConfig
from memguard.data import sources
from memguard.errors import DataError, ModelError
from memguard.hf import checkpoint_files
from memguard.workflows.requests import AuditRequest

_DOCUMENTS = ("train", "control", "background", "heldout", "forget")


def check_audit_paths(request: AuditRequest) -> None:
    """Look for the documents and models of `memguard audit`.

    Raises:
        DataError: documents are missing.
        ModelError: a folder is missing, or holds no checkpoint.
    """
    documents = {"--members": request.members, "--nonmembers": request.nonmembers}
    models = {"--model": request.model, "--base": request.base}
    # Of a run, only what was given here: where its own model and base are is the run's to say.
    _check(documents, {**models, "--reference": request.settings.get("reference")})


def check_run_paths(config: RunConfig, *, has_model: bool = True) -> None:
    """Look for the documents and models of a run.

    Args:
        config: the run's settings.
        has_model: False where 'model.path' is trained first, by the same command.

    Raises:
        DataError: documents are missing.
        ModelError: a folder is missing, or holds no checkpoint.
    """
    documents = {
        f"data.{name}": [each for each in getattr(config.data, name) if each != "remainder"]
        for name in _DOCUMENTS
    }
    models = {"model.path": config.model.path if has_model else None}
    if config.audit.enabled:
        models["audit.reference"] = config.audit.reference
    scratch = config.model.scratch
    tokenizers = {"model.scratch.tokenizer": None if scratch is None else scratch.tokenizer}
    _check(documents, models, tokenizers)


def _check(
    documents: Mapping[str, Sequence[str]],
    models: Mapping[str, str | None],
    tokenizers: Mapping[str, str | None] | None = None,
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
        for setting, path in _list_given({**models, **(tokenizers or {})})
        if checkpoint_files.is_missing(path)
    ]
    missing = [*no_documents, *no_models]
    if missing:
        kind = DataError if no_documents else ModelError
        way_out = "Correct the path." if len(missing) == 1 else "Correct the paths."
        raise kind(f"{'; '.join(missing)}. {way_out}")
    for _, path in _list_given(models):
        checkpoint_files.check_folder(path)


def _list_given(paths: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    return ((setting, path) for setting, path in paths.items() if path is not None)
