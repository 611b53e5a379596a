"""Fields of the small models on which the planner is compared with the engine; sums of traffic."""

from collections.abc import Iterable
from typing import Any

from memguard.planner.traffic import Collective, TrafficAxis

MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 44,
    "vocab_size": 97,
    "num_hidden_layers": 3,
}


def sum_by_axis(collectives: Iterable[Collective]) -> dict[TrafficAxis, tuple[int, int, float]]:
    """Return number of calls, payload (bytes) and ring traffic (bytes) of each axis."""
    totals: dict[TrafficAxis, tuple[int, int, float]] = {}
    for each in collectives:
        calls, payload, ring = totals.get(each.axis, (0, 0, 0.0))
        totals[each.axis] = (
            calls + each.num_calls,
            payload + each.payload_bytes,
            ring + each.ring_bytes,
        )
    return totals
