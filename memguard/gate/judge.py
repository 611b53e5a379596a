"""Judges an audit by a policy: every rule on every row that it is about.

    rules about metrics   one judgement for each row
    risk                  one for each bucket: of the metric with the highest upper end; one that
                          surely fails decides before it
    findings, epsilon     see `counted`
    verdict               one, with the number 0, as has an audit with a gap

An audit that lacks what a rule names, or has a gap, cannot be judged; it never passes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date

from memguard import __version__
from memguard.errors import ConfigError
from memguard.gate.counted import judge_epsilon, judge_findings, list_came_out, list_held
from memguard.gate.deciding import Unit, end_sentence
from memguard.gate.decision import name_group, write_decision
from memguard.gate.earlier import measure_increase
from memguard.gate.gaps import Audited, find_audit_folder, load_audited
from memguard.gate.measured import (
    Measured,
    NotJudged,
    Selected,
    find_row,
    is_bounded,
    is_share,
    measure_row,
    select_places,
)
from memguard.gate.policy import EPSILON, FINDINGS, RISK, LoadedPolicy, Rule
from memguard.gate.triage import apply_triage, load_triage
from memguard.records import AuditReport, format_now
from memguard.records.gate import GateResult, Judgement, Outcome, decide


def judge_audit(audited: Audited, loaded: LoadedPolicy) -> GateResult:
    """Judge an audit by a policy; the result is without files.

    Raises:
        ConfigError: the policy has a limit that no value can break or none can keep, or names an
            earlier audit or a triage file that is not there.
    """
    policy, report = loaded.policy, audited.report
    triage = None if policy.triage is None else load_triage(loaded.folder / policy.triage)
    created = format_now()
    came_out = list_came_out(audited)
    today = date.fromisoformat(created[:10])
    texts = came_out if isinstance(came_out, list) else []
    accepted = [] if triage is None else apply_triage(triage, texts, today)
    judgements: list[Judgement] = []
    if policy.verdict is not None:
        judgements.append(_judge_level(audited, policy.verdict))
    judgements += [_judge_gap(gap) for gap in audited.gaps]
    earlier = _load_earlier(loaded)
    for number, rule in enumerate(policy.gate, start=1):
        if rule.metric == FINDINGS:
            judgements.append(judge_findings(number, rule, audited, accepted))
        elif rule.metric == EPSILON:
            judgements.append(judge_epsilon(number, rule, report))
        else:
            _check_limit(number, rule, audited, loaded)
            then = None if rule.than is None else earlier[rule.than]
            judgements += _judge_rows(number, rule, audited, then)
    judgements = _name_apart(judgements)
    outcome = decide([judgement.outcome for judgement in judgements])
    num_out = len(came_out) if isinstance(came_out, list) else None
    held = list_held(accepted)
    num_accepted = sum(text in held for text in texts)
    return GateResult(
        tool_version=__version__,
        created=created,
        audit=audited.name,
        report_sha256=audited.report_sha256,
        policy=loaded.text,
        triage=None if triage is None else triage.text,
        release=policy.release,
        level=report.verdict.level,
        verdict=report.verdict.describe(),
        badges=[badge.describe() for badge in report.verdict.badges],
        outcome=outcome,
        decision=write_decision(outcome, judgements, report, num_out, num_accepted),
        judgements=judgements,
        accepted=accepted,
        num_findings=num_out,
    )


def _judge_level(audited: Audited, levels: Sequence[str]) -> Judgement:
    verdict = audited.report.verdict
    is_passed = verdict.level in levels
    return Judgement(
        rule=0,
        name=f"verdict {' or '.join(levels)}",
        outcome="pass" if is_passed else "fail",
        sentence=f"The audit's level is {verdict.level}: {verdict.describe()}",
    )


def _judge_gap(gap: str) -> Judgement:
    return Judgement(
        rule=0,
        name=f"the audit is whole: {gap}",
        outcome="cannot-be-judged",
        sentence=f"The audit is not as memguard writes one: {gap}. Run 'memguard audit' again.",
    )


def _load_earlier(loaded: LoadedPolicy) -> dict[str, Audited]:
    """Return the earlier audits that a policy names."""
    audits: dict[str, Audited] = {}
    for number, rule in enumerate(loaded.policy.gate):
        if rule.than is None or rule.than in audits:
            continue
        place = loaded.document.locate(("gate", number, "than"))
        try:
            audits[rule.than] = load_audited(find_audit_folder(loaded.folder / rule.than))
        except ConfigError as error:
            raise ConfigError(f"{place} 'gate[{number}].than': {error}") from error
    return audits


def _check_limit(number: int, rule: Rule, audited: Audited, loaded: LoadedPolicy) -> None:
    """Refuse a limit of a share that every value or none keeps, such as 10 in place of 0.10."""
    metrics = [item.metric for item in select_places(rule, audited.report) if item.metric]
    if not metrics or not all(map(is_bounded, metrics)):
        return
    name = rule.limit_name
    low = -1.0 if name.startswith("above") or rule.than is not None else 0.0
    is_useful = low < rule.limit <= 1 if name == "at_least" else low <= rule.limit < 1
    if not is_useful:
        place = loaded.document.locate(("gate", number - 1, name))
        raise ConfigError(
            f"{place} 'gate[{number - 1}].{name}' of {rule.metric} must be a value that some audit "
            f"breaks and another keeps, between {low:g} and 1; got {rule.limit:g}. 10 % is 0.10"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    """A row of results, judged."""

    selected: Selected
    outcome: Outcome
    sentence: str
    measured: Measured | None = None
    needed: int | None = None


def _judge_rows(
    number: int, rule: Rule, audited: Audited, earlier: Audited | None
) -> Iterator[Judgement]:
    judged = [
        _judge_row(rule, item, audited, earlier) for item in select_places(rule, audited.report)
    ]
    if rule.metric == RISK:
        buckets = dict.fromkeys(item.selected.bucket for item in judged)
        judged = [
            _choose_risk([item for item in judged if item.selected.bucket == bucket])
            for bucket in buckets
        ]
    probes = {item.selected.metric.probe for item in judged if item.selected.metric is not None}
    for item in judged:
        yield _record(number, rule, item, audited.report, names_probe=len(probes) > 1)


def _judge_row(
    rule: Rule, selected: Selected, audited: Audited, earlier: Audited | None
) -> _Judged:
    metric, bucket = selected.metric, selected.bucket
    try:
        if metric is None or bucket is None:
            raise NotJudged(selected.why_not or "nothing is known of it")
        row = find_row(rule, metric, bucket, audited.report)
        measured = measure_row(rule, metric, row)
        if earlier is not None:
            unit = Unit(is_share=is_share(metric), is_difference=True)
            measured = measure_increase(audited, earlier, metric, row, unit)
    except NotJudged as reason:
        sentence = end_sentence(str(reason))
        return _Judged(selected=selected, outcome="cannot-be-judged", sentence=sentence)
    outcome, sentence, needed = measured.judge(rule.limit, at_least=rule.at_least is not None)
    return _Judged(
        selected=selected, outcome=outcome, sentence=sentence, measured=measured, needed=needed
    )


def _choose_risk(judged: Sequence[_Judged]) -> _Judged:
    """Return the risk of a bucket that decides.

    One that surely fails, else one that cannot be judged, else the one with the highest upper end.
    """
    outcome = decide([item.outcome for item in judged])
    return max(
        (item for item in judged if item.outcome == outcome),
        key=lambda item: 0.0 if item.measured is None else item.measured.high,
    )


def _record(
    number: int, rule: Rule, item: _Judged, report: AuditReport, *, names_probe: bool
) -> Judgement:
    metric, measured = item.selected.metric, item.measured
    named = "" if metric is None or rule.metric != RISK else f"{metric.probe} {metric.metric}: "
    judgement = Judgement(
        rule=number,
        name=_name(rule, item.selected, report, names_probe=names_probe),
        outcome=item.outcome,
        sentence=f"{named}{item.sentence}",
        limit=rule.limit,
        num_documents_needed=item.needed,
    )
    if measured is None or metric is None:
        return judgement
    numbers = ("compared_with", "value", "low", "high", "num_documents", "num_matched")
    place = {name: getattr(metric, name) for name in ("probe", "metric", "parameters")}
    values = {name: getattr(measured, name) for name in numbers}
    return judgement.model_copy(update={**place, "bucket": item.selected.bucket, **values})


def _name(rule: Rule, selected: Selected, report: AuditReport, *, names_probe: bool) -> str:
    """Return the rule and its place: ``risk on documents trained 4 times at most 10 %``."""
    metric, is_risk = selected.metric, rule.metric == RISK
    parts = [rule.metric]
    parameters = metric.parameters if metric and not is_risk else rule.parameters
    if parameters:
        parts.append(f"({parameters})")
    probe = metric.probe if metric and names_probe and not is_risk else rule.probe
    if probe:
        parts.insert(0, probe)
    if rule.statistic is not None:
        parts.append(rule.statistic)
    if rule.model != "trained":
        parts.append(f"of the {rule.model} model")
    parts.append(f"on {name_group(selected.bucket or rule.on, report)}")
    shares = is_risk or (metric is not None and is_share(metric))
    bound = Unit(is_share=shares).write(rule.limit)
    limit = {
        "at_most": f"at most {bound}",
        "at_least": f"at least {bound}",
        "above_control": f"at most {bound} above the control",
        "above_base": f"at most {bound} above the base model",
    }[rule.limit_name]
    parts.append(limit if rule.than is None else f"at most {bound} more than {rule.than}")
    return " ".join(parts)


def _name_apart(judgements: Sequence[Judgement]) -> list[Judgement]:
    """Return the judgements with unique names."""
    counts = Counter(judgement.name for judgement in judgements)
    seen: Counter[str] = Counter()
    named = []
    for judgement in judgements:
        name = judgement.name
        if counts[name] > 1:
            seen[name] += 1
            name = f"{name} [rule {judgement.rule}, {seen[name]}]"
        named.append(judgement.model_copy(update={"name": name}))
    return named
