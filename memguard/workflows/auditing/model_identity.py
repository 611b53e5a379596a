"""The models of an audit: their names and hashes; an adapter is identified with its base."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memguard.audit.generation_time import GenerationLimit
from memguard.audit.requests import Model
from memguard.errors import ModelError, escape_name
from memguard.hf.adapter_files import is_adapter, read_adapter
from memguard.hf.identity import hash_sums, list_model_files, split_sums, sum_model
from memguard.hf.load_as import LoadedForm
from memguard.records import AdapterIdentity, ModelIdentity
from memguard.records.sealed import FileSum
from memguard.runtime import Console, Runtime
from memguard.runtime.shared_sums import sum_ahead
from memguard.workflows.auditing.checks import CheckedAudit
from memguard.workflows.auditing.model_in_memory import ModelInMemory
from memguard.workflows.auditing.models import DTYPES, LazyModel, ModelSource
from memguard.workflows.auditing.target import Subject
from memguard.workflows.common.setup import DistributedContext

Sums = Mapping[str, Mapping[str, FileSum]]
"""Path of a folder -> its files, see `sum_model`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AuditModels:
    """The models of an audit, of which nothing is loaded yet, with what identifies them."""

    of: Mapping[Model, LazyModel]
    subject: Subject
    sums: Sums
    hashes: Mapping[str | ModelInMemory, str | None]
    """None for a hub id."""
    form: LoadedForm | None
    """In which the audited model is loaded; None: as stored."""

    @classmethod
    def open(
        cls,
        checked: CheckedAudit,
        subject: Subject,
        distributed: DistributedContext,
        console: Console,
    ) -> "AuditModels":
        """Hash the models of an audit, on every rank, and check the base.

        Raises:
            ModelError: a folder is damaged, or the base is another than in an earlier report.
        """
        settings, form = checked.settings, _choose_form(checked)
        sums = sum_models(subject, distributed.runtime)
        hashes = _hash_models(subject, sums, distributed.runtime)
        _check_base(subject, hashes)
        limit = GenerationLimit(max_minutes=settings.max_generation_minutes, say=console.info)

        def lazy(model: str | ModelInMemory, **how: Any) -> LazyModel:
            source = ModelSource(
                model=model, weights_sha256=hashes[model], attn=subject.attn, **how
            )
            return LazyModel(source, settings, distributed, limit)

        models: dict[Model, LazyModel] = {
            "trained": lazy(subject.model, base=subject.adapter_base, form=form)
        }
        if subject.base is not None:
            models["base"] = lazy(
                subject.base,
                revision=subject.base_revision,
                quantization=find_base_quantization(subject),
            )
        if subject.reference is not None:
            models["reference"] = lazy(subject.reference)
        if form is not None:
            console.info(f"audit: the model is loaded as {form.name}: {form.describe()}")
        return cls(of=models, subject=subject, sums=sums, hashes=hashes, form=form)

    def names(self) -> ModelIdentity:
        """Return names and hashes for the report, on the main rank."""
        subject, base, form = self.subject, self.subject.base, self.form

        def identify(model: str | ModelInMemory) -> str:
            kind = "hub id" if isinstance(model, str) else "in memory:"
            return self.hashes[model] or f"{kind} {_name_model(model)}, not hashed"

        return ModelIdentity(
            name=subject.run or _name_model(subject.model),
            weights_sha256=identify(subject.model),
            load_as="stored" if form is None else form.name,
            load_as_detail="" if form is None else form.describe(),
            num_parameters=self.of["trained"].num_parameters,
            base=None if base is None else _name_model(base),
            base_weights_sha256=None if base is None else identify(base),
            adapter=_identify_adapter(subject, self.sums),
        )


def _choose_form(checked: CheckedAudit) -> LoadedForm | None:
    """Return the form in which an audited model is loaded; None: as it is stored.

    Weights are rounded to the precision of the run that trained them, as its export does.
    """
    if checked.load_as == "stored":
        return None
    stored = checked.settings.dtype
    if checked.run is not None:
        stored = "bf16" if checked.run.config.train.precision == "bf16" else "fp32"
    dtype = DTYPES[checked.settings.dtype]
    return LoadedForm(name=checked.load_as, stored=DTYPES[stored], dtype=dtype)


def find_base_quantization(subject: Subject) -> Literal["nf4"] | None:
    """Return the form in which the base of an audited model is compared with it; None: as stored.

    An adapter that was trained on a base in NF4 is compared with that: the difference is what was
    trained, without what was lost by rounding. Another model than its base is compared as stored.

    Raises:
        ModelError: the adapter cannot be read.
    """
    model, base = subject.model, subject.base
    if not isinstance(model, str) or not isinstance(base, str) or not is_adapter(model):
        return None
    adapter = read_adapter(model, base=subject.adapter_base)
    is_own = subject.run is not None or Path(base).resolve() == Path(adapter.base).resolve()
    return adapter.base_quantization if is_own else None


def sum_models(subject: Subject, runtime: Runtime) -> Sums:
    """Hash the files of those models of an audit that are folders; reads all of them.

    Every rank calls this, hashes its share of the files, and gets all sums.

    Raises:
        ModelError: see `sum_model`; on rank 0.
        OtherRankFailed: on the other ranks.
    """
    bases = {
        model: subject.adapter_base if model == subject.model else None
        for model in (subject.model, subject.base, subject.reference)
        if isinstance(model, str) and Path(model).is_dir()
    }

    def list_files() -> list[Path]:
        files = [list_model_files(Path(model), base=base) for model, base in bases.items()]
        return [path for of_model in files for path in of_model.values()]

    read = sum_ahead(list_files, runtime)
    sums = runtime.only_on_main(
        lambda: {
            model: sum_model(Path(model), base=base, read=read) for model, base in bases.items()
        }
    )
    return runtime.broadcast_object(sums)


def _hash_models(
    subject: Subject, sums: Sums, runtime: Runtime
) -> dict[str | ModelInMemory, str | None]:
    """Return a single hash of each model of an audit, on every rank."""

    def hash_model(model: str | ModelInMemory) -> str | None:
        if isinstance(model, ModelInMemory):
            # Ranks hash a sharded model together.
            return model.weights_sha256 if runtime.is_main or model.is_sharded else None
        return hash_sums(sums[model]) if model in sums else None

    given = (subject.model, subject.base, subject.reference)
    models = [model for model in given if model is not None]
    hashes = runtime.broadcast_object([hash_model(model) for model in models])
    return dict(zip(models, hashes, strict=True))


def _check_base(subject: Subject, hashes: Mapping[str | ModelInMemory, str | None]) -> None:
    """Reject a base model whose hash differs from that in an earlier report of this model."""
    before = subject.before
    if subject.base is None or before is None or before.weights_sha256 != hashes[subject.model]:
        return
    expected = before.base_weights_sha256
    if expected is not None and hashes[subject.base] not in (None, expected):
        raise ModelError(
            f"the model before training: '{_name_model(subject.base)}' has other weights than in "
            f"the run's earlier audit (sha256 {hashes[subject.base]}, not {expected}). Name the "
            "correct base model with --base DIR, or leave it out with audit.base=false"
        )


def _name_model(model: str | ModelInMemory) -> str:
    if isinstance(model, ModelInMemory):
        return model.name
    # Reports are shared with others; full local paths must not be.
    name = "/".join(Path(model).resolve().parts[-2:]) if Path(model).is_dir() else model
    return escape_name(name)


def _identify_adapter(subject: Subject, sums: Sums) -> AdapterIdentity | None:
    """Return the parts of a model that consists of a base and an adapter."""
    model = subject.model
    if not isinstance(model, str) or not is_adapter(model):
        return None
    adapter = read_adapter(model, base=subject.adapter_base)
    own, base = split_sums(sums[model])
    return AdapterIdentity(
        description=adapter.describe(),
        weights_sha256=hash_sums(own),
        base=_name_model(adapter.base),
        base_weights_sha256=hash_sums(base),
    )
