"""What to do after an audit: decisions that follow from the two badges, with the audit's numbers.

text         what to withhold, and what finds the cause or makes the audit large enough
documents    to review and accept what was extracted; training that lowers it
membership   to keep the weights confidential, or what is missing for a judgement
others       a base model, attacks and precision that this audit did not have
"""

from collections.abc import Iterator, Mapping

from memguard.audit.statistics import compute_p_above_control
from memguard.records import REFERENCE_SECRETS, SECRETS, AuditReport, MembershipVerdict, VerdictTest
from memguard.records.verdict import MIN_TRAINED, MIN_UNSEEN

_DECISIONS: Mapping[str | None, str] = {
    "control": "Do not release these weights; or release them with each extracted document "
    "accepted by a person.",
    "canaries": "Do not release these weights: a model that repeats random secrets may repeat real "
    "ones.",
    "no-control": "{not_yet} without unseen documents cause and membership are open. {compare}.",
    "too-few": "{not_yet} {extracted} {are} too few to blame training. {more_unseen}.",
    "control-too": "{not_yet} {unseen} unseen documents are extracted too. Accept what is a form "
    "that many texts share; withhold the weights for the rest.",
    "base-too": "Decide on each extracted document: the base model produces it too, so that "
    "another fine-tuning does not remove it. Accept it, or take another base.",
    "other-kind": "{not_yet} give {min_unseen} unseen documents of the same source, form and "
    "length{or_base}. Without them a form that was learned looks like memorization; membership is "
    "not judged.",
    "forgotten": "Do not release these weights as free of these documents: train on with 'npo' and "
    "more 'data.forget_repetitions'.",
    "canaries-too": "Train again with more canaries than {canaries} ('data.canaries.count'): "
    "references are extracted as well, so that chance is not excluded.",
    "not-trained": "Give documents that this model was trained on: none of these was.",
    "collapsed": "Discard these weights or check their training: the model predicts the same few "
    "tokens everywhere, so that low rates show nothing.",
    "not-generated": "{not_yet} near-verbatim text was not tested. Audit again with time and "
    "memory for generation: {without_limit}.",
    "weakened": "{not_yet} audit without 'audit.prefix_tokens', and with at most 50 continuation "
    "tokens: these settings find less.",
    "unaudited": "{not_yet} {unaudited} training documents were not audited and count as "
    "extracted. {more_audited}.",
    "too-small": "{not_yet} {more_trained}.",
}
"""The decision about the text by the reason of its level; too-small: too few, none extracted."""
_MORE_LONG = (
    "Give more that are long enough, or lower 'audit.continuation_tokens' (of answers "
    "'audit.min_prefix_tokens')"
)
_MORE_KNOWN = (
    "Train a model whose tokenizer knows the letters of {:,} of them, which it mostly replaces by "
    "its unknown token"
)
_MOST_UNSEEN = 10_000
"""A larger number of unseen documents is not proposed."""


def write_next_steps(report: AuditReport, run_path: str | None) -> tuple[str, ...]:
    """Return decisions, the most important first; commands run as they are printed.

    ``run_path`` is the folder of the audited run from the working directory; None if the audit is
    not of a run or its page is not stored.
    """
    parts = (_decide_text, _treat_documents, _decide_membership, _complete)
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


def _decide_text(report: AuditReport, run_path: str | None) -> Iterator[str]:
    """Yield the decision about the text: one for every reason of its level."""
    verdict, is_run = report.verdict, report.training is not None
    trained, unseen = verdict.trained, verdict.control
    if verdict.reason is None:
        return
    rows = [row for row in report.tables.buckets if row.role == "trained"]
    num_unaudited = sum(row.num_not_auditable for row in rows)
    num_unknown = sum(row.num_unknown for row in rows)
    audited = [_MORE_KNOWN.format(num_unknown)] if num_unknown else []
    if num_unaudited > num_unknown or not audited:
        audited.append(_MORE_LONG)
    num_trained = num_unaudited + sum(row.num_documents + row.num_not_sampled for row in rows)
    canaries = (
        report.tables.find("canaries", "verbatim", bucket, statistic="rate")
        for bucket in (SECRETS, REFERENCE_SECRETS)
    )
    given = f"Audit with {MIN_UNSEEN} documents of the same kind that were never trained"
    is_small = verdict.reason == "too-few" and verdict.level == "inconclusive"
    yield _DECISIONS["too-small" if is_small else verdict.reason].format(
        not_yet="Do not release these weights yet:",
        compare=f"Train again with {MIN_UNSEEN} documents in 'data.control'"
        if is_run
        else f"{given} ('--nonmembers')",
        extracted=f"{trained.num_matched:,} of {trained.num_documents:,}",
        are="is" if trained.num_matched == 1 else "are",
        more_unseen=_ask_for_unseen(verdict.test),
        unseen=f"{unseen.num_matched:,} of {unseen.num_documents:,}",
        min_unseen=MIN_UNSEEN,
        or_base="" if verdict.base is not None else ", and the base model ('--base')",
        canaries=sum(row.num_documents for row in canaries if row is not None),
        without_limit=_repeat(run_path, "audit.max_generation_minutes=null"),
        unaudited=f"{num_unaudited:,} of {num_trained:,}",
        more_audited=". ".join(audited),
        more_trained=_ask_for_trained(report, run_path, trained.num_clusters),
    )


def _ask_for_unseen(test: VerdictTest | None) -> str:
    """Say how many unseen texts, none further extracted, would make the test significant."""
    if test is None:
        return "Audit more trained and more unseen documents"
    trained, control = test.trained, test.control
    counts = (trained.num_matched_clusters, trained.num_clusters, control.num_matched_clusters)
    number = now = control.num_clusters
    while compute_p_above_control(*counts, number) > test.level:
        number += -(-number // 10)
        if number > _MOST_UNSEEN:
            return "Audit more trained and more unseen documents"
    is_sampled = test.documents in ("attacked", "generated")
    how = "Attack, in a larger suite," if is_sampled else "Give"
    return (
        f"{how} {number - now:,} more unseen documents ({now:,} of {number:,}): if none of them is "
        "extracted, training is the cause"
    )


def _ask_for_trained(report: AuditReport, run_path: str | None, number: int) -> str:
    """Say how to audit more trained texts, of which there are too few."""
    left = sum(row.num_not_sampled for row in report.tables.buckets if row.role == "trained")
    if left:
        again = _repeat(run_path, "audit.max_documents_per_bucket=null")
        return f"audit the other {left:,} trained documents too: {again}"
    if number >= MIN_TRAINED:
        return f"give more trained documents that differ: copies count once ({number:,} texts)"
    how = "give" if report.training is None else "train on"
    return f"{how} {MIN_TRAINED - number:,} more trained documents ({number:,} of {MIN_TRAINED})"


def _treat_documents(report: AuditReport, run_path: str | None) -> Iterator[str]:
    """Yield how to review and accept the extracted documents, and how to lower their number."""
    if report.num_findings:
        what = "document" if report.num_findings == 1 else "documents"
        step = f"Review the {report.num_findings:,} {what} of 'findings.csv'"
        if report.data.identity_key is not None:
            place = "RUN" if run_path is None else run_path
            step += f"; accept one with 'memguard accept {place} DOCUMENT --by NAME --reason TEXT'"
        if "audit.excerpts=true" not in report.method.command:
            again = _repeat(run_path, "audit.excerpts=true")
            step += f". {again[:1].upper()}{again[1:]} writes their text to a private file"
        yield f"{step}."
    if not report.verdict.may_be_fixed:
        return
    what = "goldfish loss and a smaller k" if _has(report, "goldfish") else "goldfish loss"
    if run_path is None:
        yield f"Fine-tune again with {what}, or train these documents fewer times."
        return
    yield f"Train again with {what} and compare both runs: 'memguard compare {run_path} --fix'."
    yield (
        "If these weights must be kept, train them on with the mitigation 'npo' and the extracted "
        "documents as 'data.forget'."
    )


def _has(report: AuditReport, mitigation: str) -> bool:
    listed = report.training.mitigations if report.training else []
    return any(one.get("name") == mitigation for one in listed)


def _decide_membership(report: AuditReport, run_path: str | None) -> Iterator[str]:
    """Yield the decision about membership; none if there is no sign."""
    membership = report.verdict.membership
    if membership.level in ("told-apart", "slightly"):
        how = "with a smaller epsilon of 'dp_sgd'" if _has(report, "dp_sgd") else "with 'dp_sgd'"
        yield f"Keep the weights confidential, or retrain {how}."
    # The steps of these reasons ask for the same documents.
    elif membership.lack is not None and report.verdict.reason not in ("no-control", "other-kind"):
        missing = _ask_for_membership(report, run_path, membership)
        yield f"To judge membership, {missing}."


def _ask_for_membership(
    report: AuditReport, run_path: str | None, membership: MembershipVerdict
) -> str:
    """Say what is missing for a judgement of membership."""
    if membership.lack == "no-score":
        return "audit with a suite that has the probe 'membership', such as 'extraction'"
    if membership.lack == "other-kind":
        return f"give {MIN_UNSEEN} unseen documents of the same source, form and length"
    if membership.lack == "no-base":
        return "give the model before training ('--base'), whose losses differ from this model's"
    if membership.lack == "trained-texts":
        return _ask_for_trained(report, run_path, membership.num_members)
    left = sum(row.num_not_sampled for row in report.tables.buckets if row.role == "control")
    if left:
        again = _repeat(run_path, "audit.max_documents_per_bucket=null")
        return f"audit the other {left:,} unseen documents too: {again}"
    number, how = membership.num_nonmembers, "'--nonmembers'"
    if report.training is not None:
        how = f"{MIN_UNSEEN} in 'data.control' (of a study: 'documents_per_bucket'), then train"
    more = "more " if number else ""
    return (
        f"give {MIN_UNSEEN - number:,} {more}unseen documents ({number:,} of {MIN_UNSEEN}): {how}"
    )


def _complete(report: AuditReport, run_path: str | None) -> Iterator[str]:
    """Yield what makes the result more complete, and what to keep."""
    verdict = report.verdict
    # A base that ran may not be used: one that gives nearly the same losses.
    has_base = report.training is not None or report.model.base is not None
    if not has_base and verdict.reason != "other-kind":  # The step of this reason names --base.
        yield (
            "Add '--base' with the model it was fine-tuned from: text that this model produces was "
            "not learned in the fine-tuning."
        )
    # Attacks that could not run would fail again.
    is_attacked = any(run.name == "attacks" for run in report.probe_runs)
    has_dropped = report.training is not None and bool(report.training.dropped_fraction)
    if not is_attacked and (has_dropped or verdict.level == "none-found"):
        who = (
            "who knows which tokens the mitigation dropped" if has_dropped else "with more guesses"
        )
        again = _repeat(run_path, "--suite attacks")
        yield f"Before a release include an attacker {who}: {again}."
    if report.method.dtype != "fp32" and (number := count_tiny(report)):
        yield f"Resolve the {number:,} near-ties: {_repeat(run_path, 'audit.dtype=fp32')}."
    if verdict.level == "none-found":
        yield (
            "Keep this page with the weights it identifies, and audit again if documents, epochs "
            "or mitigations change."
        )
