"""Settings that drop labels, with background added until as many labels receive loss.

At equal steps a setting that drops labels learns from fewer. Every step has r background rows for
each row of the study; with r' = (1 + r) / share - 1 of them, where ``share`` of the labels is kept,
a run has (1 + r') / (1 + r) = 1 / share times as many labels and keeps as many as one that drops
none. Each studied document is trained as often as before, in more steps, so its repetitions lie
further apart. Goldfish's authors compare so too (more rows a step); adding background is ours.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from memguard.config import (
    Document,
    GoldfishConfig,
    MitigationConfig,
    SweepConfig,
    TokenDropoutConfig,
)


def list_kept_shares(config: SweepConfig) -> list[float]:
    """Return for each setting the share of labels that more background makes up for; 1 for none."""
    if config.equal == "steps":
        return [1.0] * len(config.settings)
    return [compute_kept_share(setting.mitigations) for setting in config.settings]


def compute_kept_share(mitigations: Sequence[MitigationConfig]) -> float:
    """Return the share of labels that mitigations keep by their settings.

    What is really kept differs a little: a document's first labels have no tokens before them to
    decide by, and a hash is even only on average.
    """
    shares = [1.0]
    for mitigation in mitigations:
        match mitigation:
            case GoldfishConfig(k=k):
                shares.append(1 - 1 / k)
            case TokenDropoutConfig(rate=rate):
                shares.append(1 - rate)
    return math.prod(shares)


def raise_background_ratio(ratio: float, kept_share: float) -> float:
    """Return the background rows a studied row with which as many labels are kept."""
    return (1 + ratio) / kept_share - 1


def check_equal(config: SweepConfig, document: Document) -> Iterator[str]:
    """Yield why labels cannot be made equal in this sweep, or why that would do nothing."""
    if config.equal == "steps":
        return
    place = document.locate(("equal",))
    asked = f"{place} 'equal' cannot be '{config.equal}'"
    data = config.run.get("data")
    if isinstance(data, Mapping) and not (data.get("study") and data.get("background")):
        yield (
            f"{asked} without 'run.data.study' and 'run.data.background': it adds background rows, "
            "and without them every document would be trained more often"
        )
    for index, setting in enumerate(config.settings):
        if any(isinstance(one, GoldfishConfig) and one.k_by_dose for one in setting.mitigations):
            yield (
                f"{asked} where 'settings[{index}]' has a goldfish with 'k_by_dose': what share of "
                "the labels it drops is not known before its documents are read"
            )
    if all(compute_kept_share(setting.mitigations) == 1 for setting in config.settings):
        yield f"{asked}: no setting drops labels (goldfish, token_dropout), so it would do nothing"
