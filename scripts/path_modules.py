"""Count the modules of `memguard audit`, and of `memguard train` to its first step.

    python scripts/path_modules.py BEFORE AFTER    both, side by side; AFTER may be left out
    python scripts/path_modules.py . --list        the modules, with the functions that ran in each

Each checkout trains a small run with random weights and audits it, in a folder of its own. A module
is counted if one of its functions runs; what runs while a module is imported does not count, nor
what lies outside of cli, workflows, records, report and audit, nor the probes, statistics and
benchmarks of the audit, whose number is that of what is measured.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

COUNTED = ("cli", "workflows", "records", "report", "audit")
NOT_COUNTED = ("audit/probes", "audit/statistics", "audit/benchmarks")
SETTINGS = """
name: run
seed: 0
output_dir: {folder}
model:
  scratch:
    vocab_size: 300
    config:
      model_type: llama
      hidden_size: 32
      intermediate_size: 64
      num_hidden_layers: 1
      num_attention_heads: 2
      num_key_value_heads: 2
      max_position_embeddings: 128
data:
  train: [{folder}/members.jsonl]
  seq_len: 64
  study: {{num_repetitions: [0, 1, 4]}}
train: {{batch_size: 2, epochs: 1}}
mitigations: [{{name: goldfish, k: 4}}]
"""
# `sys.setprofile` calls this at each function; a class body is code without local variables.
CHILD = """
import json, sys, threading
from inspect import CO_OPTIMIZED
root, out, ends_at = sys.argv[1:4]
del sys.argv[1:4]
ran = {}
def watch(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_flags & CO_OPTIMIZED or not code.co_filename.startswith(root):
        return
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_code.co_filename.startswith(root):
            return
        caller = caller.f_back
    file = code.co_filename[len(root) + 1 :]
    if ends_at and file == ends_at.split(":")[0] and code.co_name == ends_at.split(":")[1]:
        sys.setprofile(None), threading.setprofile(None)
    ran.setdefault(file, set()).add(code.co_qualname)
from memguard.cli import main
threading.setprofile(watch), sys.setprofile(watch)
try:
    main()
finally:
    sys.setprofile(None)
    with open(out, "w") as handle:
        json.dump({file: sorted(names) for file, names in ran.items()}, handle)
"""
FIRST_STEP = "train/trainer.py:_timed_step"


def list_modules(checkout: Path, command: str, folder: Path) -> dict[str, list[str]]:
    """Run a command of a checkout and return the functions that ran, by counted module."""
    root, out = checkout.resolve() / "memguard", folder / f"{command}.json"
    ends_at = FIRST_STEP if command == "train" else ""
    arguments = {"train": [str(folder / "run.yaml")], "audit": [str(folder / "run")]}[command]
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout.resolve()),
        "HOME": str(folder),
        "MEMGUARD_CACHE": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(root), str(out), ends_at, command, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0 or not out.exists():
        raise SystemExit(
            f"{checkout}: memguard {command} ended with {done.returncode}\n{done.stderr}"
        )
    ran = json.loads(out.read_text())
    return {
        file: names
        for file, names in sorted(ran.items())
        if file.endswith(".py")
        and file.startswith(tuple(f"{package}/" for package in COUNTED))
        and not file.startswith(tuple(f"{package}/" for package in NOT_COUNTED))
    }


def measure(checkout: Path) -> dict[str, dict[str, list[str]]]:
    """Return the modules of both commands, for a run in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw = random.Random(0)
        lines = [
            json.dumps(
                {"text": " ".join("".join(draw.choices("aeioulnrst", k=5)) for _ in range(80))}
            )
            for _ in range(60)
        ]
        (folder / "members.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "run.yaml").write_text(SETTINGS.format(folder=folder))
        return {command: list_modules(checkout, command, folder) for command in ("train", "audit")}


def main() -> None:
    """Print how many modules ran, for each command and checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--list", action="store_true", help="show modules and functions")
    arguments = parser.parse_args()
    sides = [measure(checkout) for checkout in arguments.checkouts]
    for command in ("train", "audit"):
        counts = [len(side[command]) for side in sides]
        ratio = f"  {counts[-1] / counts[0]:.0%}" if len(counts) == 2 else ""
        print(f"{command:6} {'  '.join(f'{count:4}' for count in counts)} modules{ratio}")
        if arguments.list:
            for file, names in sides[-1][command].items():
                print(f"    {file:40} {', '.join(names)}")


if __name__ == "__main__":
    main()
