"""The steps of the GPU check, each in a process that gpu.py starts.

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

from gpu_facts import Place, attempt, fact, read_gb

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "datasets", "memguard-llm")
NO_GPU = 3


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


# -- rows --------------------------------------------------------------------------------------


def rows(place: Place) -> None:
    """Tokens/s and memory of several settings, beside the plan and the Trainer."""
    from dataclasses import replace

    import torch
    from gpu_rows import Setting
    from gpu_sizes import TINY, Sizes, count_layers

    sizes = TINY
    if not place.is_dry:
        sizes = replace(Sizes(), num_rounds=3)
        memory = torch.cuda.get_device_properties(0).total_memory
        # More take longer, and are no other kernels.
        sizes = replace(sizes, num_layers=min(5, count_layers(sizes, memory)))
    fact("sizes", layers=sizes.num_layers, rows=sizes.batch_size, seq_len=sizes.seq_len)
    trainer, mesh = Setting(trainer=True), (1, 1, 1, 1)
    settings = {
        "memguard": Setting(goldfish=True),
        "memguard, compiled": Setting(compile=True),
        "Trainer, bf16, compiled": replace(trainer, compile=True),
        "Trainer, bf16": trainer,
        "memguard, mesh (1,1,1,1)": Setting(mesh=mesh),
        "memguard, full": Setting(checkpointing="full"),
        "memguard, selective": Setting(checkpointing="selective"),
        "memguard, auto": Setting(auto=True),
        "memguard, mesh (1,1,1,1), compiled": Setting(mesh=mesh, compile=True),
    }
    speeds: dict[str, float] = {}
    for name, setting in settings.items():
        attempt(name, _measure_row, place, name, setting, sizes, speeds)
        if name == "Trainer, bf16":
            # What is left out where time ends can only be faster on our side.
            _compare_best(speeds)
    _compare_best(speeds, is_last=True, is_dry=place.is_dry)


def _measure_row(
    place: Place, name: str, setting: Any, sizes: Any, speeds: dict[str, float]
) -> None:
    from dataclasses import replace

    from gpu_facts import clean_up
    from gpu_session import Speed
    from gpu_work import OUT_OF_MEMORY, Work, run_here

    begin_s, before_gb = time.monotonic(), read_gb("memory_allocated")
    answer = run_here(Work(task="speed", setting=setting, sizes=sizes), place.device)
    while answer.get("failed") == OUT_OF_MEMORY and sizes.batch_size > 1:
        fact(f"{name}, {sizes.batch_size} rows", failed=OUT_OF_MEMORY)
        sizes = replace(sizes, batch_size=sizes.batch_size // 2)
        clean_up()
        answer = run_here(Work(task="speed", setting=setting, sizes=sizes), place.device)
    if "failed" in answer:
        fact(name, failed=answer["failed"], **({} if setting.trainer else {"ok": False}))
        return
    speed = Speed(setting=setting, sizes=sizes, result=answer)
    speeds[name] = speed.tokens_per_s()
    values = _describe_row(place, speed)
    fact(name, **values, took_s=time.monotonic() - begin_s, left_before_gb=before_gb)


def _describe_row(place: Place, speed: Any) -> dict[str, Any]:
    """Return the figures of a row, and whether its limits hold."""
    import torch
    from gpu_plan import AT_LEAST, AT_MOST, plan_row
    from gpu_session import MAX_GOLDFISH
    from gpu_sizes import find_peak_tflops

    from memguard.planner.machine import load_machine

    result, sizes = speed.result, speed.sizes
    peak_tflops = None if place.is_dry else find_peak_tflops(torch.cuda.get_device_name(0))
    held = result["reserved_bytes"]
    values: dict[str, Any] = {"tokens_per_s": speed.tokens_per_s()}
    if peak_tflops is not None:
        packed = result["rows"]["plain"]
        flop = sizes.flop_per_token(packed["kept"], packed["attended"])
        values["mfu"] = speed.tokens_per_s() * flop / peak_tflops / 1e12
    values |= {"peak_gb": result["peak_bytes"] / 1e9, "held_gb": held / 1e9}
    values |= {"retries": result["num_alloc_retries"], "rows": sizes.batch_size}
    holds = []
    if "goldfish" in result["seconds"]:
        values["goldfish_ratio"] = speed.goldfish_ratio()
        holds.append(speed.goldfish_ratio() <= MAX_GOLDFISH)
    if speed.setting.auto:
        used = result["used"]
        values |= {name: used[name] for name in ("precision", "checkpointing", "micro_batch_size")}
    if not speed.setting.trainer:
        file = place.out / "machine.yaml"
        machine = load_machine(file if file.exists() else "dgx-h100")
        planned = plan_row(sizes, result["used"], machine)
        values |= {"plan_gb": planned.needed_bytes / 1e9, "plan_per_s": planned.tokens_per_s}
        if held:
            values["plan_over_held"] = planned.needed_bytes / held
            holds.append(AT_LEAST <= planned.needed_bytes / held <= AT_MOST)
    if holds and not place.is_dry:
        values["ok"] = all(holds)
    return values


def _compare_best(speeds: dict[str, float], *, is_last: bool = False, is_dry: bool = False) -> None:
    """Print the ratio of the fastest rows; the last one is judged."""
    from gpu_session import MIN_SPEED

    name = "fastest memguard / fastest Trainer" if is_last else "fastest so far"
    sides = [[each for each in speeds if each.startswith(side)] for side in ("memguard", "Trainer")]
    if not all(sides):
        fact(name, failed="a side has no row", **({"ok": False} if is_last else {}))
        return
    ours, theirs = (max(side, key=speeds.__getitem__) for side in sides)
    ratio = speeds[ours] / speeds[theirs]
    is_judged = is_last and not is_dry
    fact(
        name,
        ours=ours,
        theirs=theirs,
        ratio=ratio,
        **({"ok": ratio >= MIN_SPEED} if is_judged else {}),
    )


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
    if name in ("machine", "check", "run", "rows"):
        globals()[name](place)
    elif name == "tests" and importlib.util.find_spec("pytest") is None:
        fact("tests", skipped="pytest is not installed")
    else:
        # gpu_tests.tests and so on
        getattr(importlib.import_module(f"gpu_{name}"), name)(place)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Libraries take seconds to leave, and a communicator may never.
    os._exit(code)
