"""`CheckedAudit`: an audit whose arguments passed every check that needs no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from memguard.audit.benchmarks.tasks import check_tasks
from memguard.audit.suite import Suite, load_audit_suite
from memguard.config import (
    AuditConfig,
    Document,
    FormatConfig,
    ParallelConfig,
    RunConfig,
    apply_overrides,
    validate,
)
from memguard.config.settings import Seed, Settings
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
from memguard.workflows.auditing.trained_counts import TrainedCounts
from memguard.workflows.common.checks import check_device_map, check_paths, has_ternary_weights
from memguard.workflows.common.folder import RunFolder, check_free, check_outside_runs, check_usable

if TYPE_CHECKING:
    from memguard.workflows.auditing.model_in_memory import ModelInMemory

_KEY_SETTING = "identity_key"
_FORMS: tuple[LoadAs, ...] = get_args(LoadAs)
_SETTINGS = "audit.KEY, parallel.KEY, seed and data.identity_key"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """What is known of a model that memguard did not train."""

    base: "str | ModelInMemory | None" = None
    members: tuple[str | Table, ...] = ()
    """Paths, hub ids, or documents in memory."""
    nonmembers: tuple[str | Table, ...] = ()
    form: FormatConfig = field(default_factory=FormatConfig)
    """How the documents are read."""
    counts: TrainedCounts | None = None
    """How often the members were trained, where training was counted; they have its ids."""
    style: Style = "arguments"
    """How errors name settings of the format: options, or arguments of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditArguments(_Known):
    """The arguments of `memguard audit` and of `api.audit`, as they were given."""

    run: Path | None = None
    """A run of memguard, or:"""
    model: "str | ModelInMemory | None" = None
    step: int | None = None
    """Of the run's checkpoint to audit; None: its exported weights."""
    out: Path | None = None
    load_as: str = "stored"
    """Form in which the audited model is loaded, a `LoadAs`."""
    settings: Document = field(default_factory=lambda: Document(path="audit", values={}, places={}))
    """Settings with the names that they have in a run's file: `audit`, `parallel`, `seed`."""

    @classmethod
    def read_settings(cls, given: Sequence[str]) -> Document:
        """Return settings of the command line, ``audit.prefix_tokens=5``."""
        document = apply_overrides(Document(path="memguard audit", values={}, places={}), given)
        for name, value in document.values.items():
            is_block = isinstance(value, dict)
            is_key = is_block and name == "data" and {*value} == {"identity_key"}
            if not (name == "seed" or is_key or (is_block and name in ("audit", "parallel"))):
                raise ConfigError(
                    f"'{shorten(name)}': an audit takes {_SETTINGS}; remove the others"
                )
        return document


class _Seed(Settings):
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedRun:
    """A run of memguard, which knows its model and documents."""

    folder: Path
    config: RunConfig
    base: str | None
    """Present location of the model before training, if it was named."""
    step: int | None = None
    """Of the checkpoint that is audited; None: the exported weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignModel(_Known):
    """A model that memguard did not train, and the documents that are known of it."""

    model: "str | ModelInMemory"
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CheckedAudit:
    """An audit that passed every check that needs neither torch nor the network."""

    source: AuditedRun | ForeignModel
    settings: AuditConfig
    """The run's or the defaults, updated with those that were given."""
    suite: Suite
    load_as: LoadAs
    out: Path
    parallel: ParallelConfig | None
    """The mesh, if it was given."""
    identity_key: str | None
    """File of the key of the documents' hashes; None: in the user's configuration folder."""
    num_processes: int

    @property
    def run(self) -> AuditedRun | None:
        """The run under audit; None for a model that memguard did not train."""
        return self.source if isinstance(self.source, AuditedRun) else None

    @property
    def model(self) -> "str | ModelInMemory":
        """The audited model: folder, hub id, or in memory."""
        if isinstance(self.source, AuditedRun):
            return str(find_weights_folder(self.source.folder))
        return self.source.model

    @property
    def writes_run_audit(self) -> bool:
        """Whether the report is that of the run, which its model card shows."""
        return self.run is not None and is_own_audit(self.run.folder, self.out)

    @property
    def locked_folder(self) -> Path:
        """Folder to lock: the run's, or that of a report elsewhere."""
        return self.run.folder if self.run and self.writes_run_audit else self.out


def check_audit(
    arguments: AuditArguments, *, num_processes: int = 1, writes: bool = True
) -> CheckedAudit:
    """Check the arguments of an audit: all checks that need neither torch nor the network.

    ``writes``: this process looks at the output folder and the identity key; one does.
    """
    if problems := list(_list_contradictions(arguments)):
        raise ConfigError(*problems)
    if arguments.run is not None:
        check_name(arguments.run, "RUN", ConfigError)
    if arguments.out is not None:
        check_outside_runs(arguments.out, "--out", but=arguments.run)
    format_now()  # Raises an error for a wrong SOURCE_DATE_EPOCH, before anything is read.
    given, places = arguments.settings.values, arguments.settings
    config = None if arguments.run is None else RunFolder(arguments.run).read_config()
    before = (AuditConfig() if config is None else config.audit).model_dump()
    prefix = ("audit",) if arguments.style == "options" else ()
    settings = validate(AuditConfig, {**before, **given.get("audit", {})}, places, prefix=prefix)
    parallel = given.get("parallel")
    identity_key = given.get("data", {}).get("identity_key")
    source: AuditedRun | ForeignModel
    if arguments.run is not None and config is not None:
        if "seed" in given:
            raise ConfigError("'seed' is for a --model; a run is audited with its own")
        assert arguments.base is None or isinstance(arguments.base, str)
        if (step := arguments.step) is not None:
            RunFolder(arguments.run).find_checkpoint(step)
        source = AuditedRun(folder=arguments.run, config=config, base=arguments.base, step=step)
    else:
        assert arguments.model is not None, "checked: there is a run or a model"
        source = ForeignModel(
            model=arguments.model,
            **{one.name: getattr(arguments, one.name) for one in fields(_Known)},
            seed=validate(_Seed, {"seed": given.get("seed", 0)}, places).seed,
        )
    checked = CheckedAudit(
        source=source,
        settings=settings,
        suite=load_audit_suite(settings),
        load_as=cast("LoadAs", arguments.load_as),
        out=arguments.out or cast("AuditedRun", source).folder / "audit",
        parallel=None
        if parallel is None
        else validate(ParallelConfig, {"data": 1, "z": 1} | parallel, places, prefix=("parallel",)),
        identity_key=None if identity_key is None else str(identity_key),
        num_processes=num_processes,
    )
    _check_model(checked)
    # For a run only these arguments: the paths of its own model and base are checked later.
    reference = given.get("audit", {}).get("reference")
    models = {"--model": arguments.model, "--base": arguments.base, "audit.reference": reference}
    check_paths(
        {
            "--members": [source for source in arguments.members if isinstance(source, str)],
            "--nonmembers": [source for source in arguments.nonmembers if isinstance(source, str)],
        },
        {name: model for name, model in models.items() if isinstance(model, str)},
    )
    check_tasks(settings.utility)
    if writes:
        _check_places(checked, arguments.style)
    return checked


def _list_contradictions(arguments: AuditArguments) -> Iterator[str]:
    run, model, load_as = arguments.run, arguments.model, arguments.load_as
    if str(run).startswith("--"):
        yield f"'{shorten(str(run))}' is no option of audit; see 'memguard audit --help'"
        return
    if load_as not in _FORMS:
        yield (
            f"'--load-as' must be one of {', '.join(_FORMS[1:])}; got "
            f"'{shorten(ascii(load_as)[1:-1])}'"
        )
    elif run is not None and is_own_audit(run, arguments.out):
        if load_as != "stored" or arguments.step is not None:
            option = "--load-as" if arguments.step is None else "--step"
            yield f"{option} needs --out: a folder for its report, which is not that of the run"
    elif run is None and arguments.step is not None:
        yield "--step is of a RUN's checkpoint; leave it out with --model"
    if (run is None) == (model is None):
        got = "neither" if run is None else "both"
        yield (
            f"RUN or --model is required; got {got}. Example: memguard audit --model DIR --members "
            "FILE --out DIR"
        )
    elif run is None:
        if not arguments.members:
            yield "--model needs --members: documents the model was trained on"
        if arguments.out is None:
            yield "--model needs --out: a folder for the report"
    else:
        if arguments.members or arguments.nonmembers:
            yield "--members and --nonmembers need --model; a run uses its own documents"
        elif arguments.form != FormatConfig():
            yield "--format is for --members of a --model; a run has a format of its own"
        # Adapters cannot be audited without their base, even if it is not scored itself.
        needs_base = find_weights_folder(run).name == "adapter"
        given = arguments.settings.values.get("audit", {})
        if arguments.base and not needs_base and given.get("base") is False:
            yield "--base and audit.base=false contradict each other; give one of them"
        if arguments.base is not None and not isinstance(arguments.base, str):
            yield "--base of a run must be a folder or a hub id"
        if not (run / "config.yaml").is_file():
            yield (
                f"'{shorten(str(run), MAX_PATH)}' is not the folder of a run (no config.yaml); for "
                "a model memguard did not train use --model DIR --members FILE"
            )


def _check_places(checked: CheckedAudit, style: Style) -> None:
    """Check that the output folder can be written to, and that the key may be where it is."""
    if not isinstance(checked.model, str):
        # The ranks of the program agree on it, once they have joined.
        return
    if style == "options":
        check_free(checked.locked_folder)
    else:
        check_usable(checked.locked_folder)
    if checked.run is None:
        path = find_key_path(checked.identity_key, setting=_KEY_SETTING)
        check_key_place(path, setting=_KEY_SETTING, outside=[checked.locked_folder])


def _check_model(checked: CheckedAudit) -> None:
    """Check the form in which the model is loaded, and the devices that it is spread over."""
    model, form, settings = checked.model, checked.load_as, checked.settings
    num_processes = checked.num_processes
    is_adapted = isinstance(model, str) and is_adapter(model)
    check_device_map(settings, world_size=num_processes, is_adapter=is_adapted)
    if form == "stored":
        return
    if not isinstance(model, str):
        raise ConfigError("'--load-as' needs the folder of a model; save the model and audit that")
    name, library = shorten(model, MAX_PATH), QUANTISING_LIBRARIES.get(form)
    rules = {
        f"'--load-as' merged needs a model with an adapter, and '{name}' has none. Leave it out": (
            form == "merged" and not is_adapted
        ),
        f"'--load-as' needs one process; got {num_processes}. Leave out --nproc": num_processes > 1,
        "'--load-as' and 'audit.device_map' cannot be combined; remove one": (
            settings.device_map is not None
        ),
        f"'--load-as' {form} needs a model that is not quantised; the layers of '{name}' already "
        "round their weights. Leave it out": library is not None and has_ternary_weights(model),
    }
    if problems := [text for text, is_broken in rules.items() if is_broken]:
        raise ConfigError(problems[0])
    if library is not None:
        require_library(library, f"'--load-as': {form}")


def load_audit_identity(checked: CheckedAudit, say: Callable[[str], None]) -> IdentityKey | None:
    """Return the key for the documents of an audit, on one process; made if it is missing.

    A run's documents were hashed when they were prepared: a key that was given must be the run's,
    and None is returned. ``say`` is called with one line if the key is made.
    """
    if checked.run is not None and checked.identity_key is None:
        return None
    expected: Mapping[str, Any] = {}
    if checked.run is not None:
        summary = load_summary(checked.run.folder)
        expected = {
            "expected": None if summary is None else summary.identity_key,
            "of": f"'{checked.run.folder}'",
        }
    key = load_identity_key(
        checked.identity_key,
        setting=_KEY_SETTING,
        outside=[checked.locked_folder],
        say=say if checked.run is None else None,
        **expected,
    )
    return key if checked.run is None else None
