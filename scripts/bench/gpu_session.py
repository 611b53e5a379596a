"""One run of gpu_many.py: time left, works done in new processes, tables, verdict and JSON."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_rows import Setting
from gpu_sizes import Sizes, find_peak_tflops
from gpu_work import OUT_OF_MEMORY, Work, run_apart
from harness import Table, Verdict

ROW_TIMEOUT_S, MORE_TIMEOUT_S = 240, 60
# bf16 has 8 bits: a loss near 12 nats is a mean of thousands of rounded values; a norm is a sum
# over all gradients, each computed from products of rounded values.
SAME_LOSS, SAME_NORM = 5e-3, 3e-2
OUT_OF_TIME = "skipped: out of time"
MIN_SPEED, MAX_GOLDFISH = 1.0, 1.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the table of speeds."""

    name: str
    settings: tuple[Setting, ...]
    """The first that fits into memory is measured."""
    counts: bool = True
    """Whether it can be the best of its side, and must run for that."""

    @property
    def is_trainer(self) -> bool:
        """Whether this is a row of the Trainer."""
        return self.settings[0].trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What was measured of a row."""

    setting: Setting
    sizes: Sizes
    result: dict[str, Any]

    def tokens_per_s(self, kind: str = "plain") -> float:
        """Return the tokens a second of all ranks, from the median round."""
        return self.sizes.step_tokens / statistics.median(self.result["seconds"][kind])

    def goldfish_ratio(self) -> float:
        """Return the median over rounds of the step time with goldfish over that without."""
        seconds = self.result["seconds"]
        pairs = zip(seconds["goldfish"], seconds["plain"], strict=True)
        return statistics.median(goldfish / plain for goldfish, plain in pairs)


def add_options(parser: argparse.ArgumentParser, *, deadline_s: float) -> None:
    """Add the options of the script."""
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--peak-tflops", type=float, help="a GPU's dense bf16 TFLOP/s")
    parser.add_argument("--layers", type=int, help="number of layers; default: as many as fit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument(
        "--deadline-s", type=float, default=deadline_s, help="total time limit (seconds)"
    )


def has_gpus(options: argparse.Namespace, count: int) -> bool:
    """Return whether the machine has enough GPUs, or none is needed; print the reason if not."""
    available = torch.cuda.device_count()
    if options.dry_run or available >= count:
        return True
    seen = f"torch sees {available or 'no'} GPU{'s' * (available > 1)}"
    words = f"{seen}, {count} are needed; --dry-run shows that the rest works"
    print(f"gpu_check_many: {words}", file=sys.stderr)
    return False


class Session:
    """One run of a script."""

    def __init__(self, options: argparse.Namespace, sizes: Sizes, *, num_ranks: int) -> None:
        """Read the GPU's properties and print them."""
        self.options, self.sizes, self.num_ranks = options, sizes, num_ranks
        self.is_dry: bool = options.dry_run
        self.begin_s = time.monotonic()
        self.verdict = Verdict()
        self.speeds: dict[str, Speed] = {}
        self.answers: dict[str, Any] = {}
        self.peak_tflops: float | None = options.peak_tflops
        self.gpu, self.memory_bytes = "none: a dry run", 0
        if not self.is_dry:
            properties = torch.cuda.get_device_properties(0)
            self.memory_bytes = properties.total_memory
            self.gpu = f"{num_ranks} x {properties.name}, {self.memory_bytes / 2**30:.0f} GiB"
            self.peak_tflops = self.peak_tflops or find_peak_tflops(properties.name)
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        print(f"GPU: {self.gpu}; {versions}")
        peak = "unknown, set --peak-tflops" if self.peak_tflops is None else self.peak_tflops
        print(f"peak bf16: {peak} TFLOP/s (dense)", flush=True)

    @property
    def left_s(self) -> float:
        """Remaining time (seconds)."""
        return float(self.options.deadline_s - (time.monotonic() - self.begin_s))

    def do(self, works: Sequence[Work]) -> list[dict[str, Any]]:
        """Run works on new processes."""
        if self.left_s < 30:
            return [{"failed": OUT_OF_TIME}] * len(works)
        timeout_s = min(self.left_s, ROW_TIMEOUT_S + MORE_TIMEOUT_S * (len(works) - 1))
        return run_apart(works, num_ranks=self.num_ranks, timeout_s=timeout_s)

    # -- correctness ---------------------------------------------------------------------------

    def check(self, settings: dict[str, Setting], sizes: Sizes) -> None:
        """Measure and print loss and gradient norm of one step, beside transformers' own model."""
        self.show_checks(settings, sizes, self.do(self.list_checks(settings, sizes)))

    def list_checks(self, settings: dict[str, Setting], sizes: Sizes) -> list[Work]:
        """Return the works whose answers `show_checks` prints."""
        return [Work(task="check", setting=setting, sizes=sizes) for setting in settings.values()]

    def show_checks(
        self, settings: dict[str, Setting], sizes: Sizes, results: Sequence[dict[str, Any]]
    ) -> None:
        """Print loss and gradient norm of one step, compared with transformers' own model."""
        print()
        headings = ("      loss", "   Trainer", "      norm", "   Trainer")
        table = Table(36, *headings, corner=f"correctness, bf16, {sizes.num_layers} layers")
        for name, result in zip(settings, results, strict=True):
            self.answers[f"check {name}"] = result
            if "failed" in result:
                table.failure(name, result["failed"])
                self.verdict.fail(f"{name} was not checked")
                continue
            wrong = [
                key
                for key, bound in (("loss", SAME_LOSS), ("norm", SAME_NORM))
                if not abs(result[key] - result[f"their_{key}"]) <= bound * result[f"their_{key}"]
            ]
            figures = (result["loss"], result["their_loss"], result["norm"], result["their_norm"])
            cells = (f"{figure:.4f}" for figure in figures)
            table.row(name, *cells, end="differs" if wrong else "ok")
            for key in wrong:
                self.verdict.fail(f"{name}: {key} differs from the Trainer's")

    # -- speed ---------------------------------------------------------------------------------

    def measure(self, rows: Sequence[Row]) -> None:
        """Measure every row."""
        if self.is_dry:
            # Starting processes takes longer than all else of a dry run.
            works = [Work(task="speed", setting=r.settings[0], sizes=self.sizes) for r in rows]
            for row, work, result in zip(rows, works, self.do(works), strict=True):
                self._keep(row, work, result)
            return
        for row in rows:
            self._keep(row, *self._measure_first_that_fits(row))

    def _measure_first_that_fits(self, row: Row) -> tuple[Work, dict[str, Any]]:
        """Measure a row by its settings in order, then with fewer rows a step, until it fits."""
        sizes = self.sizes
        while True:
            for setting in row.settings:
                work = Work(task="speed", setting=setting, sizes=sizes)
                (result,) = self.do([work])
                if result.get("failed") != OUT_OF_MEMORY:
                    return work, result
            if sizes.batch_size < 2 * self.num_ranks:
                return work, result
            sizes = replace(sizes, batch_size=sizes.batch_size // 2)

    def _keep(self, row: Row, work: Work, result: dict[str, Any]) -> None:
        """Print and write what was measured: the table comes at the end, if there is one."""
        self.answers[row.name] = result
        words = f"failed: {result.get('failed')}"
        if "failed" not in result:
            speed = Speed(setting=work.setting, sizes=work.sizes, result=result)
            self.speeds[row.name] = speed
            words = f"{speed.tokens_per_s() / self.num_ranks:,.0f} tokens/s a GPU"
        print(f"measured {row.name}: {words}", flush=True)
        self.write()

    def best(self, rows: Sequence[Row], *, is_trainer: bool) -> str | None:
        """Return the name of a side's fastest row; None if none ran."""
        names = [r.name for r in rows if r.is_trainer == is_trainer and r.counts]
        ran = [name for name in names if name in self.speeds]
        return max(ran, key=lambda name: self.speeds[name].tokens_per_s(), default=None)

    def show_speed(self, rows: Sequence[Row], default: str) -> None:
        """Print the table of speeds; ratios are to the Trainer's default and to its best row."""
        sizes = self.sizes
        print(
            f"\n{sizes.num_layers} layers, {sizes.batch_size} x {sizes.seq_len} tokens per step; "
            f"medians of {sizes.num_rounds} rounds of {sizes.num_steps} steps after "
            f"{sizes.num_warmup} for warm-up"
        )
        columns = (
            "a GPU",
            "MFU",
            "MFU full",
            "peak GB",
            "held GB",
            "x default",
            "x best",
            "memory",
        )
        table = Table(40, *(f"{column:>10}" for column in columns))
        theirs = {"x default": default, "x best": self.best(rows, is_trainer=True)}
        for row in rows:
            speed = self.speeds.get(row.name)
            if speed is None:
                reason = self.answers[row.name]["failed"]
                table.failure(row.name, reason)
                if not row.is_trainer and (row.counts or reason != OUT_OF_TIME):
                    self.verdict.fail(f"{row.name} did not run")
                continue
            for kind in speed.result["seconds"]:
                name = row.name if kind == "plain" else f"{row.name}, {kind}"
                table.row(name, *self._cells(speed, kind, theirs), end=self._note(row, speed, kind))
        self._judge(rows)

    def _cells(self, speed: Speed, kind: str, theirs: dict[str, str | None]) -> list[str]:
        result, sizes = speed.result, speed.sizes
        tokens_per_s = speed.tokens_per_s(kind) / self.num_ranks
        rows = result["rows"][kind]
        flop = sizes.flop_per_token(rows["kept"], rows["attended"])
        whole = sizes.flop_per_token(1.0, sizes.seq_len)
        peak = self.peak_tflops and self.peak_tflops * 1e12
        best = self.speeds.get(theirs["x best"] or "")
        ratios = [
            f"{speed.tokens_per_s(kind) / self.speeds[name].tokens_per_s():.2f}x"
            if name in self.speeds
            else "-"
            for name in theirs.values()
        ]
        return [
            f"{tokens_per_s:,.0f}",
            f"{tokens_per_s * flop / peak:.1%}" if peak else "-",
            f"{tokens_per_s * whole / peak:.1%}" if peak else "-",
            f"{result['peak_bytes'] / 1e9:.1f}",
            f"{result['reserved_bytes'] / 1e9:.1f}",
            *ratios,
            f"{result['peak_bytes'] / best.result['peak_bytes']:.2f}x"
            if best and best.result["peak_bytes"]
            else "-",
        ]

    def _note(self, row: Row, speed: Speed, kind: str) -> str:
        """Return what was chosen by memory or by `auto`; for goldfish its cost."""
        if kind == "goldfish":
            ratio = speed.goldfish_ratio()
            limit = None if self.is_dry else MAX_GOLDFISH
            words = self.verdict.check(f"{row.name}, goldfish", ratio, at_most=limit)
            return f"{ratio:.3f}x the step time {words}".strip()
        used, notes = speed.result["used"], []
        if speed.setting.auto:
            rows = used["micro_batch_size"] or "all"
            notes.append(f"{used['precision']}, rows of a pass: {rows}")
        if speed.setting.auto or len(row.settings) > 1:
            notes.append(f"checkpointing {used['checkpointing']}")
        if speed.sizes.batch_size != self.sizes.batch_size:
            notes.append(f"only {speed.sizes.batch_size} rows fit")
        return "; ".join(notes)

    def _judge(self, rows: Sequence[Row]) -> None:
        """Print the ratio of the best rows; it is a limit unless this is a dry run."""
        ours, theirs = (self.best(rows, is_trainer=side) for side in (False, True))
        if ours is None or theirs is None:
            self.verdict.fail("a side has no row to compare")
            return
        ratio = self.speeds[ours].tokens_per_s() / self.speeds[theirs].tokens_per_s()
        limit = None if self.is_dry else MIN_SPEED
        words = self.verdict.check(f"{ours} / {theirs}", ratio, at_least=limit)
        self.answers["best"] = {"memguard": ours, "Trainer": theirs, "ratio": ratio}
        print(f"best of both sides: {ours} / {theirs} = {ratio:.2f}x {words}".rstrip())

    def write(self) -> None:
        """Write the JSON of what is known by now."""
        if self.options.json is not None:
            header = {
                "gpu": self.gpu,
                "num_gpus": 0 if self.is_dry else self.num_ranks,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "peak_tflops": self.peak_tflops,
                "sizes": asdict(self.sizes),
                "failed": self.verdict.failed,
            }
            text = json.dumps({**header, "results": self.answers}, indent=1)
            self.options.json.write_text(f"{text}\n", encoding="utf-8")

    def end(self) -> int:
        """Write the JSON, print the verdict and return the exit code."""
        self.write()
        took_s = time.monotonic() - self.begin_s
        return self.verdict.end(f" ({took_s:.0f} s)")
