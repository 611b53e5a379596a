"""The study of an audit's arithmetic: what changes if the same models are audited in bf16.

    fp32     weights, hidden states and logits in fp32
    mixed    weights and hidden states in bf16, products of the head summed in fp32: what
             `audit.dtype: bf16` does
    bf16     the same, with logits rounded to bf16, which nothing in memguard does

The models are those of the quickstart, of the study of adapters, and of README's LoRA run. Every
document, trained or not, is compared with itself: what each audit says of it, and whether the audit
in bf16 names a near-tie of it.
"""

import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import yaml
from study_common import QUICK_PRETRAIN, ROOT, STUDIES, mean, run_compare
from torch import Tensor

from memguard import api
from memguard.audit.statistics.rates import clopper_pearson
from memguard.config import apply_overrides, load_yaml
from memguard.model import next_token, token_scores
from memguard.records import AuditReport, load_record, write_parameters
from memguard.records.audit_files import REPORT, SCORES

ARITHMETICS = ("fp32", "mixed", "bf16")
OUTCOMES = {
    "verbatim": "extraction.verbatim",
    "near-verbatim": "extraction.near_verbatim",
    "in the list of extracted documents": "extracted",
    "sampled within the limit": "sampling.within_limit",
    "attack cost is infinite": "never",
    "another window": "extraction.other_window",
}
"""What an audit says of a document: 0, 1 or not measured."""
NEAR_TIE, NUM_CORRECT = "extraction.tiny_margin", "extraction.num_correct"
COST, LOSS, MARGIN = "sampling.log10_queries", "membership.loss", "extraction.min_margin"
LORA = {
    "name": "lora",
    "adapter": {"name": "lora", "r": 16},
    "mitigations": [{"name": "goldfish", "k": 4}],
    "optim": {"lr": 1e-3},
    "train": {"epochs": 3, "batch_size": 16},
}
"""README's run, without its places."""
BETWEEN = (
    "seeds=[0, 1]",
    "settings=[{name: plain}]",
    "run.data.study.num_repetitions=[0, 12, 16, 20, 24, 28, 32, 36]",
)
"""The quickstart's run with doses at which some documents are extracted and others are not."""
QUICK_STUDY = (
    *QUICK_PRETRAIN,
    "run.data.study={num_repetitions: [0, 4], documents_per_bucket: 6}",
    "run.data.heldout_documents=10",
    "seeds=[0]",
)


def run(output_dir: Path, *, jobs: int, quick: bool, overrides: Sequence[str]) -> str:
    """Train the models, audit each in every arithmetic, and return the tables."""
    added = QUICK_STUDY if quick else ()
    seeds = () if quick else ("seeds=[0, 1, 2]",)
    output_dir = ROOT / output_dir
    groups: dict[str, list[Path]] = {}
    sweeps = {
        "quickstart": (ROOT / "configs" / "quickstart.yaml", seeds),
        "between": (ROOT / "configs" / "quickstart.yaml", () if quick else BETWEEN),
        "adapters": (STUDIES / "audit_dtype.yaml", tuple(overrides)),
    }
    for label, (path, changes) in sweeps.items():
        # Only the audits below count; those of the sweep are the cheapest.
        values = apply_overrides(load_yaml(path), [*added, *changes]).values
        name = f"audit-dtype-{label}{'-quick' * quick}"
        folder = output_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        values = {**values, "name": name, "output_dir": str(output_dir)}
        values["run"] = {**values["run"], "audit": {"suite": "extraction"}}
        (folder / "sweep.yaml").write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
        for one in run_compare(folder / "sweep.yaml", folder, jobs=jobs, overrides=()).runs:
            groups.setdefault(f"{label}, {one.setting}", []).append(folder / one.run)
    plain = groups["quickstart, plain"][0]
    groups["README's LoRA run"] = [train_lora(plain, output_dir / f"audit-dtype{'-quick' * quick}")]
    compared = {name: [compare(folder) for folder in folders] for name, folders in groups.items()}
    return "\n\n".join([write_groups(compared), write_changes(compared), write_numbers(compared)])


def train_lora(plain: Path, output_dir: Path) -> Path:
    """Train README's LoRA run on the documents of the quickstart that it names."""
    output_dir.mkdir(parents=True, exist_ok=True)
    texts = output_dir / "documents.jsonl"
    if not texts.is_file():
        work = output_dir / "work" / "runs" / "quickstart"
        work.mkdir(parents=True, exist_ok=True)
        (work / "plain").unlink(missing_ok=True)
        (work / "plain").symlink_to(plain)
        script = ROOT / "scripts" / "example_documents.py"
        subprocess.run([sys.executable, str(script)], check=True, cwd=output_dir / "work")
        (output_dir / "work" / "documents.jsonl").rename(texts)
    values = {
        **LORA,
        "output_dir": str(output_dir),
        "model": {"path": str(plain.parent / "base" / "model")},
        "data": {"train": [str(texts)], "seq_len": 128},
    }
    config = output_dir / "run.yaml"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    command = [sys.executable, "-m", "memguard", "train", str(config)]
    subprocess.run(command, check=True, cwd=ROOT)
    return output_dir / "lora"


@contextmanager
def rounded_logits() -> Iterator[None]:
    """Round all logits to bf16 inside this block."""
    write, compute = token_scores._write_logits, next_token.compute_logits

    def write_rounded(head: Any, hidden_CD: Tensor, logits_CV: Tensor) -> None:
        write(head, hidden_CD, logits_CV)
        logits_CV.copy_(logits_CV.bfloat16())

    def compute_rounded(head: Any, hidden_CD: Tensor) -> Tensor:
        return compute(head, hidden_CD).bfloat16().float()

    with (
        mock.patch.object(token_scores, "_write_logits", write_rounded),
        mock.patch.object(next_token, "compute_logits", compute_rounded),
    ):
        yield


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Audited:
    """One audit of a run."""

    report: AuditReport
    columns: Mapping[str, np.ndarray]
    """[N] numbers of the audited documents, NaN where not measured."""


def audit(folder: Path, arithmetic: str) -> Audited:
    """Audit a run with the quickstart's suite, unless it was done."""
    out = folder.parent / "audits" / arithmetic / folder.name
    if not (out / REPORT).is_file():
        dtype = "fp32" if arithmetic == "fp32" else "bf16"
        wanted = {"suite": "quickstart", "cache": False, "dtype": dtype}
        if arithmetic == "bf16":
            with rounded_logits():
                api.audit(folder, out=out, **wanted)
        else:
            api.audit(folder, out=out, **wanted)
    table = pq.read_table(out / SCORES).to_pydict()
    rows = [row for row, why in enumerate(table["not_audited"]) if not why]
    columns = {
        name: np.array([np.nan if values[row] is None else values[row] for row in rows], float)
        for name, values in table.items()
        if name.partition(".")[2] and not isinstance(next(filter(None, values), 0), str)
    }
    extracted = [values for name, values in columns.items() if is_extracted(name)]
    # It may be beyond what any number of queries draws.
    columns["never"] = np.isinf(columns[COST]).astype(float)
    columns["extracted"] = np.nanmax(np.stack(extracted), axis=0)
    return Audited(report=load_record(AuditReport, out / REPORT), columns=columns)


def is_extracted(name: str) -> bool:
    """Whether a column says that a probe extracts a document from the trained model."""
    return name.endswith(".extracted") and not name.startswith("base.")


def compare(folder: Path) -> dict[str, Audited]:
    """Return the audits of a run by arithmetic."""
    return {name: audit(folder, name) for name in ARITHMETICS}


Compared = Mapping[str, Sequence[Mapping[str, Audited]]]


def write_groups(compared: Compared) -> str:
    """Return verdicts and counts by models and arithmetic."""
    lines = [
        "Sums over the seeds; badges of each seed. *Not named*: documents whose verbatim or "
        "near-verbatim result differs from fp32 without a near-tie that the audit names.",
        "",
        "| models | arithmetic | badges | verbatim | near-verbatim | near-ties | differ from fp32 "
        "| not named |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, audits in compared.items():
        num = sum(len(one["fp32"].columns[NEAR_TIE]) for one in audits)
        for arithmetic in ARITHMETICS:
            ours = [one[arithmetic] for one in audits]
            badges = "; ".join(
                text if number == 1 else f"{text} ({number} seeds)"
                for text, number in _count([_write_badges(each.report) for each in ours]).items()
            )
            counts = [
                f"{sum(np.nansum(each.columns[column]) for each in ours):.0f}"
                for column in ("extraction.verbatim", "extraction.near_verbatim", NEAR_TIE)
            ]
            differ = [list_changed(one, arithmetic) for one in audits]
            cells = [
                f"{name}, {num} documents" if arithmetic == "fp32" else "",
                arithmetic,
                badges,
                *counts,
                *(
                    "" if arithmetic == "fp32" else str(sum(map(len, part)))
                    for part in zip(*differ, strict=True)
                ),
            ]
            lines.append(f"| {' | '.join(cells)} |".replace("fp32 |  |", "fp32 | |"))
    return "\n".join(lines)


def _count(texts: Sequence[str]) -> dict[str, int]:
    return {text: texts.count(text) for text in texts}


def _write_badges(report: AuditReport) -> str:
    return ", ".join(badge.state for badge in report.verdict.badges)


def list_changed(
    one: Mapping[str, Audited],
    arithmetic: str,
    names: Sequence[str] = ("verbatim", "near-verbatim"),
) -> tuple[list[int], list[int]]:
    """Return documents of which an audit says another thing than in fp32, and those not named."""
    ours, fp32 = one[arithmetic].columns, one["fp32"].columns
    changed_N = np.any(
        [
            (ours[OUTCOMES[name]] != fp32[OUTCOMES[name]])
            & ~(np.isnan(ours[OUTCOMES[name]]) & np.isnan(fp32[OUTCOMES[name]]))
            for name in names
            if OUTCOMES[name] in ours
        ],
        axis=0,
    )
    unnamed_N = changed_N & ~(ours[NEAR_TIE] > 0)
    return list(np.flatnonzero(changed_N)), list(np.flatnonzero(unnamed_N))


def write_changes(compared: Compared) -> str:
    """Return how often an outcome changes, with 95 % intervals."""
    audits = list(itertools.chain(*compared.values()))
    lines = [
        "Documents of which the audit says something else than in fp32, all models together; 95 % "
        "intervals (Clopper-Pearson; seeds and settings taken as independent).",
        "",
        "| outcome | mixed | of them not named | bf16 | of them not named |",
        "|---|---|---|---|---|",
    ]
    for name in OUTCOMES:
        cells = []
        num = sum(len(one["fp32"].columns[NEAR_TIE]) for one in audits)
        for arithmetic in ARITHMETICS[1:]:
            changed = [list_changed(one, arithmetic, [name]) for one in audits]
            number, unnamed = (sum(map(len, part)) for part in zip(*changed, strict=True))
            rate = clopper_pearson(number, num)
            low, high = (100 * end for end in rate.ci)
            cells += [f"{number} of {num}: {100 * number / num:.2f} % [{low:.2f}, {high:.2f}]"]
            cells += [str(unnamed)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_numbers(compared: Compared) -> str:
    """Return by how much numbers change."""
    lines = [
        "Differences from fp32 of the documents: median, 99th percentile, largest; margins where "
        "as many tokens are right. Of the AUC, over audits.",
        "",
        "| models | arithmetic | attack cost (powers of 10) | loss (nats a token) "
        "| smallest margin (logits) | AUC of the loss: fp32, largest change "
        "| half width of its interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, audits in compared.items():
        for arithmetic in ARITHMETICS[1:]:
            changes = [
                _show(np.concatenate([_differ(one, arithmetic, column) for one in audits]))
                for column in (COST, LOSS, MARGIN)
            ]
            pairs = [(_find_auc(one["fp32"]), _find_auc(one[arithmetic])) for one in audits]
            known = [(a, b) for a, b in pairs if a is not None and b is not None]
            auc = half = "not measured"
            if known:
                worst = max(abs(a[0] - b[0]) for a, b in known)
                auc = f"{mean([a[0] for a, _ in known]):.3f}, {worst:.4f}"
                half = f"{mean([(a[2] - a[1]) / 2 for a, _ in known]):.3f}"
            cells = [name, arithmetic, *changes, auc, half]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _differ(one: Mapping[str, Audited], arithmetic: str, column: str) -> np.ndarray:
    """Return the differences from fp32 of the documents with both; of margins, of equal tokens."""
    ours, fp32 = one[arithmetic].columns, one["fp32"].columns
    is_known = np.isfinite(ours[column]) & np.isfinite(fp32[column])
    if column == MARGIN:
        is_known &= ours[NUM_CORRECT] == fp32[NUM_CORRECT]
    changes: np.ndarray = np.abs(ours[column] - fp32[column])[is_known]
    return changes


def _find_auc(audited: Audited) -> tuple[float, float, float] | None:
    of_loss = {"parameters": write_parameters({"score": "loss"})}
    for row in audited.report.tables.select("membership", "auc", **of_loss):
        if row.value is not None and row.ci is not None:
            return row.value, *row.ci
    return None


def _show(changes: np.ndarray) -> str:
    if not len(changes):
        return "not measured"
    return f"{np.median(changes):.4f}, {np.quantile(changes, 0.99):.3f}, {changes.max():.3f}"
