"""What training taught token by token where greedy decoding extracts no document.

Said of a bucket only where training did it: teacher-forced token accuracy rose, and rose more than
the control's did, both against the base model on the same documents and by more than the interval;
and the blind baseline does not tell trained documents and control apart by their words alone.
"""

from dataclasses import dataclass

from memguard.records import AuditReport, BucketScores, Interval
from memguard.report.audit_probes import find_measured, group_measures
from memguard.report.formatting import clean_name, format_points


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """A bucket of which tokens were learned and no document is extracted."""

    bucket: BucketScores
    gain: Interval
    """Of token accuracy: model minus base model; its interval lies above 0."""
    gain_minus_control: Interval
    """The same minus that of the control; its interval lies above 0."""


def find_learned(report: AuditReport) -> list[Learned]:
    """Return the trained buckets of which that is shown, in the report's order."""
    groups = group_measures(report, "extraction")
    if not groups or not report.is_blind_at_chance:
        return []
    found = []
    for bucket in report.buckets:
        if bucket.role != "trained" or any(rate.num_matched for rate in bucket.risks.values()):
            continue
        measured = find_measured(groups[0], "token_accuracy", bucket.bucket)
        if measured is None:
            continue
        gain, excess = measured.counterfactual, measured.counterfactual_minus_control
        if gain is None or excess is None or not _is_above_zero(gain):
            continue
        if _is_above_zero(excess):
            found.append(Learned(bucket=bucket, gain=gain, gain_minus_control=excess))
    return found


def _is_above_zero(interval: Interval) -> bool:
    return interval.ci is not None and interval.ci[0] > 0


def tell_learned(found: list[Learned]) -> str:
    """Say what was learned token by token; "" where nothing is shown."""
    if not found:
        return ""
    told = []
    for one in found:
        gain, excess = format_points(one.gain), format_points(one.gain_minus_control)
        told.append(
            f"{clean_name(one.bucket.bucket, 40)}: {gain.value}, "
            f"{excess.value} more than in the control ({excess.interval})"
        )
    return (
        "No document of these buckets is extracted, yet training raised their teacher-forced token "
        f"accuracy: {'; '.join(told)}. That is knowledge token by token, not extraction."
    )
