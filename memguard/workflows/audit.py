"""One audit: measures the model, then the base model, and writes report and records."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import memguard
from memguard.audit.blind import compare_kinds
from memguard.audit.document_scores import save_scores
from memguard.audit.extraction import TINY_MARGINS
from memguard.audit.findings import save_findings
from memguard.audit.generation_time import GenerationLimit
from memguard.audit.parts import describe_cut, find_cut
from memguard.audit.run import AuditOutcome, run_audit
from memguard.audit.suite import Suite, load_audit_suite
from memguard.audit.training import HELDOUT_NLL, tabulate_training
from memguard.audit.variants import ComparedVariants
from memguard.config import AuditConfig, ParallelConfig, RunConfig
from memguard.data.identity_key import IdentityKey
from memguard.errors import ConfigError, MemguardError
from memguard.hf import adapter_files
from memguard.hf.assembly import find_sizes
from memguard.hf.checkpoint import load_config
from memguard.hf.identity import hash_weights
from memguard.model.evaluation import keep_random_states
from memguard.pages.probe_runs import write_not_run, write_ran
from memguard.parallel.mesh_shape import resolve_mesh
from memguard.parallel.model_sizes import Sizes
from memguard.records import (
    PRIVATE_MODE,
    AuditReport,
    AuditResults,
    Banner,
    Method,
    ModelIdentity,
    Tables,
    Variant,
    format_now,
    merge_tables,
    save_canaries,
    save_record,
    write_atomically,
)
from memguard.records.audit_files import CANARIES, FINDINGS, REPORT, RESULTS, SCORES
from memguard.records.results import save_results
from memguard.records.run_files import find_weights_folder, list_trained_files
from memguard.runtime import (
    Console,
    Runtime,
    describe_environment,
    detect_runtime,
    quieted_libraries,
)
from memguard.runtime.processes import join_program
from memguard.runtime.shared_sums import sum_ahead
from memguard.workflows.any_model import describe_checkpoint
from memguard.workflows.audit_context import open_audit_context
from memguard.workflows.audit_inputs import AuditTarget, describe_run, find_base
from memguard.workflows.audit_output import finish_audit, restore_report, show_verdict
from memguard.workflows.audit_progress import show_progress
from memguard.workflows.audit_request import AuditRequest, load_audit_identity
from memguard.workflows.audit_variants import VariantPlan, plan_variants
from memguard.workflows.audited_model import LazyModel, find_base_quantization
from memguard.workflows.model_identity import check_base, hash_models, name_models, sum_models
from memguard.workflows.model_in_memory import ModelInMemory
from memguard.workflows.requests import make_command
from memguard.workflows.run_checks import check_device_map
from memguard.workflows.run_folder import (
    check_finished,
    check_usable,
    load_own_config,
    locked,
)
from memguard.workflows.setup import DistributedContext, open_distributed


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
        _check_run(request, runtime)
        if run is not None and request.run is not None:
            base = _named_base(request)
            target = describe_run(request.run, run, settings, out=request.out, base=base)
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
            variants=plan_variants(request, settings, target, distributed),
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
    runtime.only_on_main(lambda: check_finished(folder, read=read))


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
) -> AuditReport:
    """Audit a run with its own settings; the report is written to its `audit/`.

    Args:
        folder: of the run, which rank 0 has locked.
        distributed: of this process.
        console: reports progress.
        command: recorded in the report.
        check_folder: on rank 0: raises an error if the folder is no longer the locked one.
    """
    config = load_own_config(folder)
    target = describe_run(folder, config, config.audit)
    return _audit(
        target, config.audit, distributed, console, command=command, check_folder=check_folder
    )


def is_current(report: AuditReport, folder: Path, config: RunConfig) -> bool:
    """Return whether a report matches a run's current weights and audit settings."""
    method = report.method
    return (
        method.probes == load_audit_suite(config.audit).describe_probes()
        and method.dtype == config.audit.dtype
        and method.sample_size == config.audit.max_documents_per_bucket
        and method.window == config.audit.window
        and (report.model.base is not None) == (config.audit.base and config.model.path is not None)
        # Last, because it reads the weights.
        and report.model.weights_sha256 == hash_weights(find_weights_folder(folder))
    )


def find_current_report(folder: Path, config: RunConfig, console: Console) -> AuditReport | None:
    """Return a run's report if its audit is complete and matches the run's settings.

    A missing or damaged page or model card is rendered again.
    """
    report = restore_report(folder / "audit", console.warn)
    return report if report is not None and is_current(report, folder, config) else None


def _audit(
    target: AuditTarget,
    settings: AuditConfig,
    distributed: DistributedContext,
    console: Console,
    *,
    command: str,
    check_folder: Callable[[], None] | None,
    variants: VariantPlan | None = None,
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
        )

    def open_base() -> LazyModel | None:
        if target.base is None:
            return None
        form = find_base_quantization(target)
        return open_model(target.base, target.base_revision, quantization=form)

    model = open_model(target.model, base=target.adapter_base)
    started = time.perf_counter()
    with (
        console.phase("audit"),
        _reporting_lost_folder(check_folder),
        show_progress(console, has_variants=variants is not None) as (show, meter),
    ):
        context = open_audit_context(target, settings, runtime, show, meter)
        outcome = run_audit(
            documents=target.documents,
            model=model,
            base=open_base(),
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
        )
        compared = ComparedVariants()
        if variants is not None:
            compared = variants.measure(target, hashes[target.model], suite, context, console)
    method = _describe_method(suite, settings, target.seed, command, time.perf_counter() - started)

    def write() -> AuditReport:
        if check_folder is not None:
            check_folder()
        names = name_models(target, model.num_parameters, hashes, sums)
        summary = _add_tables(target, outcome.summary, compared.tables)
        report = _build_report(target, summary, names, method, banners, runtime, compared.variants)
        if settings.excerpts:
            _write_excerpts(target, outcome)
        save_scores(outcome.scores.with_columns(compared.columns), target.out / SCORES)
        save_results(report.tables.results, target.out / RESULTS)
        (target.out / CANARIES).unlink(missing_ok=True)
        if outcome.canaries:
            save_canaries(outcome.canaries, target.out / CANARIES)
        save_findings(outcome.scores, target.out / FINDINGS)
        save_record(report, target.out / REPORT)
        finish_audit(target.out, report, card_of=target.card_of)
        return report

    report = runtime.broadcast_object(runtime.only_on_main(write))
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


def _add_tables(target: AuditTarget, summary: AuditResults, variants: Tables) -> AuditResults:
    """Add the rows of the training and of the variants."""
    training = tabulate_training(target.training, target.watched)
    if HELDOUT_NLL in training.metrics:
        variants = variants.model_copy(update={"metrics": ()})
    tables = merge_tables([summary.tables, training, variants])
    return summary.model_copy(update={"tables": tables})


def _build_report(
    target: AuditTarget,
    summary: AuditResults,
    model: ModelIdentity,
    method: Method,
    banners: Sequence[Banner],
    runtime: Runtime,
    variants: Sequence[Variant],
) -> AuditReport:
    parts: dict[str, Any] = dict(summary)
    notes = [Banner(level="note", text=text) for text in target.notes]
    parts["banners"] = [*banners, *summary.banners, *notes]
    return AuditReport(
        **parts,
        tool_version=memguard.__version__,
        created=format_now(),
        run=target.run,
        model=model,
        data=target.data,
        training=target.training,
        method=method,
        variants=list(variants),
        environment=describe_environment(runtime.device, runtime.world_size),
    )


def _describe_method(
    suite: Suite, settings: AuditConfig, seed: int, command: str, wall_s: float
) -> Method:
    probe = suite.extraction
    return Method(
        suite=suite.name,
        suite_version=suite.version,
        probes=suite.describe_probes(),
        continuation_tokens=probe.continuation_tokens,
        prefix_tokens=probe.prefix_tokens,
        window=settings.window,
        max_edit_share=probe.max_edit_share,
        tiny_margin=TINY_MARGINS[settings.dtype],
        dtype=settings.dtype,
        batch_tokens=settings.batch_tokens,
        sample_size=settings.max_documents_per_bucket,
        seed=seed,
        command=command,
        wall_s=round(wall_s, 3),
    )


@contextmanager
def _reporting_lost_folder(check_folder: Callable[[], None] | None) -> Iterator[None]:
    """If a file cannot be read because the whole folder is gone, raise that error instead."""
    try:
        yield
    except (OSError, MemguardError):
        if check_folder is not None:
            check_folder()
        raise


def _write_excerpts(target: AuditTarget, outcome: AuditOutcome) -> None:
    """Write the text of the findings, or token ids if there is no tokenizer, to a private file."""
    decode: Callable[[Any], str] = str
    if target.tokenizer is not None:
        decode = target.tokenizer.decode
    documents = {document.id: document for document in target.documents}
    parts = []
    for finding in outcome.summary.findings:
        # The continuation is the end of the document or of its audited part.
        ids = documents[finding.id].input_ids
        split = len(ids) - finding.continuation_tokens
        prefix, continuation = decode(ids[:split].tolist()), decode(ids[split:].tolist())
        parts.append(
            f"== {finding.id}: {finding.sentence}\n-- prefix\n{prefix}\n-- continuation\n"
            f"{continuation}\n"
        )
    private = target.out / "private"
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)
    write_atomically(private / "excerpts.txt", "\n".join(parts).encode(), mode=PRIVATE_MODE)
