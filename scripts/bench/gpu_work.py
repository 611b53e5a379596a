"""Measurements of the GPU benchmarks in processes of their own, started by memguard's launcher.

    python scripts/bench/gpu_work.py WORKS.json ANSWERS.json

The processes have the environment that `memguard train --nproc N` gives its ranks, and no other
settings, so that what is measured is what a user runs. One GPU needs no process: see `run_here`.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from gpu_machine import measure_machine
from gpu_parity import compare_meshes, sample_meshes
from gpu_rows import Setting, check_row, measure_row
from gpu_sizes import Sizes
from harness import describe_error
from torch import distributed as dist

from memguard.errors import is_out_of_memory
from memguard.runtime import Runtime, set_allocator_defaults, start_runtime
from memguard.runtime.children import ExitReport, is_started_by_nproc, report_exit
from memguard.workflows.common.launch import launch

OUT_OF_MEMORY = "out of memory"
# Variables that change speed or memory; they are reported with each answer.
_SETTINGS = ("CUBLAS_", "CUDA_", "GLOO_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One measurement."""

    task: Literal["speed", "check", "parity", "machine"]
    setting: Setting
    sizes: Sizes

    def run(self, runtime: Runtime) -> dict[str, Any]:
        """Run on this rank; every rank must call this."""
        if self.task == "parity":
            return compare_meshes(sample_meshes(runtime.world_size), runtime)
        if self.task == "machine":
            return measure_machine(runtime.device)
        return (check_row if self.task == "check" else measure_row)(
            self.sizes, self.setting, runtime
        )


def read_work(fields: dict[str, Any]) -> Work:
    """Return a work that was written as JSON."""
    setting = dict(fields["setting"])
    if setting["mesh"] is not None:
        setting["mesh"] = tuple(setting["mesh"])
    return Work(task=fields["task"], setting=Setting(**setting), sizes=Sizes(**fields["sizes"]))


def run_apart(works: Sequence[Work], *, num_ranks: int, timeout_s: float) -> list[dict[str, Any]]:
    """Run some works one after another on the same new processes; return rank 0's answers.

    A work that fails has the answer ``{"failed": reason}``; those after it are not run.
    """
    answers: list[dict[str, Any]] = []
    reason = f"did not finish within {timeout_s:.0f} s"
    with tempfile.TemporaryDirectory(prefix="memguard_bench.") as folder:
        works_file, answers_file = Path(folder) / "works.json", Path(folder) / "answers.jsonl"
        works_file.write_text(json.dumps([asdict(work) for work in works]))
        command = [sys.executable, __file__, str(works_file), str(answers_file), str(num_ranks)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
            last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
            reason = OUT_OF_MEMORY if OUT_OF_MEMORY in last else last[:200]
            if done.returncode and OUT_OF_MEMORY not in last:
                print(done.stderr[-2000:], file=sys.stderr)
        except subprocess.TimeoutExpired:
            pass
        if answers_file.exists():
            answers = [json.loads(line) for line in answers_file.read_text().splitlines()]
    return answers + [{"failed": reason}] * (len(works) - len(answers))


def run_here(work: Work, device: torch.device) -> dict[str, Any]:
    """Run a work in this process, without other ranks; a failure is returned as a result."""
    try:
        with _single_group(device, needed=work.setting.mesh is not None):
            return work.run(Runtime(device=device))
    except Exception as error:
        traceback.print_exc()
        return {"failed": _name_failure(error)}


def _name_failure(error: Exception) -> str:
    return OUT_OF_MEMORY if is_out_of_memory(error) else describe_error(error)


@contextmanager
def _single_group(device: torch.device, *, needed: bool) -> Any:
    """Start the process group of a mesh of one rank."""
    if not needed:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _be_rank(works: Sequence[Work], answers_file: Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    environment = {name: os.environ[name] for name in os.environ if name.startswith(_SETTINGS)}
    with start_runtime() as runtime, answers_file.open("a") as file:
        for work in works:
            answer = work.run(runtime)
            if runtime.is_main:
                file.write(json.dumps({**answer, "environment": environment}) + "\n")
                file.flush()


def main() -> int:
    """Start the ranks, or be one of them."""
    works_file, answers_file, num_ranks = sys.argv[1:]
    if not is_started_by_nproc():
        # As the command line does before it starts ranks.
        set_allocator_defaults()
        return launch([sys.executable, *sys.argv], int(num_ranks))
    works = [read_work(fields) for fields in json.loads(Path(works_file).read_text())]
    if not torch.cuda.is_available():
        # A dry run: a compiler may be missing, and the tests cover compilation.
        torch.compiler.set_stance("force_eager")
    try:
        _be_rank(works, Path(answers_file))
    except Exception as error:
        text = _name_failure(error)
        trace = "" if text == OUT_OF_MEMORY else traceback.format_exc()
        report_exit(ExitReport(code=1, kind=type(error).__name__, text=text, traceback=trace))
        # Other ranks may wait in a collective, and the interpreter would wait for NCCL's threads.
        sys.stderr.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
