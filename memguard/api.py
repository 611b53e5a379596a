"""memguard from Python: the functions behind the command line, for scripts and notebooks.

    audit(...)    -> AuditResult     of a run, a checkpoint, or a model in memory
    train(...)    -> TrainResult     a run: documents, training, export, audit
    compare(...)  -> CompareResult   a sweep, or finished runs
    plan(...)     -> PlanResult      which meshes hold a training step

Importing this module loads neither torch nor transformers; the functions do. Each result has
`to_pandas()`, `save(folder)` and a rich form in notebooks. Errors are those of `memguard.errors`,
with the messages of the command line. Progress goes to standard error.
"""

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from memguard.assets import find_asset
from memguard.config import RunConfig, apply_settings, load_yaml, validate
from memguard.errors import ConfigError
from memguard.records import AuditReport, Comparison, load_record
from memguard.records.audit_files import REPORT
from memguard.workflows.results import AuditResult, CompareResult, PlanResult, TrainResult


def audit(
    run: str | Path | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    members: Any = (),
    nonmembers: Any = None,
    base: Any = None,
    suite: str | None = None,
    out: str | Path | None = None,
    text_column: str = "text",
    seed: int = 0,
    variants: Sequence[str] = (),
    **settings: Any,
) -> AuditResult:
    """Measure what a model has memorized of its training documents.

    Args:
        run: folder of a run that memguard trained; knows its model and documents.
        model: in place of a run: a folder, a hub id, or a `PreTrainedModel` in memory, also one
            wrapped by peft (LoRA, DoRA) or `torch.compile`; it is left as it is (mode, device,
            dtype) and audited in its own dtype.
        tokenizer: of a model in memory.
        members: documents that ``model`` was trained on: paths or hub ids, a list of texts, or a
            `datasets.Dataset`. A list of strings that are all files or hub ids is a list of paths
            only where each exists; a `pathlib.Path` always is.
        nonmembers: documents of the same kind that it never saw.
        base: the model before fine-tuning, like ``model``; of a run, its folder now;
            "adapter-off": of a model in memory with an adapter, the model without it.
        suite: name of a shipped suite or a YAML file; "extraction" if None.
        out: folder of the report; of a run its `audit/` if None, else a temporary folder that is
            deleted with the result.
        text_column: column of the texts.
        seed: decides which documents are sampled.
        variants: forms of the model to compare on the same documents: adapter, merged, int8, nf4.
        settings: further settings of an audit, e.g. ``continuation_tokens=100``, ``cache=False``.

    Raises:
        ConfigError: arguments that contradict each other, or a setting out of range.
        DataError: documents are missing or unusable.
        ModelError: no usable model or tokenizer.
        RecordError: the run is damaged.

    Example:
        >>> from memguard import api
        >>> result = api.audit(model=model, tokenizer=tokenizer, members=texts, nonmembers=unseen)
        >>> print(result.verdict.describe())
        >>> worst = result.to_pandas().sort_values("extraction.num_correct").tail()
        >>> result.save("report")
    """
    from memguard.workflows.audit_request import AuditRequest, check_audit

    given = {**settings, **({} if suite is None else {"suite": suite})}
    opened = _take_model(model, tokenizer, "model")
    in_memory = None if opened is None or isinstance(opened, str) else opened
    if in_memory is not None:
        given["dtype"] = _choose_dtype(given.get("dtype"), in_memory.dtype)
    with ExitStack() as on_error:
        is_temporary = run is None and out is None
        if is_temporary:
            out = tempfile.mkdtemp(prefix="memguard-audit-")
            on_error.callback(shutil.rmtree, out, ignore_errors=True)
        request = AuditRequest(
            run=None if run is None else Path(run),
            model=opened,
            base=_take_base(base, in_memory),
            members=_take_documents(members, "members", text_column),
            nonmembers=_take_documents(nonmembers, "nonmembers", text_column),
            out=None if out is None else Path(out),
            text_column=text_column,
            mesh=None,
            settings=given,
            seed=seed,
            variants=tuple(variants),
        )
        checked = request.check()
        check_audit(request, checked, num_processes=1)
        _check_free(request.locked_folder)
        from memguard.workflows.audit import audit_request

        folder, report = audit_request(request, checked)
        on_error.pop_all()
    result = AuditResult(folder=folder, report=report)
    if is_temporary:
        weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result


def train(
    config: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> TrainResult:
    """Train a run in this process, export its model and audit it; an interrupted run resumes.

    Args:
        config: a run's YAML, the name of a shipped one, or its settings as nested dicts.
        overrides: settings to change, by dotted name: ``{"optim.lr": 1e-4}``.

    Raises:
        ConfigError: settings that are wrong; all of them, one line each.
        DataError: documents are missing or unusable.
        Interrupted: Ctrl-C; the state was saved, and the same call resumes.
        ModelError: no usable checkpoint.
        RecordError: the run's folder is damaged beyond repair, or of other settings.

    Example:
        >>> from memguard import api
        >>> settings = {"name": "mails", "model": {"path": path}, "data": {"train": [documents]}}
        >>> result = api.train(settings, {"mitigations": [{"name": "goldfish", "k": 4}]})
        >>> print(result.model, result.verdict.describe())
    """
    run = _load_run(config, overrides)
    from memguard.runtime import Console
    from memguard.workflows.processes import count_usable_gpus
    from memguard.workflows.requests import check_run
    from memguard.workflows.run_folder import check_outside_runs

    if (num_gpus := count_usable_gpus()) > 1:
        Console().info(f"train: 1 of {num_gpus} visible GPUs is used; `memguard train` uses more")
    check_run(run, num_processes=1)
    check_outside_runs(Path(run.output_dir) / run.name, "output_dir")
    _check_free(Path(run.output_dir) / run.name)
    from memguard.workflows.train import train_run

    outcome = train_run(run)
    folder = Path(outcome["run"])
    audited = None
    if run.audit.enabled:
        report = load_record(AuditReport, folder / "audit" / REPORT)
        audited = AuditResult(folder=folder / "audit", report=report)
    return TrainResult(folder=folder, model=Path(outcome["model"]), audit=audited)


def compare(
    sweep: str | Path | Sequence[str | Path],
    overrides: Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    jobs: int = 1,
) -> CompareResult:
    """Train and compare the settings of a sweep, or compare finished runs.

    Args:
        sweep: a sweep's YAML or the name of a shipped one; or the folders of finished runs, of
            which the first is the reference.
        overrides: settings of the sweep to change, by dotted name.
        out: folder of a comparison of runs; `comparison` beside the first run if None.
        jobs: runs of a sweep that are trained at a time.

    Raises:
        ConfigError: a sweep that is wrong, or arguments that contradict each other.
        RecordError: runs that cannot be compared, with the reason.

    Example:
        >>> from memguard import api
        >>> result = api.compare(["runs/plain", "runs/goldfish"])
        >>> print(result.verdict)
        >>> result.to_pandas()[["name", "risk", "utility"]]
    """
    from memguard.workflows.compare import compare as compare_request
    from memguard.workflows.requests import CompareRequest

    runs = (sweep,) if isinstance(sweep, str | Path) else tuple(sweep)
    changes = tuple(f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items())
    request = CompareRequest(
        given=(*map(str, runs), *changes),
        out=None if out is None else Path(out),
        jobs=None if jobs == 1 else jobs,
        fix=False,
        keep_weights=False,
        num_processes=None,
    )
    request.check()
    page, comparison = compare_request(request)
    assert isinstance(comparison, Comparison), "nothing was fixed"
    return CompareResult(page=page, comparison=comparison)


def plan(
    config: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: str | Path | None = None,
    gpus: int | None = None,
    machine: str | None = None,
    mesh: str | None = None,
) -> PlanResult:
    """Estimate memory and time of a training step on every mesh of a machine.

    Args:
        config: a run's YAML, the name of a shipped one, or its settings; None for a model alone.
        overrides: settings to change, by dotted name; of a model alone those of a step and its
            adapter, ``{"data.seq_len": 4096, "train.batch_size": 64}``.
        model: a model's config.json, or the folder it is in; alone or for ``config``.
        gpus: number of GPUs; the mesh's or one machine's if None.
        machine: name of a shipped machine or a YAML file; this machine if None.
        mesh: plan this mesh only, e.g. ``"z=16,y=2,x=8"``.

    Raises:
        ConfigError: no such machine or mesh, or arguments that contradict each other.
        ModelError: no such configuration.

    Example:
        >>> from memguard import api
        >>> result = api.plan(model="config.json", gpus=8, machine="dgx-h100")
        >>> print(result.verdict)
        >>> result.to_pandas()[["z", "y", "x", "fits", "memory.needed"]].head()
    """
    from memguard.workflows.plan import plan as make_plan
    from memguard.workflows.requests import MODEL_ALONE, PlanRequest

    request = PlanRequest(
        run=_load_run(MODEL_ALONE.values if config is None else config, overrides),
        is_run=config is not None,
        model=None if model is None else Path(model),
        gpus=gpus,
        machine=machine,
        mesh=mesh,
    )
    request.check()
    return PlanResult(plan=make_plan(request))


def _load_run(
    config: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None
) -> RunConfig:
    from memguard.config import Document

    if isinstance(config, Mapping):
        document = Document(path="config", values=dict(config), places={})
    else:
        document = load_yaml(find_asset("configs", str(config), setting="config"))
    values = apply_settings(document.values, overrides or {})
    return validate(RunConfig, values, document)


def _take_model(model: Any, tokenizer: Any, name: str) -> Any:
    """Return a path or hub id as it is, a model in memory with its tokenizer."""
    if model is None:
        return None
    if isinstance(model, str | Path):
        if tokenizer is not None and name == "model":
            raise ConfigError("'tokenizer' belongs to a model in memory; a folder has its own")
        return str(model)
    from memguard.workflows.audited_model import ModelInMemory

    return ModelInMemory.open(model, tokenizer)


def _take_base(base: Any, audited: Any) -> Any:
    """Return the base model; "adapter-off" is the audited model in memory without its adapter."""
    if isinstance(base, str) and base == "adapter-off":
        if audited is None:
            raise ConfigError(
                "'base' may be 'adapter-off' for a model in memory; of a folder, name its base"
            )
        return audited.switch_off()
    return _take_model(base, None if audited is None else audited.tokenizer, "base")


def _check_free(folder: Path) -> None:
    """Refuse a folder that cannot be written to, or that another process is using.

    Raises:
        ConfigError: names the reason.
    """
    from memguard.workflows.run_folder import check_free

    try:
        check_free(folder)
    except OSError as error:
        raise ConfigError(f"'{folder}' cannot be written to: {error.strerror}") from error


def _choose_dtype(wanted: str | None, own: str) -> str:
    if wanted not in (None, own):
        raise ConfigError(
            f"'dtype' must be {own}, the dtype of the model in memory; got {wanted}. Convert the "
            "model, or leave it out"
        )
    return own


def _take_documents(documents: Any, name: str, text_column: str) -> tuple[Any, ...]:
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

    return (make_table(documents, name=name, text_column=text_column),)


def _names_a_source(text: Any) -> bool:
    """Tell a path from a text: it exists, or names reference documentation."""
    if not isinstance(text, str) or len(text) > 4096 or "\n" in text:
        return False
    try:
        return text.startswith("docstrings:") or (bool(text.strip()) and Path(text).exists())
    except (OSError, ValueError):
        return False
