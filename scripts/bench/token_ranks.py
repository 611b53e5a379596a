"""Measure what the ranks of true tokens cost in an audit's pass: CPU seconds with and without them.

python scripts/bench/token_ranks.py            three Llamas, 15 rounds; a minute
python scripts/bench/token_ranks.py --quick    few documents, one round, to check it; seconds

Both sides score the same documents of 128 tokens with what the suite `extraction` asks for:
entropy, variance and best tokens of all labels, and two sampling schemes of the last 50. Weights
are random, because speed does not depend on them. Sides alternate on one thread; a ratio is the
median of those of each round. The last line is a verdict; exit 1 if a limit is missed.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from harness import Table, Verdict, build_parser, take_turns
from workload import build_llama, draw_model

from memguard.audit.passages import Passage, ScoreSelection
from memguard.audit.scoring import ModelScorer
from memguard.config.settings import SamplingScheme
from memguard.model.checks import build_causal_lm

NUM_TOKENS, NUM_CHOICES = 128, 50
SCHEMES = (SamplingScheme(), SamplingScheme(top_k=40))
NEEDS = frozenset({"entropy", "is_best", "variance_logprob"})
# Name, sizes of `build_llama`, documents, limit.
MODELS = (
    ("stories260K, V = 512", (512, 64, 172, 5, 8), 128, 1.10),
    ("d = 288, V = 32,000", (32_000, 288, 768, 6, 6), 16, 1.10),
    ("d = 64, V = 32,000", (32_000, 64, 172, 5, 8), 16, 1.35),
)


def build_side(
    scorer: ModelScorer, passages: list[Passage], selection: ScoreSelection
) -> Callable[[], float]:
    """Return a side that scores all passages and returns its CPU seconds."""

    def side() -> float:
        begin_s = time.process_time()
        scorer.score(passages, selection)
        return time.process_time() - begin_s

    return side


def main() -> int:
    """Print a row for each model; return 1 if a limit is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few documents, one round")
    parser.add_argument("--rounds", type=int, default=15, help="rounds; medians are printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, verdict = np.random.default_rng(0), Verdict()
    table = Table(24, "    with (s)", " without (s)", "   ratio", "  quartiles", end="limit")
    for name, sizes, num_documents, limit in MODELS:
        scorer = ModelScorer(build_causal_lm(draw_model(build_llama(*sizes)).eval()))
        passages = [
            Passage(
                input_ids=draw.integers(0, sizes[0], NUM_TOKENS).astype(np.int32),
                first_label=1,
                first_choice=NUM_TOKENS - NUM_CHOICES,
            )
            for _ in range(2 if options.quick else num_documents)
        ]
        sides = {
            "with": build_side(
                scorer, passages, ScoreSelection(needs=NEEDS | {"rank"}, schemes=SCHEMES)
            ),
            "without": build_side(scorer, passages, ScoreSelection(needs=NEEDS, schemes=SCHEMES)),
        }
        rounds = take_turns(sides, rounds=1 if options.quick else options.rounds)
        ratio = rounds.ratio("without", "with")
        ratios = np.divide(rounds.seconds["with"], rounds.seconds["without"])
        low, high = np.quantile(ratios, (0.25, 0.75))
        table.row(
            name,
            *(f"{rounds.median_s(side):.3f}" for side in sides),
            f"{ratio:.2f}x",
            f"{low:.2f}-{high:.2f}",
            end=verdict.check(name, ratio, at_most=limit),
        )
    return verdict.end()


if __name__ == "__main__":
    sys.exit(main())
