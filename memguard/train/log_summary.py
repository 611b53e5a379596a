"""Summarises a run's log: totals, losses by step, audits during training."""

from collections.abc import Sequence

from memguard.config import RunConfig
from memguard.records import Budget, LossCurve, LossPoint, StartLine, TrainingSummary, WatchedLine
from memguard.train.metrics import EndMetrics, HeldoutMetrics, MetricsLine, StepMetrics

_MOST_POINTS = 200
"""Of the training loss in a chart."""


def summarise_training(
    lines: Sequence[MetricsLine],
    config: RunConfig,
    num_removed: int | None = None,
    *,
    so_far: bool = False,
) -> TrainingSummary | None:
    """Return what a report says of a training; None if it has not ended, or has no step.

    ``num_removed`` documents were removed as copies; None if no mitigation removes any. With
    ``so_far`` a training that has not ended is summarised too.
    """
    end = next((line for line in lines if isinstance(line, EndMetrics)), None)
    if end is None and so_far:
        end = _sum_steps(lines)
    if end is None:
        return None
    heldout = _list_heldout(lines)
    before = next((line for line in heldout if line.step == 0), None)
    after = next((line for line in heldout if line.step == end.step), None)
    starts = [line for line in lines if isinstance(line, StartLine)]
    dropped = 1 - end.num_kept_tokens / max(1, end.num_supervised_tokens)
    drops = bool(config.mitigations) or end.num_kept_tokens < end.num_supervised_tokens
    return TrainingSummary(
        num_steps=end.step,
        last_step=end.last_step,
        kept_by=end.kept_by,
        stopped_by=end.stopped_by,
        curve=summarise_losses(lines),
        num_supervised_tokens=end.num_kept_tokens,
        dropped_fraction=dropped if drops else None,
        mitigations=[mitigation.model_dump(mode="json") for mitigation in config.mitigations],
        num_removed=num_removed,
        epsilon=end.epsilon,
        epsilon_if_sampled=end.epsilon_if_sampled,
        delta=end.delta,
        train_s=end.train_s,
        heldout_nll=after and after.nll,
        base_heldout_nll=before and before.nll,
        heldout_bucket=after and after.bucket,
        heldout_num_documents=after.num_documents if after else 0,
        heldout_num_tokens=after.num_tokens if after else 0,
        starts=starts if len(starts) > 1 else [],
        watched=[line.to_step() for line in lines if isinstance(line, WatchedLine)],
        budget=None if config.budget is None else Budget(**config.budget.model_dump()),
    )


def _sum_steps(lines: Sequence[MetricsLine]) -> EndMetrics | None:
    """Return the totals of the steps so far; None if there is none."""
    steps = [line for line in lines if isinstance(line, StepMetrics)]
    if not steps:
        return None
    return EndMetrics(
        step=steps[-1].step,
        last_step=steps[-1].step,
        num_rows=sum(line.num_rows for line in steps),
        num_supervised_tokens=sum(line.num_supervised_tokens for line in steps),
        num_kept_tokens=sum(line.num_kept_tokens for line in steps),
        train_s=steps[-1].elapsed_s,
        tally_sha256="",
    )


def summarise_losses(lines: Sequence[MetricsLine]) -> LossCurve:
    """Return the losses over the steps of a log."""
    steps = [line for line in lines if isinstance(line, StepMetrics)]
    size = max(1, -(-len(steps) // _MOST_POINTS))
    training = []
    for begin in range(0, len(steps), size):
        group = steps[begin : begin + size]
        losses = [line.loss for line in group if line.loss is not None]
        if losses:
            training.append(LossPoint(step=group[-1].step, nll=sum(losses) / len(losses)))
    heldout = [LossPoint(step=line.step, nll=line.nll) for line in _list_heldout(lines)]
    return LossCurve(training=training, heldout=heldout)


def _list_heldout(lines: Sequence[MetricsLine]) -> list[HeldoutMetrics]:
    # The loss of a single document would confirm a guess of its text.
    return [line for line in lines if isinstance(line, HeldoutMetrics) and line.num_documents > 1]
