"""memguard from Python: the functions behind the command line, for scripts and notebooks.

    audit(...)    -> AuditResult     of a run, a checkpoint, or a model in memory
    train(...)    -> TrainResult     a run: documents, training, export, audit
    compare(...)  -> CompareResult   a sweep, or finished runs
    plan(...)     -> PlanResult      which meshes hold a training step

Importing this module loads neither torch nor transformers; the functions do. Each result has
`to_pandas()`, `save(folder)` and a rich form in notebooks; an audit's `gate(policy)` judges it, and
`diff(earlier)` compares it. Errors are those of `memguard.errors`, with the messages of the command
line. Progress goes to standard error; in a notebook a bar shows it.
"""

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from memguard.assets import find_asset
from memguard.config import RunConfig, apply_settings, load_yaml, validate
from memguard.errors import ConfigError
from memguard.records import AuditReport, Comparison, load_record
from memguard.records.audit_files import REPORT
from memguard.workflows.common.python_arguments import (
    Name,
    Place,
    Seed,
    Whole,
    check_tokenizer,
    python_call,
    write_overrides,
)
from memguard.workflows.results import AuditResult, CompareResult, PlanResult, TrainResult

Overrides = Mapping[Name, Any]
"""Settings to change, by dotted name."""


@python_call
def audit(
    run: Place | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    members: Any = (),
    nonmembers: Any = None,
    base: Any = None,
    suite: Place | None = None,
    out: Place | None = None,
    format: str | Mapping[str, Any] | None = None,
    seed: Seed | None = None,
    load_as: Name = "stored",
    identity_key: Place | None = None,
    **settings: Any,
) -> AuditResult:
    """Measure what a model has memorized of its training documents.

    Args:
        run: folder of a run that memguard trained; knows its model and documents.
        model: in place of a run: a folder, a hub id, or a `PreTrainedModel` in memory, also with
            4-bit layers of bitsandbytes, or wrapped by peft (LoRA, DoRA), `torch.compile`, DDP or
            FSDP2; it is left as it is (mode, device, dtype) and audited in its own dtype. In a
            program of several processes every one makes this call, and each scores a part of the
            documents.
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
        format: of the documents: text, prompt_completion, messages, alpaca, sharegpt or input_ids;
            or a mapping, ``{"format": "alpaca", "columns": {"prompt": "question"}}``, also with
            'template' and 'tags'; taken from their columns if None.
        seed: decides which documents are sampled; of a run its own, 0 if None.
        load_as: form in which the model of a folder is loaded: "stored", "merged" (its adapter),
            "int8" or "nf4". A report of another form than "stored" is not that of the run, and
            needs ``out``.
        identity_key: file of the key under which equal texts have equal hashes, so that later
            audits can be matched; memguard-identity.key in the user's configuration folder if None.
        settings: further settings of an audit, e.g. ``continuation_tokens=100``, ``cache=False``,
            ``utility=["hellaswag:200", "./my_task.yaml"]`` for benchmark tasks of lm-eval (extra
            `bench`), whose datasets are downloaded with ``allow_download=True`` only.

    Raises:
        ConfigError: arguments that contradict each other, or a setting out of range.
        DataError: documents are missing or unusable.
        ModelError: no usable model or tokenizer.
        OtherRankFailed: the audit failed on another process, which gives the reason.
        RecordError: the run is damaged.

    Example:
        >>> from memguard import api
        >>> result = api.audit(model=model, tokenizer=tokenizer, members=texts, nonmembers=unseen)
        >>> print(result.verdict.describe())
        >>> worst = result.to_pandas().sort_values("extraction.num_correct").tail()
        >>> result.save("report")
    """
    is_in_memory = not (model is None or isinstance(model, str | Path))
    is_temporary = run is None and out is None
    with ExitStack() as on_error:
        from memguard.workflows.auditing.arguments import make_arguments
        from memguard.workflows.auditing.checks import check_audit

        if is_in_memory:
            check_tokenizer(tokenizer)
        if is_temporary:
            if is_in_memory:
                _refuse_several_folders()
            out = tempfile.mkdtemp(prefix="memguard-audit-")
            on_error.callback(shutil.rmtree, out, ignore_errors=True)
        arguments = make_arguments(
            run=run,
            model=model,
            tokenizer=tokenizer,
            members=members,
            nonmembers=nonmembers,
            base=base,
            out=out,
            format=format,
            seed=seed,
            load_as=load_as,
            identity_key=identity_key,
            settings={**settings, **({} if suite is None else {"suite": str(suite)})},
        )
        checked = check_audit(arguments)
        from memguard.workflows.auditing.audit import audit as audit_checked

        folder, report = checked.out, audit_checked(checked)
        on_error.pop_all()
    result = AuditResult(folder=folder, report=report, is_temporary=is_temporary)
    if is_temporary:
        weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result


@python_call
def train(config: Place | Mapping[str, Any], overrides: Overrides | None = None) -> TrainResult:
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
    from memguard.runtime import Console
    from memguard.workflows.common.checks import count_usable_gpus
    from memguard.workflows.training.checks import check_run

    run = _load_run(config, overrides)
    if (num_gpus := count_usable_gpus()) > 1:
        more = "`memguard train` uses more"
        Console().info(f"train: 1 of {num_gpus} visible GPUs is used; {more}")
    checked = check_run(run)
    from memguard.workflows.training.train import train_run

    outcome = train_run(checked)
    folder = Path(outcome["run"])
    audited = None
    if run.audit.enabled:
        report = load_record(AuditReport, folder / "audit" / REPORT)
        audited = AuditResult(folder=folder / "audit", report=report)
    return TrainResult(folder=folder, model=Path(outcome["model"]), audit=audited)


@python_call
def compare(
    sweep: Place | Annotated[Sequence[Place], Field(min_length=1)],
    overrides: Overrides | None = None,
    *,
    out: Place | None = None,
    jobs: Annotated[Whole, Field(ge=1, le=10**5)] = 1,
    utility: str | None = None,
) -> CompareResult:
    """Train and compare the settings of a sweep, or compare finished runs.

    Args:
        sweep: a sweep's YAML or the name of a shipped one; or the folders of finished runs, of
            which the first is the reference.
        overrides: settings of the sweep to change, by dotted name.
        out: folder of a comparison of runs; `comparison` beside the first run if None.
        jobs: runs of a sweep that are trained at a time.
        utility: of a comparison of runs: ``heldout_nll`` or a benchmark task that all of them
            answered; None takes the former. A sweep has `utility` among its settings.

    Raises:
        ConfigError: a sweep that is wrong, or arguments that contradict each other.
        RecordError: runs that cannot be compared, with the reason.

    Example:
        >>> from memguard import api
        >>> result = api.compare(["runs/plain", "runs/goldfish"])
        >>> print(result.verdict)
        >>> result.to_pandas()[["name", "risk", "risk_low", "risk_high", "utility"]]
    """
    from memguard.workflows.compare import CompareRequest
    from memguard.workflows.compare import compare as compare_request

    runs = (sweep,) if isinstance(sweep, str | Path) else sweep
    request = CompareRequest(
        given=(*map(str, runs), *write_overrides(overrides)),
        out=None if out is None else Path(out),
        jobs=None if jobs == 1 else jobs,
        fix=False,
        num_processes=None,
        utility=utility,
    )
    request.check()
    page, comparison = compare_request(request)
    assert isinstance(comparison, Comparison), "nothing was fixed"
    return CompareResult(page=page, comparison=comparison)


@python_call
def plan(
    config: Place | Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
    *,
    model: Place | None = None,
    gpus: Annotated[Whole, Field(ge=1, le=10**7)] | None = None,
    machine: Place | None = None,
    mesh: Name | None = None,
) -> PlanResult:
    """Estimate memory and time of a training step on every mesh of a machine.

    Documents are not read.

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
    from memguard.workflows.plan import MODEL_ALONE, PlanRequest
    from memguard.workflows.plan import plan as make_plan

    request = PlanRequest(
        run=_load_run(MODEL_ALONE.values if config is None else config, overrides),
        is_run=config is not None,
        model=None if model is None else Path(model),
        gpus=gpus,
        machine=None if machine is None else str(machine),
        mesh=mesh,
    )
    request.check()
    return PlanResult(plan=make_plan(request).plan)


def _load_run(config: Place | Mapping[str, Any], overrides: Overrides | None) -> RunConfig:
    from memguard.config import Document

    if isinstance(config, Mapping):
        document = Document(path="config", values=dict(config), places={})
    else:
        document = load_yaml(find_asset("configs", str(config), setting="config"))
    values = apply_settings(document.values, overrides or {})
    return validate(RunConfig, values, document)


def _refuse_several_folders() -> None:
    """Refuse to create a temporary folder on each process of a program."""
    from torch import distributed

    if distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ConfigError(
            f"'out' is needed where {distributed.get_world_size()} processes share an audit: a "
            "folder for the report, the same on all of them"
        )
