"""An audit of a run, or of any checkpoint: what the command line joins."""

import gc
import hashlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import memguard
from memguard.audit.banners import Tally
from memguard.audit.extraction import TINY_MARGINS, AuditDocument, TokenResult, Window
from memguard.audit.procedure import AuditOutcome, Stage, run_audit
from memguard.audit.scores_file import save_scores
from memguard.audit.scoring import ModelScorer, Progress
from memguard.audit.statistics import clopper_pearson
from memguard.audit.suite import Suite, load_suite
from memguard.cli.audit_request import AuditRequest
from memguard.config import AuditConfig, RunConfig, load_run_config
from memguard.data.corpus import Corpus, CorpusDocument, load_corpus
from memguard.data.documents import load_documents
from memguard.data.packing import split_points
from memguard.data.tokenization import TokenizedDocument, hash_tokens, tokenize_documents
from memguard.errors import ModelError
from memguard.parallel.vocab import build_vocab_layer
from memguard.parallel.weights import (
    count_parameters,
    hash_weights,
    load_model,
    load_tokenizer,
    max_positions,
)
from memguard.records import (
    AuditReport,
    DataIdentity,
    Method,
    ModelIdentity,
    Role,
    TrainingSummary,
    save_record,
    write_atomically,
)
from memguard.report import render_report
from memguard.runtime import (
    Console,
    default_cache_dir,
    describe_environment,
    detect_runtime,
    quiet_libraries,
)
from memguard.train.metrics import EndMetrics, HeldoutMetrics, hash_tally, read_metrics

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Without a stated limit a model is asked no more than this at once.
_DEFAULT_SEQ_LEN = 4096


def to_audit_document(
    tokens: CorpusDocument | TokenizedDocument,
    *,
    seq_len: int,
    id: str = "",
    bucket: str = "trained",
    role: Role = "trained",
    source: str = "",
    num_repetitions: int | None = None,
    text_hmac: str | None = None,
) -> AuditDocument:
    """Return the last piece of a document, as the model saw it in training, without its EOS."""
    ends = split_points(len(tokens.input_ids), seq_len)
    start = ends[-2] if len(ends) > 1 else 0
    cut = slice(start, max(start, tokens.num_content_tokens))
    return AuditDocument(
        id=id,
        bucket=bucket,
        role=role,
        source=source,
        num_repetitions=num_repetitions,
        input_ids=tokens.input_ids[cut],
        supervised=tokens.supervised[cut],
        format=tokens.format,
        num_tokens=len(tokens.input_ids),
        text_hmac=text_hmac,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """Everything an audit needs to know of what it measures."""

    documents: Sequence[AuditDocument]
    model: str
    base: str | None
    base_revision: str | None
    attn: str | None
    data: DataIdentity
    training: TrainingSummary | None
    tally: Tally
    run: str | None
    seed: int
    out: Path


def audit_request(request: AuditRequest, settings: AuditConfig) -> tuple[Path, AuditReport]:
    """Do what `memguard audit` was asked; return the folder and the report."""
    console = Console()
    quiet_libraries()
    command = shlex.join(["memguard", *sys.argv[1:]])
    if request.run is not None:
        subject = _describe_run(request.run, request.load_run(), settings, request.out)
    else:
        subject = _describe_checkpoint(request, console)
    return subject.out, _audit(subject, settings, console, command)


def audit_run(folder: Path, *, console: Console, command: str) -> AuditReport:
    """Audit a run as its own settings say; the report goes into its `audit/`."""
    config = load_run_config(folder / "config.yaml")
    subject = _describe_run(folder, config, config.audit, None)
    return _audit(subject, config.audit, console, command)


def _audit(subject: _Subject, settings: AuditConfig, console: Console, command: str) -> AuditReport:
    suite = _final_suite(settings)
    runtime = detect_runtime()
    subject.out.mkdir(parents=True, exist_ok=True)
    model = _LoadedWhenAsked(
        path=subject.model, revision=None, settings=settings, attn=subject.attn
    )
    base = subject.base and _LoadedWhenAsked(
        path=subject.base, revision=subject.base_revision, settings=settings, attn=subject.attn
    )
    started = time.perf_counter()
    with _shown_progress(console) as show:
        outcome = run_audit(
            documents=subject.documents,
            scorer=model,
            base_scorer=base or None,
            suite=suite,
            tally=subject.tally,
            tiny_margin=TINY_MARGINS[settings.dtype],
            seed=subject.seed,
            min_documents=settings.min_documents,
            max_documents_per_bucket=settings.max_documents_per_bucket,
            on_progress=show,
        )
    summary = outcome.summary
    report = AuditReport(
        status="complete",
        tool_version=memguard.__version__,
        created=_now(),
        run=subject.run,
        model=ModelIdentity(
            name=subject.run or _short_name(subject.model),
            weights_sha256=_identify(subject.model),
            num_parameters=model.num_parameters,
            base=subject.base and _short_name(subject.base),
            base_weights_sha256=subject.base and _identify(subject.base),
        ),
        data=subject.data,
        training=subject.training,
        method=_method(suite, settings, subject.seed, command, time.perf_counter() - started),
        verdict=summary.verdict,
        banners=summary.banners,
        buckets=summary.buckets,
        dose_response=summary.dose_response,
        membership=summary.membership,
        findings=summary.findings,
        num_findings=summary.num_findings,
        environment=describe_environment(runtime.device),
    )
    save_scores(outcome.scores, subject.out / "records.parquet")
    save_record(report, subject.out / "report.json")
    write_atomically(subject.out / "report.html", render_report(report).encode())
    if settings.excerpts:
        _write_excerpts(subject, outcome, load_tokenizer(subject.model))
    console.info(f"audit: report in {subject.out / 'report.html'}")
    return report


def _describe_run(
    folder: Path, config: RunConfig, settings: AuditConfig, out: Path | None
) -> _Subject:
    if not (folder / "model" / "config.json").is_file():
        raise ModelError(
            f"'{folder}' has no model/ yet: finish it with memguard train {folder}/config.yaml"
        )
    corpus = load_corpus(folder)
    doses: dict[str, set[int | None]] = {}
    for entry in corpus.manifest:
        doses.setdefault(entry.bucket, set()).add(entry.num_repetitions)
    documents = []
    for index, entry in enumerate(corpus.manifest):
        control, dose = entry.role == "control", entry.num_repetitions
        # A run that was ended early never reached some: neither trained nor a fair control.
        if not control and (entry.role != "trained" or dose == 0):
            continue
        mixed = len(doses[entry.bucket]) > 1
        documents.append(
            to_audit_document(
                corpus.document(index),
                seq_len=config.data.seq_len,
                id=entry.id,
                bucket=f"{entry.bucket}, {dose} times" if mixed else entry.bucket,
                role=entry.role,
                source=entry.source,
                num_repetitions=0 if control else dose,
                text_hmac=entry.text_hmac,
            )
        )
    summary = corpus.summary
    return _Subject(
        documents=documents,
        model=str(folder / "model"),
        base=config.model.path if settings.base else None,
        base_revision=config.model.revision,
        attn=config.model.attn_implementation,
        data=DataIdentity(
            sources=summary.sources,
            documents_sha256=summary.documents_sha256,
            num_documents=summary.num_documents,
            num_clusters=summary.num_clusters,
            overlap_with_control=clopper_pearson(
                summary.num_control_overlapping, summary.num_control
            ),
            near_duplicate_words=config.data.near_duplicate_words,
        ),
        training=_summarise_training(folder, config),
        tally=_check_tally(folder, corpus),
        run=config.name,
        seed=config.seed,
        out=out or folder / "audit",
    )


def _describe_checkpoint(request: AuditRequest, console: Console) -> _Subject:
    assert request.model is not None, "checked: there is a model"
    assert request.out is not None, "checked: there is a folder for the report"
    tokenizer = load_tokenizer(request.model)
    seq_len = max_positions(request.model) or _DEFAULT_SEQ_LEN
    documents: list[AuditDocument] = []
    sources: list[str] = []
    digest = hashlib.sha256()
    sides: tuple[tuple[str, Role, tuple[str, ...]], ...] = (
        ("members", "trained", request.members),
        ("nonmembers", "control", request.nonmembers),
    )
    for name, role, given in sides:
        if not given:
            continue
        console.info(f"{name}: reading {', '.join(given)}")
        loaded = load_documents(
            given,
            setting=f"--{name}",
            text_column=request.text_column,
            cache_dir=default_cache_dir(),
        )
        tokenized = tokenize_documents(
            loaded.documents, tokenizer, append_eos=False, max_tokens=None, setting=f"--{name}"
        )
        for tokens in tokenized:
            # Control ids may repeat those of members: row numbers of two files.
            id = tokens.id if role == "trained" else f"{name}:{tokens.id}"
            digest.update(f"{id}\0{name}\0{hash_tokens(tokens.input_ids)}\n".encode())
            documents.append(
                to_audit_document(
                    _last_tokens(tokens, seq_len),
                    seq_len=seq_len,
                    id=id,
                    bucket=name,
                    role=role,
                    source=tokens.source,
                )
            )
        sources += [source for source in given if source not in sources]
    return _Subject(
        documents=documents,
        model=request.model,
        base=request.base,
        base_revision=None,
        attn=None,
        data=DataIdentity(
            sources=[Path(source).name for source in sources],
            documents_sha256=digest.hexdigest(),
            num_documents=len(documents),
            num_clusters=None,
            overlap_with_control=None,
            near_duplicate_words=None,
        ),
        training=None,
        tally="missing",
        run=None,
        seed=request.seed,
        out=request.out,
    )


def _last_tokens(tokens: TokenizedDocument, seq_len: int) -> CorpusDocument:
    """Keep the last ``seq_len`` content tokens: how it was cut in training is not known."""
    cut = slice(max(0, tokens.num_content_tokens - seq_len), tokens.num_content_tokens)
    return CorpusDocument(
        input_ids=tokens.input_ids[cut],
        supervised=tokens.supervised[cut],
        num_content_tokens=cut.stop - cut.start,
        format=tokens.format,
    )


class _LoadedWhenAsked:
    """A scorer that loads its model when asked and frees it after: one in memory at a time."""

    def __init__(
        self, *, path: str, revision: str | None, settings: AuditConfig, attn: str | None
    ) -> None:
        self._path, self._revision, self._attn = path, revision, attn
        self._settings = settings
        self.num_parameters = 0

    def score(
        self, windows: Sequence[Window], on_progress: Progress | None = None
    ) -> list[TokenResult]:
        model = load_model(
            self._path,
            revision=self._revision,
            dtype=_DTYPES[self._settings.dtype],
            attn_implementation=self._attn,
        ).to(detect_runtime().device)
        self.num_parameters = count_parameters(model)
        scorer = ModelScorer(build_vocab_layer(model), self._settings.batch_tokens)
        results = scorer.score(windows, on_progress)
        del model, scorer
        gc.collect()
        return results


def _final_suite(settings: AuditConfig) -> Suite:
    """Return the suite with the values put in that the audit's settings give."""
    suite = load_suite(settings.suite)
    probe = suite.extraction.adapt(
        continuation_tokens=settings.continuation_tokens,
        prefix_tokens=settings.prefix_tokens,
        min_prefix_tokens=settings.min_prefix_tokens,
    )
    probes = tuple(probe if each is suite.extraction else each for each in suite.probes)
    return suite.model_copy(update={"probes": probes})


def _method(suite: Suite, settings: AuditConfig, seed: int, command: str, wall_s: float) -> Method:
    probe = suite.extraction
    return Method(
        suite=suite.name,
        suite_version=suite.version,
        probes=[each.model_dump(mode="json") for each in suite.probes],
        continuation_tokens=probe.continuation_tokens,
        prefix_tokens=probe.prefix_tokens,
        near_verbatim_threshold=probe.near_verbatim_threshold,
        tiny_margin=TINY_MARGINS[settings.dtype],
        dtype=settings.dtype,
        batch_tokens=settings.batch_tokens,
        seed=seed,
        command=command,
        wall_s=round(wall_s, 3),
    )


def _summarise_training(folder: Path, config: RunConfig) -> TrainingSummary | None:
    lines = list(read_metrics(folder / "metrics.jsonl"))
    end = next((line for line in lines if isinstance(line, EndMetrics)), None)
    if end is None:
        return None
    heldout = [line for line in lines if isinstance(line, HeldoutMetrics)]
    before = next((line for line in heldout if line.step == 0), None)
    after = next((line for line in heldout if line.step == end.step), None)
    dropped = 1 - end.num_kept_tokens / max(1, end.num_supervised_tokens)
    return TrainingSummary(
        num_steps=end.step,
        num_supervised_tokens=end.num_kept_tokens,
        dropped_fraction=dropped if config.mitigations else None,
        mitigations=[each.model_dump(mode="json") for each in config.mitigations],
        train_s=end.train_s,
        heldout_nll=after and after.nll,
        base_heldout_nll=before and before.nll,
        heldout_bucket=after and after.bucket,
        heldout_num_documents=after.num_documents if after else 0,
        heldout_num_tokens=after.num_tokens if after else 0,
    )


def _check_tally(folder: Path, corpus: Corpus) -> Tally:
    """Compare the manifest's counts with what training recorded when it ended."""
    counts = [entry.num_repetitions for entry in corpus.manifest]
    if any(count is None for count in counts):
        return "missing"
    lines = read_metrics(folder / "metrics.jsonl")
    end = next((line for line in lines if isinstance(line, EndMetrics)), None)
    agrees = end is not None and end.tally_sha256 == hash_tally(counts)
    return "complete" if agrees else "contradicting"


def _short_name(path: str) -> str:
    """Return a folder's last two parts; a report is shared, where it lay on this machine is not."""
    return "/".join(Path(path).resolve().parts[-2:]) if Path(path).is_dir() else path


def _identify(path: str) -> str:
    return hash_weights(path) if Path(path).is_dir() else f"hub id {path}, not hashed"


def _now() -> str:
    """Return the time in UTC; SOURCE_DATE_EPOCH fixes it for byte-equal reports."""
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    moment = datetime.fromtimestamp(int(fixed), UTC) if fixed else datetime.now(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def _shown_progress(console: Console) -> Iterator[Any]:
    with ExitStack() as stack:
        shown: dict[Stage, Any] = {}
        done_before: dict[Stage, int] = {}

        def show(stage: Stage, done: int, total: int) -> None:
            if stage not in shown:
                what = "audit" if stage == "model" else "audit of the base model"
                shown[stage] = stack.enter_context(console.progress(what, total, "documents"))
            shown[stage](done - done_before.get(stage, 0), "")
            done_before[stage] = done

        yield show


def _write_excerpts(subject: _Subject, outcome: AuditOutcome, tokenizer: Any) -> None:
    """Write the findings' text where only this user can read it."""
    documents = {document.id: document for document in subject.documents}
    scores = {score.id: score for score in outcome.scores}
    parts = []
    for finding in outcome.summary.findings:
        ids = documents[finding.id].input_ids
        split = len(ids) - scores[finding.id].continuation_tokens
        prefix, continuation = tokenizer.decode(ids[:split]), tokenizer.decode(ids[split:])
        parts.append(
            f"== {finding.id}: {finding.sentence}\n-- prefix\n{prefix}\n-- continuation\n"
            f"{continuation}\n"
        )
    private = subject.out / "private"
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)
    write_atomically(private / "excerpts.txt", "\n".join(parts).encode(), mode=0o600)
