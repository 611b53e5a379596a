"""One audit from the command line: model and base in turn, report and records out."""

import contextlib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import memguard
from memguard.audit.context import Stage
from memguard.audit.document_scores import save_scores
from memguard.audit.extraction import TINY_MARGINS
from memguard.audit.kinds import compare_kinds
from memguard.audit.parts import describe_cut, tell_cut
from memguard.audit.probes import Probe
from memguard.audit.run import AuditOutcome, run_audit
from memguard.audit.selection import select_windows
from memguard.audit.suite import Suite, load_suite
from memguard.config import AuditConfig, ParallelConfig, RunConfig, load_run_config
from memguard.errors import ConfigError, ModelError, RecordError
from memguard.hf.checkpoint import hash_weights, load_config, load_tokenizer
from memguard.parallel.mesh_shape import ModelSizes, resolve_mesh
from memguard.records import (
    AuditReport,
    Banner,
    Method,
    ModelIdentity,
    load_record,
    save_record,
    write_atomically,
)
from memguard.report import render_report
from memguard.report.audit_probes import write_not_run, write_ran
from memguard.runtime import (
    Console,
    Runtime,
    describe_environment,
    detect_runtime,
    quiet_libraries,
)
from memguard.workflows.any_model import describe_checkpoint
from memguard.workflows.audit_context import LoadedWhenAsked, open_workshop
from memguard.workflows.audit_inputs import Subject, describe_run, load_probe
from memguard.workflows.requests import AuditRequest
from memguard.workflows.setup import Workplace, open_workplace


def audit_request(request: AuditRequest, settings: AuditConfig) -> tuple[Path, AuditReport]:
    """Do what `memguard audit` was asked; return the folder and the report."""
    console = Console()
    quiet_libraries()
    command = shlex.join(["memguard", *sys.argv[1:]])
    load_suite(settings.suite)  # one that is not there is told before anything is read
    world_size = detect_runtime().world_size
    parallel, sizes = choose_audit_mesh(request, world_size)
    with open_workplace(parallel, sizes) as workplace:
        if request.run is not None:
            subject = describe_run(
                request.run, request.load_run(), settings, request.out, base=request.base
            )
        else:
            subject = describe_checkpoint(request, settings, console)
        report = _audit(subject, settings, workplace, console, command)
    console.info(report.verdict.sentence)
    return subject.out, report


def choose_audit_mesh(
    request: AuditRequest, world_size: int
) -> tuple[ParallelConfig, ModelSizes | None]:
    """Return the mesh asked for, else the run's where it fits, else all ranks along z."""
    if world_size == 1:
        return request.parallel or ParallelConfig(), None
    model = str(request.run / "model") if request.run is not None else request.model
    assert model is not None, "checked: there is a run or a model"
    sizes = ModelSizes.from_config(load_config(model))
    if request.parallel is not None:
        return request.parallel, sizes
    if request.run is not None:
        parallel: ParallelConfig = request.load_run().parallel
        with contextlib.suppress(ConfigError):
            resolve_mesh(parallel, world_size, sizes)
            return parallel, sizes
    return ParallelConfig(data=1, z=-1), sizes


def audit_run(folder: Path, *, workplace: Workplace, console: Console, command: str) -> AuditReport:
    """Audit a run as its own settings say; the report goes into its `audit/`."""
    config = load_run_config(folder / "config.yaml")
    subject = describe_run(folder, config, config.audit, None)
    return _audit(subject, config.audit, workplace, console, command)


def find_current_report(folder: Path, config: RunConfig) -> AuditReport | None:
    """Return the run's report if it is of the model that is there and of the probes asked for."""
    path = folder / "audit" / "report.json"
    if not path.exists():
        return None
    try:
        report = load_record(AuditReport, path)
    except RecordError:
        return None
    suite = _final_suite(config.audit)
    method = report.method
    same = (
        report.model.weights_sha256 == hash_weights(folder / "model"),
        method.probes == [describe_probe(each) for each in suite.probes],
        method.dtype == config.audit.dtype,
        method.sample_size == config.audit.max_documents_per_bucket,
        method.window == config.audit.window,
        (report.model.base is not None) == (config.audit.base and config.model.path is not None),
    )
    return report if all(same) else None


def _audit(
    subject: Subject,
    settings: AuditConfig,
    workplace: Workplace,
    console: Console,
    command: str,
) -> AuditReport:
    suite = _final_suite(settings)
    runtime = workplace.runtime
    if settings.device_map is not None and runtime.world_size > 1:
        raise ConfigError(
            f"'audit.device_map' spreads a model from one process; this audit has "
            f"{runtime.world_size}, which split it over their mesh. Leave one of the two out."
        )
    runtime.only_on_main(lambda: _check_writable(subject.out))
    banners = _compare_kinds(subject, settings, suite, console)
    hashes = runtime.broadcast_object(
        {
            path: _hash_if_folder(path)
            for path in (subject.model, subject.base, subject.reference)
            if runtime.is_main and path is not None
        }
    )

    _check_base(subject, hashes)

    def open_model(path: str, revision: str | None = None) -> LoadedWhenAsked:
        return LoadedWhenAsked(
            path=path,
            revision=revision,
            weights_sha256=hashes[path],
            settings=settings,
            attn=subject.attn,
            workplace=workplace,
        )

    if cut := describe_cut(subject.documents, (), window=settings.window):
        console.warn(tell_cut(cut))
    model = open_model(subject.model)
    started = time.perf_counter()
    with _shown_progress(console) as show:
        outcome = run_audit(
            documents=subject.documents,
            model=model,
            base=None if subject.base is None else open_model(subject.base, subject.base_revision),
            reference=None if subject.reference is None else open_model(subject.reference),
            canaries=subject.canaries,
            suite=suite,
            tally=subject.tally,
            tiny_margin=TINY_MARGINS[settings.dtype],
            seed=subject.seed,
            window=settings.window,
            min_documents=settings.min_documents,
            max_documents_per_bucket=settings.max_documents_per_bucket,
            workshop=open_workshop(subject, suite, settings, runtime, show),
        )
    wall_s = time.perf_counter() - started

    def finish() -> AuditReport:
        report = _describe(
            subject, settings, suite, outcome, model, hashes, command, wall_s, runtime, banners
        )
        _write(subject, settings, outcome, report)
        return report

    written = runtime.only_on_main(finish)
    report = runtime.broadcast_object(written)
    console.info(f"audit: probes that ran: {write_ran(report)}")
    not_run = write_not_run(report)
    if not_run:
        console.info(f"audit: not run: {not_run}")
    console.info(f"audit: report in {subject.out / 'report.html'}")
    return report


def _compare_kinds(
    subject: Subject, settings: AuditConfig, suite: Suite, console: Console
) -> list[Banner]:
    """Warn where members and nonmembers are different kinds of text; before weights are read.

    Raises:
        DataError: see `select_windows`.
    """
    if subject.run is not None:
        return []  # A run draws its control from the documents that it trains.
    selection = select_windows(
        subject.documents,
        suite.extraction,
        seed=subject.seed,
        min_documents=settings.min_documents,
        max_documents_per_bucket=settings.max_documents_per_bucket,
    )
    told = compare_kinds([window.document for window in selection.windows], seed=subject.seed)
    if not told:
        return []
    console.warn(told)
    return [Banner(level="warning", text=told)]


def _check_base(subject: Subject, hashes: Mapping[str, str | None]) -> None:
    """Refuse another base than the one that an earlier report of this model names by its hash."""
    known = subject.known_base
    if subject.base is None or known is None or known.model_sha256 != hashes[subject.model]:
        return
    if hashes[subject.base] not in (None, known.base_sha256):
        raise ModelError(
            f"the model before training: '{subject.base}' has other weights than the run was "
            f"audited with before (sha256 {hashes[subject.base]}, not {known.base_sha256}). Name "
            "the right one with --base DIR, or leave it out with --no-base"
        )


def _check_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Told before the hours of scoring, not after.
    tempfile.TemporaryFile(dir=folder).close()


def _describe(
    subject: Subject,
    settings: AuditConfig,
    suite: Suite,
    outcome: AuditOutcome,
    model: LoadedWhenAsked,
    hashes: Mapping[str, str | None],
    command: str,
    wall_s: float,
    runtime: Runtime,
    banners: Sequence[Banner],
) -> AuditReport:
    summary = outcome.summary
    return AuditReport(
        tool_version=memguard.__version__,
        created=_now(),
        run=subject.run,
        model=ModelIdentity(
            name=subject.run or _short_name(subject.model),
            weights_sha256=_identify(subject.model, hashes),
            num_parameters=model.num_parameters,
            base=subject.base and _short_name(subject.base),
            base_weights_sha256=subject.base and _identify(subject.base, hashes),
        ),
        data=subject.data,
        training=subject.training,
        method=_method(suite, settings, subject.seed, command, wall_s),
        probe_runs=summary.probe_runs,
        verdict=summary.verdict,
        banners=[
            *banners,
            *summary.banners,
            *(Banner(level="note", text=text) for text in subject.notes),
        ],
        buckets=summary.buckets,
        generated=summary.generated,
        base_generated=summary.base_generated,
        dose_response=summary.dose_response,
        membership=summary.membership,
        findings=summary.findings,
        num_findings=summary.num_findings,
        cut=summary.cut,
        measures=summary.measures,
        attack_cost=summary.attack_cost,
        attacks=summary.attacks,
        extracted_copies=summary.extracted_copies,
        canaries=summary.canaries,
        mask_changes=summary.mask_changes,
        trends=summary.trends,
        environment=describe_environment(runtime.device, runtime.world_size),
    )


def _write(
    subject: Subject, settings: AuditConfig, outcome: AuditOutcome, report: AuditReport
) -> None:
    save_scores(outcome.scores, subject.out / "records.parquet")
    save_record(report, subject.out / "report.json")
    write_atomically(subject.out / "report.html", render_report(report).encode())
    if settings.excerpts:
        _write_excerpts(subject, outcome)


def _final_suite(settings: AuditConfig) -> Suite:
    """Return the suite with the values put in that the audit's settings give."""
    suite = load_suite(settings.suite)
    probe = load_probe(settings)
    probes = tuple(probe if each is suite.extraction else each for each in suite.probes)
    return suite.model_copy(update={"probes": probes})


def describe_probe(probe: Probe) -> dict[str, Any]:
    """Return a probe's name, version and parameters, as reports carry them."""
    return {"name": probe.name, "version": probe.VERSION, **probe.model_dump(mode="json")}


def _method(suite: Suite, settings: AuditConfig, seed: int, command: str, wall_s: float) -> Method:
    probe = suite.extraction
    return Method(
        suite=suite.name,
        suite_version=suite.version,
        probes=[describe_probe(each) for each in suite.probes],
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


def _short_name(path: str) -> str:
    """Return a folder's last two parts; a report is shared, where it lay on this machine is not."""
    return "/".join(Path(path).resolve().parts[-2:]) if Path(path).is_dir() else path


def _hash_if_folder(path: str) -> str | None:
    return hash_weights(path) if Path(path).is_dir() else None


def _identify(path: str, hashes: Mapping[str, str | None]) -> str:
    return hashes[path] or f"hub id {path}, not hashed"


def _now() -> str:
    """Return the time in UTC; SOURCE_DATE_EPOCH fixes it for byte-equal reports."""
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    moment = datetime.fromtimestamp(int(fixed), UTC) if fixed else datetime.now(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


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


def _write_excerpts(subject: Subject, outcome: AuditOutcome) -> None:
    """Write the findings' text, or ids without a tokenizer, where only this user can read it."""
    decode: Callable[[Any], str] = str
    if subject.has_tokenizer:
        decode = load_tokenizer(subject.model).decode
    documents = {document.id: document for document in subject.documents}
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
    private = subject.out / "private"
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)
    write_atomically(private / "excerpts.txt", "\n".join(parts).encode(), mode=0o600)
