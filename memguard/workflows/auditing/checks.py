"""The arguments of `memguard audit`, checked before torch is imported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from memguard.audit.benchmarks.tasks import check_tasks
from memguard.audit.suite import load_audit_suite
from memguard.config import AuditConfig, Document, FormatConfig, ParallelConfig, RunConfig, validate
from memguard.data.formats import Style
from memguard.data.identity_key import (
    IdentityKey,
    check_key_place,
    find_key_path,
    load_identity_key,
)
from memguard.data.table_files import Table
from memguard.errors import MAX_PATH, ConfigError, check_name, require_library, shorten
from memguard.hf.adapter_files import is_adapter
from memguard.records import QUANTISING_LIBRARIES, LoadAs, format_now
from memguard.records.run_files import find_weights_folder, load_summary
from memguard.workflows.auditing.pages import is_own_audit
from memguard.workflows.common.checks import check_device_map, has_ternary_weights
from memguard.workflows.common.folder import RunFolder, check_outside_runs
from memguard.workflows.common.requests import check_paths, read_mesh
from memguard.workflows.common.trained_counts import TrainedCounts

if TYPE_CHECKING:
    from memguard.workflows.auditing.model_in_memory import ModelInMemory

_KEY_SETTING = "--identity-key"
_FORMS: tuple[LoadAs, ...] = get_args(LoadAs)


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """The arguments of `memguard audit`."""

    run: Path | None
    model: "str | ModelInMemory | None"
    base: "str | ModelInMemory | None"
    members: tuple[str | Table, ...]
    """Paths, hub ids, or documents in memory."""
    nonmembers: tuple[str | Table, ...]
    out: Path | None
    form: FormatConfig = field(default_factory=FormatConfig)
    """How the documents are read."""
    mesh: str | None
    """Degrees of axes as given, `z=2,x=2`."""
    settings: dict[str, Any]
    """Fields of `AuditConfig` that were given."""
    seed: int
    load_as: str = "stored"
    """Form in which the audited model is loaded, a `LoadAs`."""
    counts: TrainedCounts | None = None
    """How often the members were trained, where training was counted; they have its ids."""
    style: Style = "options"
    """How errors write settings of the format."""
    identity_key: str | Path | None = None
    """File of the key of the documents' hashes; None: in the user's configuration folder."""

    def check(self) -> AuditConfig:
        """Return the audit's settings: the run's or the defaults, updated with those given.

        Raises:
            ConfigError: arguments that contradict each other, or a value out of range.
        """
        problems = []
        if self.load_as not in _FORMS:
            problems.append(
                f"'--load-as' must be one of {', '.join(_FORMS[1:])}; got "
                f"'{shorten(ascii(self.load_as)[1:-1])}'"
            )
        elif self.run is not None and self.load_as != "stored" and is_own_audit(self.run, self.out):
            problems.append(
                "--load-as needs --out: a folder for its report, which is not that of the run"
            )
        if (self.run is None) == (self.model is None):
            problems.append(
                "give either the folder of a RUN, or --model DIR with --members FILE for a model "
                "memguard did not train"
            )
        elif self.run is not None:
            if self.members or self.nonmembers:
                problems.append(
                    "--members and --nonmembers need --model; a run uses its own documents"
                )
            elif self.form != FormatConfig():
                problems.append(
                    "--format, --columns, --template and --tags are for --members of a --model; a "
                    "run reads its documents as its own settings say"
                )
            # Adapters cannot be audited without their base, even if it is not scored itself.
            needs_base = find_weights_folder(self.run).name == "adapter"
            if self.base and self.settings.get("base") is False and not needs_base:
                problems.append("--base and --no-base contradict each other; give one of them")
            if self.base is not None and not isinstance(self.base, str):
                problems.append("--base of a run must be a folder or a hub id")
            if not (self.run / "config.yaml").is_file():
                problems.append(
                    f"'{self.run}' is not the folder of a run (no config.yaml); for a model "
                    "memguard did not train use --model DIR --members FILE"
                )
        else:
            if not self.members:
                problems.append("--model needs --members: documents the model was trained on")
            if self.out is None:
                problems.append("--model needs --out: a folder for the report")
        if problems:
            raise ConfigError(*problems)
        if self.run is not None:
            check_name(self.run, "RUN", ConfigError)
        if self.out is not None:
            check_outside_runs(self.out, "--out", but=self.run)
        # Both raise an error before anything is read.
        _ = self.parallel
        format_now()
        origin = Document(
            path="memguard audit",
            values={},
            places={(key,): f"--{key.replace('_', '-')}" for key in self.settings},
        )
        before = AuditConfig() if self.run_config is None else self.run_config.audit
        return validate(AuditConfig, {**before.model_dump(), **self.settings}, origin)

    @cached_property
    def parallel(self) -> ParallelConfig | None:
        """The requested mesh.

        Raises:
            ConfigError: an unknown axis, or a value that is not a number.
        """
        return None if self.mesh is None else read_mesh(self.mesh, command="audit")

    @property
    def audited(self) -> "str | ModelInMemory":
        """The audited model: folder, hub id, or in memory."""
        if self.run is not None:
            return str(find_weights_folder(self.run))
        assert self.model is not None, "checked: there is a run or a model"
        return self.model

    @property
    def locked_folder(self) -> Path:
        """Folder to lock: the run's, or that of a report elsewhere."""
        if self.run is not None and is_own_audit(self.run, self.out):
            return self.run
        assert self.out is not None, "checked: there is a run or a folder for the report"
        return self.out

    @cached_property
    def run_config(self) -> RunConfig | None:
        """The settings of the run under audit; None for a model that memguard did not train.

        Raises:
            ConfigError: the settings cannot be read.
            RecordError: the file differs from the one that the run wrote.
        """
        return None if self.run is None else RunFolder(self.run).read_config()


def check_audit(request: AuditRequest, settings: AuditConfig, num_processes: int) -> None:
    """Check that the documents, models and suite of `memguard audit` exist.

    Raises:
        ConfigError: the suite is missing or invalid; device_map with several processes; a form
            in which the model cannot be loaded; benchmark tasks that do not exist, or without
            their library.
        DataError: documents are missing.
        ModelError: a folder is missing, or has no checkpoint.
    """
    audited = request.audited
    has_adapter = isinstance(audited, str) and is_adapter(audited)
    check_device_map(settings, world_size=num_processes, is_adapter=has_adapter)
    check_load_as(request.load_as, audited, settings, num_processes)
    documents = {
        "--members": _list_paths(request.members),
        "--nonmembers": _list_paths(request.nonmembers),
    }
    # For a run only these arguments: the paths of its own model and base are checked later.
    given = {"--model": request.model, "--base": request.base}
    models = {
        name: model for name, model in given.items() if model is None or isinstance(model, str)
    }
    check_paths(documents, {**models, "--reference": request.settings.get("reference")}, {})
    load_audit_suite(settings)
    check_tasks(settings.utility)


def check_identity_place(request: AuditRequest) -> None:
    """Check on one process, before torch is imported, that the identity key may be where it is.

    Raises:
        ConfigError: see `check_key_place`.
    """
    if request.run is None:
        path = find_key_path(request.identity_key, setting=_KEY_SETTING)
        check_key_place(path, setting=_KEY_SETTING, outside=[request.locked_folder])


def load_audit_identity(request: AuditRequest, say: Callable[[str], None]) -> IdentityKey | None:
    """Return the key for the documents of an audit, on one process; made if it is missing.

    A run's documents were hashed when they were prepared: a key that was given must be the run's.

    Args:
        request: of the audit.
        say: called with one line if the key is made.

    Returns:
        None for a run.

    Raises:
        ConfigError, DataError: see `load_identity_key`.
    """
    outside = [request.locked_folder]
    if request.run is None:
        return load_identity_key(
            request.identity_key, setting=_KEY_SETTING, outside=outside, say=say
        )
    if request.identity_key is not None:
        summary = load_summary(request.run)
        load_identity_key(
            request.identity_key,
            setting=_KEY_SETTING,
            outside=outside,
            expected=None if summary is None else summary.identity_key,
            of=f"'{request.run}'",
        )
    return None


def _list_paths(given: Sequence[str | Table]) -> list[str]:
    return [source for source in given if isinstance(source, str)]


def check_load_as(
    load_as: str, model: "str | ModelInMemory", settings: AuditConfig, num_processes: int
) -> LoadAs:
    """Return the form in which the audited model is loaded.

    Args:
        load_as: as checked by `AuditRequest.check`.
        model: folder or hub id of the audited model.
        settings: of the audit.
        num_processes: of the audit.

    Raises:
        ConfigError: a form that the model does not have, several processes, a model that is
            already quantised, or a missing library.
    """
    form = cast("LoadAs", load_as)
    if form == "stored":
        return form
    if not isinstance(model, str):
        raise ConfigError("'--load-as' needs the folder of a model; save the model and audit that")
    if form == "merged" and not is_adapter(model):
        raise ConfigError(
            f"'--load-as' merged needs a model with an adapter, and '{shorten(model, MAX_PATH)}' "
            "has none. Leave it out"
        )
    if num_processes > 1:
        raise ConfigError(f"'--load-as' needs one process; got {num_processes}. Leave out --nproc")
    if settings.device_map is not None:
        raise ConfigError("'--load-as' and 'audit.device_map' cannot be combined; remove one")
    if (library := QUANTISING_LIBRARIES.get(form)) is not None:
        if has_ternary_weights(model):
            raise ConfigError(
                f"'--load-as' {form} needs a model that is not quantised; the layers of "
                f"'{shorten(model, MAX_PATH)}' already round their weights. Leave it out"
            )
        require_library(library, f"'--load-as': {form}", extra="quant")
    return form
