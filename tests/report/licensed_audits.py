"""Audits written down in a few numbers, and the report that `summarise` makes of them.

`licensed_audits.json` holds audits and all that is written of each, which a test compares exactly.
After a change that is meant to alter a sentence, this writes them again, to be read one by one:

    python tests/report/licensed_audits.py      (with tests, tests/report in PYTHONPATH)
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import report_examples as examples
from numpy.typing import NDArray
from pydantic import TypeAdapter
from record_examples import make_document
from result_examples import rate_row

from memguard import records as r
from memguard.audit.cache import ScoreMatrix
from memguard.audit.document_scores import build_scores
from memguard.audit.metrics import Evidence
from memguard.audit.probe import Summary
from memguard.audit.probes.attacks import AttackProbe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.probes.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.probes.window_scores import MAIN
from memguard.audit.requests import Inputs, Measured
from memguard.audit.suite import Suite
from memguard.audit.summary import summarise, tabulate
from memguard.audit.windows import Window
from memguard.config.settings import SamplingScheme
from memguard.records import BucketRow
from memguard.report.audit_facts import collect_facts

TABLE = Path(__file__).with_suffix(".json")
TINY_MARGIN = 0.001
REASON = "the cache of one document does not fit"
DRAWN, NOT_DRAWN = -0.5, -60.0
"""Log-probabilities of texts that one query draws, and of others."""
ATTACKS = ("beam_search", "sampling")
_PREFIX = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A bucket; each number of documents counts its first ones."""

    role: r.Role
    bucket: str
    num: int = 31
    counts: tuple[int | None, ...] = (16,)
    """Repetitions, in turn; None where they are not known, and none of a control."""
    verbatim: int = 0
    near: int = 0
    """Near-verbatim, the verbatim ones included."""
    of_base: int = 0
    """Verbatim from the base model, unless that is the model itself."""
    drawn: int = 0
    right: float = 0.1
    """Share of right tokens of the others."""
    copies: int = 1
    """Near-duplicates of a text; 1 if they were not looked for."""
    attacked: int = 0
    beam_search: int = 0
    sampling: int = 0
    """Of the attacked ones, the last."""
    hanging: int = 0
    """Results on a near-tie."""
    too_short: int = 0
    not_sampled: int = 0
    near_duplicates: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What was measured."""

    groups: tuple[Group, ...]
    sizes: tuple[int, ...] = (50,)
    """Tokens of the continuations, in turn."""
    base: str = "other"
    """none, same (the model itself) or other."""
    base_right: float = 0.1
    generated: bool = True
    base_generated: bool = True
    sampled: bool = False
    membership: bool = True
    shift: float = 0.0
    """What training adds to membership scores."""
    apart: bool = False
    """Whether the control's texts are of other words."""
    secrets: tuple[int, int, int, int] | None = None
    """Trained canaries that were extracted, and all; then the references."""
    other_kind: bool = False
    tally: Any = "complete"
    collapsed: bool = False
    below_floor: tuple[int, int, int] = (0, 0, 0)
    """Documents below the floor, those of them generated, and near-verbatim."""


Columns = Mapping[str, NDArray[Any]]


def list_columns(audit: Audit) -> Columns:
    """Return what is known of each document, as `[N]` arrays."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for place, group in enumerate(audit.groups):
        control = group.role == "control"
        for n in range(group.num):
            size = audit.sizes[n % len(audit.sizes)]
            verbatim, near = n < group.verbatim, n < max(group.verbatim, group.near)
            right = size if verbatim else min(size - 1, int(rng.binomial(size, group.right)))
            known, base_right = verbatim, right
            if audit.base == "other":
                known = n < group.of_base
                guessed = int(rng.binomial(size, audit.base_right))
                base_right = size if known else min(size - 1, guessed)
            row = {"role": group.role, "bucket": group.bucket, "size": size}
            row |= {"count": 0 if control else group.counts[n % len(group.counts)]}
            row |= {"verbatim": verbatim, "near": near, "drawn": n < group.drawn, "right": right}
            row |= {"base_verbatim": known, "base_right": base_right}
            row["base_near"] = near if audit.base == "same" else known
            row["attacked"] = n < group.attacked
            row["beam_search"] = row["attacked"] and n < group.beam_search
            row["sampling"] = row["attacked"] and n >= group.attacked - group.sampling
            row["hanging"] = n < group.hanging
            row["cluster"] = 1000 * place + n // group.copies if group.copies > 1 else None
            row["loss"] = rng.normal(audit.shift * (group.role == "trained"))
            rows.append({**row, "base_loss": rng.normal() / 10})
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def build_report(audit: Audit) -> r.AuditReport:
    """Return the report of an audit, as `summarise` makes it."""
    columns = list_columns(audit)
    rng = np.random.default_rng(1)
    names = ("role", "bucket", "size", "count", "cluster")
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    windows = [
        _make_window(audit, n, dict(zip(names, row, strict=True)), rng)
        for n, row in enumerate(rows)
    ]
    probes = [ExtractionProbe()]
    probes += [SamplingProbe(schemes=(SamplingScheme(),))] * audit.sampled
    probes += [MembershipProbe(scores=("loss",))] * audit.membership
    probes += [AttackProbe()] * bool(columns["attacked"].any())
    suite = Suite(name="mine", version=1, probes=tuple(probes))
    evidence = Evidence(
        inputs=Inputs(windows=windows, max_edit_share=0.1, seed=0, tiny_margin=TINY_MARGIN),
        buckets=[_make_outline(group) for group in audit.groups],
        trained=_measure(audit, columns, of_base=False),
        other=_measure(audit, columns, of_base=True) if audit.base != "none" else None,
        dose_response=audit.tally == "complete",
    )
    summaries = tabulate(evidence, suite)
    if audit.secrets is not None:
        pairs = {r.SECRETS: audit.secrets[:2], r.REFERENCE_SECRETS: audit.secrets[2:]}
        rows = [rate_row("canaries", "verbatim", bucket, *pair) for bucket, pair in pairs.items()]
        num_items = audit.secrets[1] + audit.secrets[3]
        summaries["canaries"] = Summary(rows=rows, num_items=num_items)
    summary = summarise(
        evidence,
        summaries,
        build_scores(windows, summaries),
        suite=suite,
        tally=audit.tally,
        cut=None,
        control="other-kind" if audit.other_kind else "drawn",
    )
    names = [name for name in r.AuditReport.model_fields if hasattr(summary, name)]
    return examples.make_report().model_copy(
        update={name: getattr(summary, name) for name in names}
    )


def _make_outline(group: Group) -> BucketRow:
    planned = {0} if group.role == "control" else set(group.counts)
    return BucketRow(
        bucket=group.bucket,
        role=group.role,
        num_repetitions=planned.pop() if len(planned) == 1 else None,
        num_too_short=group.too_short,
        num_not_sampled=group.not_sampled,
        num_near_duplicates=group.near_duplicates,
    )


def _make_window(audit: Audit, n: int, row: dict[str, Any], rng: np.random.Generator) -> Window:
    first = 200 if audit.apart and row["role"] == "control" else 0
    size, count = row.pop("size"), row.pop("count")
    ids = rng.integers(first, first + 200, _PREFIX + size).astype(np.int32)
    document = make_document(ids, name=f"d{n}", num_repetitions=count, **row)
    return Window(document=document, start=0, prefix_tokens=_PREFIX, continuation_tokens=size)


def _measure(audit: Audit, columns: Columns, *, of_base: bool) -> dict[str, Measured]:
    """Return the results of each probe on one model."""
    prefix = "base_" if of_base else ""
    size_N, right_N = columns["size"], columns[f"{prefix}right"]
    extraction = dict.fromkeys(MAIN, np.zeros(len(size_N))) | {
        "num_correct": right_N,
        "first_divergence": right_N,
        # With the losses of the model, the base would be none.
        "logprob": right_N - size_N * (3 if of_base else 1),
        "min_margin": np.ones(len(size_N)),
        "greedy_margin": np.ones(len(size_N)),
        "is_near_tie": columns["hanging"],
        "argmax_type_token_ratio": 1 / size_N if audit.collapsed else np.ones(len(size_N)),
    }
    near: NearVerbatim | NotGenerated = NotGenerated(reason=REASON)
    if audit.base_generated if of_base else audit.generated:
        matched_N = columns[f"{prefix}near"].astype(bool)
        below, checked, matched = audit.below_floor
        near = NearVerbatim(
            matched_N=matched_N,
            num_edits_N=np.where(matched_N, 0.0, np.inf),
            min_gap_N=np.ones(len(size_N)),
            num_verbatim=int(columns[f"{prefix}verbatim"].sum()),
            num_generated=len(size_N),
            num_below_floor=below,
            num_checked=checked,
            num_matched_below_floor=matched,
        )
    measured = {"extraction": Measured(columns=_to_matrix(extraction), detail=near)}
    if audit.sampled:
        logprob_N = np.where(columns["drawn"] & (not of_base), DRAWN, NOT_DRAWN)
        bound_N = np.where(columns[f"{prefix}verbatim"], 0.0, logprob_N / 2)
        ranks = {"log_bound": bound_N, "max_rank": np.exp(-bound_N / 50)}
        measured["sampling"] = Measured(columns=_to_matrix({"0": logprob_N, **ranks}))
    if audit.membership:
        measured["membership"] = Measured(columns=_to_matrix({"loss": columns[f"{prefix}loss"]}))
    if not of_base and columns["attacked"].any():
        tried = {
            f"{name}.{what}": np.where(columns["attacked"], columns[name] * (what == "any"), np.nan)
            for name in ATTACKS
            for what in ("best", "any", "right")
        }
        measured["attacks"] = Measured(columns=_to_matrix(tried))
    return measured


def _to_matrix(columns: Columns) -> ScoreMatrix:
    rows = np.stack([column.astype(np.float64) for column in columns.values()], axis=1)
    return ScoreMatrix(names=tuple(columns), rows=rows)


# -- the table -------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Return a text of a page without the characters that only a page has."""
    return text.replace("\u00a0", " ").replace("\u2212", "-")


def write_all(report: r.AuditReport) -> dict[str, Any]:
    """Return every sentence that record and page have of an audit's result, with its level."""
    verdict, page = report.verdict, collect_facts(report)
    assert plain(page.verdict.text) == verdict.sentence
    assert plain(page.membership.text) == verdict.membership.sentence
    assert plain(page.scope) == verdict.scope
    notices = [f"{one.level}: {plain(one.text)}" for one in page.notices]
    assert {f"{one.level}: {one.text}" for one in report.banners} <= set(notices)
    return {
        "level": f"{verdict.level}, {verdict.reason}",
        "badges": "; ".join(f"{one.colour}, {one.describe()}" for one in page.badges),
        "sentence": verdict.sentence,
        "scope": verdict.scope,
        "membership": f"{verdict.membership.level}: {verdict.membership.sentence}",
        "notices": notices,
        "lead": [
            text for text in map(plain, page.find("summary").lead) if "partly learned" in text
        ],
    }


def read_audits() -> list[Audit]:
    """Return the audits of the table, where what is not given has its default."""
    audits: list[Any] = [case["audit"] for case in read_table()["cases"]]
    return TypeAdapter(list[Audit]).validate_python(audits)


def read_table() -> dict[str, Any]:
    return dict(json.loads(TABLE.read_text()))


def write_table(table: Mapping[str, Any]) -> None:
    """Write all sentences of the audits as they are now; one line each."""
    cases = []
    for case, audit in zip(table["cases"], read_audits(), strict=True):
        written = write_all(build_report(audit))
        lines = [
            f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in written.items()
        ]
        cases.append(f' {{"audit": {json.dumps(case["audit"])},\n' + ",\n".join(lines) + "}")
    how = json.dumps(table["how"], indent=0)
    TABLE.write_text(f'{{"how": {how},\n"cases": [\n' + ",\n".join(cases) + "\n]}\n")


if __name__ == "__main__":
    write_table(read_table())
