"""One audit, read from top to bottom: checks, plan, models, measuring, summary, writing.

    check_audit         (checks.py) refuses wrong arguments, before torch
    audit               opens the ranks and locks the folder      in use: ConfigError
    audit_on_ranks      plans what is measured                    unusable documents: DataError
                        hashes the models, loads none             another base: ModelError
                        measures them in turn, tasks included     the folder is gone: RecordError
                        rank 0 writes report, records and pages   audit.json, last

Every rank takes the same way; only rank 0 reads what others may not, and writes.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from memguard.audit.benchmarks.tasks import OpenedTask
from memguard.audit.document_scores import save_scores
from memguard.audit.findings import FindingList, save_findings
from memguard.audit.run import measure
from memguard.audit.selection import describe_cut, find_cut
from memguard.audit.suite import load_audit_suite
from memguard.audit.warnings import warn_of_base
from memguard.config import ParallelConfig, RunConfig
from memguard.errors import ConfigError, MemguardError
from memguard.hf.assembly import find_sizes
from memguard.hf.checkpoint import load_config
from memguard.hf.identity import hash_weights
from memguard.model.evaluation import keep_random_states
from memguard.pages.facts import write_not_run, write_ran
from memguard.parallel.mesh_shape import resolve_mesh
from memguard.parallel.model_sizes import Sizes
from memguard.records import AuditReport, Banner, save_canaries, save_record
from memguard.records.audit_files import CANARIES, FINDINGS, REPORT, RESULTS, SCORES
from memguard.records.results import save_results
from memguard.records.run_files import find_weights_folder, list_trained_files
from memguard.runtime import Console, detect_runtime, quieted_libraries
from memguard.runtime.processes import join_program
from memguard.runtime.shared_sums import sum_ahead
from memguard.workflows.auditing.checks import AuditedRun, CheckedAudit, load_audit_identity
from memguard.workflows.auditing.documents import plan_foreign
from memguard.workflows.auditing.model_in_memory import ModelInMemory
from memguard.workflows.auditing.models import AuditModels, choose_dtype
from memguard.workflows.auditing.pages import finish_audit, restore_report, show_verdict
from memguard.workflows.auditing.report import (
    add_tables,
    build_report,
    describe_method,
    write_excerpts,
)
from memguard.workflows.auditing.resources import open_resources, show_progress
from memguard.workflows.auditing.target import find_base, plan_run
from memguard.workflows.auditing.utility import UtilityRun, describe_tasks, open_alone, open_on_all
from memguard.workflows.common.checks import make_command
from memguard.workflows.common.folder import RunFolder, check_usable, locked
from memguard.workflows.common.setup import DistributedContext, open_distributed, read_sizes

AtStep = Callable[[AuditedRun, Path, Console], AbstractContextManager[AuditedRun]]
"""Opens a run that ended after its step, in a folder beside the report."""


def audit(checked: CheckedAudit, *, at_step: AtStep | None = None) -> AuditReport:
    """Audit a run, or a model that memguard did not train; the report is in `checked.out`."""
    with quieted_libraries(), _open_ranks(checked) as distributed, ExitStack() as lock:
        runtime = distributed.runtime
        console = Console(quiet=not runtime.is_main)
        check_folder = runtime.only_on_main(lambda: _begin(checked, lock))
        tasks = open_on_all(checked.settings, runtime)
        run = checked.run
        if run is not None and run.step is not None:
            assert at_step is not None, "a checkpoint is opened as a run"
            opened = partial(at_step, run, checked.out, console)
            run = runtime.only_on_main(lambda: lock.enter_context(opened()))
            checked = replace(checked, source=runtime.broadcast_object(run))
        elif run is not None:
            # Each rank hashes its share of the weights.
            read = sum_ahead(lambda: list_trained_files(run.folder), runtime)
            runtime.only_on_main(lambda: RunFolder(run.folder).require_trained(read=read))
        report = audit_on_ranks(
            checked,
            distributed,
            console,
            command=make_command(),
            check_folder=check_folder,
            tasks=tasks,
        )
        show_verdict(report, checked.out, console)
    return report


def audit_on_ranks(
    checked: CheckedAudit,
    distributed: DistributedContext,
    console: Console,
    *,
    command: str,
    check_folder: Callable[[], None] | None,
    tasks: Sequence[OpenedTask],
    is_trained_here: bool = False,
) -> AuditReport:
    """Measure the models of an audit, the same on every rank, and write report and records.

    ``check_folder``: on rank 0, raises an error if the folder is no longer the locked one;
    ``is_trained_here``: this program has trained the run, and warned of its documents.
    """
    runtime = distributed.runtime
    settings = choose_dtype(checked.settings, runtime, console)
    checked = replace(checked, settings=settings)
    # Only rank 0 needs the file of the key; every rank hashes documents with it.
    identity = runtime.from_main(lambda: load_audit_identity(checked, console.info))
    if checked.run is not None:
        plan, subject = plan_run(checked, tasks, console=None if is_trained_here else console)
    else:
        assert identity is not None, "without a run there is a key"
        plan, subject = plan_foreign(checked, identity, console, tasks)
    plan.check_same(runtime)
    runtime.only_on_main(lambda: _check_writable(subject.out))
    if plan.other_kind:
        console.warn(plan.other_kind)
    models = AuditModels.open(checked, subject, distributed, console)
    if cut := find_cut(plan.documents, (), window=settings.window):
        console.warn(describe_cut(cut))

    started = time.perf_counter()
    with (
        console.phase("audit"),
        _reporting_lost_folder(check_folder),
        show_progress(console) as show,
    ):
        context = open_resources(plan, subject, settings, runtime, show)
        utility = UtilityRun(
            tasks=plan.tasks,
            settings=settings,
            tokenizer=subject.tokenizer,
            models={role: model for role, model in models.of.items() if role != "reference"},
            peers=runtime,
            console=console,
            show=show,
        )
        outcome = measure(plan, models.of, context, also_measure=utility.measure)
    for text in warn_of_base(outcome.scores):
        console.warn(text)
    method = describe_method(plan, settings, command, time.perf_counter() - started)
    kinds = [Banner(level="warning", text=plan.other_kind)] if plan.other_kind else []

    def write() -> AuditReport:
        if check_folder is not None:
            check_folder()
        names = models.names()
        summary = add_tables(subject, outcome.summary, names.load_as, utility)
        banners = [*kinds, *utility.list_banners()]
        report = build_report(subject, summary, names, method, banners, runtime)
        findings = FindingList(outcome.scores)
        if settings.excerpts:
            write_excerpts(plan, subject, findings)
        out = subject.out
        save_scores(outcome.scores, out / SCORES)
        save_results(report.tables.results, out / RESULTS)
        (out / CANARIES).unlink(missing_ok=True)
        if outcome.canaries:
            save_canaries(outcome.canaries, out / CANARIES)
        utility.save(out)
        save_findings(findings, out / FINDINGS)
        save_record(report, out / REPORT)
        finish_audit(out, report, card_of=subject.card_of)
        return report

    report = runtime.from_main(write)
    utility.report(report.tables)
    console.info(f"audit: probes that ran: {write_ran(report)}")
    if not_run := write_not_run(report):
        console.info(f"audit: not run: {not_run}")
    console.info(f"audit: report in {subject.out / 'report.html'}")
    return report


@contextmanager
def _open_ranks(checked: CheckedAudit) -> Iterator[DistributedContext]:
    """Start the ranks of an audit, or take those of the program whose model is audited."""
    if isinstance(checked.model, ModelInMemory):
        with keep_random_states(), join_program() as runtime:
            yield DistributedContext(runtime=runtime, mesh=None)
        return
    parallel, sizes = choose_audit_mesh(checked, detect_runtime().world_size)
    with open_distributed(parallel, sizes) as distributed:
        yield distributed


def choose_audit_mesh(
    checked: CheckedAudit, world_size: int
) -> tuple[ParallelConfig, Sizes | None]:
    """Return the mesh that was given, else the run's if it is valid, else all ranks along z."""
    if world_size == 1:
        return checked.parallel or ParallelConfig(), None
    run = checked.run
    assert isinstance(checked.model, str), "a model in memory has no mesh"
    if run is not None and run.step is not None:
        sizes = read_sizes(run.config, None)
    else:
        sizes = find_sizes(load_config(checked.model, base=None if run is None else run.base))
    if checked.parallel is not None:
        return checked.parallel, sizes
    if run is not None:
        with contextlib.suppress(ConfigError):
            resolve_mesh(run.config.parallel, world_size, sizes)
            return run.config.parallel, sizes
    return ParallelConfig(data=1, z=-1), sizes


def _begin(checked: CheckedAudit, lock: ExitStack) -> Callable[[], None]:
    """Lock the output folder, and check that the run has a base, before weights are read.

    The function returned raises an error if the folder is no longer the locked one.
    """
    if isinstance(checked.model, ModelInMemory):
        check_usable(checked.locked_folder)
    check_folder = lock.enter_context(locked(checked.locked_folder))
    if (run := checked.run) is not None and checked.settings.base:
        find_base(run.folder, run.config, run.base)
    return check_folder


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


# -- whether an audit has to run -------------------------------------------------------------------


def is_current(
    report: AuditReport,
    folder: Path,
    config: RunConfig,
    tasks: Sequence[OpenedTask] | None = None,
) -> bool:
    """Return whether a report matches a run's current weights and audit settings.

    ``tasks``: benchmark tasks that are opened; None opens them.
    """
    method = report.method
    return (
        report.model.load_as == "stored"
        and method.probes == load_audit_suite(config.audit).describe_probes()
        and config.audit.dtype in ("auto", method.dtype)
        and method.sample_size == config.audit.max_documents_per_bucket
        and method.window == config.audit.window
        and (report.model.base is not None) == (config.audit.base and config.model.path is not None)
        and len(method.utility) == len(config.audit.utility)
        and method.utility == describe_tasks(open_alone(config.audit) if tasks is None else tasks)
        # Last, because it reads the weights.
        and report.model.weights_sha256 == hash_weights(find_weights_folder(folder))
    )


def find_current_report(
    folder: Path, config: RunConfig, console: Console, tasks: Sequence[OpenedTask] | None = None
) -> AuditReport | None:
    """Return a run's report if its audit is complete and matches the run's settings.

    A missing or damaged page or model card is rendered again. ``tasks``: see `is_current`.
    """
    report = restore_report(folder / "audit", console.warn)
    return report if report is not None and is_current(report, folder, config, tasks) else None
