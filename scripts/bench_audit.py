"""Measure how fast an audit asks a model, beside `generate`, and what its scores cost.

python scripts/bench_audit.py                   a 1M Llama on the CPU, five rounds; minutes
python scripts/bench_audit.py --quick           tiny sizes, one round, to see that it works; seconds
python scripts/bench_audit.py --device cuda     the shape of Llama-3.1-8B in bf16 on a GPU

First table: documents a second whose greedy continuation of 50 tokens is known, by one pass over
prefix and continuation, and by transformers' `generate` from the prefix: (a) in batches as large as
ours, (b) one document at a time, as published tools do. Both sides start from token ids and end at
verdicts, which are compared: every second document is one that the model recites. No row is padded
and nothing ends early, which is kind to `generate`.

Second table: the default audit of a document, near-verbatim by generation and all numbers of its
one pass, beside `generate` in batches for every document and an edit distance. A third of the
documents is recited, a third leaves the text half-way (one token is another one, and the text goes
on as the model does after it, so that it is known token by token), a third is unknown.

Third table: every number of the suite `extraction` that needs no other pass, with text scores and
all, beside verbatim alone and beside our pass that scores every token and no more; for the record
also beside transformers' own forward.

Weights are random: no speed here depends on what they are. Sides take turns; a figure is the median
of the rounds, a ratio the median of the rounds' ratios, because a machine that others use changes
speed from minute to minute. The last line is a verdict; exit 1 where a bar is missed.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from rapidfuzz.distance import Levenshtein

from memguard.audit.cache import Numbers
from memguard.audit.decoding import Decoder
from memguard.audit.extraction import TINY_MARGINS, AuditDocument, ExtractionProbe, Window
from memguard.audit.generation import generate_edits
from memguard.audit.membership_scores import Codec
from memguard.audit.near_verbatim import NAMES, find_near_verbatim
from memguard.audit.passages import Asked, Passage
from memguard.audit.run import plan_one_pass
from memguard.audit.scoring import ModelScorer
from memguard.audit.suite import load_suite
from memguard.audit.teacher_forcing import OnePass
from memguard.model.checks import build_vocab_layer

CONTINUATION_TOKENS = 50
# Of the same two sides: what the bars ask for.
MIN_BATCHED, MIN_ALONE = 2.0, 15.0
MIN_GPU = {8: 15.0, 64: 5.0}
MIN_GENERATING = 1.5
MAX_BESIDE_VERBATIM, MAX_BESIDE_ALL_ROWS = 1.35, 1.2
SMALL_VOCAB, LARGE_VOCAB = 2048, 32_000
GPU_BATCHES = (8, 16, 32, 64, 128, 256)

SMALL = transformers.LlamaConfig(
    vocab_size=SMALL_VOCAB,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
LARGE = transformers.LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison with `generate`."""

    prefix_tokens: int
    batch: int
    num_documents: int
    num_alone: int
    """Of these, how many are generated one at a time; 0 leaves that side out."""
    min_batched: float | None = None
    """The bar; None where there is none."""
    min_alone: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that is measured."""

    rounds: int
    rows: tuple[Row, ...]
    num_scored: int
    """Documents of the second table."""
    batches: tuple[int, ...] = ()
    """Sizes tried for each side's best; () leaves it out."""


CPU_ROWS = (
    Row(
        prefix_tokens=50,
        batch=32,
        num_documents=128,
        num_alone=16,
        min_batched=MIN_BATCHED,
        min_alone=MIN_ALONE,
    ),
    Row(prefix_tokens=462, batch=16, num_documents=32, num_alone=8),
    Row(prefix_tokens=1998, batch=4, num_documents=8, num_alone=4),
)
GPU_ROWS = tuple(
    Row(prefix_tokens=50, batch=n, num_documents=2 * n, num_alone=0, min_batched=MIN_GPU[n])
    for n in MIN_GPU
)


class Bench:
    """A model, and documents for it."""

    def __init__(self, config: transformers.LlamaConfig, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.model = model.eval()
        self.model.generation_config = transformers.GenerationConfig()
        self.vocab = build_vocab_layer(self.model)
        self.margin = TINY_MARGINS["fp32" if dtype == torch.float32 else "bf16"]
        self.draw = np.random.default_rng(0)

    def make_windows(self, prefix_tokens: int, num_documents: int) -> list[Window]:
        """Return windows of random tokens; in every second one the continuation is the model's."""
        size = prefix_tokens + CONTINUATION_TOKENS
        ids = self.draw.integers(0, self.vocab.vocab_size, (num_documents, size))
        for start in range(0, num_documents, 2 * max(1, 8192 // size)):
            part = ids[start : start + 2 * max(1, 8192 // size) : 2]
            part[:] = self.generate(part[:, :prefix_tokens])
        probe = ExtractionProbe(continuation_tokens=CONTINUATION_TOKENS)
        windows = [probe.window(make_document(row)) for row in ids.astype(np.int32)]
        return [window for window in windows if window is not None]

    def generate(self, prompts: np.ndarray) -> np.ndarray:
        """Return prompts and what `generate` writes after them."""
        rows = torch.from_numpy(prompts).to(self.model.device)
        written = self.model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=False,
            max_new_tokens=CONTINUATION_TOKENS,
            pad_token_id=0,
        )
        return written.cpu().numpy()

    def judge_by_generating(self, windows: Sequence[Window], batch: int) -> np.ndarray:
        """Return ``[N]`` whether the first choices are the continuation."""
        verdicts = []
        for start in range(0, len(windows), batch):
            rows = np.stack([w.input_ids for w in windows[start : start + batch]]).astype(np.int64)
            written = self.generate(rows[:, :-CONTINUATION_TOKENS])
            verdicts.append((written == rows).all(1))
        return np.concatenate(verdicts)

    def scorer(self, windows: Sequence[Window], batch: int) -> ModelScorer:
        """Return one that takes so many documents at a time."""
        return ModelScorer(self.vocab, batch * len(windows[0].input_ids))

    def ask(self, one_pass: OnePass, windows: Sequence[Window], scorer: ModelScorer) -> np.ndarray:
        """Return all numbers of one pass ``[N, len(names)]``."""
        passages = [passage for window in windows for passage in one_pass.plan(window)]
        return one_pass.measure(windows, scorer.score(passages, one_pass.asked))

    @torch.no_grad()
    def score_plainly(self, windows: Sequence[Window]) -> None:
        """Find log-probability and first choice of every token, as a notebook does."""
        for start in range(0, len(windows), 16):
            rows = np.stack([w.input_ids for w in windows[start : start + 16]]).astype(np.int64)
            ids = torch.from_numpy(rows).to(self.model.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            logprob = logits.log_softmax(-1).gather(2, ids[:, 1:, None])
            (logprob.cpu(), logits.argmax(-1).cpu())

    def wait(self) -> None:
        """Let the device finish."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


def make_document(ids: np.ndarray, id: str = "") -> AuditDocument:
    """Return a text of these tokens."""
    return AuditDocument(
        id=id,
        bucket="trained",
        role="trained",
        source="",
        num_repetitions=None,
        input_ids=ids,
        supervised=np.ones(len(ids), dtype=bool),
        format="text",
        num_tokens=len(ids),
        text_hmac=None,
    )


def build_codec(vocab_size: int) -> Codec:
    """Return a byte-level tokenizer of that many tokens, to have text that can be compressed."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = itertools.chain.from_iterable(
        itertools.product(letters, repeat=size) for size in (1, 2, 3)
    )
    ids = {"".join(word): id for id, word in enumerate(itertools.islice(words, vocab_size))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    core.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core)

    def decode(ids: np.ndarray) -> str:
        return tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)

    return Codec(decode=decode, encode=lambda text: tokenizer(text).input_ids)


def take_turns(
    bench: Bench, sides: dict[str, tuple[int, Callable[[], object]]], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds a document of each round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, (num_documents, work) in sides.items():
            bench.wait()
            begin = time.perf_counter()
            work()
            bench.wait()
            if number:
                seconds[name].append((time.perf_counter() - begin) / num_documents)
    return seconds


def find_ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def write_rate(seconds: Sequence[float]) -> str:
    """Return documents a second."""
    return f"{1 / statistics.median(seconds):>14,.1f}"


class Verdict:
    """What was missed."""

    def __init__(self) -> None:
        self.num_bars = 0
        self.missed: list[str] = []

    def check(self, what: str, value: float, bar: float | None, *, at_least: bool) -> str:
        """Return the bar in words, and remember it where it was missed."""
        if bar is None:
            return "-"
        self.num_bars += 1
        if (value < bar) if at_least else (value > bar):
            self.missed.append(f"{what} {value:.2f}x")
        return f"{'>=' if at_least else '<='} {bar:g}x"


def compare_with_generate(bench: Bench, row: Row, rounds: int, verdict: Verdict) -> None:
    """Print one row of the first table."""
    windows = bench.make_windows(row.prefix_tokens, row.num_documents)
    one_pass = OnePass(extraction=ExtractionProbe(), tiny_margin=bench.margin)
    scorer = bench.scorer(windows, row.batch)
    found: dict[str, np.ndarray] = {}

    def ours() -> None:
        found["ours"] = bench.ask(one_pass, windows, scorer)

    def batched() -> None:
        found["batched"] = bench.judge_by_generating(windows, row.batch)

    def alone() -> None:
        bench.judge_by_generating(windows[: row.num_alone], 1)

    sides: dict[str, tuple[int, Callable[[], object]]] = {
        "ours": (len(windows), ours),
        "batched": (len(windows), batched),
    }
    if row.num_alone:
        sides["alone"] = row.num_alone, alone
    seconds = take_turns(bench, sides, rounds)
    name = f"prefix {row.prefix_tokens}, batch {row.batch}"
    ratio = find_ratio(seconds["batched"], seconds["ours"])
    cells = [write_rate(seconds["ours"]), write_rate(seconds["batched"]), f"{ratio:>8.1f}x"]
    bars = [verdict.check(f"{name} (a)", ratio, row.min_batched, at_least=True)]
    if row.num_alone:
        ratio = find_ratio(seconds["alone"], seconds["ours"])
        cells += [write_rate(seconds["alone"]), f"{ratio:>8.1f}x"]
        bars.append(verdict.check(f"{name} (b)", ratio, row.min_alone, at_least=True))
    verbatim = found["ours"][:, one_pass.names.index("num_correct")] == CONTINUATION_TOKENS
    is_sure = found["ours"][:, one_pass.names.index("hangs_on_margin")] == 0
    differing = int(((verbatim != found["batched"]) & is_sure).sum())
    if differing:
        verdict.missed.append(f"{name}: {differing} verdicts differ")
    same = f"{int((verbatim == found['batched']).sum())}/{len(windows)}"
    print(f"{name:<24}{''.join(cells)}{same:>10}  {', '.join(bars)}", flush=True)


def make_thirds(bench: Bench, prefix_tokens: int, num_documents: int) -> list[Window]:
    """Return documents that are recited, left half-way, and unknown, in turn."""
    size = prefix_tokens + CONTINUATION_TOKENS
    ids = bench.draw.integers(0, bench.vocab.vocab_size, (num_documents, size))
    ids[0::3] = bench.generate(ids[0::3, :prefix_tokens])
    left = prefix_tokens + CONTINUATION_TOKENS // 2
    halfway = bench.generate(ids[1::3, :prefix_tokens])[:, : left + 1]
    halfway[:, left] = (halfway[:, left] + 1) % bench.vocab.vocab_size
    ids[1::3] = bench.generate(halfway)[:, :size]
    probe = ExtractionProbe(continuation_tokens=CONTINUATION_TOKENS)
    windows = [
        probe.window(make_document(row, str(number)))
        for number, row in enumerate(ids.astype(np.int32))
    ]
    return [window for window in windows if window is not None]


def compare_default_audit(bench: Bench, row: Row, rounds: int, verdict: Verdict) -> None:
    """Print one row of the second table."""
    windows = make_thirds(bench, row.prefix_tokens, row.num_documents)
    suite = load_suite("extraction")
    codec = build_codec(bench.vocab.vocab_size)
    one_pass = plan_one_pass(suite, tiny_margin=bench.margin, codec=codec)
    probe, scorer = suite.extraction, bench.scorer(windows, row.batch)
    decoder = Decoder(bench.vocab, row.batch * len(windows[0].input_ids))
    found: dict[str, np.ndarray] = {}

    def ours() -> None:
        numbers = Numbers(names=one_pass.names, rows=bench.ask(one_pass, windows, scorer))

        def generate(indices: Sequence[int]) -> Numbers:
            chosen = [windows[index] for index in indices]
            kept = numbers["first_divergence"][list(indices)].astype(int).tolist()
            rows = np.array(generate_edits(probe, decoder, chosen, kept), dtype=np.float64)
            return Numbers(names=NAMES, rows=rows.reshape(-1, len(NAMES)))

        near = find_near_verbatim(probe, windows, numbers, generate, seed=0)
        found["ours"] = near.matched_N
        found["sure"] = ~(near.min_gap_N < bench.margin)

    def batched() -> None:
        matched = []
        limit = probe.num_edits_allowed(CONTINUATION_TOKENS)
        for start in range(0, len(windows), row.batch):
            batch = np.stack([w.input_ids for w in windows[start : start + row.batch]])
            written = bench.generate(batch[:, :-CONTINUATION_TOKENS].astype(np.int64))
            matched += [
                Levenshtein.distance(one.tolist(), other.tolist(), score_cutoff=limit) <= limit
                for one, other in zip(written, batch, strict=True)
            ]
        found["batched"] = np.array(matched)

    sides: dict[str, tuple[int, Callable[[], object]]] = {
        "ours": (len(windows), ours),
        "batched": (len(windows), batched),
    }
    seconds = take_turns(bench, sides, rounds)
    name = f"prefix {row.prefix_tokens}, batch {row.batch}"
    ratio = find_ratio(seconds["batched"], seconds["ours"])
    bar = None if row.min_batched is None else MIN_GENERATING
    told = verdict.check(f"{name} with generation", ratio, bar, at_least=True)
    differing = int(((found["ours"] != found["batched"]) & found["sure"]).sum())
    if differing:
        verdict.missed.append(f"{name}: {differing} near-verbatim matches differ")
    same = f"{int((found['ours'] == found['batched']).sum())}/{len(windows)}"
    print(
        f"{name:<24}{write_rate(seconds['ours'])}{write_rate(seconds['batched'])}"
        f"{ratio:>8.1f}x{'':>23}{same:>10}  {told}",
        flush=True,
    )


def compare_scores(bench: Bench, num_documents: int, rounds: int, verdict: Verdict) -> None:
    """Print one row of the third table."""
    windows = bench.make_windows(50, num_documents)
    vocab_size = bench.vocab.vocab_size
    suite = load_suite("extraction")
    everything = plan_one_pass(suite, tiny_margin=bench.margin, codec=build_codec(vocab_size))
    verbatim = OnePass(extraction=ExtractionProbe(), tiny_margin=bench.margin)
    scorer = ModelScorer(bench.vocab)
    rows = [Passage(input_ids=w.input_ids, first_label=1, first_choice=1) for w in windows]
    seconds = take_turns(
        bench,
        {
            "all": (num_documents, lambda: bench.ask(everything, windows, scorer)),
            "verbatim": (num_documents, lambda: bench.ask(verbatim, windows, scorer)),
            "rows": (num_documents, lambda: scorer.score(rows, Asked())),
            "plain": (num_documents, lambda: bench.score_plainly(windows)),
        },
        rounds,
    )
    beside = {name: find_ratio(seconds["all"], seconds[name]) for name in ("verbatim", "rows")}
    bars = [
        verdict.check(
            f"V={vocab_size} beside verbatim",
            beside["verbatim"],
            MAX_BESIDE_VERBATIM if vocab_size == SMALL_VOCAB else None,
            at_least=False,
        ),
        verdict.check(
            f"V={vocab_size} beside all rows",
            beside["rows"],
            MAX_BESIDE_ALL_ROWS if vocab_size == LARGE_VOCAB else None,
            at_least=False,
        ),
    ]
    print(
        f"V = {vocab_size:<20,}{write_rate(seconds['all'])}{write_rate(seconds['verbatim'])}"
        f"{beside['verbatim']:>8.2f}x{write_rate(seconds['rows'])}{beside['rows']:>8.2f}x"
        f"{'':>10}  {', '.join(bars)}",
        flush=True,
    )
    plain = find_ratio(seconds["all"], seconds["plain"])
    print(
        f"{'':<24}and {plain:.2f}x of transformers' forward with all logits, log-softmax, gather "
        f"and argmax ({write_rate(seconds['plain']).strip()})",
        flush=True,
    )


def find_best_batches(bench: Bench, batches: Sequence[int]) -> None:
    """Print the batch at which each side is fastest."""
    windows = bench.make_windows(50, max(batches))
    one_pass = OnePass(extraction=ExtractionProbe(), tiny_margin=bench.margin)
    best: dict[str, tuple[float, int]] = {}
    for batch in batches:
        sides: dict[str, tuple[int, Callable[[], object]]] = {
            "one pass": (
                len(windows),
                lambda n=batch: bench.ask(one_pass, windows, bench.scorer(windows, n)),
            ),
            "generate": (batch, lambda n=batch: bench.judge_by_generating(windows[:n], n)),
        }
        for name, seconds in take_turns(bench, sides, 1).items():
            best[name] = max(best.get(name, (0.0, 0)), (1 / seconds[0], batch))
    told = ", ".join(f"{name} {rate:,.1f} at batch {n}" for name, (rate, n) in best.items())
    ratio = best["one pass"][0] / best["generate"][0]
    print(f"each at its best, documents a second: {told}; {ratio:.1f}x", flush=True)


def shrink(plan: Plan) -> Plan:
    """Return what takes seconds."""
    rows = tuple(
        replace(row, batch=4, num_documents=6, num_alone=min(row.num_alone, 1)) for row in plan.rows
    )
    return replace(plan, rounds=1, rows=rows[:1], num_scored=8, batches=plan.batches[:1])


def main() -> int:
    """Print the tables; return 1 where a bar is missed."""
    summary, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="medians of so many")
    asked = parser.parse_args()
    is_gpu = asked.device == "cuda"
    plan = Plan(rounds=asked.rounds, rows=CPU_ROWS, num_scored=256)
    if is_gpu:
        plan = replace(plan, rows=GPU_ROWS, batches=GPU_BATCHES)
    if asked.quick:
        plan = shrink(plan)
    configs = [LARGE] if is_gpu else [SMALL, transformers.LlamaConfig(**SMALL.to_dict())]
    if is_gpu and asked.quick:
        configs[0].update({"num_hidden_layers": 2})
    if not is_gpu:
        configs[1].update({"vocab_size": LARGE_VOCAB})
    dtype = torch.bfloat16 if is_gpu else torch.float32
    verdict = Verdict()
    bench = Bench(configs[0], asked.device, dtype)
    size = sum(parameter.numel() for parameter in bench.model.parameters())
    print(
        f"{size / 1e6:,.1f}M parameters, {asked.device}, {str(dtype)[6:]}, "
        f"{torch.get_num_threads()} threads, medians of {plan.rounds}; documents a second"
    )
    print(
        f"{'':<24}{'one pass':>14}{'generate (a)':>14}{'ratio':>9}{'batch 1 (b)':>14}"
        f"{'ratio':>9}{'same':>10}  bar (a), (b)"
    )
    for row in plan.rows:
        compare_with_generate(bench, row, plan.rounds, verdict)
    print(f"\n{'':<24}{'default audit':>14}{'generate':>14}{'ratio':>9}{'':>23}{'same':>10}  bar")
    for row in plan.rows:
        compare_default_audit(bench, row, plan.rounds, verdict)
    if plan.batches:
        find_best_batches(bench, plan.batches)
    print(
        f"\n{'':<24}{'all scores':>14}{'verbatim':>14}{'all /':>9}{'all rows':>14}{'all /':>9}"
        f"{'':>10}  bar"
    )
    compare_scores(bench, plan.num_scored, plan.rounds, verdict)
    for config in configs[1:]:
        bench = Bench(config, asked.device, dtype)
        compare_scores(bench, max(8, plan.num_scored // 4), plan.rounds, verdict)
    if verdict.missed:
        print(f"FAIL: {'; '.join(verdict.missed)}")
        return 1
    print(f"PASS: {verdict.num_bars} bars, and every verdict that does not hang on a tiny margin")
    return 0


if __name__ == "__main__":
    sys.exit(main())
