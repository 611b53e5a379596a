"""Names and hashes of the models of an audit; an adapter is identified with its base."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from memguard.errors import ModelError, escape_name
from memguard.hf.adapter_files import is_adapter, read_adapter
from memguard.hf.identity import hash_sums, list_model_files, split_sums, sum_model
from memguard.hf.load_as import LoadedForm
from memguard.records import AdapterIdentity, ModelIdentity
from memguard.records.sealed import FileSum
from memguard.runtime import Runtime
from memguard.runtime.shared_sums import sum_ahead
from memguard.workflows.auditing.model_in_memory import ModelInMemory
from memguard.workflows.auditing.target import AuditTarget

Sums = Mapping[str, Mapping[str, FileSum]]
"""Path of a folder -> its files, see `sum_model`."""
Hashes = Mapping[str | ModelInMemory, str | None]
"""None for a hub id."""


def sum_models(target: AuditTarget, runtime: Runtime) -> Sums:
    """Hash the files of those models of an audit that are folders; reads all of them.

    Every rank calls this, hashes its share of the files, and gets all sums.

    Raises:
        ModelError: see `sum_model`; on rank 0.
        OtherRankFailed: on the other ranks.
    """
    bases = {
        model: target.adapter_base if model == target.model else None
        for model in _list_models(target)
        if isinstance(model, str) and Path(model).is_dir()
    }

    def list_files() -> list[Path]:
        found = [list_model_files(Path(model), base=base) for model, base in bases.items()]
        return [path for files in found for path in files.values()]

    read = sum_ahead(list_files, runtime)
    sums = runtime.only_on_main(
        lambda: {
            model: sum_model(Path(model), base=base, read=read) for model, base in bases.items()
        }
    )
    return runtime.broadcast_object(sums)


def _list_models(target: AuditTarget) -> Sequence[str | ModelInMemory | None]:
    return target.model, target.base, target.reference


def hash_models(target: AuditTarget, sums: Sums, runtime: Runtime) -> Hashes:
    """Return a single hash of each model of an audit, on every rank.

    Args:
        target: of the audit.
        sums: of its folders.
        runtime: this rank.
    """

    def hash_model(model: str | ModelInMemory) -> str | None:
        if isinstance(model, ModelInMemory):
            # Ranks hash a sharded model together.
            return model.weights_sha256 if runtime.is_main or model.is_sharded else None
        return hash_sums(sums[model]) if model in sums else None

    models = [model for model in _list_models(target) if model is not None]
    hashes = runtime.broadcast_object([hash_model(model) for model in models])
    return dict(zip(models, hashes, strict=True))


def check_base(target: AuditTarget, hashes: Hashes) -> None:
    """Reject a base model whose hash differs from that in an earlier report of this model."""
    before = target.before
    if target.base is None or before is None or before.weights_sha256 != hashes[target.model]:
        return
    expected = before.base_weights_sha256
    if expected is not None and hashes[target.base] not in (None, expected):
        raise ModelError(
            f"the model before training: '{_name_model(target.base)}' has other weights than in "
            f"the run's earlier audit (sha256 {hashes[target.base]}, not {expected}). Name the "
            "correct base model with --base DIR, or leave it out with --no-base"
        )


def name_models(
    target: AuditTarget,
    num_parameters: int,
    hashes: Hashes,
    sums: Sums,
    form: LoadedForm | None = None,
) -> ModelIdentity:
    """Return names and hashes for the report.

    Args:
        target: of the audit.
        num_parameters: of the audited model.
        hashes: of the models.
        sums: of the audited model's files, if it is a folder.
        form: in which it was loaded; None: as stored.
    """

    def identify(model: str | ModelInMemory) -> str:
        kind = "hub id" if isinstance(model, str) else "in memory:"
        return hashes[model] or f"{kind} {_name_model(model)}, not hashed"

    base = target.base
    return ModelIdentity(
        name=target.run or _name_model(target.model),
        weights_sha256=identify(target.model),
        load_as="stored" if form is None else form.name,
        load_as_detail="" if form is None else form.describe(),
        num_parameters=num_parameters,
        base=None if base is None else _name_model(base),
        base_weights_sha256=None if base is None else identify(base),
        adapter=_identify_adapter(target, sums),
    )


def _name_model(model: str | ModelInMemory) -> str:
    if isinstance(model, ModelInMemory):
        return model.name
    # Reports are shared with others; full local paths must not be.
    name = "/".join(Path(model).resolve().parts[-2:]) if Path(model).is_dir() else model
    return escape_name(name)


def _identify_adapter(target: AuditTarget, sums: Sums) -> AdapterIdentity | None:
    """Return the parts of a model that consists of a base and an adapter."""
    model = target.model
    if not isinstance(model, str) or not is_adapter(model):
        return None
    adapter = read_adapter(model, base=target.adapter_base)
    own, base = split_sums(sums[model])
    return AdapterIdentity(
        description=adapter.describe(),
        weights_sha256=hash_sums(own),
        base=_name_model(adapter.base),
        base_weights_sha256=hash_sums(base),
    )
