"""What is audited of a run: its plan from the files of the run, and the models and data named."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from memguard.audit.benchmarks.tasks import OpenedTask
from memguard.audit.plan import AuditPlan
from memguard.audit.probes.canary_results import AuditCanary
from memguard.audit.selection import Identify, WhichWindow, choose_part, list_pieces
from memguard.audit.statistics import clopper_pearson
from memguard.audit.suite import Suite, load_audit_suite
from memguard.audit.warnings import Tally
from memguard.audit.windows import SECRET, TINY_MARGINS, AuditDocument, WindowSettings
from memguard.compare import find_early_end
from memguard.config import MitigationConfig, RunConfig
from memguard.data.corpus import Corpus, load_corpus
from memguard.data.documents import say_empty
from memguard.data.packing import split_points
from memguard.data.token_checks import Tokens, find_training_faults
from memguard.data.tokenization import TokenizedDocument
from memguard.errors import DataError, ModelError, plural
from memguard.hf.adapter_config import find_moved_base
from memguard.hf.checkpoint import load_config, load_tokenizer
from memguard.mitigation.k_schedule import compute_doses
from memguard.records import (
    DataIdentity,
    ManifestEntry,
    ModelIdentity,
    TrainingSummary,
    WatchedLine,
)
from memguard.records.run_files import has_weights
from memguard.runtime import Console
from memguard.train.log_summary import summarise_training
from memguard.train.metrics import EndMetrics, MetricsLine, hash_tally, read_metrics
from memguard.workflows.auditing.checks import CheckedAudit
from memguard.workflows.auditing.model_in_memory import ModelInMemory
from memguard.workflows.auditing.pages import load_former_report


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What an audit is about, beside its plan: models, tokenizer, and what the report says of them.

    The last fields are those of a run that memguard trained.
    """

    model: str | ModelInMemory
    base: str | ModelInMemory | None
    reference: str | None
    """Another model of the same vocabulary."""
    data: DataIdentity
    out: Path
    tokenizer: Any
    """None if the model's folder has no tokenizer; the documents are then token ids."""
    notes: Sequence[str] = ()
    """Notes shown in the report before the numbers."""
    run: str | None = None
    adapter_base: str | None = None
    """Present location of the base that the run's adapters belong to; None if it was not named."""
    base_revision: str | None = None
    attn: str | None = None
    mitigations: Sequence[MitigationConfig] = ()
    training: TrainingSummary | None = None
    watched: Sequence[WatchedLine] = ()
    """Audits during training."""
    before: ModelIdentity | None = None
    """The models named in an earlier report of the run; None without a report."""
    card_of: RunConfig | None = None
    """The run's settings if its model card shows this audit; None if `--out` is elsewhere."""


def choose_piece(
    tokens: TokenizedDocument,
    identify: Identify,
    *,
    seq_len: int,
    probe: WindowSettings,
    window: WhichWindow,
) -> AuditDocument:
    """Return the piece of a document that is audited, cut as in training to ``seq_len`` tokens.

    ``probe`` decides which pieces can be audited, ``window`` which of them is chosen.
    """
    pieces = list_pieces(split_points(len(tokens.input_ids), seq_len))
    return choose_part(tokens, pieces, identify, kind="piece", probe=probe, window=window)


def name_buckets(manifest: Sequence[ManifestEntry], counts: Sequence[int | None]) -> list[str]:
    """Return each document's bucket name, split by repetitions if training ended early."""
    doses: dict[str, set[int | None]] = {}
    for entry, count in zip(manifest, counts, strict=True):
        doses.setdefault(entry.bucket, set()).add(count)
    return [
        f"{entry.bucket}, {count} times"
        if entry.role in ("trained", "forget") and len(doses[entry.bucket]) > 1
        else entry.bucket
        for entry, count in zip(manifest, counts, strict=True)
    ]


def _identify(entry: ManifestEntry, **others: Any) -> Identify:
    same = ("id", "role", "source", "text_hmac", "has_own_id")
    return partial(AuditDocument, **{name: getattr(entry, name) for name in same}, **others)


def list_audited(
    corpus: Corpus,
    counts: Sequence[int | None],
    suite: Suite,
    config: RunConfig,
    *,
    window: WhichWindow,
) -> list[AuditDocument]:
    """Return the documents that an audit may measure: trained, control, and to be forgotten.

    ``counts`` is how often each was, or will be, trained.
    """
    probe, seq_len = suite.extraction, config.data.seq_len
    names = name_buckets(corpus.manifest, counts)
    copies = Counter(
        entry.cluster
        for entry, count in zip(corpus.manifest, counts, strict=True)
        if entry.role in ("trained", "background") and count != 0
    )
    # From planned repetitions, as in training: a run that ended early masked labels by these.
    doses = compute_doses(corpus.manifest).tolist()
    return [
        choose_piece(
            corpus.document(index),
            _identify(
                entry,
                bucket=name,
                num_repetitions=0 if entry.role == "control" else count,
                cluster=entry.cluster,
                num_copies=copies[entry.cluster],
                dose=dose,
            ),
            seq_len=seq_len,
            probe=probe,
            window=window,
        )
        for index, (entry, name, count, dose) in enumerate(
            zip(corpus.manifest, names, counts, doses, strict=True)
        )
        # A run that ended early did not reach some documents, which are neither trained nor a fair
        # control. Documents to be forgotten are audited even if not reached.
        if entry.role in ("control", "forget") or (entry.role == "trained" and count != 0)
    ]


def list_canaries(corpus: Corpus, *, seq_len: int) -> list[AuditCanary]:
    """Return the run's canaries in the order in which they were drawn."""
    return [
        AuditCanary(
            document=choose_piece(
                corpus.document(index),
                _identify(entry, bucket=entry.bucket, num_repetitions=entry.num_repetitions),
                seq_len=seq_len,
                probe=SECRET,
                window="last",
            ),
            was_trained=entry.planned_repetitions > 0,
            num_loss_tokens=entry.num_loss_tokens,
            num_losses=entry.num_losses,
        )
        for index, entry in sorted(enumerate(corpus.manifest), key=lambda pair: pair[1].id)
        if entry.role == "canary"
    ]


def find_base(folder: Path, config: RunConfig, named: str | None = None) -> str | None:
    """Return the model that a run started from; None if it started from random weights.

    The path in the settings is tried first, then the same relative path from the run's current
    folder, since a sweep may be moved together with its models. ``named``, a path given by the
    user, is tried alone.
    """
    path = config.model.path
    if path is None:
        if named is not None:
            raise ModelError(
                f"--base '{named}': this run started from random weights ('model.scratch'). Leave "
                "it out"
            )
        return None
    if named is not None:
        load_config(named)  # Raises an error if there is no model.
        return named
    if (moved := find_moved_base(folder, config)) is not None:
        return moved
    try:
        load_config(path, revision=config.model.revision)
    except ModelError as error:
        # Adapters cannot be audited without it.
        other = "" if config.adapter is not None else ", or leave it out with audit.base=false"
        raise ModelError(
            f"the model before training: {error}. Name it with --base DIR{other}"
        ) from error
    return path


def plan_run(
    checked: CheckedAudit, tasks: Sequence[OpenedTask] = (), *, console: Console | None = None
) -> tuple[AuditPlan, Subject]:
    """Return what a run's audit measures: its trained and control documents, and its model.

    ``console`` is warned of tokens that make training and audit wrong; None: training has warned.
    """
    run, settings = checked.run, checked.settings
    assert run is not None, "the audit is of a run"
    assert isinstance(checked.model, str), "a run has its model in a folder"
    folder, config = run.folder, run.config
    if not has_weights(folder):
        raise ModelError(
            f"'{folder}' has no model/ yet: finish it with memguard train {folder}/config.yaml"
        )
    base = find_base(folder, config, run.base) if settings.base else None
    corpus = load_corpus(folder)
    counts = [entry.num_repetitions for entry in corpus.manifest]
    documents = list_audited(corpus, counts, checked.suite, config, window=settings.window)
    num_trained = sum(document.role == "trained" for document in documents)
    early = find_early_end(config) if config.train.max_steps is None else "train.max_steps"
    if early and num_trained < settings.min_documents:
        raise DataError(
            f"with '{early}' the model was trained on {plural(num_trained, 'document')} in full; "
            f"'audit.min_documents' is {settings.min_documents}. "
            "Train longer under another 'name', or set audit.enabled=false"
        )
    tokenizer = load_tokenizer(checked.model, base=run.base)
    if console is not None:
        model_config = load_config(checked.model, base=run.base)
        warn_of_faults(corpus, tokenizer, model_config, config, console)
    summary, report = corpus.summary, load_former_report(folder / "audit")
    metrics = list(read_metrics(folder / "metrics.jsonl"))
    plan = AuditPlan.of(
        documents,
        checked.suite,
        seed=config.seed,
        min_documents=settings.min_documents,
        max_documents_per_bucket=settings.max_documents_per_bucket,
        tiny_margin=TINY_MARGINS[settings.dtype],
        canaries=list_canaries(corpus, seq_len=config.data.seq_len),
        tally=_check_tally(metrics, corpus.manifest),
        has_given_control=bool(config.data.control),
        window=settings.window,
        tasks=tasks,
    )
    subject = Subject(
        model=checked.model,
        tokenizer=tokenizer,
        base=base,
        reference=settings.reference,
        data=DataIdentity(
            sources=summary.sources,
            documents_sha256=summary.documents_sha256,
            num_documents=summary.num_documents,
            num_clusters=summary.num_clusters,
            overlap_with_control=clopper_pearson(
                summary.num_control_overlapping, summary.num_control
            ),
            near_duplicate_words=config.data.near_duplicate_words,
            identity_key=summary.identity_key,
            # Different texts, without canaries; they cannot be told apart without a key.
            num_texts=None
            if summary.identity_key is None
            else len({entry.text_hmac for entry in corpus.manifest if entry.role != "canary"}),
        ),
        out=checked.out,
        run=config.name,
        adapter_base=run.base,
        base_revision=config.model.revision if base == config.model.path else None,
        attn=config.model.attn_implementation,
        mitigations=config.mitigations,
        training=summarise_training(metrics, config, summary.num_removed),
        watched=[line for line in metrics if isinstance(line, WatchedLine)],
        before=None if report is None else report.model,
        card_of=config if checked.writes_run_audit else None,
        notes=_note_not_reached(corpus.manifest, run.step),
    )
    return plan, subject


def plan_training(
    config: RunConfig,
    corpus: Corpus,
    counts: Sequence[int | None],
    *,
    min_documents: int,
    size: int | None,
) -> AuditPlan:
    """Return what is measured of a run that is being trained, or will be.

    ``counts`` is how often each document will have been trained in full, ``min_documents`` how many
    of those must be long enough, ``size`` that of the sample of each bucket; None takes all.
    """
    suite, window = load_audit_suite(config.audit), config.audit.window
    return AuditPlan.of(
        list_audited(corpus, counts, suite, config, window=window),
        suite,
        seed=config.seed,
        min_documents=min_documents,
        max_documents_per_bucket=size,
        window=window,
    )


def warn_of_faults(
    corpus: Corpus, tokenizer: Any, model_config: Any, config: RunConfig, console: Console
) -> None:
    """Warn of tokens that make training and audit of a run silently wrong."""
    if num := corpus.summary.num_empty:
        console.warn(f"documents: {say_empty(num)} left out")
    tokens = Tokens.of_corpus(corpus)
    for fault in find_training_faults(tokens, tokenizer, model_config, config.data):
        console.warn(fault.text)


def _note_not_reached(manifest: Sequence[ManifestEntry], step: int | None) -> tuple[str, ...]:
    first = () if step is None else (f"The model is that of step {step:,}, from its checkpoint.",)
    trained = [entry for entry in manifest if entry.role == "trained"]
    num = sum(entry.num_repetitions == 0 for entry in trained)
    if not num:
        return first
    return (
        *first,
        f"{num:,} of {len(trained):,} documents {'was' if num == 1 else 'were'} not trained in "
        "full when the run ended, and not audited.",
    )


def _check_tally(lines: Sequence[MetricsLine], manifest: Sequence[ManifestEntry]) -> Tally:
    """Compare the manifest's counts with the hash that training recorded when it ended."""
    counts = [entry.num_repetitions for entry in manifest]
    if None in counts:
        return "missing"
    end = next((line for line in lines if isinstance(line, EndMetrics)), None)
    agrees = end is not None and end.tally_sha256 == hash_tally(
        counts, [entry.num_tokens_fed for entry in manifest]
    )
    return "complete" if agrees else "contradicting"
