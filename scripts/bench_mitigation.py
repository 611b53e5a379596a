"""Measure what a goldfish's mask costs: beside the published way to make it, and beside a step.

python scripts/bench_mitigation.py             medians of 5 rounds; a minute
python scripts/bench_mitigation.py --quick     tiny sizes, one round, to see that it works; seconds

The published code (ahans30/goldfish-loss) unfolds each row into windows of h tokens, multiplies
these and looks the products up in a table; restated here in torch. Ours hashes with prefix sums,
whatever h is. Both mask the same [8, 4096] tokens with k = 4 and h = 13, on the CPU. The last row
is no mask: it sums the tokens once, as every hash by prefix sums must, and so no such mask made
with numpy could be faster.

A step is memguard's own, fp32, of a random Llama with 31M parameters; the mask is that of its rows.
Sides take turns; ratios are medians of the rounds' ratios. The last line is a verdict; exit 1 where
a bar is missed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from memguard.config import GoldfishConfig, OptimConfig, TrainConfig
from memguard.data.loader import Batch
from memguard.mitigation import Goldfish, build_mitigations
from memguard.mitigation.goldfish import TokenLetters, reference_table
from memguard.model.checks import build_vocab_layer
from memguard.runtime import Runtime
from memguard.train.step import TrainStep

MIN_RATIO, MAX_SHARE = 20.0, 0.01
K, WIDTH, VOCAB = 4, 13, 32_000
# Each round repeats what takes milliseconds.
REPEATS = 20


def build_masks() -> dict[str, Callable[[np.ndarray], Any]]:
    """Return every way to make a mask ``[B, T]`` of tokens ``[B, T]``, the published one first."""
    table = torch.from_numpy(reference_table())
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("abcdefghij"), 4)) for _ in range(VOCAB)]

    def publish(ids_BT: np.ndarray) -> torch.Tensor:
        windows_BTh = torch.from_numpy(ids_BT).unfold(1, WIDTH, 1)
        return table[windows_BTh.prod(2) % len(table)] < 1 / K

    def make(**settings: Any) -> Callable[[np.ndarray], Any]:
        config = GoldfishConfig(name="goldfish", k=K, context_width=WIDTH, **settings)
        letters = TokenLetters.of(words) if config.normalise == "text" else None
        goldfish = Goldfish(config, special_ids=[0, 1, 2], letters=letters)
        return lambda ids_BT: goldfish.drop_mask(ids_BT, None, draw)

    return {
        "published: unfold, product, table": publish,
        "hash": make(),
        "hash, normalise: text": make(normalise="text"),
        "hash_reference": make(mode="hash_reference"),
        "no mask: one sum over the tokens": lambda ids_BT: np.cumsum(ids_BT, axis=1),
    }


def take_turns(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each round, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, work in sides.items():
            begin = time.perf_counter()
            work()
            if number:
                found[name].append((time.perf_counter() - begin) * 1e3)
    return found


def build_step(rows: int, tokens: int, hidden_size: int) -> tuple[Callable[[], object], np.ndarray]:
    """Return an optimizer step of a random Llama, and the tokens of its rows."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    layer = build_vocab_layer(transformers.LlamaForCausalLM(config))
    layer.model.train()
    step = TrainStep(
        vocab=layer,
        mitigations=build_mitigations([], special_ids=[]),
        train=TrainConfig(batch_size=rows),
        optim=OptimConfig(lr=1e-5),
        seed=0,
        runtime=Runtime(device=torch.device("cpu")),
    )
    ids = np.random.default_rng(0).integers(3, VOCAB, (rows, tokens))
    labels = ids.copy()
    labels[:, 0] = -100
    num = int((labels != -100).sum())
    batch = Batch(
        input_ids=ids,
        labels=labels,
        position_ids=np.broadcast_to(np.arange(tokens), ids.shape).copy(),
        document_ids=np.zeros_like(ids),
        num_supervised=num,
        num_kept=num,
    )
    return lambda: step.run(batch, lr=1e-5, step=1, first_sample=0), ids


def main() -> int:
    """Print both tables; return 1 where a bar is missed."""
    summary, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round")
    asked = parser.parse_args()
    rounds, shape = (1, (2, 256)) if asked.quick else (5, (8, 4096))
    masks = build_masks()
    ids = np.random.default_rng(1).integers(3, VOCAB, shape)

    def repeat(mask: Callable[[np.ndarray], Any]) -> Callable[[], object]:
        return lambda: [mask(ids) for _ in range(REPEATS)]

    found = take_turns({name: repeat(mask) for name, mask in masks.items()}, rounds)
    published, *others = found.values()
    print(f"mask of {list(shape)} tokens, k={K}, h={WIDTH}, {torch.get_num_threads()} threads")
    print(f"{'':<36}{'ms':>8}{'published /':>13}")
    ratios = {}
    for name, times in found.items():
        ratios[name] = statistics.median(a / b for a, b in zip(published, times, strict=True))
        print(f"{name:<36}{statistics.median(times) / REPEATS:>8.3f}{ratios[name]:>12.1f}x")
    assert others, "there is something to compare"

    step, rows = build_step(*((2, 32, 32) if asked.quick else (8, 128, 384)))
    sides: dict[str, Callable[[], object]] = {"step": step}
    sides["mask"] = lambda: [masks["hash"](rows) for _ in range(REPEATS)]
    times = take_turns(sides, rounds)
    share = statistics.median(
        mask / REPEATS / step for mask, step in zip(times["mask"], times["step"], strict=True)
    )
    print(
        f"\nstep of {list(rows.shape)} tokens {statistics.median(times['step']):,.0f} ms, its mask "
        f"{statistics.median(times['mask']) / REPEATS:.3f} ms: {share:.3%}"
    )
    missed = []
    if ratios["hash"] < MIN_RATIO:
        missed.append(f"hash is {ratios['hash']:.1f}x as fast as the published way, not 20x")
    if share > MAX_SHARE:
        missed.append(f"the mask adds {share:.2%} to a step, not at most 1 %")
    print(f"FAIL: {'; '.join(missed)}" if missed else "PASS: both bars")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
