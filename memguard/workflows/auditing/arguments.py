"""The arguments of an audit from those of a call: models and documents in memory, or names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memguard.config import Document, FormatConfig, validate
from memguard.config.yaml_text import parse_yaml
from memguard.data.source_files import expand_pattern
from memguard.data.table_files import find_suffix
from memguard.errors import ConfigError
from memguard.workflows.auditing.checks import AuditArguments
from memguard.workflows.auditing.trained_counts import TrainedCounts


def make_arguments(
    *,
    run: str | Path | None = None,
    model: Any = None,
    tokenizer: Any = None,
    members: Any = (),
    nonmembers: Any = None,
    base: Any = None,
    out: str | Path | None = None,
    format: str | Mapping[str, Any] | None = None,
    seed: int | None = None,
    load_as: str = "stored",
    settings: Mapping[str, Any],
    counts: TrainedCounts | None = None,
    identity_key: str | Path | None = None,
) -> AuditArguments:
    """Return the arguments of an audit from those of a call, see `memguard.api.audit`."""
    form = read_format(format)
    opened = _take_model(model, tokenizer, "model")
    in_memory = None if opened is None or isinstance(opened, str) else opened
    audit = dict(settings)
    if in_memory is not None:
        if (wanted := audit.get("dtype")) not in (None, "auto", in_memory.dtype):
            raise ConfigError(
                f"'dtype' must be {in_memory.dtype}, the dtype of the model in memory; got "
                f"{wanted}. Convert the model, or leave it out"
            )
        audit["dtype"] = in_memory.dtype
    values: dict[str, Any] = {"audit": audit}
    if seed is not None:
        values["seed"] = seed
    if identity_key is not None:
        values["data"] = {"identity_key": str(identity_key)}
    return AuditArguments(
        run=None if run is None else Path(run),
        model=opened,
        base=_take_base(base, in_memory),
        members=take_documents(members, "members"),
        nonmembers=take_documents(nonmembers, "nonmembers"),
        out=None if out is None else Path(out),
        form=form,
        load_as=load_as,
        counts=counts,
        settings=Document(path="argument", values=values, places={}),
    )


def read_format(format: str | Mapping[str, Any] | None, *, option: str = "") -> FormatConfig:
    """Return how documents are read: ``"messages"``, or a mapping of `FormatConfig`.

    ``option`` is the option of the command line that it is from.
    """
    place = Document(path=option or "argument", values={}, places={})
    values: Any = format
    if isinstance(format, str) and option and format.lstrip().startswith("{"):
        values = parse_yaml(format, option).values
    if isinstance(values, str):
        values = {"format": values}
    return validate(FormatConfig, dict(values or {}), place)


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


def take_documents(documents: Any, name: str) -> tuple[Any, ...]:
    """Return paths and hub ids as strings, documents in memory as a table."""
    if documents is None:
        return ()
    if isinstance(documents, str | Path):
        return (str(documents),)
    if isinstance(documents, list | tuple):
        if not documents:
            return ()
        if all(isinstance(source, Path) or _names_a_source(source) for source in documents):
            return tuple(map(str, documents))
    from memguard.data.documents import make_table

    return (make_table(documents, name=name),)


def _names_a_source(text: Any) -> bool:
    """Tell a path from a text: it exists, is a pattern of files, or names documentation."""
    if not isinstance(text, str) or len(text) > 4096 or "\n" in text:
        return False
    try:
        if text.startswith("docstrings:") or (text.strip() and Path(text).exists()):
            return True
        return bool(find_suffix(text)) and expand_pattern(text) not in ([text], [])
    except (OSError, ValueError):
        return False
