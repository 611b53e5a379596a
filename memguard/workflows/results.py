"""What the commands return to Python: typed, shown in notebooks, read as tables, saved.

AuditResult    report.json, report.html, records.parquet, results.parquet
TrainResult    a run: model, log, audit
CompareResult  comparison.json and .parquet, its page and chart
PlanResult     meshes with their memory and time
"""

import html
import json
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memguard.errors import ConfigError, RecordError
from memguard.records import AuditReport, Comparison, Verdict, write_atomically
from memguard.records.audit_files import (
    AUDIT_FILES,
    CANARIES,
    FINDINGS,
    PAGE,
    REPORT,
    RESULTS,
    SCORES,
)
from memguard.records.comparison import check_results
from memguard.records.results import read_results

if TYPE_CHECKING:
    import pandas

    from memguard.planner.plan import Plan
    from memguard.planner.storage import StoragePlan

_FRAME_HEIGHT = 720


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """A finished audit."""

    folder: Path
    """Contains report.json and .html, findings.csv, and records, results and canaries.parquet."""
    report: AuditReport

    @property
    def verdict(self) -> Verdict:
        """The verdict of the report: level, sentences, counts and test."""
        return self.report.verdict

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the scores of the documents, one row each, without any text."""
        import pandas

        return pandas.read_parquet(_find(self.folder, SCORES))

    @property
    def results(self) -> "pandas.DataFrame":
        """Every number of the report, one row each, as `memguard.records.results` describes."""
        return read_results(_find(self.folder, RESULTS))

    def save(self, folder: str | Path) -> Path:
        """Copy the audit's files into a folder, which is created if needed; return it.

        Raises:
            ConfigError: the folder cannot be created.
            RecordError: the audit's folder, or a file in it, was deleted.
        """
        canaries = (CANARIES,) if (self.folder / CANARIES).exists() else ()
        names = (SCORES, RESULTS, *canaries, FINDINGS, REPORT, PAGE, AUDIT_FILES)
        return _copy_files(self.folder, names, Path(folder))

    def _repr_html_(self) -> str:
        return _embed(_find(self.folder, PAGE).read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
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

    def _repr_html_(self) -> str:
        if self.audit is None:
            return f"<p>Run <code>{html.escape(str(self.folder))}</code>, not audited</p>"
        return self.audit._repr_html_()


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """Settings compared."""

    page: Path
    """comparison.html, beside comparison.json."""
    comparison: Comparison

    @property
    def verdict(self) -> str:
        """The recommendation, as a sentence."""
        return self.comparison.recommendation.sentence

    def to_pandas(self) -> "pandas.DataFrame":
        """Return one row for each setting: its risk, its utility and what dominates it."""
        import pandas

        points = [point.model_dump(mode="json") for point in self.comparison.front]
        return pandas.json_normalize(points)

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

    def _repr_html_(self) -> str:
        return _embed(_find(self.page.parent, self.page.name).read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Which meshes hold a training step."""

    plan: "Plan | StoragePlan"
    """A storage plan for a family whose memory and time cannot be estimated."""

    @property
    def verdict(self) -> str:
        """Which mesh is best, or what would make one fit."""
        plan = self.plan
        where = f"{plan.num_gpus:,} x {plan.gpu}"
        if plan.kind == "storage_plan":
            return (
                f"{plan.num_possible:,} of {plan.num_meshes:,} meshes of {where} hold the weights, "
                f"gradients and moments of {plan.model}; what else a step needs is not predicted, "
                f"because {plan.not_predicted['activations']}"
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
        """Write plan.json into a folder, which is created if needed; return the folder."""
        from memguard.records import save_record

        save_record(self.plan, Path(folder) / "plan.json")
        return Path(folder)

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.verdict)}</p>{self.to_pandas().to_html(index=False)}"


def _find(folder: Path, name: str) -> Path:
    """Return the path of a file of a result, which may have been deleted since.

    Raises:
        RecordError: there is no such file.
    """
    path = folder / name
    if path.exists():
        return path
    raise RecordError(
        f"'{path}' was deleted since: make this result again, and keep its folder (programs that "
        "clean temporary folders delete those of audits without 'out')"
    )


def _copy_files(source: Path, names: Sequence[str], target: Path) -> Path:
    paths = [_find(source, name) for name in names]  # All of them before the first is copied.
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"'{target}' cannot be created: {error.strerror}") from error
    for path in paths:
        if path.resolve() != (target / path.name).resolve():
            # Not copy2, which writes first and narrows the mode afterwards.
            mode = stat.S_IMODE(path.stat().st_mode)
            write_atomically(target / path.name, path.read_bytes(), mode=mode)
    return target


def _embed(page: str) -> str:
    """Show a page in a notebook without letting it run anything or reach the network."""
    text = html.escape(page, quote=True)
    style = f"width:100%;height:{_FRAME_HEIGHT}px;border:1px solid #8888"
    return f'<iframe sandbox srcdoc="{text}" style="{style}" title="memguard report"></iframe>'
