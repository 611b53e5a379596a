"""Measures as the extraction, grid and generation probes leave them, made up."""

from collections.abc import Callable
from typing import Any

import report_examples as examples

from memguard import records as r

Make = Callable[[int, str], r.MeasuredBucket]


def make_rates(matched: list[int]) -> Make:
    def make(place: int, name: str) -> r.MeasuredBucket:
        return r.MeasuredBucket(
            bucket=name,
            num_documents=40,
            num_missing=0,
            model=examples.make_rate(matched[place], 40),
            base=examples.make_rate(0, 40),
            change_from_base=examples.make_interval(matched[place] / 40, 0.07, -1, 1),
            minus_control=None,
            change_from_base_minus_control=None
            if place == 0
            else examples.make_interval(matched[place] / 40, 0.08, -1, 1),
        )

    return make


def make_means(values: list[float], base: float, half: float, low: float, high: float) -> Make:
    def make(place: int, name: str) -> r.MeasuredBucket:
        value = values[place]
        return r.MeasuredBucket(
            bucket=name,
            num_documents=40,
            num_missing=0,
            model=examples.make_interval(value, half, low, high),
            base=examples.make_interval(base, half, low, high),
            change_from_base=examples.make_interval(value - base, half, low - high, high - low),
            minus_control=None,
            change_from_base_minus_control=None
            if place == 0
            else examples.make_interval(value - values[0], half, low - high, high - low),
        )

    return make


def make_measures(
    probe: str, parameters: dict[str, Any], metrics: dict[str, tuple[str, Make]], names: list[str]
) -> list[r.Measure]:
    return [
        r.Measure(
            probe=probe,
            version=1,
            parameters=parameters,
            metric=metric,
            meaning="What it is.",
            unit=unit,
            higher_is_better=False,
            buckets=[make(place, name) for place, name in enumerate(names)],
        )
        for metric, (unit, make) in metrics.items()
    ]


def make_all_measures(names: list[str]) -> list[r.Measure]:
    found = make_measures(
        "extraction",
        {"continuation_tokens": 50, "prefix_tokens": None},
        {
            "verbatim": ("documents", make_rates([0, 0, 0, 0])),
            "near_verbatim": ("documents", make_rates([0, 0, 0, 6])),
            "token_accuracy": ("share", make_means([0.19, 0.31, 0.55, 0.82], 0.137, 0.03, 0, 1)),
            "logprob": ("nats", make_means([-2.8, -1.99, -1.01, -0.33], -3.379, 0.11, -20, 0)),
        },
        names,
    )
    for offset in (0, 64):
        for prefix in (10, 25, 50):
            for size in (25, 50):
                accuracy = [0.17, 0.22 + prefix / 400, 0.4 + prefix / 300, 0.6 + prefix / 250]
                found += make_measures(
                    "grid",
                    {"offset": offset, "prefix_tokens": prefix, "continuation_tokens": size},
                    {
                        "verbatim": ("documents", make_rates([0, 0, prefix // 25, prefix // 5])),
                        "token_accuracy": ("share", make_means(accuracy, 0.131, 0.03, 0, 1)),
                    },
                    names,
                )
    for decoding, lost in (("greedy", 0.0), ("T=1, top-p 0.95", 0.11)):
        overlap = [0.21, 0.3 - lost / 3, 0.52 - lost, 0.79 - lost]
        found += make_measures(
            "generation",
            {"decoding": decoding},
            {
                "rouge_l": ("share", make_means(overlap, 0.184, 0.03, 0, 1)),
                "longest_copied_run": (
                    "tokens",
                    make_means([3.1, 5.2, 14.7 - 10 * lost, 31.5], 3.0, 1.4, 0, 50),
                ),
                "edit_distance": (
                    "share",
                    make_means([0.86, 0.77, 0.51 + lost, 0.24 + lost], 0.88, 0.03, 0, 1),
                ),
                "near_verbatim": ("documents", make_rates([0, 0, 2, 11])),
                "bleu_above_0.75": ("documents", make_rates([0, 0, 3, 13])),
                "type_token_ratio": (
                    "share",
                    make_means([0.63, 0.66, 0.7, 0.71], 0.61, 0.02, 0, 1),
                ),
            },
            names,
        )
    return found
