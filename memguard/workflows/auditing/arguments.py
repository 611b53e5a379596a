"""The arguments of an audit as Python has them: models and documents in memory, or their names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memguard.config import AuditConfig, FormatConfig
from memguard.errors import ConfigError
from memguard.workflows.auditing.checks import AuditRequest, check_audit
from memguard.workflows.common.trained_counts import TrainedCounts


def make_audit_request(
    *,
    run: str | Path | None = None,
    model: Any = None,
    tokenizer: Any = None,
    members: Any = (),
    nonmembers: Any = None,
    base: Any = None,
    out: str | Path | None,
    form: FormatConfig | None = None,
    seed: int = 0,
    load_as: str = "stored",
    settings: Mapping[str, Any],
    counts: TrainedCounts | None = None,
    identity_key: str | Path | None = None,
) -> tuple[AuditRequest, AuditConfig]:
    """Return the checked request of an audit, and its settings.

    Args:
        run: folder of a run.
        model: in place of a run: a folder, a hub id or a model in memory.
        tokenizer: of a model in memory.
        members: trained documents: paths, texts or a `datasets.Dataset`.
        nonmembers: documents that were not trained.
        base: the model before fine-tuning, or "adapter-off".
        out: folder of the report; None: the run's own.
        form: how the documents are read; None: by their columns.
        seed: decides which documents are sampled.
        load_as: form in which the model is loaded.
        settings: fields of `AuditConfig`.
        counts: how often the members were trained; None if nobody counted.
        identity_key: file of the key of the documents' hashes; None: in the user's configuration
            folder.

    Raises:
        ConfigError: arguments that contradict each other, or a setting out of range.
        DataError: documents are missing.
        ModelError: no usable model or tokenizer.
    """
    given = dict(settings)
    opened = _take_model(model, tokenizer, "model")
    in_memory = None if opened is None or isinstance(opened, str) else opened
    if in_memory is not None:
        given["dtype"] = _choose_dtype(given.get("dtype"), in_memory.dtype)
    request = AuditRequest(
        run=None if run is None else Path(run),
        model=opened,
        base=_take_base(base, in_memory),
        members=take_documents(members, "members"),
        nonmembers=take_documents(nonmembers, "nonmembers"),
        out=None if out is None else Path(out),
        form=FormatConfig() if form is None else form,
        style="arguments",
        mesh=None,
        settings=given,
        seed=seed,
        load_as=load_as,
        counts=counts,
        identity_key=identity_key,
    )
    checked = request.check()
    check_audit(request, checked, num_processes=1)
    return request, checked


def _take_model(model: Any, tokenizer: Any, name: str) -> Any:
    """Return a path or hub id as it is, a model in memory with its tokenizer."""
    if model is None:
        return None
    if isinstance(model, str | Path):
        if tokenizer is not None and name == "model":
            raise ConfigError("'tokenizer' belongs to a model in memory; a folder has its own")
        return str(model)
    from memguard.workflows.auditing.model_in_memory import ModelInMemory

    return ModelInMemory.open(model, tokenizer)


def _take_base(base: Any, audited: Any) -> Any:
    """Return the base model; "adapter-off" is the audited model in memory without its adapter."""
    if isinstance(base, str) and base == "adapter-off":
        if audited is None:
            raise ConfigError(
                "'base' may be 'adapter-off' for a model in memory; of a folder, name its base"
            )
        return audited.switch_off()
    if isinstance(base, str | Path) and audited is not None and audited.is_sharded:
        raise ConfigError(
            f"'base': each process would load '{base}' whole, and the audited model is sharded "
            "over them; leave 'base' out or use 'adapter-off', or save the model and audit the "
            "folder"
        )
    return _take_model(base, None if audited is None else audited.tokenizer, "base")


def _choose_dtype(wanted: str | None, own: str) -> str:
    if wanted not in (None, own):
        raise ConfigError(
            f"'dtype' must be {own}, the dtype of the model in memory; got {wanted}. Convert the "
            "model, or leave it out"
        )
    return own


def take_documents(documents: Any, name: str) -> tuple[Any, ...]:
    """Return paths and hub ids as strings, documents in memory as a table."""
    if documents is None:
        return ()
    if isinstance(documents, str | Path):
        return (str(documents),)
    if isinstance(documents, list | tuple):
        if not documents:
            return ()
        if all(isinstance(each, Path) or _names_a_source(each) for each in documents):
            return tuple(map(str, documents))
    from memguard.data.documents import make_table

    return (make_table(documents, name=name),)


def _names_a_source(text: Any) -> bool:
    """Tell a path from a text: it exists, or names reference documentation."""
    if not isinstance(text, str) or len(text) > 4096 or "\n" in text:
        return False
    try:
        return text.startswith("docstrings:") or (bool(text.strip()) and Path(text).exists())
    except (OSError, ValueError):
        return False
