"""Speed of matmuls and of attention by their shape, from published measurements. No torch.

    a matmul      max(2 M N K / (peak x the machine's matmul_share),
                      a (MN + NK + KM) / (memory bandwidth x MEMORY_SHARE)) + KERNEL_S
    attention     operations / (peak x the machine's attention_share x CURVE at rows of T tokens)

No measurement of memguard is in these figures, and the step adds its own constants (compute.py).

The matmul: MEMORY_SHARE and KERNEL_S were fitted to 375 bf16 products that XLA's developers
measured on an H100, M, N and K between 256 and 4,096 and batches of 1, 2 and 4 (XLA_TABLE): the
median error is 5 %, nine of ten are within 14 %. A product is as fast as the larger of its two
bounds; KERNEL_S, which products with a side of some hundred consist of, is the ramp of a kernel at
its begin and end.

The curves: FlashAttention-2 on an H100, causal, heads of 128 features. Forward from figure 5 of
arXiv 2407.08608, forward and backward together from figure 7 of arXiv 2307.08691, both as printed
above the bars; backward is what remains of the second when the first is taken away, with the
papers' counts of operations (2 and 5 matmuls, of which causal rows need half). On an A100 the curve
of forward and backward together (figure 4 of arXiv 2307.08691) has the same form within 5 %, 1.8
times as high: that is ``attention_share``.
"""

import math
from bisect import bisect_right

MEMORY_SHARE = 0.9
"""Share of the nominal bandwidth at which a matmul reads and writes its matrices."""

KERNEL_S = 5.6e-6
"""Time that a matmul takes however small it is (seconds)."""

XLA_TABLE = (
    "https://github.com/openxla/xla/blob/main/xla/service/gpu/model/matmul_interpolator_data.h"
)

_ROWS = (512, 1024, 2048, 4096, 8192, 16384)
# TFLOP/s, as printed.
_FORWARD = (191, 260, 298, 319, 333, 335)
_TOGETHER = (163, 221, 265, 294, 308, 328)
_FORWARD_MATMULS, _BACKWARD_MATMULS = 2, 5
BACKWARD_OPERATIONS = _BACKWARD_MATMULS / _FORWARD_MATMULS
"""Operations of attention's backward, relative to its forward."""


def time_matmul(
    rows: int,
    outs: int,
    ins: int,
    *,
    element_bytes: int,
    flops_per_s: float,
    bytes_per_s: float,
) -> float:
    """Return the time of one product of [rows, ins] and [ins, outs] (seconds).

    Args:
        rows: M.
        outs: N.
        ins: K.
        element_bytes: bytes of an element of all three matrices.
        flops_per_s: what the largest products reach (FLOP/s).
        bytes_per_s: nominal bandwidth of the memory (bytes/s).
    """
    num_bytes = element_bytes * (rows * outs + outs * ins + ins * rows)
    compute_s = 2 * rows * outs * ins / flops_per_s
    return max(compute_s, num_bytes / (bytes_per_s * MEMORY_SHARE)) + KERNEL_S


def attention_curve(seq_len: int, *, is_backward: bool) -> float:
    """Return the speed of attention over rows of this length, relative to the longest ones.

    1 is the speed of forward and backward together over rows of 16,384 tokens. Between the measured
    lengths the curve is linear in their logarithm; outside it is that of the nearest.

    Args:
        seq_len: tokens of a row.
        is_backward: whether backward is meant, or forward.
    """
    speeds = [_backward_speed(i) if is_backward else _FORWARD[i] for i in range(len(_ROWS))]
    clamped = min(max(seq_len, _ROWS[0]), _ROWS[-1])
    upper = min(bisect_right(_ROWS, clamped), len(_ROWS) - 1)
    lower = upper - 1
    share = math.log2(clamped / _ROWS[lower]) / math.log2(_ROWS[upper] / _ROWS[lower])
    return (speeds[lower] + share * (speeds[upper] - speeds[lower])) / _TOGETHER[-1]


def _backward_speed(index: int) -> float:
    """Return the speed of backward alone (TFLOP/s): all operations' time less that of forward."""
    together_s = (_FORWARD_MATMULS + _BACKWARD_MATMULS) / _TOGETHER[index]
    return _BACKWARD_MATMULS / (together_s - _FORWARD_MATMULS / _FORWARD[index])
