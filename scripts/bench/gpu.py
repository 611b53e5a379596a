"""Say what memguard does on one GPU: facts, the most valuable first, each as soon as it is known.

scripts/gpu_check.sh                  all steps, under 10 minutes
scripts/gpu_check.sh audit tests      some, in this order
scripts/gpu_check.sh --dry-run        tiny sizes on the CPU; the figures are meaningless

    machine   versions, the card and what memguard sees of it, its speeds as a machine file
    check     loss and gradient norm of one step of two 8B layers, beside transformers' own model:
              plain, one rank of NCCL, goldfish, compiled, recomputed
    run       one whole `memguard train`, with audit and export
    rows      tokens/s and memory of layers of the 8B shape, beside the plan and the Trainer
    kernels   FP8 by rows, attention in fp32 with grouped heads, varlen, NF4, products
    qlora     a step of 70B in NF4 on one card, full and selective recomputation, beside the plan
    audit     scores and generation of 8B layers in fp32 and bf16
    tests     the tests with the mark `gpu`

Each step is a process with a time limit. What fails is listed, and the next step runs. Facts are
printed and appended to facts.jsonl at once, so that whatever ends the check leaves those before it;
log.txt has all output. The last line is a verdict: exit 1 if a fact misses its limit, a step fails
or no time is left for it, 3 without a GPU.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from gpu_facts import MARK

ROOT = Path(__file__).resolve().parents[2]
LEAST_S, GRACE_S = 12, 3
NO_GPU = 3
"""Exit code of a step that found no GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A process of the check."""

    name: str
    limit_s: int
    command: tuple[str, ...] = (sys.executable, str(Path(__file__).with_name("gpu_steps.py")))


STEPS = (
    Step(name="machine", limit_s=70),
    Step(name="check", limit_s=110),
    Step(name="run", limit_s=140),
    Step(name="rows", limit_s=190),
    Step(name="kernels", limit_s=60),
    Step(name="qlora", limit_s=200),
    Step(name="audit", limit_s=70),
    Step(name="tests", limit_s=150),
)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """How a step ended."""

    name: str
    seconds: float = 0.0
    num_facts: int = 0
    problems: list[str] = field(default_factory=list)
    has_no_gpu: bool = False


class Check:
    """One run of the check."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        """Begin without facts of this run; those of earlier ones stay."""
        self.options, self.work, self.out = options, work, options.out
        self.begin_s = time.monotonic()
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def gone_s(self) -> float:
        """Seconds since the check began."""
        return time.monotonic() - self.begin_s

    def run(self, step: Step, outcome: Outcome) -> None:
        """Run a step; print and write its facts as they come."""
        left_s = self.options.deadline_s - self.gone_s - GRACE_S - 1
        limit_s = min(step.limit_s, left_s)
        if limit_s < min(step.limit_s, LEAST_S):
            outcome.problems.append(f"no time was left: scripts/gpu_check.sh {step.name}")
            print(f"== {step.name}: no time left", flush=True)
            return
        print(f"== {step.name} (at most {limit_s:.0f} s; {self.gone_s:.0f} s gone)", flush=True)
        begin_s, end = time.monotonic(), deque[str](maxlen=14)
        arguments = [step.name, str(self.work), str(self.out)]
        arguments += ["--dry-run"] * self.options.dry_run
        with (
            (self.out / "log.txt").open("a", encoding="utf-8", buffering=1) as log,
            _start([*step.command, *arguments]) as (process, lines),
        ):
            log.write(f"##### {step.name}\n")
            for line in lines(begin_s + limit_s):
                log.write(f"{line}\n")
                # Libraries leave lines unfinished.
                before, mark, values = line.partition(MARK)
                if mark:
                    self._keep(outcome, json.loads(values))
                elif before:
                    end.append(line)
        outcome.seconds = time.monotonic() - begin_s
        code = process.returncode
        outcome.has_no_gpu = code == NO_GPU
        if outcome.seconds >= limit_s:
            outcome.problems.append(f"ended at its limit of {limit_s:.3g} s")
        elif code:
            outcome.problems.append(f"exit {code}")
        if code and not outcome.has_no_gpu:
            print("\n".join(f"   | {line[:200]}" for line in end), flush=True)

    def _keep(self, outcome: Outcome, values: dict[str, Any]) -> None:
        """Print and write a fact."""
        at_s = round(self.gone_s, 1)
        with (self.out / "facts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": outcome.name, "at_s": at_s, **values}) + "\n")
        outcome.num_facts += 1
        name = values.pop("fact")
        words = "  ".join(f"{key} {_show(value)}" for key, value in values.items() if key != "ok")
        is_wrong = values.get("ok", True) is not True
        mark = "" if "ok" not in values else "  NOT OK" if is_wrong else "  ok"
        print(f"{at_s:6.1f} s  {name}: {words}{mark}", flush=True)
        if is_wrong:
            outcome.problems.append(
                f"{name}{': ' * ('failed' in values)}{values.get('failed', '')}"
            )

    def end(self, outcomes: Sequence[Outcome]) -> int:
        """Print what failed and the verdict; return the exit code."""
        print("\n== steps")
        for outcome in outcomes:
            words = "ok" if not outcome.problems else f"{len(outcome.problems)} failed"
            facts = f"{outcome.num_facts} facts"
            print(f"   {outcome.name:<10}{outcome.seconds:5.0f} s{facts:>12}   {words}")
            for problem in outcome.problems:
                print(f"{'':14}{problem[:200]}")
        failed = [outcome.name for outcome in outcomes if outcome.problems]
        verdict = f"FAIL: {', '.join(failed)}" if failed else "PASS"
        what = "a dry run on the CPU, whose figures mean nothing; " * self.options.dry_run
        print(f"facts and all output: {self.out}")
        print(f"{verdict} ({what}{self.gone_s:.0f} s)", flush=True)
        return 1 if failed else 0


def _show(value: Any) -> str:
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


@contextlib.contextmanager
def _start(command: Sequence[str]) -> Iterator[Any]:
    """Start a step in a process group of its own, which ends with the block.

    It stays in this session, so that what ends the session ends the step too.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    assert process.stdout is not None
    read: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process.stdout, read), daemon=True)
    reader.start()

    def lines(until_s: float) -> Iterator[str]:
        """Return lines until the step has ended or its time is over."""
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                line = read.get(timeout=min(left_s, 0.5))
            except queue.Empty:
                # A process that the step left behind may hold the pipe.
                if process.poll() is not None:
                    return
                continue
            if line is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until_s - time.monotonic()))
                return
            yield line
        while not read.empty() and (line := read.get()) is not None:
            yield line

    try:
        yield process, lines
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        reader.join(1)
        if not reader.is_alive():
            process.stdout.close()


def _read(stream: TextIO, lines: "queue.SimpleQueue[str | None]") -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments."""
    summary, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in STEPS]
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(names))
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "gpu_check", help="folder; default: %(default)s"
    )
    parser.add_argument(
        "--deadline-s", type=float, default=570, help="limit of all steps; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.steps) - set(names))
    if unknown:
        parser.error(f"no step is named {unknown[0]!r}; steps: {', '.join(names)}")
    options.out = options.out.resolve()
    return options


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Run the check; return the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    by_name = {step.name: step for step in steps}
    chosen = [by_name[name] for name in options.steps] or list(steps)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="gpu_check.", ignore_cleanup_errors=True) as work:
        check = Check(options, Path(work))
        try:
            for step in chosen:
                outcomes.append(Outcome(name=step.name))
                check.run(step, outcomes[-1])
                if outcomes[-1].has_no_gpu:
                    print(
                        "gpu_check: torch sees no GPU; --dry-run shows that the rest works",
                        file=sys.stderr,
                    )
                    return NO_GPU
        except KeyboardInterrupt:
            outcomes[-1].problems.append("ended from outside")
            for step in chosen[len(outcomes) :]:
                outcomes.append(Outcome(name=step.name, problems=["not run"]))
        return check.end(outcomes)


if __name__ == "__main__":
    # Whatever ends the check also ends its step, and what failed until then is listed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
