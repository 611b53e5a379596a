"""The models of an audit: named and hashed; loaded at their first use, freed after their last.

A folder or hub id is loaded plain, over several devices, on a mesh or in another form (`load_as`);
a model in memory is borrowed from the program, see `model_in_memory`. An adapter is merged and
identified with its base; one that was trained on a base in NF4 is audited as it was trained: beside
weights in NF4, of which no dense copy is made. Layers that y or x splits cannot be in NF4, and are
merged.
"""

import gc
import hashlib
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from memguard.audit.decoding import Decoder, GenerationLimit
from memguard.audit.requests import Model
from memguard.audit.scoring import ModelScorer
from memguard.config import AuditConfig
from memguard.errors import ConfigError, ModelError, escape_name
from memguard.hf.adapter_files import find_config, is_adapter, read_adapter
from memguard.hf.assembly import Assembly
from memguard.hf.checkpoint import find_positions, load_config
from memguard.hf.identity import hash_sums, list_model_files, split_sums, sum_model
from memguard.hf.load import (
    count_parameters,
    find_quantization,
    load_assembled,
    load_model,
    plan_devices,
)
from memguard.hf.load_as import LoadedForm
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.planner.meta_model import describe_model
from memguard.records import AdapterIdentity, ModelIdentity
from memguard.records.sealed import FileSum
from memguard.runtime import Console, Runtime
from memguard.runtime.shared_sums import sum_ahead
from memguard.workflows.auditing.checks import CheckedAudit, ForeignModel
from memguard.workflows.auditing.model_in_memory import ModelInMemory
from memguard.workflows.auditing.target import Subject
from memguard.workflows.common.setup import DistributedContext

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FAST_BF16 = (8, 0)


def choose_dtype(settings: AuditConfig, runtime: Runtime, console: Console) -> AuditConfig:
    """Return the settings with ``auto`` replaced by the dtype that all ranks then compute in."""
    if settings.dtype != "auto":
        return settings
    device = runtime.device
    is_fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FAST_BF16
    if runtime.agree_any(not is_fast):
        return settings.model_copy(update={"dtype": "fp32"})
    console.info("audit: computed in bf16; 'audit.dtype' fp32 leaves fewer near-ties")
    return settings.model_copy(update={"dtype": "bf16"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Where a model of an audit is, and how it is loaded."""

    model: str | ModelInMemory
    """Folder or hub id; or a model in memory, which is audited on its own device, in its dtype and
    with its attention."""
    revision: str | None = None
    """Of a hub id."""
    base: str | None = None
    """Folder or hub id of an adapter's base; None locates it."""
    weights_sha256: str | None = None
    """None if not hashed, which disables the score cache."""
    attn: str | None = None
    """Attention implementation."""
    form: LoadedForm | None = None
    """Form of the loaded weights, on one process; None loads them as they are stored."""
    quantization: Literal["nf4"] | None = None
    """Form of the linear layers of a model without an adapter; None: as stored."""


class LazyModel:
    """A model for `measure`; `free` releases it, or gives back a model in memory."""

    def __init__(
        self,
        source: ModelSource,
        settings: AuditConfig,
        distributed: DistributedContext,
        limit: GenerationLimit | None = None,
    ) -> None:
        """Store the location of a model; nothing is loaded or copied.

        ``limit`` is the longest time that it and other models generate.
        """
        self._source, self._settings, self._limit = source, settings, limit
        self._model, self._attn, self._form = source.model, source.attn, source.form
        self._mesh, self._runtime = distributed.mesh, distributed.runtime
        if isinstance(source.model, ModelInMemory):
            self._runtime = replace(self._runtime, device=source.model.model.device)
        self._lm: CausalLM | None = None
        self._scorer: ModelScorer | None = None
        self._decoder: Decoder | None = None
        self._num_parameters: int | None = None
        self._offload: tempfile.TemporaryDirectory[str] | None = None
        self._borrowed = ExitStack()

    @property
    def identity(self) -> str | None:
        """Key of the score cache: weights, configuration, arithmetic; None if not hashed."""
        if self._source.weights_sha256 is None:
            return None
        if isinstance(self._model, ModelInMemory):
            attn = getattr(self._config, "_attn_implementation", None)
            weights = f"in memory {self._source.weights_sha256} {self._model.dtype}"
        else:
            # With another rotary base, window or scale the same weights are a different model.
            config = hashlib.sha256(find_config(self._model, base=self._source.base).read_bytes())
            attn = self._attn
            weights = f"{self._source.weights_sha256} {config.hexdigest()} {self._settings.dtype}"
        versions = f"torch {torch.__version__} transformers {transformers.__version__}"
        form = "" if self._quantization is None else f" layers in {self._quantization}"
        form = form if self._form is None else f" {self._form.describe()}"
        return f"{weights} {self._runtime.device.type} {attn} {versions}{form}"

    @cached_property
    def _config(self) -> Any:
        if isinstance(self._model, ModelInMemory):
            return self._model.model.config
        return load_config(self._model, revision=self._source.revision, base=self._source.base)

    @cached_property
    def _quantization(self) -> Literal["nf4"] | None:
        """Form of the linear layers; of an adapter's base, that in which it was trained."""
        is_split = self._mesh is not None and self._mesh.shape.y * self._mesh.shape.x > 1
        if isinstance(self._model, ModelInMemory) or is_split:
            return None
        return find_quantization(self._model, base=self._source.base) or self._source.quantization

    @property
    def max_tokens(self) -> int | None:
        """Number of positions; None if the configuration does not limit it."""
        return find_positions(self._config)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones counted once; does not load the model."""
        if isinstance(self._model, ModelInMemory):
            return count_parameters(self._model.model)
        if self._num_parameters is None:
            self._num_parameters = describe_model(self._config, name=self._model).num_parameters
        return self._num_parameters

    @property
    def runtime(self) -> Runtime:
        """This rank, with the device of a model in memory."""
        return self._runtime

    def scorer(self) -> ModelScorer:
        """Return the scorer, the same object until `free`; the first call loads the model."""
        if self._scorer is None:
            self._scorer = ModelScorer(self.load(), self._settings.batch_tokens, self._runtime)
        return self._scorer

    def decoder(self) -> Decoder:
        """Return the decoder, the same object until `free`; the first call loads the model."""
        if self._decoder is None:
            tokens = self._settings.batch_tokens
            self._decoder = Decoder(self.load(), tokens, self._runtime, self._limit)
        return self._decoder

    def free(self) -> None:
        """Release the model."""
        self._scorer = self._decoder = self._lm = None
        self._borrowed.close()
        gc.collect()
        if self._offload is not None:
            self._offload.cleanup()
            self._offload = None

    def load(self) -> CausalLM:
        """Return the model, the same object until `free`; the first call loads it."""
        if self._lm is None:
            gc.collect()  # Reference cycles may still hold a model that was trained before.
            self._lm = self._load()
        return self._lm

    def _load(self) -> CausalLM:
        if isinstance(self._model, ModelInMemory):
            return self._borrowed.enter_context(self._model.borrow(self._runtime))
        given: dict[str, Any] = {"revision": self._source.revision, "base": self._source.base}
        dtype, device = DTYPES[self._settings.dtype], self._runtime.device
        assembly = Assembly(
            mesh=self._mesh,
            device=device,
            dtype=dtype,
            quantization=self._quantization,
            is_trained=False,
        )
        if self._mesh is None and self._form is not None:
            return self._form.load(self._model, device, attn=self._attn, **given)
        if self._mesh is not None or assembly.quantization is not None:
            layer = load_assembled(self._model, assembly, attn=self._attn, **given)
            if layer.assembly.adapter is None:
                self._num_parameters = count_parameters(layer.lm.model)
            return layer.lm
        given |= {"dtype": dtype, "attn_implementation": self._attn}
        if self._settings.device_map is not None:
            # It may be larger than one device.
            self._offload = tempfile.TemporaryDirectory(prefix="memguard-offload-")
            devices = plan_devices(self._config, dtype=dtype, max_memory=self._settings.max_memory)
            given |= {"devices": devices, "offload_folder": self._offload.name}
            return build_causal_lm(load_model(self._model, **given))
        model = load_model(self._model, **given)
        self._num_parameters = count_parameters(model)
        # Without a mesh several ranks, of another program, have a copy each.
        peers = self._runtime if self._runtime.world_size > 1 else None
        return build_causal_lm(model.to(device), peers=peers)


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
        """Hash the models of an audit, on every rank, and check the base, before one is loaded."""
        settings, form = checked.settings, _choose_form(checked)
        sums = sum_models(subject, distributed.runtime)
        hashes = _hash_models(subject, sums, distributed.runtime)
        _check_base(subject, hashes)
        refuse_equal_base(checked, hashes)
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
    return runtime.from_main(
        lambda: {
            model: sum_model(Path(model), base=base, read=read) for model, base in bases.items()
        }
    )


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


def refuse_equal_base(
    checked: CheckedAudit, hashes: Mapping[str | ModelInMemory, str | None]
) -> None:
    """Reject a base model that is the audited one: of what both produce, nothing would count.

    A training of memguard, or one that was counted, may have changed nothing; see `warn_of_base`.
    """
    given = checked.source
    if not isinstance(given, ForeignModel) or given.base is None or given.counts is not None:
        return
    if given.base == given.model or hashes[given.model] == hashes[given.base] is not None:
        raise ConfigError(
            "'--base' has the weights of '--model', so nothing it produces counts. Give the model "
            "before the fine-tuning, or leave it out"
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
