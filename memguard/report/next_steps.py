"""What to do after an audit: decisions that follow from the two badges, with the audit's numbers.

text         what to withhold, and what finds the cause or makes the audit large enough
documents    to review and accept what was extracted; training that lowers it
membership   to keep the weights confidential, or what is missing for a judgement
others       attacks, a base model and precision that this audit did not have
"""

from collections.abc import Callable, Iterator, Mapping

from memguard.audit.statistics import compute_p_above_control
from memguard.pages import formatting as fmt
from memguard.records import REFERENCE_SECRETS, SECRETS, AuditReport, Reason, VerdictTest
from memguard.records.verdict import MIN_TRAINED, MIN_UNSEEN, MembershipLack

_MOST_UNSEEN = 10_000
"""A larger number of unseen documents is not proposed."""


def write_next_steps(report: AuditReport, run_path: str | None) -> tuple[str, ...]:
    """Return decisions, the most important first; commands run as they are printed.

    ``run_path`` is the folder of the audited run from the working directory; None if the audit is
    not of a run or its page is not stored.
    """
    parts = (_decide_text, _review, _train_again, _decide_membership, _complete)
    return tuple(step for part in parts for step in part(report, run_path))


def has_attacks(report: AuditReport) -> bool:
    """Return whether an attack ran."""
    return bool(report.tables.select("attacks", "any_answer"))


def count_tiny(report: AuditReport) -> int:
    """Count the documents whose result depends on a near-tie."""
    rows = report.tables.select("extraction", "tiny_margin")
    return sum(row.num_matched or 0 for row in rows)


def _repeat(run_path: str | None, setting: str) -> str:
    """Return the command that audits again with a setting."""
    if run_path is None:
        return f"the same command with '{setting}'"
    return f"'memguard audit {run_path} {setting}'"


# -- text ------------------------------------------------------------------------------------------

_NOT_YET = "Do not release these weights yet:"
_FIXED: Mapping[Reason, str] = {
    "control": "Do not release these weights; or release them with each extracted document "
    "accepted by a person.",
    "canaries": "Do not release these weights: a model that repeats random secrets may repeat real "
    "ones.",
    "base-too": "Decide on each extracted document: the base model produces it too, so that "
    "another fine-tuning does not remove it. Accept it, or take another base.",
    "forgotten": "Do not release these weights as free of these documents: train on with 'npo' and "
    "more 'data.forget_repetitions'.",
    "collapsed": "Discard these weights or check their training: the model predicts the same few "
    "tokens everywhere, so that low rates show nothing.",
    "not-trained": "Give documents that this model was trained on: none of these was.",
    "weakened": f"{_NOT_YET} audit without 'audit.prefix_tokens', and with at most 50 continuation "
    "tokens: these settings find less.",
}
"""The decision by the reason of a verdict, where it has no number."""


def _decide_text(report: AuditReport, run_path: str | None) -> Iterator[str]:
    """Yield the decision about the text: one for every state of its badge."""
    reason = report.verdict.reason
    if reason is not None:
        write = _COUNTED.get(reason)
        yield _FIXED[reason] if write is None else write(report, run_path)
    elif _may_attack(report):
        again = _repeat(run_path, "--suite attacks")
        yield f"Attack the weights before a release: {again}. No attack was part of this audit."


def _may_attack(report: AuditReport) -> bool:
    """Return whether the suite had no attack; one that could not run would fail again."""
    return all(run.name != "attacks" for run in report.probe_runs)


def _compare_with_unseen(report: AuditReport, run_path: str | None) -> str:
    control = "Train again with 'data.control_fraction' above 0"
    if report.training is None:
        control = f"audit with {MIN_UNSEEN} documents of the same kind that were never trained"
        control += " ('--nonmembers')"
    return f"{_NOT_YET} without unseen documents cause and membership are open. {_start(control)}."


def _enlarge_comparison(report: AuditReport, run_path: str | None) -> str:
    """Say how many more unseen documents would show that training is the cause."""
    test = report.verdict.test
    trained = report.verdict.trained
    start = f"{_NOT_YET} {trained.num_matched:,} of {trained.num_documents:,} "
    start += f"{'is' if trained.num_matched == 1 else 'are'} too few to blame training."
    needed = None if test is None else count_unseen_needed(test)
    if test is None or needed is None:
        return f"{start} Audit more trained and more unseen documents."
    now = test.control.num_clusters
    how = f"Give {needed - now:,} more unseen documents"
    if test.documents in ("attacked", "generated"):
        how = f"Raise 'max_documents_per_bucket' of the probe by {needed - now:,} unseen documents"
    return (
        f"{start} {how} ({now:,} of {needed:,}): if none of them is extracted, training is the "
        "cause."
    )


def count_unseen_needed(test: VerdictTest) -> int | None:
    """Return the least number of unseen texts, none further extracted, that would be significant.

    None if it is more than can be proposed.
    """
    trained, control = test.trained, test.control

    def is_enough(number: int) -> bool:
        p_value = compute_p_above_control(
            trained.num_matched_clusters,
            trained.num_clusters,
            control.num_matched_clusters,
            number,
        )
        return p_value <= test.level

    low, high = control.num_clusters, _MOST_UNSEEN
    if low >= high or not is_enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _explain_form(report: AuditReport, run_path: str | None) -> str:
    control = report.verdict.control
    return (
        f"{_NOT_YET} {control.num_matched:,} of {control.num_documents:,} unseen documents are "
        "extracted too. Accept what is a form that many texts share; withhold the weights for the "
        "rest."
    )


def _match_control(report: AuditReport, run_path: str | None) -> str:
    base = "" if report.verdict.base is not None else ", and the base model ('--base')"
    return (
        f"{_NOT_YET} give {MIN_UNSEEN} unseen documents of the same source, form and length{base}. "
        "Without them a form that was learned looks like memorization; membership is not judged."
    )


def _enlarge_canaries(report: AuditReport, run_path: str | None) -> str:
    rows = (
        report.tables.find("canaries", "verbatim", bucket, statistic="rate")
        for bucket in (SECRETS, REFERENCE_SECRETS)
    )
    number = sum(row.num_documents for row in rows if row is not None)
    now = f", {number:,} now" if number else ""
    return (
        f"Train again with more canaries ('data.canaries.count'{now}): of so few, references are "
        "extracted as well, so that chance is not excluded."
    )


def _finish_generation(report: AuditReport, run_path: str | None) -> str:
    again = _repeat(run_path, "audit.max_generation_minutes=null")
    return (
        f"{_NOT_YET} near-verbatim text was not tested. Audit again with time and memory for "
        f"generation: {again}."
    )


def _enlarge(report: AuditReport, run_path: str | None) -> str:
    return f"{_NOT_YET} {_add_trained(report, run_path, report.verdict.trained.num_clusters)}"


def _reach_documents(report: AuditReport, run_path: str | None) -> str:
    trained = [bucket for bucket in report.tables.buckets if bucket.role == "trained"]
    number = sum(bucket.num_not_auditable for bucket in trained)
    total = number + sum(bucket.num_documents + bucket.num_not_sampled for bucket in trained)
    return (
        f"{_NOT_YET} {number:,} of {total:,} training documents were not audited and count as "
        "extracted. Give more that are long enough and no labels, or lower "
        "'audit.continuation_tokens'."
    )


_COUNTED: Mapping[Reason, Callable[[AuditReport, str | None], str]] = {
    "no-control": _compare_with_unseen,
    "too-few": lambda report, run_path: (
        _enlarge_comparison if report.verdict.level == "extracted" else _enlarge
    )(report, run_path),
    "control-too": _explain_form,
    "other-kind": _match_control,
    "canaries-too": _enlarge_canaries,
    "not-generated": _finish_generation,
    "unaudited": _reach_documents,
}
"""The decision by the reason of a verdict, where it has numbers or a command."""


def _add_trained(report: AuditReport, run_path: str | None, number: int) -> str:
    """Say how to audit more trained texts, of which there are too few."""
    missing = MIN_TRAINED - number
    left = sum(row.num_not_sampled for row in report.tables.buckets if row.role == "trained")
    if left:
        again = _repeat(run_path, "audit.max_documents_per_bucket=null")
        return f"{left:,} trained documents are not in the sample. Audit them too: {again}."
    now = f"({number:,} of {MIN_TRAINED})"
    if missing <= 0:
        return f"give more trained documents that differ: copies count once ({number:,} texts)."
    if report.training is None:
        return f"give {missing:,} more trained documents {now}."
    return f"train on {missing:,} more documents {now}."


# -- documents -------------------------------------------------------------------------------------


def _review(report: AuditReport, run_path: str | None) -> Iterator[str]:
    """Yield how to read and to accept the extracted documents."""
    if not report.num_findings:
        return
    what = "document" if report.num_findings == 1 else "documents"
    step = f"Review the {report.num_findings:,} {what} of 'findings.csv'"
    if report.data.identity_key is not None:
        place = "RUN" if run_path is None else run_path
        step += f"; accept one with 'memguard accept {place} DOCUMENT --by NAME --reason TEXT'"
    if "audit.excerpts=true" not in report.method.command:
        step += f". {_start(_repeat(run_path, 'audit.excerpts=true'))} writes their text to a "
        step += "private file"
    yield f"{step}."


def _train_again(report: AuditReport, run_path: str | None) -> Iterator[str]:
    """Yield the changes of the training that lower extraction."""
    if not report.verdict.may_be_fixed:
        return
    mitigations = report.training.mitigations if report.training else []
    has_goldfish = any(mitigation.get("name") == "goldfish" for mitigation in mitigations)
    what = "goldfish loss and a smaller k" if has_goldfish else "goldfish loss"
    if run_path is None:
        yield f"Fine-tune again with {what}, or train these documents fewer times."
        return
    yield f"Train again with {what} and compare both runs: 'memguard compare {run_path} --fix'."
    yield (
        "If these weights must be kept, train them on with the mitigation 'npo' and the extracted "
        "documents as 'data.forget'."
    )


# -- membership ------------------------------------------------------------------------------------


def _decide_membership(report: AuditReport, run_path: str | None) -> Iterator[str]:
    """Yield the decision about membership; none if there is no sign."""
    membership = report.verdict.membership
    if report.verdict.reason in ("no-control", "other-kind") and membership.lack is not None:
        return  # The step of the text asks for these documents.
    if membership.lack is not None:
        yield _complete_membership(report, run_path, membership.lack)
        return
    if membership.level == "not-seen":
        return
    mitigations = report.training.mitigations if report.training else []
    has_dp = any(mitigation.get("name") == "dp_sgd" for mitigation in mitigations)
    retrain = "with a smaller epsilon of 'dp_sgd'" if has_dp else "with 'dp_sgd'"
    who = "" if membership.level == "told-apart" else ", if being in the training data is a secret"
    yield f"Keep the weights confidential, or retrain {retrain}{who}."


def _complete_membership(report: AuditReport, run_path: str | None, lack: MembershipLack) -> str:
    """Say what is missing for a judgement of membership."""
    membership = report.verdict.membership
    end = "to judge membership"
    if lack == "no-score":
        return f"Audit with a suite that has the probe 'membership' {end}: 'extraction' has it."
    if lack == "other-kind":
        return f"Give {MIN_UNSEEN} unseen documents of the same source, form and length {end}."
    if lack == "trained-texts":
        return f"{_start(_add_trained(report, run_path, membership.num_members)[:-1])} {end}."
    left = sum(row.num_not_sampled for row in report.tables.buckets if row.role == "control")
    if left:
        return f"Audit the other {left:,} unseen documents {end}: " + (
            f"{_repeat(run_path, 'audit.max_documents_per_bucket=null')}."
        )
    number = membership.num_nonmembers
    now = f"({number:,} of {MIN_UNSEEN})"
    how = "'--nonmembers'"
    if report.training is not None:
        how = "a larger 'data.control_fraction' or more documents, before training"
    more = "more " if number else ""
    return f"Give {MIN_UNSEEN - number:,} {more}unseen documents {now} {end}: {how}."


# -- what the audit did not have -------------------------------------------------------------------


def _complete(report: AuditReport, run_path: str | None) -> Iterator[str]:
    """Yield what makes the result more complete or more certain."""
    verdict = report.verdict
    is_named = verdict.reason == "other-kind"  # The step of this reason names --base.
    # A base that ran may be none: one that gives nearly the same losses.
    if not report.training and verdict.base is None and report.model.base is None and not is_named:
        yield (
            "Add '--base' with the model it was fine-tuned from: text that this model produces was "
            "not learned in the fine-tuning."
        )
    dropped = report.training is not None and bool(report.training.dropped_fraction)
    if dropped and _may_attack(report) and verdict.reason is not None:
        yield (
            "Include an attacker who knows which tokens the mitigation dropped: "
            f"{_repeat(run_path, '--suite attacks')}."
        )
    if report.method.dtype != "fp32" and count_tiny(report):
        yield (
            f"Resolve the {fmt.count(count_tiny(report))} near-ties: "
            f"{_repeat(run_path, 'audit.dtype=fp32')}."
        )
    if verdict.level == "none-found":
        yield (
            "Keep this page with the weights it identifies, and audit again if documents, epochs "
            "or mitigations change."
        )


def _start(text: str) -> str:
    """Return a text that begins a sentence."""
    return f"{text[:1].upper()}{text[1:]}"
