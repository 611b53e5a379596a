"""Sizes of the GPU benchmarks: an 8B-shaped Llama, its FLOP a token, and the peak rate of GPUs.

Hidden size 4096, FFN 14336, 32 heads, 8 key/value heads, vocabulary 128256 as in Llama-3.1-8B, with
as many of its 32 layers as fit. Weights, gradients and AdamW moments are fp32, arithmetic is bf16.

    MFU = FLOP a token * tokens/s / peak
    FLOP a token = 6 * (matmul parameters of the layers + V * D * share of labels kept)
                   + 12 * layers * D * mean number of tokens that a token attends to

Recomputed operations are not counted. A token of a packed row attends to the earlier tokens of its
own document only. torchtitan counts all labels and the whole row, whether masked or not,

    FLOP a token = 6 * (matmul parameters of the layers + V * D) + 12 * layers * D * T

and reports 33 % without and 39 % with compilation for Llama-3.1-8B on H100 (8 GPUs, rows of 8192
tokens; https://arxiv.org/abs/2410.06511 and
https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md). The
tables print both, the second as "MFU full".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from workload import build_llama, draw_batches, draw_model

from memguard.data.loader import Batch

# Dense bf16 with fp32 accumulation, TFLOP/s, from the manufacturers' data sheets; the first name
# that matches is used.
PEAK_TFLOPS = {
    "GH200": 989.0,
    "GB200": 2450.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "L40S": 362.0,
    "A6000": 155.0,
    "RTX 4090": 165.0,
    "MI300X": 1307.0,
    "MI250X": 191.5,
}
MAX_LAYERS = 32
NUM_BATCHES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the model, of a step and of the measurement."""

    hidden: int = 4096
    inner: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    lm: int = 128256
    num_layers: int = 2
    batch_size: int = 4
    """Rows of a step, of all ranks."""
    seq_len: int = 2048
    num_warmup: int = 3
    """Steps before the first round, on each kind of rows."""
    num_rounds: int = 5
    num_steps: int = 2
    """Steps of a round."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matmuls."""
        head_dim = self.hidden // self.num_heads
        attention = 2 * self.hidden * (self.num_heads + self.num_kv_heads) * head_dim
        return attention + 3 * self.hidden * self.inner

    @property
    def step_tokens(self) -> int:
        """Number of tokens of a step, of all ranks."""
        return self.batch_size * self.seq_len

    def flop_per_token(self, kept: float, attended: float) -> float:
        """Return the FLOP per token of a step; see the formula at the top of this file.

        Args:
            kept: share of the tokens whose label is kept.
            attended: mean number of tokens that a token attends to, itself included.
        """
        matmul = self.num_layers * self.layer_parameters + kept * self.lm * self.hidden
        return 6 * matmul + 12 * self.num_layers * self.hidden * attended


TINY = Sizes(
    hidden=64,
    inner=128,
    num_heads=4,
    num_kv_heads=2,
    lm=512,
    batch_size=2,
    seq_len=64,
    num_warmup=1,
    num_rounds=1,
    num_steps=1,
)


def count_layers(sizes: Sizes, memory_bytes: int, *, num_ranks: int = 1) -> int:
    """Return the number of layers, at most 32, that fit into each of some GPUs with a margin.

    A parameter takes 16 bytes, sharded over the ranks: weight, gradient and moments in fp32. The
    bf16 copy of a step is whole on one rank, and of two layers on several. A token of this rank
    takes about 34 bytes per hidden feature and 14 per FFN feature in each layer, and 16 bytes per
    logit on the side that computes all logits at once. On several ranks blocks are recomputed: a
    token keeps 4 bytes per hidden feature and layer, and the rest of one layer.
    """
    tokens = sizes.step_tokens // num_ranks
    block = _count_block_bytes(sizes, num_ranks)
    outside = 16 * 2 * sizes.lm * sizes.hidden // num_ranks + 2 * 2 * sizes.lm * sizes.hidden
    outside += tokens * 16 * sizes.lm
    per_layer = 16 * sizes.layer_parameters // num_ranks
    if num_ranks == 1:
        per_layer += 2 * sizes.layer_parameters + block
    else:
        per_layer += tokens * 4 * sizes.hidden
        outside += block + 2 * 2 * sizes.layer_parameters
    return max(1, min(MAX_LAYERS, int((0.9 * memory_bytes - outside) // per_layer)))


def keeps_activations(sizes: Sizes, memory_bytes: int, *, num_ranks: int) -> bool:
    """Return whether a GPU's memory holds what all layers keep for backward, if it held no more."""
    return sizes.num_layers * _count_block_bytes(sizes, num_ranks) < memory_bytes


def _count_block_bytes(sizes: Sizes, num_ranks: int) -> int:
    tokens = sizes.step_tokens // num_ranks
    return tokens * (34 * sizes.hidden + 14 * sizes.inner)


def find_peak_tflops(name: str) -> float | None:
    """Return the dense bf16 peak of a GPU (TFLOP/s); None if it is not in the table."""
    return next((peak for gpu, peak in PEAK_TFLOPS.items() if gpu in name), None)


def build_config(sizes: Sizes) -> Any:
    """Return the configuration of a Llama with untied embeddings."""
    return build_llama(
        sizes.lm,
        sizes.hidden,
        sizes.inner,
        sizes.num_layers,
        sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        max_len=sizes.seq_len,
        is_tied=False,
    )


def draw_llama(sizes: Sizes, device: torch.device, *, attn: str = "sdpa") -> Any:
    """Create a random fp32 Llama directly on the device."""
    config = build_config(sizes)
    config._attn_implementation = attn
    return draw_model(config, device=device)


def draw_rows(sizes: Sizes, *, goldfish: bool = False) -> list[Batch]:
    """Create packed rows of documents of random tokens."""
    return draw_batches(
        sizes.lm,
        (sizes.batch_size, sizes.seq_len),
        document_tokens=(sizes.seq_len // 4, sizes.seq_len),
        num_batches=NUM_BATCHES,
        goldfish=goldfish,
    )


def measure_rows(batches: Sequence[Batch]) -> dict[str, float]:
    """Return the share of labels kept, and the mean number of tokens that a token attends to."""
    num_tokens = sum(batch.input_ids.size for batch in batches)
    return {
        "kept": sum(batch.num_kept for batch in batches) / num_tokens,
        "attended": sum(float((batch.position_ids + 1).sum()) for batch in batches) / num_tokens,
    }
