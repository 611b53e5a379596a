"""One audit: model and base model in turn, report and records out."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import memguard
from memguard.audit.context import Stage
from memguard.audit.document_scores import save_scores
from memguard.audit.extraction import TINY_MARGINS
from memguard.audit.kinds import compare_kinds
from memguard.audit.parts import describe_cut, tell_cut
from memguard.audit.run import AuditOutcome, run_audit
from memguard.audit.selection import select_windows
from memguard.audit.suite import Suite, load_audit_suite
from memguard.audit.summary import Summary
from memguard.config import AuditConfig, ParallelConfig, RunConfig
from memguard.errors import ConfigError, MemguardError, ModelError
from memguard.hf.checkpoint import load_config, load_tokenizer
from memguard.hf.identity import hash_weights
from memguard.parallel.mesh_shape import ModelSizes, resolve_mesh
from memguard.records import (
    AuditReport,
    Banner,
    Method,
    ModelIdentity,
    format_now,
    save_record,
    write_atomically,
)
from memguard.records.audit_files import REPORT, SCORES
from memguard.report.audit_probes import write_not_run, write_ran
from memguard.runtime import (
    Console,
    Runtime,
    describe_environment,
    detect_runtime,
    quiet_libraries,
)
from memguard.workflows.any_model import describe_checkpoint
from memguard.workflows.audit_context import LazyModel, open_workshop
from memguard.workflows.audit_inputs import AuditTarget, describe_run, find_base
from memguard.workflows.audit_output import finish_audit, restore_report
from memguard.workflows.requests import AuditRequest, make_command
from memguard.workflows.run_checks import check_device_map
from memguard.workflows.run_folder import locked
from memguard.workflows.setup import Workplace, open_workplace
from memguard.workflows.verify import check_finished, load_own_config


def audit_request(request: AuditRequest, settings: AuditConfig) -> tuple[Path, AuditReport]:
    """Audit a run, or a model that memguard did not train; return the folder and the report.

    Args:
        request: the arguments of `memguard audit`.
        settings: what its check returned.
    """
    console = Console()
    quiet_libraries()
    run = request.run_config
    parallel, sizes = choose_audit_mesh(request, detect_runtime().world_size)
    with open_workplace(parallel, sizes) as workplace, ExitStack() as lock:
        check_folder = workplace.runtime.only_on_main(lambda: _begin(request, settings, lock))
        if run is not None and request.run is not None:
            target = describe_run(request.run, run, settings, out=request.out, base=request.base)
        else:
            target = describe_checkpoint(request, settings, console)
        report = _audit(
            target, settings, workplace, console, command=make_command(), check_folder=check_folder
        )
    console.info(report.verdict.sentence)
    return target.out, report


def _begin(request: AuditRequest, settings: AuditConfig, lock: ExitStack) -> Callable[[], None]:
    """Keep other processes out of what is written; refuse a run that is damaged.

    Returns:
        What raises where the folder is no longer the one that is locked.
    """
    check_folder = lock.enter_context(locked(request.locked_folder))
    if request.run is not None and request.run_config is not None:
        if settings.base:  # Told before weights are read.
            find_base(request.run, request.run_config, request.base)
        check_finished(request.run)
    return check_folder


def choose_audit_mesh(
    request: AuditRequest, world_size: int
) -> tuple[ParallelConfig, ModelSizes | None]:
    """Return the mesh of the request, else the run's where it fits, else all ranks along z."""
    if world_size == 1:
        return request.parallel or ParallelConfig(), None
    model = str(request.run / "model") if request.run is not None else request.model
    assert model is not None, "checked: there is a run or a model"
    sizes = ModelSizes.from_config(load_config(model))
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
    workplace: Workplace,
    console: Console,
    command: str,
    check_folder: Callable[[], None] | None,
) -> AuditReport:
    """Audit a run as its own settings say; the report goes into its `audit/`.

    Args:
        folder: of the run, which rank 0 has locked.
        workplace: of this process.
        console: says what is done.
        command: for the report.
        check_folder: on rank 0: raises where the folder is no longer the one that is locked.
    """
    config = load_own_config(folder)
    target = describe_run(folder, config, config.audit)
    return _audit(
        target, config.audit, workplace, console, command=command, check_folder=check_folder
    )


def is_current(report: AuditReport, folder: Path, config: RunConfig) -> bool:
    """Tell whether a report is of a run's present model and of the probes of its settings."""
    method = report.method
    return (
        method.probes == load_audit_suite(config.audit).describe_probes()
        and method.dtype == config.audit.dtype
        and method.sample_size == config.audit.max_documents_per_bucket
        and method.window == config.audit.window
        and (report.model.base is not None) == (config.audit.base and config.model.path is not None)
        # Last: it reads the weights.
        and report.model.weights_sha256 == hash_weights(folder / "model")
    )


def find_current_report(folder: Path, config: RunConfig, console: Console) -> AuditReport | None:
    """Return a run's report if its audit ended and is the one that its settings ask for.

    A page or model card that is missing or damaged is rendered again.
    """
    report = restore_report(folder / "audit", console.warn)
    return report if report is not None and is_current(report, folder, config) else None


def _audit(
    target: AuditTarget,
    settings: AuditConfig,
    workplace: Workplace,
    console: Console,
    *,
    command: str,
    check_folder: Callable[[], None] | None,
) -> AuditReport:
    """Check, run the probes on each model in turn, write report and records."""
    suite = load_audit_suite(settings)
    runtime = workplace.runtime
    check_device_map(settings, world_size=runtime.world_size)
    runtime.only_on_main(lambda: _check_writable(target.out))
    banners = _compare_kinds(target, settings, suite, console)
    hashes = runtime.broadcast_object(
        {
            path: hash_weights(path) if Path(path).is_dir() else None
            for path in (target.model, target.base, target.reference)
            if runtime.is_main and path is not None
        }
    )
    _check_base(target, hashes)
    if cut := describe_cut(target.documents, (), window=settings.window):
        console.warn(tell_cut(cut))

    def open_model(path: str, revision: str | None = None) -> LazyModel:
        return LazyModel(
            path=path,
            revision=revision,
            weights_sha256=hashes[path],
            settings=settings,
            attn=target.attn,
            workplace=workplace,
        )

    model = open_model(target.model)
    started = time.perf_counter()
    with _folder_told(check_folder), _shown_progress(console) as show:
        outcome = run_audit(
            documents=target.documents,
            model=model,
            base=None if target.base is None else open_model(target.base, target.base_revision),
            reference=None if target.reference is None else open_model(target.reference),
            canaries=target.canaries,
            suite=suite,
            tally=target.tally,
            tiny_margin=TINY_MARGINS[settings.dtype],
            seed=target.seed,
            window=settings.window,
            min_documents=settings.min_documents,
            max_documents_per_bucket=settings.max_documents_per_bucket,
            workshop=open_workshop(target, suite, settings, runtime, show),
        )
    method = _describe_method(suite, settings, target.seed, command, time.perf_counter() - started)

    def write() -> AuditReport:
        if check_folder is not None:
            check_folder()
        names = _name_models(target, model.num_parameters, hashes)
        report = _build_report(target, outcome.summary, names, method, banners, runtime)
        if settings.excerpts:
            _write_excerpts(target, outcome)
        save_scores(outcome.scores, target.out / SCORES)
        save_record(report, target.out / REPORT)
        finish_audit(target.out, report, card_of=target.card_of)
        return report

    report = runtime.broadcast_object(runtime.only_on_main(write))
    console.info(f"audit: probes that ran: {write_ran(report)}")
    if not_run := write_not_run(report):
        console.info(f"audit: not run: {not_run}")
    console.info(f"audit: report in {target.out / 'report.html'}")
    return report


def _compare_kinds(
    target: AuditTarget, settings: AuditConfig, suite: Suite, console: Console
) -> list[Banner]:
    """Warn where members and nonmembers are different kinds of text; before weights are read.

    Raises:
        DataError: see `select_windows`.
    """
    if target.run is not None:
        return []  # A run draws its control from the documents that it trains.
    selection = select_windows(
        target.documents,
        suite.extraction,
        seed=target.seed,
        min_documents=settings.min_documents,
        max_documents_per_bucket=settings.max_documents_per_bucket,
    )
    text = compare_kinds([window.document for window in selection.windows], seed=target.seed)
    if not text:
        return []
    console.warn(text)
    return [Banner(level="warning", text=text)]


def _check_base(target: AuditTarget, hashes: Mapping[str, str | None]) -> None:
    """Refuse another base than the one that an earlier report of this model names by its hash."""
    before = target.before
    if target.base is None or before is None or before.weights_sha256 != hashes[target.model]:
        return
    named = before.base_weights_sha256
    if named is not None and hashes[target.base] not in (None, named):
        raise ModelError(
            f"the model before training: '{target.base}' has other weights than the run was "
            f"audited with before (sha256 {hashes[target.base]}, not {named}). Name "
            "the right one with --base DIR, or leave it out with --no-base"
        )


def _check_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Told before the hours of scoring, not after.
    tempfile.TemporaryFile(dir=folder).close()


def _name_models(
    target: AuditTarget, num_parameters: int, hashes: Mapping[str, str | None]
) -> ModelIdentity:
    def name(path: str) -> str:
        # A report is shared; where a folder lay on this machine is not.
        return "/".join(Path(path).resolve().parts[-2:]) if Path(path).is_dir() else path

    def identify(path: str) -> str:
        return hashes[path] or f"hub id {path}, not hashed"

    return ModelIdentity(
        name=target.run or name(target.model),
        weights_sha256=identify(target.model),
        num_parameters=num_parameters,
        base=target.base and name(target.base),
        base_weights_sha256=target.base and identify(target.base),
    )


def _build_report(
    target: AuditTarget,
    summary: Summary,
    model: ModelIdentity,
    method: Method,
    banners: Sequence[Banner],
    runtime: Runtime,
) -> AuditReport:
    parts = {field.name: getattr(summary, field.name) for field in fields(summary)}
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
def _folder_told(check_folder: Callable[[], None] | None) -> Iterator[None]:
    """Say of a file that cannot be read that the whole folder is gone, where it is."""
    try:
        yield
    except (OSError, MemguardError):
        if check_folder is not None:
            check_folder()
        raise


@contextmanager
def _shown_progress(console: Console) -> Iterator[Any]:
    """Yield a function that shows one stage after the other."""
    with ExitStack() as stack:
        advance: dict[Stage, Any] = {}
        before = 0

        def show(stage: Stage, done: int, total: int) -> None:
            nonlocal before
            if stage not in advance:
                stack.close()
                what = "audit" if stage == "model" else f"audit, {stage}"
                advance[stage] = stack.enter_context(console.progress(what, total, "documents"))
                before = 0
            advance[stage](done - before, "")
            before = done

        yield show


def _write_excerpts(target: AuditTarget, outcome: AuditOutcome) -> None:
    """Write the findings' text, or ids without a tokenizer, where only this user can read it."""
    decode: Callable[[Any], str] = str
    if target.has_tokenizer:
        decode = load_tokenizer(target.model).decode
    documents = {document.id: document for document in target.documents}
    parts = []
    for finding in outcome.summary.findings:
        # Of a document, or of its part, the continuation is the end.
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
    write_atomically(private / "excerpts.txt", "\n".join(parts).encode(), mode=0o600)
