"""Summarises a run's log: totals, losses by step, audits during training."""

from collections.abc import Iterator, Sequence

from memguard.config import RunConfig
from memguard.records import Budget, LossCurve, LossPoint, StartLine, TrainingSummary, WatchedLine
from memguard.train.metrics import EndMetrics, HeldoutMetrics, MetricsLine, StepMetrics

_MOST_POINTS = 200
"""Of the training loss in a chart."""


def summarise_training(
    lines: Sequence[MetricsLine], config: RunConfig, num_removed: int | None = None
) -> TrainingSummary | None:
    """Return what a report says of a training, so far if it has not ended; None without a step.

    ``num_removed`` documents were removed as copies; None if no mitigation removes any.
    """
    end = next((line for line in lines if isinstance(line, EndMetrics)), None) or _sum_steps(lines)
    if end is None:
        return None
    # The loss of a single document would confirm a guess of its text.
    losses = [line for line in lines if isinstance(line, HeldoutMetrics) and line.num_documents > 1]
    heldout = {line.step: line for line in losses}
    before, after = heldout.get(0), heldout.get(end.step)
    starts = [line for line in lines if isinstance(line, StartLine)]
    dropped = 1 - end.num_kept_tokens / max(1, end.num_supervised_tokens)
    drops = bool(config.mitigations) or end.num_kept_tokens < end.num_supervised_tokens
    return TrainingSummary(
        num_steps=end.step,
        last_step=end.last_step,
        kept_by=end.kept_by,
        stopped_by=end.stopped_by,
        curve=LossCurve(
            training=list(_average_losses(lines)),
            heldout=[LossPoint(step=line.step, nll=line.nll) for line in losses],
        ),
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


def _average_losses(lines: Sequence[MetricsLine]) -> Iterator[LossPoint]:
    """Yield the training loss over the steps of a log."""
    steps = [line for line in lines if isinstance(line, StepMetrics)]
    size = max(1, -(-len(steps) // _MOST_POINTS))
    for begin in range(0, len(steps), size):
        group = steps[begin : begin + size]
        losses = [line.loss for line in group if line.loss is not None]
        if losses:
            yield LossPoint(step=group[-1].step, nll=sum(losses) / len(losses))
