"""One audit: measures the model, then the base model, and writes report and records."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memguard.audit.document_scores import save_findings, save_scores
from memguard.audit.generation_time import GenerationLimit
from memguard.audit.parts import describe_cut, find_cut
from memguard.audit.run import run_audit
from memguard.audit.statistics.blind import compare_kinds
from memguard.audit.suite import load_audit_suite
from memguard.audit.windows import TINY_MARGINS
from memguard.config import AuditConfig, ParallelConfig, RunConfig
from memguard.data.identity_key import IdentityKey
from memguard.errors import ConfigError, MemguardError
from memguard.hf import adapter_files
from memguard.hf.assembly import find_sizes
from memguard.hf.checkpoint import load_config
from memguard.hf.identity import hash_weights
from memguard.hf.load_as import LoadedForm
from memguard.model.evaluation import keep_random_states
from memguard.pages.probe_runs import write_not_run, write_ran
from memguard.parallel.mesh_shape import resolve_mesh
from memguard.parallel.model_sizes import Sizes
from memguard.records import (
    AuditReport,
    Banner,
    save_canaries,
    save_record,
)
from memguard.records.audit_files import CANARIES, FINDINGS, REPORT, RESULTS, SCORES
from memguard.records.results import save_results
from memguard.records.run_files import find_weights_folder, list_trained_files
from memguard.runtime import (
    Console,
    Runtime,
    detect_runtime,
    quieted_libraries,
)
from memguard.runtime.processes import join_program
from memguard.runtime.shared_sums import sum_ahead
from memguard.workflows.auditing.checks import AuditRequest, load_audit_identity
from memguard.workflows.auditing.documents import describe_checkpoint
from memguard.workflows.auditing.model_identity import (
    check_base,
    hash_models,
    name_models,
    sum_models,
)
from memguard.workflows.auditing.model_in_memory import ModelInMemory
from memguard.workflows.auditing.models import LazyModel, choose_form, find_base_quantization
from memguard.workflows.auditing.pages import finish_audit, restore_report, show_verdict
from memguard.workflows.auditing.progress import show_progress
from memguard.workflows.auditing.report import (
    add_tables,
    build_report,
    describe_method,
    write_excerpts,
)
from memguard.workflows.auditing.resources import open_audit_context
from memguard.workflows.auditing.target import AuditTarget, describe_run, find_base
from memguard.workflows.auditing.utility import (
    UtilityRun,
    describe_tasks,
    open_alone,
    open_on_all,
)
from memguard.workflows.common.checks import check_device_map
from memguard.workflows.common.folder import (
    RunFolder,
    check_usable,
    locked,
)
from memguard.workflows.common.requests import make_command
from memguard.workflows.common.setup import DistributedContext, open_distributed

if TYPE_CHECKING:
    from memguard.audit.benchmarks.tasks import OpenedTask


def audit_request(request: AuditRequest, settings: AuditConfig) -> tuple[Path, AuditReport]:
    """Audit a run, or a model that memguard did not train; return the folder and the report.

    Args:
        request: the arguments of `memguard audit`.
        settings: the result of `AuditRequest.check`.
    """
    run = request.run_config
    with (
        quieted_libraries(),
        _open_ranks(request) as distributed,
        ExitStack() as lock,
    ):
        console = Console(quiet=not distributed.runtime.is_main)
        runtime = distributed.runtime
        check_folder = runtime.only_on_main(lambda: _begin(request, settings, lock))
        # Only rank 0 needs the file of the key.
        identity: IdentityKey | None = runtime.broadcast_object(
            runtime.only_on_main(lambda: load_audit_identity(request, console.info))
        )
        tasks = open_on_all(settings, runtime)
        _check_run(request, runtime)
        if run is not None and request.run is not None:
            base = _named_base(request)
            target = describe_run(
                request.run, run, settings, out=request.out, base=base, console=console
            )
        else:
            assert identity is not None, "without a run there is a key"
            target = describe_checkpoint(request, settings, identity, console)
        report = _audit(
            target,
            settings,
            distributed,
            console,
            command=make_command(),
            check_folder=check_folder,
            form=choose_form(request, settings, runtime.world_size),
            tasks=tasks,
        )
        is_in_memory = isinstance(request.audited, ModelInMemory)
        show_verdict(report.verdict, console, has_exit_code=not is_in_memory)
    return target.out, report


@contextmanager
def _open_ranks(request: AuditRequest) -> Iterator[DistributedContext]:
    """Start the ranks of an audit, or take those of the program whose model is audited."""
    if isinstance(request.audited, ModelInMemory):
        with keep_random_states(), join_program() as runtime:
            yield DistributedContext(runtime=runtime, mesh=None, parallel=ParallelConfig())
        return
    parallel, sizes = choose_audit_mesh(request, detect_runtime().world_size)
    with open_distributed(parallel, sizes) as distributed:
        yield distributed


def _named_base(request: AuditRequest) -> str | None:
    assert request.base is None or isinstance(request.base, str), "checked: that of a run is named"
    return request.base


def _begin(request: AuditRequest, settings: AuditConfig, lock: ExitStack) -> Callable[[], None]:
    """Lock the output folder, and check that the run has a base.

    Returns:
        A function that raises an error if the folder is no longer the locked one.
    """
    if isinstance(request.audited, ModelInMemory):
        check_usable(request.locked_folder)
    check_folder = lock.enter_context(locked(request.locked_folder))
    if request.run is not None and request.run_config is not None and settings.base:
        # Fail before weights are read.
        find_base(request.run, request.run_config, _named_base(request))
    return check_folder


def _check_run(request: AuditRequest, runtime: Runtime) -> None:
    """Check the files of a run; each rank hashes its share of the weights."""
    folder = request.run
    if folder is None or request.run_config is None:
        return
    read = sum_ahead(lambda: list_trained_files(folder), runtime)
    runtime.only_on_main(lambda: RunFolder(folder).require_trained(read=read))


def choose_audit_mesh(
    request: AuditRequest, world_size: int
) -> tuple[ParallelConfig, Sizes | None]:
    """Return the mesh of the request, else the run's if it is valid, else all ranks along z."""
    if world_size == 1:
        return request.parallel or ParallelConfig(), None
    model = request.audited
    assert isinstance(model, str), "a model in memory has no mesh"
    base = None if request.run is None else _named_base(request)
    sizes = find_sizes(load_config(model, base=base))
    if request.parallel is not None:
        return request.parallel, sizes
    if request.run_config is not None:
        parallel = request.run_config.parallel
        with contextlib.suppress(ConfigError):
            resolve_mesh(parallel, world_size, sizes)
            return parallel, sizes
    return ParallelConfig(data=1, z=-1), sizes


def audit_run(
    folder: Path,
    *,
    distributed: DistributedContext,
    console: Console,
    command: str,
    check_folder: Callable[[], None] | None,
    tasks: "Sequence[OpenedTask] | None" = None,
) -> AuditReport:
    """Audit a run with its own settings; the report is written to its `audit/`.

    Args:
        folder: of the run, which rank 0 has locked.
        distributed: of this process.
        console: reports progress.
        command: recorded in the report.
        check_folder: on rank 0: raises an error if the folder is no longer the locked one.
        tasks: benchmark tasks of the run, if this rank has opened them; None opens them.
    """
    config = RunFolder(folder).read_config()
    target = describe_run(folder, config, config.audit)
    return _audit(
        target,
        config.audit,
        distributed,
        console,
        command=command,
        check_folder=check_folder,
        tasks=open_alone(config.audit) if tasks is None else tasks,
    )


def is_current(
    report: AuditReport,
    folder: Path,
    config: RunConfig,
    tasks: "Sequence[OpenedTask] | None" = None,
) -> bool:
    """Return whether a report matches a run's current weights and audit settings.

    Args:
        report: of an audit of the run.
        folder: of the run.
        config: its settings.
        tasks: its benchmark tasks, if they are opened; None opens them.

    Raises:
        ConfigError: a benchmark task cannot be opened.
    """
    method = report.method
    return (
        report.model.load_as == "stored"
        and method.probes == load_audit_suite(config.audit).describe_probes()
        and method.dtype == config.audit.dtype
        and method.sample_size == config.audit.max_documents_per_bucket
        and method.window == config.audit.window
        and (report.model.base is not None) == (config.audit.base and config.model.path is not None)
        and len(method.utility) == len(config.audit.utility)
        and method.utility == describe_tasks(open_alone(config.audit) if tasks is None else tasks)
        # Last, because it reads the weights.
        and report.model.weights_sha256 == hash_weights(find_weights_folder(folder))
    )


def find_current_report(
    folder: Path,
    config: RunConfig,
    console: Console,
    tasks: "Sequence[OpenedTask] | None" = None,
) -> AuditReport | None:
    """Return a run's report if its audit is complete and matches the run's settings.

    A missing or damaged page or model card is rendered again.

    Args:
        folder: of the run.
        config: its settings.
        console: shows what is rendered.
        tasks: its benchmark tasks, if they are opened; None opens them.
    """
    report = restore_report(folder / "audit", console.warn)
    return report if report is not None and is_current(report, folder, config, tasks) else None


def _audit(
    target: AuditTarget,
    settings: AuditConfig,
    distributed: DistributedContext,
    console: Console,
    *,
    command: str,
    check_folder: Callable[[], None] | None,
    form: LoadedForm | None = None,
    tasks: "Sequence[OpenedTask]" = (),
) -> AuditReport:
    """Check the inputs, run the probes on each model in turn, write report and records."""
    suite = load_audit_suite(settings)
    runtime = distributed.runtime
    is_adapter = isinstance(target.model, str) and adapter_files.is_adapter(target.model)
    check_device_map(settings, world_size=runtime.world_size, is_adapter=is_adapter)
    runtime.only_on_main(lambda: _check_writable(target.out))
    banners = _compare_kinds(target, settings, console)
    sums = sum_models(target, runtime)
    hashes = hash_models(target, sums, runtime)
    check_base(target, hashes)
    if cut := find_cut(target.documents, (), window=settings.window):
        console.warn(describe_cut(cut))

    limit = GenerationLimit(max_minutes=settings.max_generation_minutes, say=console.info)

    def open_model(
        model: str | ModelInMemory,
        revision: str | None = None,
        base: str | None = None,
        quantization: Literal["nf4"] | None = None,
        form: LoadedForm | None = None,
    ) -> LazyModel:
        return LazyModel(
            model,
            revision=revision,
            base=base,
            weights_sha256=hashes[model],
            settings=settings,
            attn=target.attn,
            distributed=distributed,
            limit=limit,
            quantization=quantization,
            form=form,
        )

    def open_base() -> LazyModel | None:
        if target.base is None:
            return None
        quantization = find_base_quantization(target)
        return open_model(target.base, target.base_revision, quantization=quantization)

    model, base = open_model(target.model, base=target.adapter_base, form=form), open_base()
    if form is not None:
        console.info(f"audit: the model is loaded as {form.name}: {form.describe()}")
    started = time.perf_counter()
    with (
        console.phase("audit"),
        _reporting_lost_folder(check_folder),
        show_progress(console) as show,
    ):
        context = open_audit_context(target, settings, runtime, show)
        utility = UtilityRun(
            tasks=tasks,
            settings=settings,
            tokenizer=target.tokenizer,
            models={"trained": model, **({} if base is None else {"base": base})},
            peers=runtime,
            console=console,
            show=show,
        )
        outcome = run_audit(
            documents=target.documents,
            model=model,
            base=base,
            reference=None if target.reference is None else open_model(target.reference),
            canaries=target.canaries,
            suite=suite,
            tally=target.tally,
            tiny_margin=TINY_MARGINS[settings.dtype],
            seed=target.seed,
            is_other_kind=bool(banners),
            window=settings.window,
            min_documents=settings.min_documents,
            max_documents_per_bucket=settings.max_documents_per_bucket,
            context=context,
            also_measure=utility.measure,
        )
    wall_s = time.perf_counter() - started
    method = describe_method(suite, settings, target.seed, command, wall_s, tasks)
    banners += utility.list_banners()

    def write() -> AuditReport:
        if check_folder is not None:
            check_folder()
        names = name_models(target, model.num_parameters, hashes, sums, form)
        summary = add_tables(target, outcome.summary, names.load_as, utility)
        report = build_report(target, summary, names, method, banners, runtime)
        if settings.excerpts:
            write_excerpts(target, outcome)
        save_scores(outcome.scores, target.out / SCORES)
        save_results(report.tables.results, target.out / RESULTS)
        (target.out / CANARIES).unlink(missing_ok=True)
        if outcome.canaries:
            save_canaries(outcome.canaries, target.out / CANARIES)
        utility.save(target.out)
        save_findings(outcome.scores, target.out / FINDINGS)
        save_record(report, target.out / REPORT)
        finish_audit(target.out, report, card_of=target.card_of)
        return report

    report = runtime.broadcast_object(runtime.only_on_main(write))
    utility.report(report.tables)
    console.info(f"audit: probes that ran: {write_ran(report)}")
    if not_run := write_not_run(report):
        console.info(f"audit: not run: {not_run}")
    console.info(f"audit: report in {target.out / 'report.html'}")
    return report


def _compare_kinds(target: AuditTarget, settings: AuditConfig, console: Console) -> list[Banner]:
    """Warn if a given control is another kind of text, before weights are read.

    A control that a run draws is of one kind with its trained documents.

    Raises:
        DataError: see `select_windows`.
    """
    if not target.has_given_control:
        return []
    windows = target.select(settings).windows
    text = compare_kinds([window.document for window in windows], seed=target.seed)
    if not text:
        return []
    console.warn(text)
    return [Banner(level="warning", text=text)]


def _check_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Fail before the hours of scoring, not after.
    tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def _reporting_lost_folder(check_folder: Callable[[], None] | None) -> Iterator[None]:
    """If a file cannot be read because the whole folder is gone, raise that error instead."""
    try:
        yield
    except (OSError, MemguardError):
        if check_folder is not None:
            check_folder()
        raise
