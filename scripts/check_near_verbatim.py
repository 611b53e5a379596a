"""Compare an audit's near-verbatim matches with plain greedy generation of every document.

    python scripts/check_near_verbatim.py runs/quickstart/* [--base]

Generates the continuation of each audited document with transformers' `generate` (greedy, end-of-
text tokens suppressed), including documents that the audit does not generate, and counts edits with
NLTK's `edit_distance`. Prints a row for each run and bucket: documents, matches of the audit and of
`generate`, documents on which they differ, documents whose greedy text has a near-tie, the matches
among documents below the audit's floor of teacher-forced accuracy, and the lowest accuracy of any
match. Exits with 1 if a document without a near-tie (a gap below the audit's tiny margin) differs,
or if a match is below the floor.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from nltk.metrics.distance import edit_distance
from transformers import AutoModelForCausalLM

from memguard.data.corpus import load_corpus
from memguard.records import AuditReport
from memguard.records.audit_files import load_audit_report

BATCH = 64
COLUMNS = ("Run", "Bucket", "Documents", "Audit", "Generate", "Differ", "Near-tie", "Below floor")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Near-verbatim matches of one document under one model."""

    bucket: str
    accuracy: float
    """Teacher-forced accuracy from the audit's records."""
    audited: bool
    generated: bool
    is_near_tie: bool
    """Whether the audit recorded a tiny gap in the greedy text."""


def main() -> None:
    """Check the runs given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of audited runs")
    parser.add_argument("--base", type=Path, help="folder of the base model, checked for each run")
    options = parser.parse_args()
    print(" | ".join(COLUMNS), "| Lowest accuracy of a match")
    is_wrong = False
    for run in options.runs:
        if not (run / "audit" / "report.json").exists():
            continue
        report = load_audit_report(run / "audit")
        detail = report.tables.find_detail("extraction")
        assert detail is not None, "every audit has this probe"
        floor = detail["floor"]
        models = [("", run / "model")]
        models += [("base.", options.base)] if options.base else []
        for prefix, folder in models:
            rows = list(check(run, report, folder, prefix))
            for bucket in dict.fromkeys(row.bucket for row in rows):
                group = [row for row in rows if row.bucket == bucket]
                print(describe(f"{run.name}{' base' if prefix else ''}", bucket, group, floor))
            is_wrong |= any(row.audited != row.generated and not row.is_near_tie for row in rows)
            is_wrong |= any(row.generated and row.accuracy < floor for row in rows)
    raise SystemExit(1 if is_wrong else 0)


def check(run: Path, report: AuditReport, folder: Path, prefix: str) -> Iterator[Checked]:
    """Generate each audited document of a run."""
    scores = pq.read_table(run / "audit" / "records.parquet").to_pylist()
    corpus = load_corpus(run)
    index_of = {entry.id: index for index, entry in enumerate(corpus.manifest)}
    by_size: dict[tuple[int, int], list[tuple[dict[str, Any], list[int]]]] = defaultdict(list)
    for score in (one for one in scores if one["not_audited"] is None):
        document = corpus.document(index_of[score["id"]])
        ids = document.input_ids[: document.num_content_tokens].tolist()
        size = score["prefix_tokens"] + score["continuation_tokens"]
        by_size[score["prefix_tokens"], score["continuation_tokens"]].append((score, ids[-size:]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for (prefix_tokens, num_new), group in by_size.items():
        allowed = num_new * report.method.max_edit_share + 1e-9
        for start in range(0, len(group), BATCH):
            batch = group[start : start + BATCH]
            prompts = torch.tensor([ids[:prefix_tokens] for _, ids in batch])
            written = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=num_new,
                max_new_tokens=num_new,
                pad_token_id=0,
            )
            for (score, ids), row in zip(batch, written[:, prefix_tokens:].tolist(), strict=True):
                margin = score["extraction.greedy_margin"]
                yield Checked(
                    bucket=score["bucket"],
                    accuracy=score[f"{prefix}extraction.num_correct"] / num_new,
                    audited=bool(score[f"{prefix}extraction.near_verbatim"]),
                    generated=edit_distance(row, ids[prefix_tokens:]) <= allowed,
                    # The base model's gaps are not recorded.
                    is_near_tie=not prefix
                    and margin is not None
                    and margin < report.method.tiny_margin,
                )


def describe(run: str, bucket: str, rows: Sequence[Checked], floor: float) -> str:
    """Return a row of the table."""
    matches = [row.accuracy for row in rows if row.generated]
    values = (
        run,
        bucket,
        len(rows),
        sum(row.audited for row in rows),
        len(matches),
        sum(row.audited != row.generated for row in rows),
        sum(row.is_near_tie for row in rows),
        f"{sum(m < floor for m in matches)} of {sum(row.accuracy < floor for row in rows)}",
        f"{min(matches):.2f}" if matches else "-",
    )
    return " | ".join(map(str, values))


if __name__ == "__main__":
    main()
