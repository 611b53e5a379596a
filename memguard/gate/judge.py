"""Judges an audit by a policy: every rule on every row that it is about.

    rules about metrics   one judgement for each row
    risk                  one for each bucket: of the metric with the highest upper end; one that
                          surely fails decides before it
    findings              documents that came out, without those that a person accepted; a count,
                          judged as it is
    epsilon               low: the lower bound that the canaries show (95 %, one-sided); high: the
                          value that dp_sgd spent, by accounting. A bound above the limit fails;
                          else the spent value decides; without it nothing does, because no lower
                          bound shows that epsilon is low
    verdict               one, with the number 0, as has an audit with a gap

An audit that lacks what a rule names, or has a gap, cannot be judged; it never passes.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date

import numpy as np

from memguard import __version__
from memguard.errors import ConfigError
from memguard.gate.deciding import Unit, end_sentence
from memguard.gate.decision import name_group, write_decision
from memguard.gate.earlier import measure_increase
from memguard.gate.gaps import Audited, find_audit_folder, load_audited
from memguard.gate.measured import (
    Measured,
    NoInterval,
    Selected,
    is_bounded,
    is_share,
    measure_row,
    select_rows,
)
from memguard.gate.policy import (
    EPSILON,
    FINDINGS,
    LIMITS,
    RISK,
    LoadedPolicy,
    Rule,
    apply_triage,
    load_triage,
)
from memguard.records import AuditReport, format_now
from memguard.records.audit_files import FINDINGS as FINDINGS_FILE
from memguard.records.documents import TRAINED_ROLES
from memguard.records.gate import Acceptance, GateResult, Judgement, Outcome, decide

_CANARIES = "canaries"


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The documents of an audit that came out."""

    texts: list[str | None] | None
    """The keyed hash of each; such a document without one counts, and cannot be accepted. None if
    they could not be counted."""
    probes: list[list[str]] = field(default_factory=list)
    """Those that extract each."""
    answered: Collection[str] = ()
    """All that have an answer."""
    why_not: str | None = None


def judge_audit(audited: Audited, loaded: LoadedPolicy) -> GateResult:
    """Judge an audit by a policy; the result is without files.

    Raises:
        ConfigError: the policy has a limit that no value can break or none can keep, or names an
            earlier audit or a triage file that is not there.
    """
    policy, report = loaded.policy, audited.report
    triage = None if policy.triage is None else load_triage(loaded.find_path(policy.triage))
    created = format_now()
    findings = _list_findings(audited)
    today = date.fromisoformat(created[:10])
    texts = [text for text in findings.texts or () if text is not None]
    accepted = [] if triage is None else apply_triage(triage, texts, today)
    judgements: list[Judgement] = []
    if policy.verdict is not None:
        judgements.append(_judge_level(audited, policy.verdict))
    judgements += [_judge_gap(gap) for gap in audited.gaps]
    earlier = _load_earlier(loaded)
    for number, rule in enumerate(policy.gate, start=1):
        if rule.metric == FINDINGS:
            judgements.append(_judge_findings(number, rule, audited, accepted))
        elif rule.metric == EPSILON:
            judgements.append(_judge_epsilon(number, rule, report))
        else:
            _check_limit(number, rule, audited, loaded)
            then = None if rule.than is None else earlier[rule.than]
            judgements += _judge_rows(number, rule, audited, then)
    judgements = _name_apart(judgements)
    outcome = decide([judgement.outcome for judgement in judgements])
    num_out = None if findings.texts is None else len(findings.texts)
    num_accepted = sum(text in _list_held(accepted) for text in texts)
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
            audits[rule.than] = load_audited(find_audit_folder(loaded.find_path(rule.than)))
        except ConfigError as error:
            raise ConfigError(f"{place} 'gate[{number}].than': {error}") from error
    return audits


def _check_limit(number: int, rule: Rule, audited: Audited, loaded: LoadedPolicy) -> None:
    """Refuse a limit of a share that every value or none keeps, such as 10 in place of 0.10."""
    metrics = [item.metric for item in select_rows(rule, audited.report) if item.metric]
    if not metrics or not all(map(is_bounded, metrics)):
        return
    name = next(name for name in LIMITS if getattr(rule, name) is not None)
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
        _judge_row(rule, item, audited, earlier) for item in select_rows(rule, audited.report)
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
    metric, row = selected.metric, selected.row
    if row is None or metric is None:
        sentence = end_sentence(selected.why_not or "nothing is known of it")
        return _Judged(selected=selected, outcome="cannot-be-judged", sentence=sentence)
    try:
        measured = measure_row(rule, metric, row)
        if earlier is not None:
            unit = Unit(is_share=is_share(metric), is_difference=True)
            measured = measure_increase(audited, earlier, metric, row, unit)
    except NoInterval as reason:
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
    known = sorted(
        (item for item in judged if item.measured is not None),
        key=lambda item: item.measured.high if item.measured is not None else 0.0,
        reverse=True,
    )
    unknown = [item for item in judged if item.measured is None]
    for outcome in ("fail", "cannot-be-judged", "inconclusive", "pass"):
        chosen = next((item for item in (*known, *unknown) if item.outcome == outcome), None)
        if chosen is not None:
            return chosen
    raise AssertionError("a bucket has at least one entry")


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
    name = next(name for name in LIMITS if getattr(rule, name) is not None)
    shares = is_risk or (metric is not None and is_share(metric))
    bound = Unit(is_share=shares).write(rule.limit)
    limit = {
        "at_most": f"at most {bound}",
        "at_least": f"at least {bound}",
        "above_control": f"at most {bound} above the control",
        "above_base": f"at most {bound} above the base model",
    }[name]
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


# -- what is no row of results ---------------------------------------------------------------------


def _list_findings(audited: Audited) -> Findings:
    """Return the documents of an audit that came out."""
    documents = audited.documents
    if documents is None:
        why_not = "only another user may read the records of the documents (records.parquet)"
        return Findings(texts=None, why_not=why_not)
    if not documents.is_trained_N.any():
        return Findings(texts=None, why_not="no trained document was audited")
    risky = {m.probe for m in audited.report.tables.metrics if m.risk_rank is not None}
    if lost := sorted(risky - set(documents.extracted)):
        return Findings(texts=None, why_not=f"the records have no answers of the probe {lost[0]}")
    rows = np.flatnonzero(documents.came_out_N)
    return Findings(
        texts=documents.text_hmac_N[rows].tolist(),
        answered=documents.extracted.keys(),
        probes=[[name for name, by_N in documents.extracted.items() if by_N[r] == 1] for r in rows],
    )


def _list_held(accepted: Sequence[Acceptance], state: str = "accepted") -> set[str]:
    return {entry.document for entry in accepted if entry.state == state}


def _judge_findings(
    number: int, rule: Rule, audited: Audited, accepted: Sequence[Acceptance]
) -> Judgement:
    """Return whether few enough documents that came out are open: not accepted by a person."""
    by_probe = "" if rule.probe is None else f" by {rule.probe}"
    limit = int(rule.limit)
    name = f"findings{by_probe} at most {limit:,}"

    def answer(outcome: Outcome, sentence: str, value: float | None = None) -> Judgement:
        return Judgement(
            rule=number, name=name, outcome=outcome, sentence=sentence, limit=limit, value=value
        )

    if findings.texts is None:
        return answer("cannot-be-judged", f"The findings cannot be counted: {findings.why_not}.")
    runs = {run.name: run for run in report.probe_runs}
    not_run = [run.name for run in runs.values() if run.num_documents is None]
    if rule.probe is not None and (rule.probe not in runs or rule.probe in not_run):
        return answer("cannot-be-judged", f"The probe {rule.probe} did not run.")
    if rule.probe is not None and rule.probe not in findings.answered:
        return answer("cannot-be-judged", f"The probe {rule.probe} extracts no documents.")
    pairs = zip(findings.texts, findings.probes, strict=True)
    texts = [text for text, probes in pairs if rule.probe is None or rule.probe in probes]
    held, expired = _list_held(accepted), _list_held(accepted, "expired")
    num_held = sum(text in held for text in texts)
    num_open = len(texts) - num_held
    noun = "document" if len(texts) == 1 else "documents"
    parts = [f"{num_held:,} accepted"]
    if rule.probe is None and report.num_by_method > len(texts) > 0:
        parts.insert(0, f"{report.num_by_method:,} findings by method")
    if num_expired := sum(text in expired for text in texts):
        parts.append(f"{num_expired:,} accepted until a day that has passed, so open again")
    if num_without := texts.count(None):
        parts.append(f"{num_without:,} without a keyed hash, which cannot be accepted")
    trained = (row for row in report.tables.buckets if row.role in TRAINED_ROLES)
    if num_unaudited := sum(row.num_not_auditable for row in trained):
        parts.append(f"{num_unaudited:,} trained documents could not be audited")
    if not_run and rule.probe is None:
        parts.append(f"not run: {', '.join(not_run)}")
    side = "within" if num_open <= limit else "above"
    return answer(
        "pass" if num_open <= limit else "fail",
        f"{len(texts):,} {noun} came out{by_probe} ({'; '.join(parts)}): {num_open:,} open, {side} "
        f"the limit of {limit:,}{f', listed in {FINDINGS_FILE}' if texts else ''}.",
        num_open,
    )


def _judge_epsilon(number: int, rule: Rule, report: AuditReport) -> Judgement:
    """Return whether epsilon is within its limit, by what was spent and what canaries show."""
    limit, training = rule.limit, report.training
    spent = None if training is None else training.epsilon
    run = next((run for run in report.probe_runs if run.name == _CANARIES), None)
    detail = report.tables.find_detail(_CANARIES)
    bound = None if detail is None else detail.get("epsilon_lower_bound")
    said = []
    if bound is not None and detail is not None:
        said.append(
            f"the canaries show an epsilon of at least {bound:.4g} (95 % confidence, delta "
            f"{detail.get('delta')}, one canary with all its repetitions)"
        )
    else:
        said.append("no lower bound was measured with canaries")
    if spent is not None and training is not None:
        said.append(
            f"dp_sgd spent {spent:.4g} at delta {training.delta:g} (by accounting, a row)"
            if training.delta is not None
            else f"dp_sgd spent {spent:.4g} (by accounting, a row)"
        )
    else:
        said.append("no epsilon was accounted, as training had no dp_sgd")
    facts = "; ".join(said)
    facts = facts[:1].upper() + facts[1:]

    def answer(outcome: Outcome, conclusion: str) -> Judgement:
        return Judgement(
            rule=number,
            name=f"epsilon at most {limit:g}",
            outcome=outcome,
            sentence=f"{facts}. {conclusion}",
            probe=None if bound is None else _CANARIES,
            metric="epsilon",
            limit=limit,
            value=spent,
            low=bound,
            high=spent,
        )

    if bound is not None and bound > limit:
        return answer("fail", f"The shown bound is above the limit of {limit:g}.")
    if run is not None and run.num_documents is not None and detail is None:
        return answer("cannot-be-judged", "The probe canaries ran, and its bound is not recorded.")
    if spent is not None:
        if spent > limit:
            return answer("fail", f"The spent value is above the limit of {limit:g}.")
        return answer("pass", f"The spent value is within the limit of {limit:g}.")
    if bound is None:
        return answer("cannot-be-judged", "There is nothing to judge.")
    return answer(
        "inconclusive",
        f"The shown bound is within the limit of {limit:g}, and no number of canaries shows that "
        "epsilon is: it has no upper end without dp_sgd.",
    )
