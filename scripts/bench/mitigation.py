"""Measure the cost of a goldfish mask, compared with a step and with the published algorithm.

python scripts/bench/mitigation.py             medians of 5 rounds; a minute
python scripts/bench/mitigation.py --quick     tiny sizes, one round, to check the script; seconds

The published code (ahans30/goldfish-loss) unfolds each row into windows of h tokens, multiplies
these and looks up the products in a table; it is reimplemented here in torch. memguard hashes with
prefix sums, whose cost does not depend on h. Both mask the same [8, 4096] tokens with k = 4 and
h = 13, on the CPU. The last row computes no mask: it sums the tokens once, which is a lower bound
for any hash by prefix sums in numpy. This comparison has no limit.

The step is memguard's, in fp32, of a random Llama with 31M parameters; the mask is that of its
rows. Sides alternate; ratios are medians of the ratios of each round. The last line is a verdict;
exit 1 if the mask adds 1 % or more to a step.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import Table, Verdict, build_parser, take_turns, timed
from workload import build_llama, build_step, draw_batches, draw_model

from memguard.config import GoldfishConfig, TrainConfig
from memguard.mitigation import Goldfish
from memguard.mitigation.goldfish import reference_table
from memguard.mitigation.letters import TokenLetters
from memguard.model.checks import build_causal_lm

MAX_PERCENT = 1.0
K, WIDTH, VOCAB = 4, 13, 32_000
PUBLISHED = "published: unfold, product, table"
# Repetitions per round of work that takes milliseconds.
REPEATS = 20


def build_masks() -> dict[str, Callable[[np.ndarray], Any]]:
    """Return functions that compute a mask ``[B, T]`` from tokens ``[B, T]``, by name."""
    table = torch.from_numpy(reference_table())
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("abcdefghij"), 4)) for _ in range(VOCAB)]

    def publish(ids_BT: np.ndarray) -> torch.Tensor:
        windows_BTh = torch.from_numpy(ids_BT).unfold(1, WIDTH, 1)
        return table[windows_BTh.prod(2) % len(table)] < 1 / K

    def make(**settings: Any) -> Callable[[np.ndarray], Any]:
        config = GoldfishConfig(name="goldfish", k=K, context_width=WIDTH, **settings)
        letters = TokenLetters(words) if config.normalise == "text" else None
        goldfish = Goldfish(config, special_ids=[0, 1, 2], letters=letters)
        return lambda ids_BT: goldfish.drop_mask(ids_BT, None, draw)

    return {
        PUBLISHED: publish,
        "hash": make(),
        "hash, normalise: text": make(normalise="text"),
        "hash_reference": make(mode="hash_reference"),
        "no mask: one sum over the tokens": lambda ids_BT: np.cumsum(ids_BT, axis=1),
    }


def make_step(rows: int, tokens: int, hidden_size: int) -> tuple[Callable[[], object], np.ndarray]:
    """Return an optimizer step of a random Llama, and the tokens of its rows."""
    config = build_llama(VOCAB, hidden_size, 4 * hidden_size, 8, 8)
    train = TrainConfig(batch_size=rows, micro_batch_size=None)
    step = build_step(build_causal_lm(draw_model(config)), train)
    (batch,) = draw_batches(VOCAB, (rows, tokens), document_tokens=(tokens, tokens), num_batches=1)
    return lambda: step.run(batch, lr=1e-5, step=1, first_sample=0), batch.input_ids


def main() -> int:
    """Print both tables; return 1 if the limit is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round")
    options = parser.parse_args()
    rounds, shape = (1, (2, 256)) if options.quick else (5, (8, 4096))
    masks = build_masks()

    def repeat(mask: Callable[[np.ndarray], Any], ids: np.ndarray) -> Callable[[], float]:
        return timed(lambda: [mask(ids) for _ in range(REPEATS)], REPEATS)

    ids = np.random.default_rng(1).integers(3, VOCAB, shape)
    times = take_turns({name: repeat(mask, ids) for name, mask in masks.items()}, rounds=rounds)
    print(f"mask of {list(shape)} tokens, k={K}, h={WIDTH}, {torch.get_num_threads()} threads")
    table = Table(36, "      ms", "  published /")
    for name in masks:
        ratio = f"{times.ratio(name, PUBLISHED):.1f}x"
        table.row(name, f"{times.median_s(name) * 1e3:.3f}", ratio)

    step, rows = make_step(*((2, 32, 32) if options.quick else (8, 128, 384)))
    times = take_turns({"step": timed(step), "mask": repeat(masks["hash"], rows)}, rounds=rounds)
    percent = 100 * times.ratio("step", "mask")
    verdict = Verdict()
    limit = verdict.check("the mask's share of a step", percent, below=MAX_PERCENT, unit=" %")
    print(
        f"\nstep of {list(rows.shape)} tokens {times.median_s('step') * 1e3:,.0f} ms, its mask "
        f"{times.median_s('mask') * 1e3:.3f} ms: {percent:.3f} %  {limit}"
    )
    return verdict.end()


if __name__ == "__main__":
    sys.exit(main())
