"""Writes the pages of an audit and marks it as finished; renders the pages again from the report.

records.parquet, report.json    results, written first
report.html, model/README.md    report page, and the model card in the run folder, or in adapter/
audit.json                      written last: an audit without it is incomplete
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from memguard.config import RunConfig, dump_yaml
from memguard.errors import MemguardError, RecordError
from memguard.records import AuditReport, write_atomically
from memguard.records.audit_files import (
    CARDS,
    PAGE,
    REPORT,
    find_card,
    has_audit,
    load_audit_files,
    load_audit_report,
    save_audit_files,
    save_page_sums,
)
from memguard.records.folders import AuditFolder
from memguard.report.html import render_report
from memguard.report.model_card import render_model_card
from memguard.runtime import Console
from memguard.workflows.common.folder import RunFolder, locked

_LINK = b'href="../../comparison.html"'


def is_own_audit(run: Path, out: Path | None) -> bool:
    """Return whether an audit of a run is written to its `audit/`, which its model card shows."""
    return out is None or out.resolve() == (run / "audit").resolve()


def finish_audit(folder: Path, report: AuditReport, *, card_of: RunConfig | None) -> None:
    """Write the pages of an audit, then mark it as finished; scores and report already exist.

    ``card_of`` is the run whose model card shows this audit; ``folder`` is its `audit/`.
    """
    _render(folder, report, card_of)
    save_audit_files(folder, has_card=card_of is not None)


def render_audit(folder: Path) -> Path:
    """Render the page of an audit, and the model card that shows it, from its report.json."""
    report = load_audit_report(folder)
    run = folder.resolve().parent
    has_card = load_audit_files(folder).card is not None
    _render(folder, report, RunFolder(run).read_config() if has_card else None)
    save_page_sums(folder)
    return folder / PAGE


def link_reports(runs: Iterable[Path], warn: Callable[[str], None]) -> None:
    """Render the reports of runs again that do not link to the comparison beside them."""
    for run in runs:
        folder = run / "audit"
        page = folder / PAGE
        if not has_audit(folder) or not page.is_file() or _LINK in page.read_bytes():
            continue
        try:
            with locked(run):
                render_audit(folder)
        except (OSError, MemguardError) as error:
            warn(f"'{page}' has no link to the comparison: {error}")


def restore_report(folder: Path, warn: Callable[[str], None]) -> AuditReport | None:
    """Return the report of a finished audit; missing or damaged pages are rendered again.

    None if there was no audit or it must run again.
    """
    if not has_audit(folder):
        return None
    damages = AuditFolder(folder).find_damage()
    text = "; ".join(map(str, damages))
    if any(damage.file not in (PAGE, *CARDS) for damage in damages):
        warn(f"audit: {text}. The audit runs again and reuses cached scores")
        return None
    if damages:
        warn(f"audit: {text}. Rendered again from {REPORT}")
        render_audit(folder)
    return load_audit_report(folder)


def load_former_report(folder: Path) -> AuditReport | None:
    """Return the report of an audit folder; None if it is missing or damaged."""
    try:
        return load_audit_report(folder)
    except RecordError:
        return None


def write_card(folder: Path, config: RunConfig, report: AuditReport | None) -> None:
    """Write the model card of a run."""
    write_atomically(find_card(folder), render_card(config, report).encode())


def render_card(config: RunConfig, report: AuditReport | None = None, *, name: str = "") -> str:
    """Return README.md of a run's model; ``name`` is that of the model if it is not the run's."""
    base, text = config.model.path, dump_yaml(config)
    return render_model_card(
        report, run_name=name or config.name, base_model=base, config_yaml=text
    )


def show_verdict(report: AuditReport, folder: Path, console: Console) -> None:
    """Print what was audited, the verdict and the next step; ``folder`` is that of the audit."""
    # Imported here: training needs no pages until its end.
    from memguard.report.html import find_run_path
    from memguard.report.next_steps import write_next_steps

    console.info(f"scope: {report.verdict.scope}")
    membership = report.verdict.badges[1]
    console.info(f"membership: {membership.state} ({membership.detail})")
    console.info(f"verdict: {report.verdict.describe()}")
    for step in write_next_steps(report, find_run_path(report, folder))[:1]:
        console.info(f"next: {step}")


def _render(folder: Path, report: AuditReport, card_of: RunConfig | None) -> None:
    if card_of is not None:
        write_card(folder.resolve().parent, card_of, report)
    write_atomically(folder / PAGE, render_report(report, folder).encode())
