"""Speed and memory of layers of the 8B shape, beside plan and Trainer: a step of the GPU check."""

import time
from dataclasses import replace
from typing import Any

import torch
from gpu_facts import Place, attempt, clean_up, fact, read_gb
from gpu_plan import AT_LEAST, AT_MOST, plan_row
from gpu_rows import Setting
from gpu_session import MAX_GOLDFISH, MIN_SPEED, Speed
from gpu_sizes import TINY, Sizes, count_layers, find_peak_tflops
from gpu_work import OUT_OF_MEMORY, Work, run_here

from memguard.planner.machine import load_machine


def rows(place: Place) -> None:
    """Tokens/s and memory of several settings, beside the plan and the Trainer."""
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
    place: Place, name: str, setting: Setting, sizes: Sizes, speeds: dict[str, float]
) -> None:
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


def _describe_row(place: Place, speed: Speed) -> dict[str, Any]:
    """Return the figures of a row, and whether its limits hold."""
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
