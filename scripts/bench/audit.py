"""Measure the speed of an audit, compared with `generate`, and the cost of its scores.

python scripts/bench/audit.py                   a 1M Llama on the CPU, five rounds; minutes
python scripts/bench/audit.py --quick           tiny sizes, one round, to check it; seconds
python scripts/bench/audit.py --device cuda     the shape of Llama-3.1-8B in bf16 on a GPU
python scripts/bench/audit.py --before DIR      CPU seconds of the default audit of two checkouts

First table: documents per second whose greedy continuation of 50 tokens is determined, by one pass
over prefix and continuation, and by transformers' `generate` from the prefix: (a) in batches as
large as memguard's, (b) one document at a time, as in published tools. Both sides start from token
ids and end with verdicts, which are compared: the model generates every second document verbatim.
No row is padded and no text ends early, which favours `generate`.

Second table: the default audit of a document (near-verbatim by generation, and all numbers of its
pass), compared with batched `generate` for every document and an edit distance, and with all
scores alone, which is the limit: nothing is generated. Ratios are of seconds and of CPU seconds.
Nothing is remembered of the rounds before, not even that the model can cache keys. A third of the
documents is generated verbatim. In a third the text diverges half-way: one token is replaced, and
the rest is the model's continuation, so that teacher forcing predicts it token by token. A third is
unknown to the model.

Third table: all numbers of the suite `extraction` that need no other pass, including text scores,
compared with verbatim match only, and with memguard's pass that only scores every token; also with
transformers' own forward, for reference.

Weights are random, because speed does not depend on them. Sides alternate; a figure is the median
over rounds, and a ratio the median of the ratios of each round, because the speed of a shared
machine varies from minute to minute. The last line is a verdict; exit 1 if a limit is missed.

With --before, each round runs the default audit once with each checkout, in turn and in a process
of its own, after one audit that is not counted; the other one is that which contains this script.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import tokenizers
import torch
import transformers
from harness import Rounds, Table, Verdict, build_parser, take_turns, timed
from rapidfuzz.distance import Levenshtein
from workload import build_llama, draw_model

from memguard.audit.context import AuditContext
from memguard.audit.decoding import DECODED_TOKENS, Decoder
from memguard.audit.passages import Codec, Passage, ScoreSelection
from memguard.audit.probe import Probe
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.requests import Inputs, Measured, Model, Score, View, join
from memguard.audit.requests import Rounds as ProbeRounds
from memguard.audit.runner import Runner
from memguard.audit.scoring import ModelScorer
from memguard.audit.suite import load_suite
from memguard.audit.windows import TINY_MARGINS, AuditDocument, Window
from memguard.model.checks import build_causal_lm

CONTINUATION_TOKENS = 50
# Limits of the ratios between two sides.
MIN_BATCHED, MIN_ALONE = 2.0, 15.0
MIN_GPU = {8: 15.0, 64: 5.0}
MAX_BESIDE_VERBATIM, MAX_BESIDE_ALL_ROWS = 1.35, 1.2
SMALL_VOCAB, LARGE_VOCAB = 2048, 32_000
GPU_BATCHES = (8, 16, 32, 64, 128, 256)

SMALL = (128, 344, 4, 4)
LARGE = build_llama(128_256, 4096, 14_336, 32, 32, num_kv_heads=8, max_len=8192, is_tied=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison with `generate`."""

    prefix_tokens: int
    batch: int
    num_documents: int
    num_alone: int
    """Number of documents that are generated one at a time; 0 skips that side."""
    min_batched: float | None = None
    """The limit; None if there is none."""
    min_alone: float | None = None
    min_generating: float | None = None
    """Limit of `generate` over the default audit."""
    max_beside_scores: float | None = None
    """Limit of the default audit over all of its scores."""

    def __str__(self) -> str:
        return f"prefix {self.prefix_tokens}, batch {self.batch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The measurements."""

    rounds: int
    rows: tuple[Row, ...]
    num_scored: int
    """Documents of the second table."""
    batches: tuple[int, ...] = ()
    """Batch sizes to try for each side's best; () skips this measurement."""


MIN_FASTER = {(50, 128): 1.15, (462, 32): 1.4, (1998, 8): 2.0, (1998, 24): 1.6}
"""Of the default audit before and after keys of scored documents were kept, in CPU seconds, by
prefix and number of documents."""
CPU_ROWS = (
    Row(
        prefix_tokens=50,
        batch=32,
        num_documents=128,
        num_alone=16,
        min_batched=MIN_BATCHED,
        min_alone=MIN_ALONE,
        min_generating=1.7,
        max_beside_scores=1.2,
    ),
    Row(
        prefix_tokens=462,
        batch=16,
        num_documents=32,
        num_alone=8,
        min_generating=1.4,
        max_beside_scores=1.1,
    ),
    Row(
        prefix_tokens=1998,
        batch=4,
        # With few documents, what an audit does once would count more than in an audit.
        num_documents=24,
        num_alone=4,
        min_generating=1.3,
        max_beside_scores=1.1,
    ),
)
GPU_ROWS = tuple(
    Row(prefix_tokens=50, batch=n, num_documents=2 * n, num_alone=0, min_batched=MIN_GPU[n])
    for n in MIN_GPU
)


class OnePass(Probe):
    """The scores that probes ask for in their first round, which share one pass."""

    models: ClassVar[tuple[Model, ...]] = ("trained",)

    name: Literal["extraction"] = "extraction"
    probes: tuple[Any, ...] = (ExtractionProbe(),)

    def measure(self, inputs: Inputs, view: View) -> ProbeRounds:
        """Score all documents; generate nothing."""
        first = [next(probe.measure(inputs, view), ()) for probe in self.probes]
        scores = [r for requests in first for r in requests if isinstance(r, Score)]
        requests = [replace(request, continues=None) for request in scores]
        numbers = yield requests
        return Measured(columns=join({f"{n}.": m for n, m in enumerate(numbers)}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model as the runner uses it; its numbers are not cached."""

    held_scorer: ModelScorer
    held_decoder: Decoder
    identity: None = None
    max_tokens: None = None

    def scorer(self) -> ModelScorer:
        """Return the scorer."""
        return self.held_scorer

    def decoder(self) -> Decoder:
        """Return the decoder."""
        return self.held_decoder

    def free(self) -> None:
        """Keep the model."""


class Bench:
    """A model and its documents."""

    def __init__(self, config: transformers.LlamaConfig, device: str, dtype: torch.dtype) -> None:
        self.model = draw_model(config, dtype=dtype, device=device).eval()
        self.model.generation_config = transformers.GenerationConfig()
        self.lm = build_causal_lm(self.model)
        self.margin = TINY_MARGINS["fp32" if dtype == torch.float32 else "bf16"]
        self.draw = np.random.default_rng(0)

    def make_windows(self, prefix_tokens: int, num_documents: int) -> list[Window]:
        """Return windows of random tokens; in every second one the continuation is the model's."""
        size = prefix_tokens + CONTINUATION_TOKENS
        ids = self.draw.integers(0, self.lm.vocab_size, (num_documents, size))
        for start in range(0, num_documents, 2 * max(1, 8192 // size)):
            part = ids[start : start + 2 * max(1, 8192 // size) : 2]
            part[:] = self.generate(part[:, :prefix_tokens])
        return cut_windows(ids)

    def make_thirds(self, prefix_tokens: int, num_documents: int) -> list[Window]:
        """Return documents that match, diverge half-way and are unknown, in turn."""
        size = prefix_tokens + CONTINUATION_TOKENS
        ids = self.draw.integers(0, self.lm.vocab_size, (num_documents, size))
        ids[0::3] = self.generate(ids[0::3, :prefix_tokens])
        left = prefix_tokens + CONTINUATION_TOKENS // 2
        halfway = self.generate(ids[1::3, :prefix_tokens])[:, : left + 1]
        halfway[:, left] = (halfway[:, left] + 1) % self.lm.vocab_size
        ids[1::3] = self.generate(halfway)[:, :size]
        return cut_windows(ids)

    def generate(self, prompts: np.ndarray) -> np.ndarray:
        """Return prompts followed by the output of `generate`."""
        rows = torch.from_numpy(prompts).to(self.model.device)
        written = self.model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=False,
            max_new_tokens=CONTINUATION_TOKENS,
            pad_token_id=0,
        )
        return written.cpu().numpy()

    def generate_in_batches(
        self, windows: Sequence[Window], batch: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the output of `generate` for each document, and the document ``[T]``."""
        for start in range(0, len(windows), batch):
            rows = np.stack([w.input_ids for w in windows[start : start + batch]]).astype(np.int64)
            yield from zip(self.generate(rows[:, :-CONTINUATION_TOKENS]), rows, strict=True)

    def judge_by_generating(self, windows: Sequence[Window], batch: int) -> np.ndarray:
        """Return ``[N]`` whether the first choices are the continuation."""
        pairs = self.generate_in_batches(windows, batch)
        return np.array([np.array_equal(written, row) for written, row in pairs])

    def scorer(self, windows: Sequence[Window], batch: int) -> ModelScorer:
        """Return a scorer that processes ``batch`` documents at a time."""
        return ModelScorer(self.lm, batch * len(windows[0].input_ids))

    def measure(
        self,
        probes: Sequence[Probe],
        windows: Sequence[Window],
        scorer: ModelScorer,
        *,
        decoder: Decoder | None = None,
        codec: Codec | None = None,
    ) -> Measured:
        """Return what an audit's runner measures, of the extraction probe."""
        loaded = Loaded(
            held_scorer=scorer, held_decoder=decoder or Decoder(self.lm, DECODED_TOKENS)
        )
        runner = Runner(
            audited=loaded, model="trained", name="model", context=AuditContext(), seed=0
        )
        return runner.measure(probes, self.build_inputs(windows, codec))["extraction"]

    def build_inputs(self, windows: Sequence[Window], codec: Codec | None = None) -> Inputs:
        """Return the inputs of an audit of these windows."""
        return Inputs(
            windows=windows,
            max_edit_share=ExtractionProbe().max_edit_share,
            seed=0,
            tiny_margin=self.margin,
            codec=codec,
        )

    @torch.no_grad()
    def score_plainly(self, windows: Sequence[Window]) -> None:
        """Compute log-probability and first choice of every token with plain transformers."""
        for start in range(0, len(windows), 16):
            rows = np.stack([w.input_ids for w in windows[start : start + 16]]).astype(np.int64)
            ids = torch.from_numpy(rows).to(self.model.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            logprob = logits.log_softmax(-1).gather(2, ids[:, 1:, None])
            (logprob.cpu(), logits.argmax(-1).cpu())

    def timed(self, work: Callable[[], object], num_documents: int) -> Callable[[], float]:
        """Return a side that returns its seconds per document."""
        is_gpu = self.model.device.type == "cuda"
        return timed(work, num_documents, torch.cuda.synchronize if is_gpu else lambda: None)


def cut_windows(ids: np.ndarray) -> list[Window]:
    """Return a window of each row of tokens."""
    probe = ExtractionProbe(continuation_tokens=CONTINUATION_TOKENS)
    rows = enumerate(ids.astype(np.int32))
    windows = [probe.window(make_document(row, str(number))) for number, row in rows]
    return [window for window in windows if window is not None]


def make_document(ids: np.ndarray, id: str) -> AuditDocument:
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
    """Return a byte-level tokenizer of this vocabulary size, whose text can be compressed."""
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


def write_rate(rounds: Rounds, side: str) -> str:
    """Return documents a second."""
    return f"{1 / rounds.median_s(side):,.1f}"


def compare_verdicts(
    verdict: Verdict, name: str, ours: np.ndarray, theirs: np.ndarray, is_sure: np.ndarray
) -> str:
    """Return how many verdicts are equal; those that differ must depend on a tiny margin."""
    if differing := int(((ours != theirs) & is_sure).sum()):
        verdict.fail(f"{name}: {differing} verdicts differ")
    return f"{int((ours == theirs).sum())}/{len(ours)}"


def compare_with_generate(
    bench: Bench, row: Row, table: Table, verdict: Verdict, rounds: int
) -> None:
    """Print one row of the first table."""
    windows = bench.make_windows(row.prefix_tokens, row.num_documents)
    scorer = bench.scorer(windows, row.batch)
    verdicts: dict[str, np.ndarray] = {}

    def ours() -> None:
        numbers = bench.measure([OnePass()], windows, scorer).columns
        verdicts["ours"] = numbers["0.num_correct"] == CONTINUATION_TOKENS
        verdicts["sure"] = numbers["0.is_near_tie"] == 0

    def batched() -> None:
        verdicts["batched"] = bench.judge_by_generating(windows, row.batch)

    def alone() -> None:
        bench.judge_by_generating(windows[: row.num_alone], 1)

    sides = {"ours": bench.timed(ours, len(windows)), "batched": bench.timed(batched, len(windows))}
    if row.num_alone:
        sides["alone"] = bench.timed(alone, row.num_alone)
    times = take_turns(sides, rounds=rounds)
    ratio = times.ratio("ours", "batched")
    cells = [write_rate(times, "ours"), write_rate(times, "batched"), f"{ratio:.1f}x"]
    limits = [verdict.check(f"{row} (a)", ratio, at_least=row.min_batched)]
    if row.num_alone:
        ratio = times.ratio("ours", "alone")
        cells += [write_rate(times, "alone"), f"{ratio:.1f}x"]
        limits.append(verdict.check(f"{row} (b)", ratio, at_least=row.min_alone))
    else:
        cells += ["", ""]
    same = compare_verdicts(
        verdict, str(row), verdicts["ours"], verdicts["batched"], verdicts["sure"]
    )
    table.row(str(row), *cells, same, end=", ".join(filter(None, limits)))


def compare_default_audit(
    bench: Bench, row: Row, table: Table, verdict: Verdict, rounds: int
) -> None:
    """Print one row of the second table."""
    audit = DefaultAudit(bench, row)
    windows = audit.windows
    verdicts: dict[str, np.ndarray] = {}

    def ours() -> None:
        near = audit.run().detail
        verdicts["ours"] = near.matched_N
        verdicts["sure"] = ~(near.min_gap_N < bench.margin)

    def batched() -> None:
        limit = bench.build_inputs(windows).num_edits_allowed(CONTINUATION_TOKENS)
        verdicts["batched"] = np.array(
            [
                Levenshtein.distance(one.tolist(), other.tolist(), score_cutoff=limit) <= limit
                for one, other in bench.generate_in_batches(windows, row.batch)
            ]
        )

    works = {"ours": ours, "batched": batched, "scores": audit.score}
    sides = {name: bench.timed(work, len(windows)) for name, work in works.items()}
    times = take_turns(sides, rounds=rounds)
    ratio, beside = times.ratio("ours", "batched"), times.ratio("scores", "ours")
    name = f"{row} with generation"
    limits = [
        verdict.check(name, ratio, at_least=row.min_generating),
        verdict.check(f"{row} beside all scores", beside, at_most=row.max_beside_scores),
    ]
    same = compare_verdicts(verdict, name, verdicts["ours"], verdicts["batched"], verdicts["sure"])
    cells = [
        *(write_rate(times, "ours"), write_rate(times, "batched")),
        *(f"{ratio:.2f}x", f"{times.cpu_ratio('ours', 'batched'):.2f}x"),
        *(write_rate(times, "scores"), f"{beside:.2f}x"),
        f"{times.cpu_ratio('scores', 'ours'):.2f}x",
    ]
    table.row(str(row), *cells, same, end=", ".join(filter(None, limits)))


class DefaultAudit:
    """The default audit of documents, all of it and only its scores."""

    def __init__(self, bench: Bench, row: Row) -> None:
        self.windows = bench.make_thirds(row.prefix_tokens, row.num_documents)
        self._bench, self._probes = bench, load_suite("extraction").probes
        self._codec = build_codec(bench.lm.vocab_size)
        self._scorer = bench.scorer(self.windows, row.batch)
        self._batch_tokens = row.batch * len(self.windows[0].input_ids)

    def run(self) -> Measured:
        """Return what the audit measures; no earlier check of the model's cache is remembered."""
        # A checkout from before checks were remembered has none.
        getattr(self._bench.lm, "cached_lengths", {}).clear()
        return self._measure(self._probes)

    def score(self) -> Measured:
        """Return all scores of the pass, without generated text."""
        return self._measure(
            (OnePass(probes=tuple(p for p in self._probes if "trained" in p.models)),)
        )

    def _measure(self, probes: Sequence[Probe]) -> Measured:
        decoder = Decoder(self._bench.lm, self._batch_tokens)
        return self._bench.measure(
            probes, self.windows, self._scorer, decoder=decoder, codec=self._codec
        )


def compare_checkouts(before: Path, verdict: Verdict, rounds: int) -> None:
    """Print the CPU seconds of the default audit of another checkout and of this one."""
    rates = ("  before ms", "   after ms", "    ratio")
    table = Table(32, *rates, end="limit")
    sides = {"before": before.resolve(), "after": Path(__file__).resolve().parents[2]}
    for (prefix, num_documents), limit in MIN_FASTER.items():
        batch = next(row.batch for row in CPU_ROWS if row.prefix_tokens == prefix)
        given = [str(value) for value in (prefix, batch, num_documents)]
        times = take_turns(
            {side: partial(audit_in_process, place, given) for side, place in sides.items()},
            rounds=rounds,
        )
        ratio, name = times.ratio("after", "before"), f"prefix {prefix}, {num_documents} documents"
        milliseconds = [f"{1e3 * times.median_s(side) / num_documents:,.1f}" for side in sides]
        words = verdict.check(name, ratio, at_least=limit)
        table.row(name, *milliseconds, f"{ratio:.2f}x", end=words)


def audit_in_process(checkout: Path, given: Sequence[str]) -> float:
    """Return the CPU seconds of one default audit by a checkout, see `--one`."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", *given],
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr}")
    return float(done.stdout.split()[-1])


def time_one(prefix_tokens: int, batch: int, num_documents: int) -> float:
    """Return the CPU seconds of the second of two default audits."""
    bench = Bench(build_llama(SMALL_VOCAB, *SMALL), "cpu", torch.float32)
    row = Row(prefix_tokens=prefix_tokens, batch=batch, num_documents=num_documents, num_alone=0)
    audit = DefaultAudit(bench, row)
    audit.run()
    begin_s = time.process_time()
    audit.run()
    return time.process_time() - begin_s


def compare_scores(
    bench: Bench, num_documents: int, table: Table, verdict: Verdict, rounds: int
) -> None:
    """Print one row of the third table."""
    windows = bench.make_windows(50, num_documents)
    vocab_size = bench.lm.vocab_size
    suite = load_suite("extraction")
    everything = OnePass(probes=tuple(p for p in suite.probes if "trained" in p.models))
    codec = build_codec(vocab_size)
    scorer = ModelScorer(bench.lm)
    rows = [Passage(input_ids=w.input_ids, first_label=1, first_choice=1) for w in windows]
    works: dict[str, Callable[[], object]] = {
        "all": lambda: bench.measure([everything], windows, scorer, codec=codec),
        "verbatim": lambda: bench.measure([OnePass()], windows, scorer),
        "rows": lambda: scorer.score(rows, ScoreSelection()),
        "plain": lambda: bench.score_plainly(windows),
    }
    sides = {name: bench.timed(work, num_documents) for name, work in works.items()}
    times = take_turns(sides, rounds=rounds)
    beside = {name: times.ratio(name, "all") for name in works}
    name = f"V = {vocab_size:,}"
    limits = [
        verdict.check(
            f"{name} vs verbatim",
            beside["verbatim"],
            at_most=MAX_BESIDE_VERBATIM if vocab_size == SMALL_VOCAB else None,
        ),
        verdict.check(
            f"{name} vs all rows",
            beside["rows"],
            at_most=MAX_BESIDE_ALL_ROWS if vocab_size == LARGE_VOCAB else None,
        ),
    ]
    cells = [write_rate(times, "all")]
    for other in ("verbatim", "rows"):
        cells += [write_rate(times, other), f"{beside[other]:.2f}x"]
    table.row(name, *cells, end=", ".join(filter(None, limits)))
    print(
        f"{'':<24}and {beside['plain']:.2f}x of transformers' forward with all logits, "
        f"log-softmax, gather and argmax ({write_rate(times, 'plain')})",
        flush=True,
    )


def find_best_batches(bench: Bench, batches: Sequence[int]) -> None:
    """Print the batch at which each side is fastest."""
    windows = bench.make_windows(50, max(batches))
    best: dict[str, tuple[float, int]] = {}
    for batch in batches:

        def one(n: int = batch) -> None:
            bench.measure([OnePass()], windows, bench.scorer(windows, n))

        def generate(n: int = batch) -> None:
            bench.judge_by_generating(windows[:n], n)

        sides = {
            "one pass": bench.timed(one, len(windows)),
            "generate": bench.timed(generate, batch),
        }
        times = take_turns(sides, rounds=1)
        for name in sides:
            best[name] = max(best.get(name, (0.0, 0)), (1 / times.median_s(name), batch))
    rates = ", ".join(f"{name} {rate:,.1f} at batch {n}" for name, (rate, n) in best.items())
    ratio = best["one pass"][0] / best["generate"][0]
    print(f"each at its best, documents per second: {rates}; {ratio:.1f}x", flush=True)


def shrink(plan: Plan) -> Plan:
    """Return a plan that takes seconds."""
    rows = tuple(
        # With six documents, texts are generated for longer than all are scored.
        replace(
            row,
            batch=4,
            num_documents=6,
            num_alone=min(row.num_alone, 1),
            max_beside_scores=None,
        )
        for row in plan.rows
    )
    return replace(plan, rounds=1, rows=rows[:1], num_scored=8, batches=plan.batches[:1])


def main() -> int:
    """Print the tables; return 1 if a limit is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are printed")
    parser.add_argument("--before", type=Path, metavar="DIR", help="compare with this checkout")
    parser.add_argument("--one", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(time_one(*options.one))
        return 0
    if options.before:
        verdict = Verdict()
        compare_checkouts(options.before, verdict, options.rounds)
        return verdict.end()
    is_gpu = options.device == "cuda"
    plan = Plan(rounds=options.rounds, rows=CPU_ROWS, num_scored=256)
    if is_gpu:
        plan = replace(plan, rows=GPU_ROWS, batches=GPU_BATCHES)
    if options.quick:
        plan = shrink(plan)
    configs = [LARGE] if is_gpu else [build_llama(v, *SMALL) for v in (SMALL_VOCAB, LARGE_VOCAB)]
    if is_gpu and options.quick:
        configs[0].update({"num_hidden_layers": 2})
    dtype = torch.bfloat16 if is_gpu else torch.float32
    verdict = Verdict()
    bench = Bench(configs[0], options.device, dtype)
    size = sum(parameter.numel() for parameter in bench.model.parameters())
    print(
        f"{size / 1e6:,.1f}M parameters, {options.device}, {str(dtype)[6:]}, "
        f"{torch.get_num_threads()} threads, medians of {plan.rounds}; documents per second"
    )
    ratio, same = "    ratio", "      same"
    rates = ("      one pass", "  generate (a)", ratio, "   batch 1 (b)", ratio)
    table = Table(24, *rates, same, end="limit (a), (b)")
    for row in plan.rows:
        compare_with_generate(bench, row, table, verdict, plan.rounds)
    print()
    cpu, beside = "   in CPU", "  audit /"
    rates = (" default audit", "      generate", ratio, cpu, "    all scores", beside, cpu)
    table = Table(24, *rates, same, end="limit")
    for row in plan.rows:
        compare_default_audit(bench, row, table, verdict, plan.rounds)
    if plan.batches:
        find_best_batches(bench, plan.batches)
    print()
    rates = ("    all scores", "      verbatim", "    all /", "      all rows", "    all /")
    table = Table(24, *rates, " " * 10, end="limit")
    compare_scores(bench, plan.num_scored, table, verdict, plan.rounds)
    for config in configs[1:]:
        bench = Bench(config, options.device, dtype)
        compare_scores(bench, max(8, plan.num_scored // 4), table, verdict, plan.rounds)
    return verdict.end(", and all verdicts that do not depend on a tiny margin are equal")


if __name__ == "__main__":
    sys.exit(main())
