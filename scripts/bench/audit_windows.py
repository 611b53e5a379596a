"""Compare the CPU seconds of the default audit of two checkouts.

python scripts/bench/audit_windows.py BEFORE AFTER --model DIR --members FILE --nonmembers FILE

Each round audits the model once with each checkout, in turn and without a cache. The figure is the
CPU time of the process, imports included; the ratio is the median of those of each round, because
the speed of a shared machine varies from minute to minute. The last line is a verdict; exit 1 if
AFTER takes more than 5 % more.
"""

import os
import resource
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from harness import Verdict, build_parser, take_turns

MAX_RATIO = 1.05


def measure_audit(checkout: Path, arguments: list[str]) -> float:
    """Return the CPU seconds of an audit.

    Raises:
        SystemExit: it failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="bench_audit.") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "memguard", "audit", *arguments, "--out", f"{folder}/audit"],
            env={
                **os.environ,
                "PYTHONPATH": str(checkout),
                "MEMGUARD_CACHE": f"{folder}/cache",
                "XDG_CONFIG_HOME": f"{folder}/config",
            },
            cwd=folder,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"{checkout}: memguard audit ended with {done.returncode}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Measure both sides in turn; return 1 if the limit is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--members", type=Path, required=True)
    parser.add_argument("--nonmembers", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    arguments = ["audit.cache=false"]
    for name in ("model", "members", "nonmembers"):
        arguments += [f"--{name}", str(getattr(options, name).resolve())]
    sides = {
        side: partial(measure_audit, checkout.resolve(), arguments)
        for side, checkout in zip(("before", "after"), options.checkouts, strict=True)
    }
    rounds = take_turns(sides, rounds=options.rounds)
    for side, seconds in rounds.seconds.items():
        print(f"{side:8} {rounds.median_s(side):6.2f} s, {min(seconds):.2f} to {max(seconds):.2f}")
    verdict = Verdict()
    ratio = rounds.ratio("before", "after")
    verdict.check("CPU time", ratio, at_most=MAX_RATIO)
    return verdict.end(f": {ratio:.3f} of the CPU time of {options.checkouts[0]}")


if __name__ == "__main__":
    sys.exit(main())
