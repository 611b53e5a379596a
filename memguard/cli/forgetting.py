"""A run that trains a finished one's model on until it forgets what its audit found."""

import math
from collections.abc import Set
from pathlib import Path
from statistics import fmean
from typing import Any

from memguard.compare import find_recited
from memguard.config import GoldfishConfig, RunConfig, apply_settings
from memguard.data.corpus import load_corpus
from memguard.data.forget_list import ForgetList, write_forget_list
from memguard.records import AuditReport, BucketScores
from memguard.runtime import Console, default_cache_dir

_EPOCHS = 5
_FORGOTTEN_TIMES = 6
"""The list once more than what is retained: the last word is its own."""
_LR_SHARE = 0.3
"""Of the learning rate that taught it: what is retained was learnt already."""
_NATS_A_LABEL = 0.5
"""A piece that has lost so much on average counts as forgotten; see NpoConfig.beta."""


def make_forgetting_run(folder: Path, config: RunConfig, console: Console) -> RunConfig | None:
    """Return a run, NAME-forget, that goes on with 'npo' against what the model recites.

    The lists of documents lie in the old run's private folder.

    Args:
        folder: of a finished run.
        config: its settings.
        console: told what is forgotten.

    Returns:
        The run's settings; None where no trained document comes back.

    Raises:
        DataError: documents have changed since, or none is left to be retained.
    """
    recited = find_recited(folder)
    if not any(recited.values()):
        console.info("nothing to forget: no trained document is extracted near-verbatim")
        return None
    lists = write_forget_list(config, folder, recited, cache_dir=default_cache_dir())
    console.info(
        f"to be forgotten: {len(lists.forgotten):,} documents, recited or near-duplicates of such; "
        f"retained: {lists.num_retained:,}"
    )
    return _make_run(config, folder, lists)


def _make_run(config: RunConfig, folder: Path, lists: ForgetList) -> RunConfig:
    goldfish = [one for one in config.mitigations if isinstance(one, GoldfishConfig)]
    labels = _count_labels(folder, lists.forgotten, config.data.seq_len)
    npo = {"name": "npo", "beta": float(f"{1 / (_NATS_A_LABEL * labels):.2g}")}
    settings: dict[str, Any] = {
        "name": f"{config.name}-forget",
        "output_dir": str(folder.resolve().parent),
        "model": {"path": str(folder / "model")},
        "mitigations": [*(one.model_dump(mode="json") for one in goldfish), npo],
        "budget": None,
        "optim.lr": float(f"{_LR_SHARE * config.optim.lr:.2g}"),
        "train.epochs": _EPOCHS,
        "train.max_steps": None,
        "data.train": list(lists.train),
        "data.forget": list(lists.forget),
        "data.forget_repetitions": _FORGOTTEN_TIMES,
        "data.control": list(lists.control),
        "data.control_fraction": 0,
        "data.heldout": list(lists.heldout),
        "data.heldout_documents": 0,
        "data.study": None,
        "data.background": [],
        "data.canaries": {"count": 0},
        "audit.base": True,
        "audit.enabled": True,
    }
    return RunConfig.model_validate(apply_settings(config.model_dump(mode="json"), settings))


def _count_labels(folder: Path, ids: Set[str], seq_len: int) -> float:
    """Return the mean number of labels of a piece of these documents, prompts left out."""
    corpus = load_corpus(folder)
    counts = [
        int(corpus.document(index).supervised.sum()) / math.ceil(entry.num_tokens / seq_len)
        for index, entry in enumerate(corpus.manifest)
        if entry.id in ids
    ]
    return max(1.0, fmean(counts))


def tell_forgotten(report: AuditReport) -> str:
    """Say what was extracted before and after, of what is forgotten and of what is retained."""
    return "; ".join(
        f"{name}: {_count(report, role, 'base')} extracted near-verbatim before, "
        f"{_count(report, role, 'model')} now"
        for name, role in (("forgotten", "forget"), ("retained", "trained"))
    )


def _count(report: AuditReport, role: str, model: str) -> str:
    buckets: list[BucketScores] = [one for one in report.buckets if one.role == role]
    scores = [one.base if model == "base" else one.model for one in buckets]
    # Verbatim where nothing was generated.
    rates = [one.near_verbatim or one.verbatim for one in scores if one is not None]
    return f"{sum(r.num_matched for r in rates):,} of {sum(r.num_documents for r in rates):,}"
