"""What a gate decided, in words: what to do, its numbers, and the setting that gives them.

    fail               Do not release: 30 documents can be extracted, listed in findings.csv.
    inconclusive       Not decided: attack 16 more documents a group (SETTING: 36).
    cannot be judged   Cannot be judged: what the audit lacks.
    pass               Release is within this policy. Not run: sampling (its reason).

Documents that came out are counted under every outcome. Groups are named by repetitions where the
audit knows them.
"""

from collections.abc import Iterator, Sequence

from memguard.errors import list_first, plural
from memguard.pages import formatting as fmt
from memguard.records import LEVEL_NAMES, AuditReport
from memguard.records.audit_files import FINDINGS
from memguard.records.documents import TRAINED_ROLES
from memguard.records.gate import Judgement, Outcome

_SAMPLE = "max_documents_per_bucket"
_MOST = 3


def write_decision(
    outcome: Outcome,
    judgements: Sequence[Judgement],
    report: AuditReport,
    num_out: int | None,
    num_accepted: int,
) -> str:
    """Return the decision; ``num_out``: documents that came out, None if they were not counted."""
    decisive = [judgement for judgement in judgements if judgement.outcome == outcome]
    came_out = _say_came_out(num_out, num_accepted)
    if outcome == "fail":
        is_why = (num_out or 0) > num_accepted and any(_is_of_text(one, report) for one in decisive)
        start = f"Do not release: {came_out if is_why else _name_failed(decisive, report)}"
        came_out = "" if is_why else came_out
    elif outcome == "inconclusive":
        parts = dict.fromkeys(describe_needed(judgement, report) for judgement in decisive)
        start = f"Not decided: {list_first(list(parts), _MOST, join='; ')}"
    elif outcome == "cannot-be-judged":
        why = decisive[0].sentence.rstrip(".")
        more = f" (and {len(decisive) - 1:,} more)" if len(decisive) > 1 else ""
        start = f"Cannot be judged: {why[:1].lower()}{why[1:]}{more}"
    else:
        start = "Release is within this policy"
    sentences = [start, *([came_out] if came_out else [])]
    if outcome == "pass":
        sentences.append(_say_not_run(report))
    return " ".join(f"{sentence}." for sentence in sentences)


def _is_of_text(judgement: Judgement, report: AuditReport) -> bool:
    """Return whether it judges what can be extracted: findings, the verdict or a trained bucket."""
    bucket = report.tables.find_bucket(judgement.bucket)
    return judgement.metric is None or (bucket is not None and bucket.role in TRAINED_ROLES)


def _say_came_out(number: int | None, num_accepted: int) -> str:
    if not number:
        return "The documents that came out could not be counted" if number is None else ""
    accepted = f" ({num_accepted:,} accepted)" if num_accepted else ""
    return f"{plural(number, 'document')} can be extracted{accepted}, listed in {FINDINGS}"


def _name_failed(failed: Sequence[Judgement], report: AuditReport) -> str:
    levels = [one for one in failed if one.rule == 0]
    if levels:
        level = LEVEL_NAMES[report.verdict.level]
        return f"the verdict of the audit is '{level}', which the policy does not take"
    more = f" and {len(failed) - 1:,} more" if len(failed) > 1 else ""
    return f"'{failed[0].name}'{more} is not kept"


def _say_not_run(report: AuditReport) -> str:
    reasons = {run.name: run.reason_not_run for run in report.probe_runs}
    names = [
        f"{fmt.clean_name(name, 40)} ({fmt.clean_text(fmt.hide_paths(why), 80)})"
        for name, why in reasons.items()
        if why is not None
    ]
    listed = list_first(names, _MOST, join="; ")
    return f"Not run: {listed}" if names else "Every probe of the suite ran"


def describe_needed(judgement: Judgement, report: AuditReport) -> str:
    """Return what decides a judgement: more documents, and the setting that gives them."""
    needed, number = judgement.num_documents_needed, judgement.num_documents
    if needed is None or number is None or judgement.probe is None:
        return f"no number of documents decides '{judgement.name}'"
    bucket = report.tables.find_bucket(judgement.bucket)
    if bucket is None or bucket.role not in TRAINED_ROLES:
        return f"'{judgement.name}' needs {needed:,} documents in place of {number:,}"
    there = bucket.num_documents + bucket.num_not_sampled
    settings = ", ".join(_list_settings(judgement.probe, needed, report))
    where = f" ({settings})" if settings else ""
    if needed > there:
        return f"give {needed:,} documents a group in place of {there:,}{where}, or raise the limit"
    verb = "attack" if judgement.probe == "attacks" else "audit"
    return f"{verb} {needed - number:,} more documents a group{where}"


def _list_settings(probe: str, needed: int, report: AuditReport) -> Iterator[str]:
    """Yield the settings that limit the documents of a probe, with the value that decides."""
    size = report.method.sample_size
    if size is not None and size < needed:
        yield f"audit.{_SAMPLE}: {needed}"
    if (size := find_sample(probe, report)) is not None and size < needed:
        yield f"audit.suite, {probe}: {_SAMPLE}: {needed}"


def find_sample(probe: str, report: AuditReport) -> int | None:
    """Return how many documents of each bucket a probe takes by its suite; None: all."""
    settings = next((one for one in report.method.probes if one.get("name") == probe), {})
    size = settings.get(_SAMPLE)
    return size if isinstance(size, int) else None


def name_group(name: str, report: AuditReport) -> str:
    """Return the words of a bucket: ``documents trained 64 times``; else its name.

    A name that says more than the number of repetitions stays: ``mails (trained once)``.
    """
    bucket = report.tables.find_bucket(name)
    number = None if bucket is None or bucket.role != "trained" else bucket.num_repetitions
    if number is None or not report.dose_response:
        return name
    times = f"trained {fmt.times(number)}"
    return f"documents {times}" if name.strip("rx") == str(number) else f"{name} ({times})"
