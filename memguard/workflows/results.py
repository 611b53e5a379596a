"""What the commands return to Python: typed, shown in notebooks, read as tables, saved.

AuditResult    report.json, report.html, records.parquet, results.parquet
TrainResult    a run: model, log, audit
CompareResult  comparison.json and .parquet, its page and chart
PlanResult     meshes with their memory and time

`repr` is one line. A notebook shows a card: verdict, counts, a chart and a link to the page.
"""

import json
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memguard.errors import MAX_PATH, ConfigError, RecordError, shorten
from memguard.records import LEVEL_NAMES, AuditReport, Comparison, Verdict, write_atomically
from memguard.records.audit_files import (
    AUDIT_FILES,
    AUDITED,
    FINDINGS,
    MAY_LACK,
    PAGE,
    REPORT,
    RESULTS,
    SCORES,
)
from memguard.records.comparison import check_results
from memguard.records.documents import NOT_AUDITED
from memguard.records.results import read_results
from memguard.workflows.common.python_arguments import Place, python_call, refusing_places

if TYPE_CHECKING:
    import pandas

    from memguard.gate.diffed import AuditDiff
    from memguard.pages.page import Fact
    from memguard.planner.plan import Plan
    from memguard.records.gate import GateResult

_NAMES = ["id", "text_hmac", "bucket"]
"""Columns of findings.csv that are text whatever they look like."""
_MOST_MESHES = 10
"""Meshes in the card of a plan."""


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditResult:
    """A finished audit."""

    folder: Path
    """Contains report.json and .html, findings.csv, and records, results and canaries.parquet."""
    report: AuditReport
    is_temporary: bool = False
    """Whether the folder is deleted with this object."""

    @property
    def verdict(self) -> Verdict:
        """The verdict of the report: level, sentences, counts and test."""
        return self.report.verdict

    def to_pandas(self, *, unaudited: bool = False) -> "pandas.DataFrame":
        """Return the scores of the audited documents, one row each, without any text.

        With ``unaudited``, those that could not be audited follow, with the reason `not_audited`.
        """
        import pandas
        from pyarrow import compute

        where = None if unaudited else compute.field(NOT_AUDITED).is_null()
        return pandas.read_parquet(_find(self.folder, SCORES), filters=where)

    @property
    def results(self) -> "pandas.DataFrame":
        """Every number of the report, one row each, as `memguard.records.results` describes."""
        return read_results(_find(self.folder, RESULTS))

    @property
    def findings(self) -> "pandas.DataFrame":
        """The documents that came out, one row each, worst first, with the evidence by method."""
        import pandas

        # A text such as "NA" is a name; only an empty field is missing. Formulas are quoted there.
        frame = pandas.read_csv(
            _find(self.folder, FINDINGS),
            dtype=dict.fromkeys(_NAMES, str),
            keep_default_na=False,
            na_values=[""],
            lineterminator="\n",
            encoding_errors="surrogatepass",
        )
        frame[_NAMES] = frame[_NAMES].replace(r"^'(?=[=+@\t\r-])", "", regex=True)
        return frame

    def diff(self, earlier: "AuditResult | str | Path") -> "AuditDiff":
        """Return what became of each finding since an earlier audit.

        Args:
            earlier: its result, or the folder of a run or an audit; its documents may be others.

        Raises:
            ConfigError: the folder is neither of a run nor of an audit.
            RecordError: an audit is missing or damaged, or the two have other identity keys.
        """
        from memguard.gate.diff import diff_folders

        folder = earlier.folder if isinstance(earlier, AuditResult) else Path(earlier)
        return diff_folders(folder, self.folder)

    def save(self, folder: str | Path) -> Path:
        """Copy the audit's files into a folder, which is created if needed; return it.

        Raises:
            ConfigError: the folder cannot be created.
            RecordError: the audit's folder, or a file in it, was deleted.
        """
        left_out = {name for name in MAY_LACK if not (self.folder / name).exists()}
        names = [name for name in (*AUDITED, AUDIT_FILES) if name not in left_out]
        return _copy_files(self.folder, names, Path(folder))

    @python_call
    def gate(self, policy: Place | Mapping[str, Any], *, out: Place | None = None) -> "GateResult":
        """Judge the audit by a policy, as `memguard gate` does; `exit_code` and `outcome` say how.

        Args:
            policy: a policy's YAML, or its settings as a dictionary.
            out: folder for gate.json, junit.xml, summary.md and report.html; None: no files.

        Raises:
            ConfigError: the policy is wrong, or the folder cannot be written to.
            RecordError: the audit, or an earlier one that the policy names, is damaged.
        """
        from memguard.workflows.gate import judge_folder

        _find(self.folder, REPORT)
        return judge_folder(self.folder, policy, out=None if out is None else Path(out))

    def __repr__(self) -> str:
        name = self.report.subject
        return _write_line("AuditResult", name, _summarise(self.verdict), self.folder / PAGE)

    def _repr_html_(self) -> str:
        from memguard.report.notebook_card import render_audit_card

        note = "is deleted with this result; save(folder) keeps it" if self.is_temporary else ""
        return render_audit_card(self.report, self.folder / PAGE, note=note)


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult:
    """A finished run."""

    folder: Path
    model: Path
    """A Hugging Face folder."""
    audit: AuditResult | None
    """None if `audit.enabled` is false."""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the audit; None without one."""
        return None if self.audit is None else self.audit.verdict

    def to_pandas(self) -> "pandas.DataFrame":
        """Return metrics.jsonl, one line a row: optimizer steps, held-out losses, the end."""
        import pandas

        lines = _find(self.folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return pandas.DataFrame([json.loads(line) for line in lines])

    def save(self, folder: str | Path) -> Path:
        """Copy model, settings, log and audit into a folder that does not exist; return it.

        Raises:
            ConfigError: the folder exists.
            RecordError: the run's folder, or a file in it, was deleted.
        """
        target = Path(folder)
        if target.exists():
            raise ConfigError(f"'{target}' exists already; choose another name or delete it")
        model = _find(self.model.parent, self.model.name)
        _copy_files(self.folder, ("config.yaml", "metrics.jsonl", "manifest.jsonl"), target)
        shutil.copytree(model, target / model.name)
        if self.audit is not None:
            self.audit.save(target / "audit")
        return target

    def __repr__(self) -> str:
        summary = "not audited" if self.verdict is None else _summarise(self.verdict)
        return _write_line("TrainResult", self.folder.name, summary, self.folder)

    def _repr_html_(self) -> str:
        from memguard.pages.page import Fact
        from memguard.report.notebook_card import render_audit_card, render_plain_card

        model = Fact("Model", str(self.model))
        if self.audit is None:
            facts = (model, Fact("Audit", "none, as 'audit.enabled' is false"))
            return render_plain_card(f"Run '{self.folder.name}'", facts)
        report, page = self.audit.report, self.audit.folder / PAGE
        return render_audit_card(report, page, facts=(*_describe_training(report), model))


@dataclass(frozen=True, kw_only=True, repr=False)
class CompareResult:
    """Settings compared."""

    page: Path
    """comparison.html, beside comparison.json."""
    comparison: Comparison

    @property
    def verdict(self) -> str:
        """The recommendation, as a sentence."""
        return self.comparison.recommendation.describe()

    def to_pandas(self) -> "pandas.DataFrame":
        """Return one row for each setting: badges, risk, utility and what dominates it."""
        import pandas

        rows = []
        for point in self.comparison.front:
            values = point.model_dump(mode="json", exclude={"badges"})
            states = {badge.title.lower(): badge.state for badge in point.badges}
            rows.append({"name": values.pop("name"), **states, **values})
        return pandas.DataFrame(rows)

    @property
    def results(self) -> "pandas.DataFrame":
        """Every number of every run and of their comparison, one row each.

        Raises:
            RecordError: comparison.parquet is missing or damaged.
        """
        return read_results(check_results(self.comparison, self.page.parent))

    def save(self, folder: str | Path) -> Path:
        """Copy comparison.json and .parquet, its page and chart into a folder; return it.

        Raises:
            ConfigError: the folder cannot be created.
            RecordError: one of them was deleted.
        """
        suffixes = (".parquet", ".json", ".html", ".svg")
        names = tuple(self.page.with_suffix(suffix).name for suffix in suffixes)
        return _copy_files(self.page.parent, names, Path(folder))

    def __repr__(self) -> str:
        return _write_line("CompareResult", self.comparison.name, self.verdict, self.page)

    def _repr_html_(self) -> str:
        from memguard.report.notebook_card import render_comparison_card

        return render_comparison_card(self.comparison, self.page)


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanResult:
    """Which meshes hold a training step."""

    plan: "Plan"
    """Without meshes for a family whose memory and time cannot be estimated."""

    @property
    def verdict(self) -> str:
        """Which mesh is best, or what would make one fit."""
        plan = self.plan
        where = f"{plan.num_gpus:,} x {plan.gpu}"
        if plan.least is not None:
            return (
                f"Memory and speed of a step of {plan.model} on {where} are not predicted, because "
                f"{plan.least.not_predicted}; {plan.least.describe()}"
            )
        if plan.num_fitting:
            best = next(mesh for mesh in plan.meshes if mesh.fits)
            return (
                f"{plan.num_fitting:,} of {plan.num_meshes:,} meshes of {where} hold a step of "
                f"{plan.model}; the fastest is {best.describe()}"
            )
        sentence = f"No mesh of {where} holds a step of {plan.model}"
        if plan.enough is None:
            return sentence
        enough = plan.enough
        return f"{sentence}; {enough.num_gpus:,} GPUs would, as {enough.mesh.describe()}"

    def to_pandas(self) -> "pandas.DataFrame":
        """Return one row for each mesh, the best first (memory in bytes, times in seconds)."""
        import pandas

        return pandas.json_normalize([mesh.model_dump(mode="json") for mesh in self.plan.meshes])

    def save(self, folder: str | Path) -> Path:
        """Write plan.json into a folder, which is created if needed; return the folder.

        Raises:
            ConfigError: the folder cannot be created.
        """
        from memguard.records import save_record

        with refusing_places():
            save_record(self.plan, Path(folder) / "plan.json")
        return Path(folder)

    def __repr__(self) -> str:
        return _write_line("PlanResult", self.plan.model, self.verdict)

    def _repr_html_(self) -> str:
        from memguard.planner.dry_run import format_bytes
        from memguard.report.notebook_card import render_table_card

        meshes = self.plan.meshes
        rows = [
            (
                mesh.describe(),
                f"{format_bytes(mesh.memory.needed)} of {format_bytes(mesh.memory.usable)}",
                "" if mesh.speed is None else f"{mesh.speed.tokens_per_s:,.0f}",
            )
            for mesh in meshes[:_MOST_MESHES]
        ]
        left_out = len(meshes) - len(rows)
        more = f"{left_out:,} more meshes, and " if left_out else ""
        note = f"Estimates; .to_pandas() has {more}the parts of each figure."
        columns = ("Mesh", "Memory of a GPU", "Tokens per second")
        return render_table_card(f"Plan · {self.plan.model}", self.verdict, columns, rows, note)


def _write_line(kind: str, name: str, summary: str, *places: Path) -> str:
    """Return the `repr` of a result: one line."""
    where = "".join(f"; {shorten(str(place), MAX_PATH)}" for place in places)
    text = f"<{kind} {shorten(name, MAX_PATH)}: {shorten(summary, 2 * MAX_PATH)}{where}>"
    return " ".join(text.split())


def _summarise(verdict: Verdict) -> str:
    """Return the level, and the documents that the verdict counts."""
    trained, control = verdict.trained, verdict.control
    text = f"{LEVEL_NAMES[verdict.level]}, {trained.num_matched:,} of {trained.num_documents:,}"
    if not control.num_documents:
        return f"{text} trained documents extracted"
    unseen = f"{control.num_matched:,} of {control.num_documents:,} control documents"
    return f"{text} trained and {unseen} extracted"


def _describe_training(report: AuditReport) -> "tuple[Fact, ...]":
    """Return the facts of the training that the card of a run shows."""
    from memguard.pages.page import Fact

    training = report.training
    if training is None:
        return ()
    loss = ""
    if training.heldout_nll is not None:
        loss = f", held-out NLL {training.heldout_nll:.4f}"
        if training.base_heldout_nll is not None:
            loss += f" (base model {training.base_heldout_nll:.4f})"
    names = ", ".join(str(one.get("name")) for one in training.mitigations) or "no mitigation"
    return (Fact("Training", f"{training.num_steps:,} steps, {names}{loss}"),)


def _find(folder: Path, name: str) -> Path:
    """Return the path of a file of a result, which may have been deleted since."""
    path = folder / name
    if path.exists():
        return path
    raise RecordError(
        f"'{path}' was deleted since: make this result again, and keep its folder (programs that "
        "clean temporary folders delete those of audits without 'out')"
    )


def _copy_files(source: Path, names: Sequence[str], target: Path) -> Path:
    paths = [_find(source, name) for name in names]  # All of them before the first is copied.
    with refusing_places():
        target.mkdir(parents=True, exist_ok=True)
        for path in paths:
            if path.resolve() != (target / path.name).resolve():
                # Not copy2, which writes first and narrows the mode afterwards.
                mode = stat.S_IMODE(path.stat().st_mode)
                write_atomically(target / path.name, path.read_bytes(), mode=mode)
    return target
