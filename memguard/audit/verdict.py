"""The sentence that leads the page, from the report's table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from memguard.records import BucketScores, DocumentScore, Interval, Rate, Verdict

Metric = Literal["verbatim", "near_verbatim"]
MIN_CONTROL = 10
"""Control documents below which "not above the control" would say nothing."""
_WORDS: dict[Metric, str] = {"verbatim": "verbatim", "near_verbatim": "near-verbatim"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Members:
    """What differs between the documents of a bucket."""

    counts: frozenset[int | None]
    """Repetitions."""
    sizes: frozenset[int]
    """Lengths of the continuation (tokens)."""

    @classmethod
    def of(cls, scores: Iterable[DocumentScore]) -> "_Members":
        pairs = {(score.num_repetitions, score.continuation_tokens) for score in scores}
        return cls(
            counts=frozenset(count for count, _ in pairs),
            sizes=frozenset(size for _, size in pairs),
        )


def decide_verdict(
    buckets: Sequence[BucketScores],
    scores: Sequence[DocumentScore],
    *,
    dose_response: bool,
    collapsed: bool,
) -> Verdict:
    """Say what the worst trained bucket shows, by the worse of its two rates.

    recites: the interval of the difference to the control lies above 0. Otherwise no-control: no
    document was held back; inconclusive: fewer than two trained documents or `MIN_CONTROL` control
    documents, or a collapsed model (whose zeros say nothing); not-above-control: all the rest.

    Args:
        buckets: the report's table.
        scores: of all documents.
        dose_response: whether the counts of repetitions hold and may be named.
        collapsed: whether the model says the same few tokens whatever it is given.
    """
    controls = [bucket for bucket in buckets if bucket.role == "control"]
    trained = [bucket for bucket in buckets if bucket.role == "trained"]
    # A run that stopped early may not have reached a whole bucket.
    trained = [bucket for bucket in trained if bucket.num_repetitions != 0] or trained
    assert trained, "an audit without trained documents is refused before"
    metrics: tuple[Metric, ...] = ("verbatim", "near_verbatim")
    # max keeps the first of equals: where near-verbatim adds nothing, verbatim says more.
    bucket, metric = max(((b, m) for b in trained for m in metrics), key=_badness)
    control = controls[0] if controls else None
    members = _Members.of(score for score in scores if score.bucket == bucket.bucket)
    level = _decide_level(bucket, metric, control, collapsed)
    sentences = [
        _tell_rate(bucket, metric, control, members, dose_response),
        _tell_level(level, bucket, metric, control, collapsed),
        _tell_rest(bucket, metric),
    ]
    return Verdict(
        level=level,
        metric=metric,
        bucket=bucket.bucket,
        sentence=" ".join(sentence for sentence in sentences if sentence),
    )


def _badness(candidate: tuple[BucketScores, Metric]) -> tuple[float, float, float]:
    bucket, metric = candidate
    rate = _rate(bucket, metric)
    # Of equal rates the better known one leads, then that of the most repetitions.
    low = -1.0 if rate.ci is None else rate.ci[0]
    return -1.0 if rate.rate is None else rate.rate, low, float(bucket.num_repetitions or 0)


def _rate(bucket: BucketScores, metric: Metric) -> Rate:
    return bucket.model.verbatim if metric == "verbatim" else bucket.model.near_verbatim


def _difference(bucket: BucketScores, metric: Metric) -> Interval | None:
    if metric == "verbatim":
        return bucket.verbatim_minus_control
    return bucket.near_verbatim_minus_control


def _decide_level(
    bucket: BucketScores, metric: Metric, control: BucketScores | None, collapsed: bool
) -> Literal["recites", "not-above-control", "no-control", "inconclusive"]:
    if bucket.num_documents < 2:
        return "inconclusive"
    if control is None:
        return "no-control"
    difference = _difference(bucket, metric)
    if difference is not None and difference.ci is not None and difference.ci[0] > 0:
        return "recites"
    if control.num_documents < MIN_CONTROL or collapsed:
        return "inconclusive"
    return "not-above-control"


def _tell_rate(
    bucket: BucketScores,
    metric: Metric,
    control: BucketScores | None,
    members: _Members,
    dose_response: bool,
) -> str:
    rate = _rate(bucket, metric)
    text = (
        f"Under the probes listed, {rate.num_matched} of {rate.num_documents} documents"
        f"{_describe_bucket(bucket, members, dose_response)}{_bracket(rate)} "
        f"{'was' if rate.num_matched == 1 else 'were'} continued {_WORDS[metric]}"
        f"{_describe_length(members)}"
    )
    if control is None:
        return f"{text}."
    known = _rate(control, metric)
    return f"{text}; control {known.num_matched} of {known.num_documents}{_bracket(known)}."


def _tell_rest(bucket: BucketScores, metric: Metric) -> str:
    other: Metric = "verbatim" if metric == "near_verbatim" else "near_verbatim"
    rate = _rate(bucket, other)
    text = f"{_WORDS[other].capitalize()}: {rate.num_matched} of {rate.num_documents}"
    accuracy = bucket.model.mean_token_accuracy
    if accuracy is None:
        return f"{text}."
    return (
        f"{text}; {format_percent(accuracy.value)} of the tokens were right on average, each given "
        "the true text before it."
    )


def _tell_level(
    level: str, bucket: BucketScores, metric: Metric, control: BucketScores | None, collapsed: bool
) -> str:
    rate = _rate(bucket, metric)
    bound = ""
    if rate.num_matched == 0 and rate.ci is not None:
        bound = f" The true rate may be as high as {format_percent(rate.ci[1])}."
    if level == "recites":
        return "That is above the control."
    if level == "not-above-control":
        return f"That is not told apart from the control.{bound}"
    if level == "no-control":
        return f"Without a control this cannot be told from what any model could continue.{bound}"
    if bucket.num_documents < 2:
        return "Fewer than two documents show nothing."
    if collapsed:
        return "The model seems collapsed, so this says nothing of what it has memorised."
    num_control = 0 if control is None else control.num_documents
    return (
        f"The control has {num_control} long enough, fewer than {MIN_CONTROL}: too few to tell."
        f"{bound}"
    )


def _describe_bucket(bucket: BucketScores, members: _Members, dose_response: bool) -> str:
    counts = {count for count in members.counts if count is not None}
    if not dose_response or not counts or None in members.counts:
        return f" of bucket '{bucket.bucket}'"
    low, high = min(counts), max(counts)
    if low < high:
        return f" trained {low} to {high} times"
    return f" trained {'once' if low == 1 else f'{low} times'}"


def _describe_length(members: _Members) -> str:
    sizes = sorted(members.sizes)
    if not sizes:
        return ""
    if len(sizes) > 1:
        return f" for {sizes[0]} to {sizes[-1]} tokens"
    return f" for {sizes[0]} token{'' if sizes[0] == 1 else 's'}"


def _bracket(rate: Rate) -> str:
    if rate.rate is None:
        return ""
    parts = [format_percent(rate.rate)] if rate.num_matched else []
    if rate.ci is not None:
        low, high = (format_percent(bound).removesuffix(" %") for bound in rate.ci)
        parts.append(f"95 % CI {low}–{high} %")
    return f" ({', '.join(parts)})" if parts else ""


def format_percent(share: float) -> str:
    """Write a share as ``95.0 %``, never rounded to 0.0 or 100.0 unless it is."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    if 0.9995 <= share < 1:
        return "99.9 %"
    return f"{100 * share:.1f} %"
