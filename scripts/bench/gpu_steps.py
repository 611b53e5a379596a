"""The steps of the GPU check, each in a process that gpu.py starts; the first three are here.

python scripts/bench/gpu_steps.py STEP WORK OUT [--dry-run]

What takes seconds to import is imported by the step that uses it: the first facts come at once.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_facts import Place, attempt, fact

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "datasets", "memguard-llm")
NO_GPU = 3
ELSEWHERE = {"rows": "gpu_speed"}
"""Modules of other names than their step."""


# -- machine -----------------------------------------------------------------------------------


def machine(place: Place) -> None:
    """The card, what memguard sees of it; then its speeds as a machine file."""
    attempt("card", _see_card, place)
    attempt("seen by memguard", _see_by_memguard)
    attempt("speeds", _measure_speeds, place)


def show_versions() -> None:
    """Versions of the libraries, before the first of them is imported."""
    versions: dict[str, str | None] = {}
    for name in (*PACKAGES, "bitsandbytes", "flash_attn"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    fact("versions", python=sys.version.split()[0], **versions)


def _see_card(place: Place) -> None:
    import torch

    if place.is_dry:
        fact("card", name="none: a dry run", cores=os.cpu_count())
        return
    properties = torch.cuda.get_device_properties(0)
    fact(
        "card",
        name=properties.name,
        gib=properties.total_memory / 2**30,
        free_gib=torch.cuda.mem_get_info()[0] / 2**30,
        capability=".".join(map(str, torch.cuda.get_device_capability())),
        cuda=torch.version.cuda,
        num_gpus=torch.cuda.device_count(),
    )
    attempt("allocator", _see_allocator, place, needed=False)


def _see_allocator(place: Place) -> None:
    import torch

    torch.zeros(1, device=place.device)
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    fact("allocator", expandable_segments=settings.get("expandable_segments"))


def _see_by_memguard() -> None:
    from memguard.runtime.environment import count_gpus, read_driver_version
    from memguard.runtime.processes import explain_unusable_gpus

    reason = explain_unusable_gpus()
    fact(
        "seen by memguard",
        num_gpus=count_gpus(),
        driver=read_driver_version(),
        unusable=reason,
        ok=reason is None,
    )


def _measure_speeds(place: Place) -> None:
    import torch
    import yaml
    from gpu_machine import describe_machine, measure_machine
    from gpu_sizes import find_peak_tflops

    from memguard.planner.machine import Machine

    measured = measure_machine(place.device)
    name, memory, count = "dry run", 80 * 2**30, 1
    if not place.is_dry:
        properties = torch.cuda.get_device_properties(0)
        name, memory = properties.name, properties.total_memory
        count = torch.cuda.device_count()
    fields = describe_machine(
        measured,
        gpu=name,
        num_gpus=count,
        memory_bytes=memory,
        peak_tflops=find_peak_tflops(name),
    )
    Machine.model_validate(fields)
    file = place.out / "machine.yaml"
    file.write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
    fact("speeds", **{key: value for key, value in measured.items() if value is not None})
    fact("machine file", path=str(file), **fields)


# -- check -------------------------------------------------------------------------------------


def check(place: Place) -> None:
    """Loss and gradient norm of one step of two layers, beside transformers' own model."""
    from dataclasses import replace

    from gpu_rows import Setting
    from gpu_sizes import TINY, Sizes

    mesh = (1, 1, 1, 1)
    sizes = TINY if place.is_dry else replace(Sizes(), batch_size=2)
    settings = {
        "plain": Setting(),
        "mesh (1,1,1,1), NCCL": Setting(mesh=mesh),
        "goldfish": Setting(goldfish=True),
        "compiled": Setting(compile=True),
        "selective": Setting(checkpointing="selective"),
        "full, compiled, mesh (1,1,1,1)": Setting(mesh=mesh, checkpointing="full", compile=True),
    }
    for name, setting in settings.items():
        attempt(name, _check_one, place, name, setting, sizes)


def _check_one(place: Place, name: str, setting: Any, sizes: Any) -> None:
    from gpu_session import SAME_LOSS, SAME_NORM
    from gpu_work import Work, run_here

    answer = run_here(Work(task="check", setting=setting, sizes=sizes), place.device)
    if "failed" in answer:
        fact(name, failed=answer["failed"], ok=False)
        return
    off_loss, off_norm = (abs(answer[key] / answer[f"their_{key}"] - 1) for key in ("loss", "norm"))
    fact(
        name,
        loss=answer["loss"],
        off_loss=off_loss,
        off_norm=off_norm,
        ok=off_loss <= SAME_LOSS and off_norm <= SAME_NORM,
    )


# -- run ---------------------------------------------------------------------------------------


def run(place: Place) -> None:
    """One `memguard train` with audit and export, followed as it goes."""
    folder = place.work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = _write_run(folder, is_dry=place.is_dry)
    done = folder / "runs" / config["name"]
    begin_s = time.monotonic()
    command = [sys.executable, "-m", "memguard", "train", str(folder / "run.yaml")]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    waiting: dict[str, Callable[[Path], dict[str, Any] | None]] = {
        "first step": lambda done: _read_step(done, 0),
        "last step": lambda done: _read_step(done, config["train"]["max_steps"] - 1),
        "audit": _read_report,
    }
    code = None
    while code is None:
        time.sleep(0.2)
        code = process.poll()
        for name, read in list(waiting.items()):
            if (found := read(done)) is not None:
                fact(name, seconds=time.monotonic() - begin_s, **found)
                del waiting[name]
    for name in waiting:
        fact(name, failed="not reached", ok=False)
    environment = done / "environment.json"
    has_model = bool(list((done / "model").glob("*.safetensors")))
    fact(
        "memguard train",
        exit_code=code,
        exported=has_model,
        seconds=time.monotonic() - begin_s,
        gpu=json.loads(environment.read_text()).get("gpu") if environment.exists() else None,
        ok=code == 0 and has_model,
    )


def _write_run(folder: Path, *, is_dry: bool) -> dict[str, Any]:
    """Write documents of random words and the configuration of a run; return it."""
    draw = random.Random(0)
    letters = "abcdefghijklmnop"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 8))) for _ in range(3000)]
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        for number in range(60 if is_dry else 400):
            text = " ".join(draw.choices(words, k=200))
            file.write(json.dumps({"id": f"d{number}", "text": text}) + "\n")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads")
    sizes = (64, 128, 2, 4, 2) if is_dry else (512, 1408, 6, 8, 4)
    model = dict(zip(names, sizes, strict=True), model_type="llama", max_position_embeddings=512)
    config: dict[str, Any] = {
        "name": "first",
        "output_dir": str(folder / "runs"),
        "model": {"scratch": {"config": model, "vocab_size": 2048}},
        "data": {"train": [str(folder / "documents.jsonl")], "seq_len": 256},
        "optim": {"lr": 1e-3},
        "train": {
            "batch_size": 8 if is_dry else 32,
            "max_steps": 4 if is_dry else 60,
            "checkpoint_every_steps": 30,
        },
        "audit": {"continuation_tokens": 16},
    }
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    return config


def _read_step(done: Path, number: int) -> dict[str, Any] | None:
    """Return the figures of a step; None until it is written."""
    try:
        lines = (done / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [line for line in map(json.loads, lines) if "tokens_per_s" in line]
    except (OSError, ValueError):
        return None
    if len(steps) <= number:
        return None
    names = ("loss", "grad_norm", "tokens_per_s", "peak_reserved_bytes", "num_alloc_retries")
    return {name: steps[number][name] for name in names if name in steps[number]}


def _read_report(done: Path) -> dict[str, Any] | None:
    try:
        report = json.loads((done / "audit" / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {"verdict": report["verdict"]["level"]}


# -- the process of a step ----------------------------------------------------------------------


def prepare(place: Place) -> None:
    """Set what the command line sets, and silence libraries."""
    os.environ["MEMGUARD_CACHE"] = str(place.work / "cache")
    if place.is_dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from memguard.runtime import set_allocator_defaults

    set_allocator_defaults()


def quieten(place: Place) -> None:
    """Silence libraries in a step that measures in its own process."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if place.is_dry:
        # A compiler may be missing, and the tests cover compilation.
        torch.compiler.set_stance("force_eager")


def main() -> int:
    """Run a step; return its exit code."""
    name, work, out = sys.argv[1:4]
    place = Place(is_dry="--dry-run" in sys.argv, work=Path(work), out=Path(out))
    if name == "machine":
        show_versions()
    prepare(place)
    if not place.has_gpu():
        return NO_GPU
    if name in ("check", "rows", "kernels", "qlora", "audit"):
        quieten(place)
    if name in ("machine", "check", "run"):
        globals()[name](place)
    elif name == "tests" and importlib.util.find_spec("pytest") is None:
        fact("tests", skipped="pytest is not installed")
    else:
        module = importlib.import_module(ELSEWHERE.get(name, f"gpu_{name}"))
        getattr(module, name)(place)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Libraries take seconds to leave, and a communicator may never.
    os._exit(code)
