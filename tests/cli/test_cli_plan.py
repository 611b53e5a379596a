"""`memguard plan`: what it shows, what it refuses in one line, and how it exits."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import rich.console
from cli_examples import Outcome, run_cli, write_run
from tiny_llama import TINY_LLAMA

from memguard.cli.plan_screen import render_plan, render_storage_plan
from memguard.planner import machine as machine_module
from memguard.planner.disk import format_bytes
from memguard.planner.plan import Plan
from memguard.planner.storage import StoragePlan

# Sizes of the config.json published with meta-llama/Llama-3.1-405B.
LLAMA_405B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}
MACHINE: dict[str, Any] = {
    "name": "mine",
    "gpu": "H100 SXM 80 GB",
    "memory_gib": 80,
    "gpus_per_node": 8,
    "link_gb_per_s": 450,
    "network_gb_per_s": 400,
    "peak_tflops": 989,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with sizes of 405B; do not write here."""
    return write_model(tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def made(model: Path) -> Plan:
    """A plan of that model on 512 GPUs."""
    shown = plan("--model", model, "--gpus", 512, "--machine", "h200", "--json")
    return Plan.model_validate_json(shown.out)


def write_model(folder: Path, **changes: Any) -> Path:
    (folder / "llama-405b").mkdir(exist_ok=True)
    path = folder / "llama-405b" / "config.json"
    path.write_text(json.dumps({**LLAMA_405B, **changes}))
    return path


def write_machine(folder: Path, **changes: Any) -> Path:
    path = folder / "machine.yaml"
    path.write_text(json.dumps({**MACHINE, **changes}))  # JSON is YAML.
    return path


def plan(*arguments: object) -> Outcome:
    return run_cli("plan", *arguments)


def flatten(text: str) -> str:
    """Undo line breaks."""
    return " ".join(text.split())


def check_refusal(outcome: Outcome, code: int, *said: str) -> None:
    """A refusal before anything is shown: one line for each problem, no traceback."""
    assert outcome.code == code
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert outcome.err.strip()
    for each in said:
        assert each in outcome.err


# -- a model alone ---------------------------------------------------------------------------------


def test_405b_on_16384_gpus(model: Path) -> None:
    outcome = plan("--model", model, "--gpus", 16384, "--machine", "frontier")
    assert outcome.code == 0
    assert outcome.err == ""
    assert "llama-405b  405.9 B parameters on 16,384 × MI250X GCD 64 GB" in outcome.out
    assert "meshes fit; the fastest first" in outcome.out
    assert "memory of (data=" in outcome.out


def test_405b_on_8_gpus_is_told_how_many_would_do(model: Path) -> None:
    outcome = plan("--model", model, "--gpus", 8, "--machine", "dgx-h100")
    assert outcome.code == 2
    assert "none of 20 meshes fits; the closest to fitting first" in outcome.out
    (line,) = outcome.err.splitlines()
    found = re.search(r"use ([\d,]+) GPUs as \(data=1, z=(\d+), y=(\d+), x=(\d+)\)", line)
    assert found
    num_gpus = int(found[1].replace(",", ""))
    # 405.9 B parameters of 16 bytes are 75.6 GiB on 80 GPUs, of 77: nothing left for a block.
    assert num_gpus == 88
    assert f"{num_gpus} GPUs would suffice, as (data=1, " in outcome.out
    # What is proposed runs.
    mesh = f"z={found[2]},y={found[3]},x={found[4]}"
    settings = ("--gpus", num_gpus, "--mesh", mesh, "--checkpointing", "full")
    assert plan("--model", model, "--machine", "dgx-h100", *settings).code == 0


def test_heads_that_do_not_divide_exit_2_with_the_nearest_meshes(model: Path) -> None:
    outcome = plan("--model", model, "--machine", "dgx-h100", "--gpus", 6, "--mesh", "x=6")
    check_refusal(
        outcome,
        2,
        "'parallel.x' must divide the model's 128 attention heads; got 6",
        "meshes that work on 6 ranks, nearest first: (data=",
    )


def test_a_mesh_of_other_ranks_than_gpus_is_told_what_it_takes(model: Path) -> None:
    outcome = plan("--model", model, "--machine", "dgx-h100", "--gpus", 8, "--mesh", "z=2")
    check_refusal(outcome, 2, "must be the number of ranks", "the requested degrees fit 2 ranks")


def test_seven_gpus_have_meshes_too_but_not_for_every_batch(model: Path) -> None:
    fitting = plan("--model", model, "--machine", "dgx-h100", "--gpus", 7 * 32)
    assert fitting.code == 0
    outcome = plan("--model", model, "--machine", "dgx-h100", "--gpus", 7, "--batch", 9)
    check_refusal(outcome, 2, "no mesh works on 7 ranks", "nearest first: 6, 8, 9")


def test_the_mesh_decides_the_number_of_gpus(tmp_path: Path) -> None:
    path = write_model(tmp_path, num_hidden_layers=2)
    outcome = plan("--model", path, "--machine", "h200", "--mesh", "z=4,x=2,y=2", "--json")
    printed = json.loads(outcome.out)
    assert printed["num_gpus"] == 16
    assert [printed["requested"][axis] for axis in ("data", "z", "y", "x")] == [1, 4, 2, 2]
    # Without either it is one node.
    assert json.loads(plan("--model", path, "--machine", "h200", "--json").out)["num_gpus"] == 8
    # -1 takes the rest.
    left = plan("--model", path, "--machine", "h200", "--gpus", 32, "--mesh", "z=-1,x=4", "--json")
    assert json.loads(left.out)["requested"]["z"] == 8


def test_a_mesh_that_is_asked_for_comes_first(tmp_path: Path) -> None:
    path = write_model(tmp_path, num_hidden_layers=2)
    outcome = plan("--model", path, "--machine", "h200", "--mesh", "x=8")
    assert outcome.code == 0
    assert "yours, then the fastest" in outcome.out
    lines = outcome.out.splitlines()
    heading = next(n for n, line in enumerate(lines) if "recompute" in line)
    assert lines[heading + 1].split()[:4] == ["1", "1", "1", "8"]
    assert "memory of (data=1, z=1, y=1, x=8)" in outcome.out


def test_a_folder_is_as_good_as_its_config(tmp_path: Path) -> None:
    path = write_model(tmp_path, num_hidden_layers=2)
    arguments = ("--mesh", "x=8", "--machine", "dgx-h100")
    by_folder = plan("--model", path.parent, *arguments)
    assert by_folder.out == plan("--model", path, *arguments).out
    assert by_folder.code == 0


def test_options_are_taken(tmp_path: Path) -> None:
    path = write_model(tmp_path, num_hidden_layers=2)
    outcome = plan(
        *("--model", path, "--machine", "h200", "--gpus", 4, "--seq-len", 512, "--batch", 32),
        *("--micro-batch", 2, "--checkpointing", "full", "--precision", "fp32", "--json"),
    )
    printed = json.loads(outcome.out)
    assert (printed["seq_len"], printed["batch_size"], printed["precision"]) == (512, 32, "fp32")
    for mesh in printed["meshes"]:
        assert mesh["activation_checkpointing"] == "full"
        assert mesh["micro_batch_size"] == 2
        assert mesh["num_micro_batches"] == 16 // (mesh["data"] * mesh["z"])
    assert "a step of 32 rows, 512 tokens per row, fp32" in flatten(
        plan("--model", path, "--machine", "h200", "--batch", 32, "--seq-len", 512).out.replace(
            "bf16", "fp32"
        )
    )


def test_options_are_short_for_settings(tmp_path: Path) -> None:
    path = write_model(tmp_path, num_hidden_layers=2)
    arguments = ("--model", path, "--machine", "h200", "--gpus", 4, "--json")
    options = (
        *("--seq-len", 512, "--batch", 32, "--micro-batch", 2, "--checkpointing", "full"),
        *("--precision", "fp32", "--lora-r", 4),
    )
    settings = (
        *("data.seq_len=512", "train.batch_size=32", "train.micro_batch_size=2"),
        *("train.activation_checkpointing=full", "train.precision=fp32"),
        *("adapter.name=lora", "adapter.r=4"),
    )
    by_options = plan(*arguments, *options)
    assert by_options.code == 0, by_options.err
    assert plan(*arguments, *settings).out == by_options.out
    assert plan(*settings[:1], *arguments, *(f"--{each}" for each in settings[1:])).out == (
        by_options.out
    )


def test_a_model_alone_has_the_settings_of_a_run(tmp_path: Path) -> None:
    path = write_model(tmp_path, num_hidden_layers=4)
    arguments = ("--model", path, "--machine", "h200", "--json")
    full = json.loads(plan(*arguments, "parallel.z=8").out)["requested"]
    assert [full[axis] for axis in ("data", "z", "y", "x")] == [1, 8, 1, 1]
    # A setting of `parallel` that is no degree chooses no mesh.
    odd = plan(*arguments, "train.batch_size=12", "parallel.reshard_after_forward=false")
    assert json.loads(odd.out)["requested"] is None
    lora = (*arguments, "parallel.z=8", "adapter.name=lora")
    wide, narrow = (
        json.loads(plan(*lora, *settings).out)["requested"]["memory"]
        for settings in ((), ("adapter.quantization=nf4",))
    )
    assert narrow["weights"] < wide["weights"] < full["memory"]["weights"]


def test_remedies_of_a_model_alone_are_settings(tmp_path: Path) -> None:
    path = write_model(tmp_path, num_hidden_layers=4)
    arguments = ["--model", path, "--machine", "dgx-h100", "--mesh", "x=8"]
    given = {"data.seq_len": "16384", "train.batch_size": "8", "train.micro_batch_size": "8"}
    given["train.activation_checkpointing"] = "none"
    outcome = plan(*arguments, *(f"{setting}={value}" for setting, value in given.items()))
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert line.startswith("the mesh (data=1, z=1, y=1, x=8) needs ")
    remedies = re.findall(r"set ([a-z_.]+)=(\w+)", line)
    assert {("train.micro_batch_size", "1"), ("train.micro_batch_size", "2")} & {*remedies}
    for setting, value in remedies:
        changed = given | {setting: value}
        assert plan(*arguments, *(f"{each}={changed[each]}" for each in changed)).code == 0


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--machine", "nowhere"], "'--machine' must be a YAML file or one of alps, dgx-a100-40gb"),
        (["--mesh", "q=8"], "must give each of data, z, y, x at most once"),
        (["--mesh", "x=2,x=4"], "must give each of data, z, y, x at most once"),
        (["--mesh", "order=x"], "must give each of data, z, y, x at most once"),
        (["--mesh", "x=two"], "'x' should be a valid integer"),
        (["--mesh", "x=0"], "should be 1 or more, or -1"),
        (["--mesh", "x"], "'x' should be a valid integer"),
        (["--mesh", "x=-1,z=-1"], "only one of"),
        (["--gpus", "0"], "'--gpus'"),
        (["--gpus", "many"], "'--gpus'"),
        (["--seq-len", "1"], "'data.seq_len' should be greater than or equal to 8; got 1"),
        (["--batch", "0"], "'train.batch_size' should be greater than or equal to 1; got 0"),
        (["--checkpointing", "some"], "should be 'auto', 'none', 'full' or 'selective'; got 'so"),
        (["--precision", "fp8"], "'train.precision' should be 'auto', 'fp32' or 'bf16'; got 'fp8"),
        (["--micro-batch", "2"], "needs 'train.batch_size', whose rows it divides"),
        (["--micro-batch", "3", "--batch", "16"], "must divide 'train.batch_size'; got 3 and 16"),
        (["train.batch=3"], "'train.batch' is not a setting; known here: epochs"),
        (["--nonsense"], "--nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(model: Path, arguments: list[str], said: str) -> None:
    machine = [] if "--machine" in arguments else ["--machine", "dgx-h100"]
    check_refusal(plan("--model", model, *machine, *arguments), 2, said)


def test_several_mistakes_are_told_at_once(model: Path) -> None:
    outcome = plan("--model", model, "--checkpointing", "some", "--precision", "fp8")
    check_refusal(outcome, 2, "'train.activation_checkpointing'", "'train.precision'")
    assert len(outcome.err.splitlines()) == 2


def test_neither_a_run_nor_a_model() -> None:
    check_refusal(plan(), 2, "give the CONFIG of a run before its settings")
    check_refusal(plan("--gpus", 8), 2, "give the CONFIG of a run")
    check_refusal(
        plan("train.batch_size=3"), 2, "give the CONFIG of a run before its settings, or --model"
    )


def test_options_change_the_settings_of_a_run(folder: Path) -> None:
    outcome = plan(write_run(folder), "--no-documents", "--batch", 3, "--seq-len", 64)
    assert (outcome.code, outcome.err) == (0, "")
    assert "a step of 3 rows, 64 tokens per row, fp32" in outcome.out


def test_no_such_model(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.json", tmp_path):
        check_refusal(plan("--model", path), 3, "'--model' must be", "cannot be read: No such file")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ("{}", "'model_type' must be one that transformers"),
        ('{"model_type": "t5"}', "cannot be loaded as a causal language model"),
        ('{"model_type": "llama"}', "must give 'hidden_size' as a whole number"),
    ],
)
def test_a_model_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    outcome = plan("--model", path, "--machine", "dgx-h100")
    check_refusal(outcome, 3, said)
    assert len(outcome.err.splitlines()) == 1


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00binary")
    check_refusal(plan("--model", path), 3, "is not JSON")


def test_a_machine_that_is_wrong(tmp_path: Path, model: Path) -> None:
    path = write_machine(tmp_path, memory_gb=80)
    outcome = plan("--model", model, "--machine", path)
    check_refusal(outcome, 2, "machine.yaml", "memory_gb")


def test_no_such_run() -> None:
    check_refusal(plan("nothing.yaml"), 2, "nothing.yaml")


# -- JSON ------------------------------------------------------------------------------------------


def test_json_has_what_the_screen_shows(model: Path) -> None:
    arguments = ("--model", model, "--gpus", 512, "--machine", "dgx-h100", "--batch", 512)
    shown, outcome = plan(*arguments).out, plan(*arguments, "--json")
    assert outcome.code == 0
    printed = json.loads(outcome.out)
    read = Plan.model_validate_json(outcome.out)
    assert (printed["kind"], printed["version"]) == ("plan", 1)
    assert printed["num_parameters"] == 405_853_388_800
    assert f"{printed['num_fitting']:,} of {printed['num_meshes']:,} meshes fit" in shown
    rows = [line.split() for line in shown.splitlines()]
    first = read.meshes[0]
    assert first.speed is not None
    row = [f"{getattr(first, axis):,}" for axis in ("data", "z", "y", "x")]
    row += [first.activation_checkpointing, f"{first.micro_batch_size}"]
    row += format_bytes(first.memory.needed).split() + format_bytes(first.headroom_bytes).split()
    assert [*row, f"{first.speed.tokens_per_s:,.0f}"] in rows
    assert f"during {first.memory.moment}" in flatten(shown)
    assert all(each in flatten(shown) for each in printed["assumptions"])
    speeds = [mesh.speed.tokens_per_s for mesh in read.meshes if mesh.speed]
    assert speeds == sorted(speeds, reverse=True)


def test_json_is_printed_and_the_reason_told_where_nothing_fits(model: Path) -> None:
    outcome = plan("--model", model, "--gpus", 8, "--machine", "dgx-h100", "--json")
    assert outcome.code == 2
    printed = json.loads(outcome.out)
    assert printed["num_fitting"] == 0
    assert printed["enough"]["num_gpus"] == 88
    assert printed["enough"]["mesh"]["fits"]
    assert all(not mesh["fits"] and mesh["speed"] is None for mesh in printed["meshes"])
    assert len(outcome.err.splitlines()) == 1


# -- a run -----------------------------------------------------------------------------------------


def test_a_run_with_its_documents(folder: Path) -> None:
    path = write_run(folder)
    outcome = plan(path)
    assert outcome.code == 0
    assert "a step of 8 rows, 128 tokens per row, fp32" in outcome.out
    assert "only mesh fits" in outcome.out
    for title in ("Tokenizer", "Training", "Disk", "Documents and audit"):
        assert f"\n{title}\n" in outcome.out
    assert not (folder / "runs").exists()


def test_the_time_of_all_steps_is_planned_for_known_gpus(folder: Path) -> None:
    path = write_run(folder)
    arguments = (path, "--machine", "dgx-h100", "--gpus", 2)
    printed = json.loads(plan(*arguments, "--json").out)
    first = printed["requested"] or printed["meshes"][0]
    num_steps = printed["dry_run"]["length"]["num_steps"]
    assert num_steps > 1
    assert printed["training_s"] == num_steps * first["speed"]["step_s"]
    assert printed["training_s"] > 0
    seconds = round(printed["training_s"])
    mesh = ", ".join(f"{axis}={first[axis]}" for axis in ("data", "z", "y", "x"))
    assert (
        f"time about {seconds} s for all steps as ({mesh}); loading, saving and the audit take "
        "longer" in flatten(plan(*arguments).out)
    )


def test_on_a_cpu_no_time_is_planned_and_memory_is_that_of_a_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "_list_gpus", lambda: ())
    text = flatten(plan(write_run(folder)).out)
    assert "time not predicted, because the speed of a CPU is not known; " in text
    assert "'memguard train' shows the time left" in text
    assert "available per process" in text
    assert "per GPU" not in text


def test_on_a_gpu_of_no_machine_file_no_time_is_planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "_list_gpus", lambda: (("Unknown 1", 80.0),))
    text = flatten(plan(write_run(folder)).out)
    assert "time not predicted, because 'Unknown 1' is in no machine file; " in text
    assert "available per GPU" in text


def test_a_run_as_json(folder: Path) -> None:
    path = write_run(folder)
    printed = json.loads(plan(path, "train.batch_size=4", "--json").out)
    assert printed["batch_size"] == 4
    assert printed["dry_run"]["length"]["batch_size"] == 4
    without = json.loads(plan(path, "--no-documents", "--json").out)
    assert "dry_run" not in without
    assert without["num_parameters"] == printed["dry_run"]["disk"]["num_parameters"]


def test_a_run_without_its_documents(folder: Path) -> None:
    path = write_run(folder, data={"train": str(folder / "not-there.jsonl")})
    assert plan(path).code == 3
    outcome = plan(path, "--no-documents")
    assert outcome.code == 0
    assert "Training" not in outcome.out
    assert not (folder / "runs").exists()


def test_a_run_on_many_gpus(folder: Path) -> None:
    path = write_run(
        folder, parallel={"data": -1, "z": 2, "x": 2, "order": ["x", "y", "z", "data"]}
    )
    arguments = ("--no-documents", "--machine", "dgx-h100", "--json")
    printed = json.loads(plan(path, *arguments).out)
    assert printed["num_gpus"] == 8, "'parallel.data' is -1: one node"
    assert [printed["requested"][axis] for axis in ("data", "z", "y", "x")] == [2, 2, 1, 2]
    # Rows of the run, split four ways.
    assert printed["requested"]["micro_batch_size"] == 2
    other = json.loads(plan(path, *arguments, "--mesh", "x=2").out)
    assert other["num_gpus"] == 2
    check_refusal(
        plan(path, *arguments, "--gpus", 12),
        2,
        "'parallel.data' × 'parallel.z' must divide 'train.batch_size', 8 rows",
        "no mesh works on 12 ranks",
        "nearest first: 8, 16, 4",
    )


def test_a_run_whose_mesh_does_not_fit_is_told_what_would_do(folder: Path) -> None:
    train = {"batch_size": 64, "micro_batch_size": 32, "activation_checkpointing": "none"}
    path = write_run(folder, train=train, parallel={"data": 2})
    # Some 2 MB: the tiny model's weights and moments, and a few rows.
    machine = write_machine(folder, memory_gib=0.003, reserved_gib=0, gpus_per_node=2)
    outcome = plan(path, "--machine", machine)
    assert outcome.code == 2
    # After the table, and what the documents give.
    assert "; yours, then" in outcome.out
    assert "Documents and audit" in outcome.out
    line = outcome.err.splitlines()[-1]
    assert line.startswith("the mesh (data=2, z=1, y=1, x=1) needs ")
    remedies = re.findall(r"set ([a-z_.]+=\w+)", line)
    assert remedies
    for remedy in remedies:
        assert plan(path, "--machine", machine, "--no-documents", remedy).code == 0
    assert not (folder / "runs").exists()


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128}
NO_FORMULA = "because the planner has no formula for layers of 'bloom'"
# 0.5 B parameters.
BLOOM: dict[str, Any] = {
    "model_type": "bloom",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "n_layer": 32,
    "n_head": 16,
}


def write_bloom(folder: Path) -> Path:
    (folder / "bloom").mkdir()
    path = folder / "bloom" / "config.json"
    path.write_text(json.dumps(BLOOM))
    return path


def test_a_run_of_another_family_has_its_plan_and_the_rest(folder: Path) -> None:
    model = {"path": None, "scratch": {"config": GPT2, "vocab_size": 400}}
    outcome = plan(write_run(folder, model=model))
    assert outcome.code == 0
    assert "model.scratch  " in outcome.out
    assert "no formula for layers of 'gpt2'" in flatten(outcome.out)
    assert "time not predicted, because there is no formula for the layers of 'gpt2'; " in flatten(
        outcome.out
    )
    assert "Training" in outcome.out


def test_of_another_family_the_storage_is_shown_and_what_is_not_predicted(tmp_path: Path) -> None:
    path = write_bloom(tmp_path)
    outcome = plan("--model", path, "--machine", "dgx-h100", "--gpus", 4)
    assert outcome.code == 0, outcome.err
    text = flatten(outcome.out)
    assert "470.2 M parameters on 4 × H100 SXM 80 GB" in text
    assert "bloom: layers are not split: data and z only" in text
    assert "3 valid meshes, of which 3 hold what a rank stores" in text
    assert f"Not predicted: activations, buffers, traffic and tokens/s, {NO_FORMULA}" in text
    # 4 + 4 + 8 bytes of a quarter of the parameters.
    assert "1 4 1 1 448.4 MiB 448.4 MiB 896.8 MiB 1.8 GiB 77.0 GiB" in text
    assert "tokens/s" not in text.replace("traffic and tokens/s", "")


def test_json_of_another_family_has_null_and_the_reason(tmp_path: Path) -> None:
    path = write_bloom(tmp_path)
    printed = json.loads(plan("--model", path, "--machine", "h200", "--json").out)
    assert printed["kind"] == "storage_plan"
    (first, *_) = printed["meshes"]
    for name in ("activations", "buffers", "needed"):
        assert first["memory"][name] is None
        assert NO_FORMULA.removeprefix("because ") in printed["not_predicted"][name]
    assert first["speed"] is None
    assert printed["num_active_parameters"] == printed["num_parameters"]


def test_what_certainly_cannot_fit_is_refused(tmp_path: Path) -> None:
    path = write_bloom(tmp_path)
    small = write_machine(tmp_path, memory_gib=5)
    outcome = plan("--model", path, "--machine", small, "--gpus", 2)
    assert outcome.code == 2
    assert "of which 0 hold what a rank stores" in outcome.out
    (line,) = outcome.err.splitlines()
    assert "no mesh of 2 × H100 SXM 80 GB can hold a step of bloom" in line
    assert "needs at least 3.5 GiB for weights, gradients and moments" in line
    assert "use 4 GPUs or more" in line
    # As it says.
    assert plan("--model", path, "--machine", small, "--gpus", 4).code == 0
    assert plan("--model", path, "--machine", small, "--gpus", 2, "--lora-r", 8).code == 0
    outcome = plan("--model", path, "--machine", small, "--mesh", "data=2,z=2")
    assert outcome.code == 2
    assert "the mesh (data=2, z=2, y=1, x=1) needs at least 3.5 GiB" in outcome.err
    assert "use the mesh (data=1, z=4, y=1, x=1)" in outcome.err
    # Layers of this family are not split.
    outcome = plan("--model", path, "--machine", small, "--mesh", "x=2")
    check_refusal(outcome, 2, "'parallel.x' must be 1: layers of 'bloom' are not split")


@pytest.mark.parametrize("width", [80, 120])
def test_a_storage_plan_is_not_cut_off(width: int, tmp_path: Path) -> None:
    path = write_bloom(tmp_path)
    outcome = plan("--model", path, "--machine", "h200", "--mesh", "data=8,z=128", "--json")
    screen = io.StringIO()
    out = rich.console.Console(file=screen, width=width)
    render_storage_plan(StoragePlan.model_validate_json(outcome.out), out)
    assert max(map(len, screen.getvalue().splitlines())) <= width
    assert "…" not in screen.getvalue()


def test_another_model_for_a_run(folder: Path) -> None:
    outcome = plan(
        write_run(folder), "--no-documents", "--model", write_model(folder), "--machine", "h200"
    )
    assert outcome.code == 2, "405B on the one GPU that the run asks for"
    assert "llama-405b  405.9 B parameters" in outcome.out


# -- the screen ------------------------------------------------------------------------------------


def test_nothing_is_cut_off(model: Path) -> None:
    arguments = ("--model", model, "--machine", "perlmutter", "--json")
    mesh = "data=8,z=128,y=2,x=8"
    for outcome in (
        plan(*arguments, "--gpus", 16384, "--batch", 65536, "--mesh", mesh),
        plan(*arguments, "--gpus", 4),
    ):
        found = Plan.model_validate_json(outcome.out)
        for width in (80, 100):
            screen = io.StringIO()
            render_plan(found, rich.console.Console(file=screen, width=width))
            shown = screen.getvalue()
            assert "…" not in shown
            assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize(
    ("num_meshes", "num_fitting", "is_asked", "said"),
    [
        (1, 1, False, "the only mesh fits"),
        (1, 0, False, "the only mesh does not fit"),
        (4, 0, False, "none of 4 meshes fits; the closest to fitting first"),
        (4, 1, False, "1 of 4 meshes fits; the fastest first"),
        (4, 3, False, "3 of 4 meshes fit; the fastest first"),
        (4, 3, True, "3 of 4 meshes fit; yours, then the fastest"),
        (4, 0, True, "none of 4 meshes fits; yours, then the closest to fitting"),
    ],
)
def test_how_many_fit(
    made: Plan, num_meshes: int, num_fitting: int, is_asked: bool, said: str
) -> None:
    changes = {"num_meshes": num_meshes, "num_fitting": num_fitting}
    requested = {"requested": made.meshes[0] if is_asked else None}
    screen = io.StringIO()
    render_plan(made.model_copy(update=changes | requested), rich.console.Console(file=screen))
    assert said in screen.getvalue().splitlines()


def test_this_machine_is_planned_for_where_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY_LLAMA, "vocab_size": 400}))
    printed = json.loads(plan("--model", path, "--json").out)
    assert printed["machine"] == "this-machine"
    assert printed["num_fitting"] >= 1


# -- without torch ---------------------------------------------------------------------------------


def test_a_model_alone_is_answered_without_torch(bare: Any, model: Path) -> None:
    done = bare("plan", "--model", model, "--gpus", 512, "--machine", "dgx-h100")
    assert done.returncode == 0, done.stderr


def test_adapters_of_a_model_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    arguments = ("--model", model, "--machine", "dgx-h100", "--gpus", 32, "--seq-len", 2048)
    refused = plan(*arguments, "--mesh", "z=32")
    assert refused.code == 2
    assert "train LoRA adapters instead of the weights, adapter.name=lora" in flatten(refused.err)
    done = plan(*arguments, "--mesh", "z=32", "--lora-r", 16, "--json")
    assert done.code == 0, done.err
    printed = json.loads(done.out)
    assert (printed["adapter_r"], printed["with_adapters"]) == (16, None)
    # 16 (K + N) of each layer of 126 blocks.
    block = 4 * 16384 + 2 * (16384 + 1024) + 3 * (16384 + 53248)
    assert printed["requested"]["memory"]["optimizer"] == 8 * 126 * 16 * block
    shown = plan(*arguments, "--mesh", "z=32", "--lora-r", 16)
    assert "bf16, LoRA adapters of rank 16" in flatten(shown.out)


# -- text that the audit generates -----------------------------------------------------------------

# As published with Qwen3 14B, 32B and Llama 3.1 70B, and the least and most minutes expected from
# gathered bytes over links of 450 and 50 GB/s a GPU.
GENERATING = {
    "14B": (8, {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40}, 3, 9),
    "32B": (8, {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}, 5, 12),
    "70B": (32, {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}, 5, 9),
    "405B": (512, {}, 8, 30),
}


@pytest.mark.parametrize("name", GENERATING)
def test_audits_of_large_models_generate_with_minutes(tmp_path: Path, name: str) -> None:
    num_gpus, sizes, least, most = GENERATING[name]
    if sizes:
        sizes = {**sizes, "num_attention_heads": 64, "head_dim": 128, "vocab_size": 151936}
    model = write_model(tmp_path, **sizes)
    arguments = ("--model", model, "--gpus", num_gpus, "--machine", "dgx-h100")
    mesh = () if name == "405B" else ("--mesh", f"z={num_gpus}")
    shown = plan(*arguments, *mesh, "--batch", 4 * num_gpus, "--json")
    generation = json.loads(shown.out)["generation"]
    assert (generation["num_documents"], generation["is_assumed"]) == (1000, True)
    # In fp32, as audits compute by default: even 14B do not fit beside one another's shards.
    assert generation["fits"] is False
    assert [probe["probe"] for probe in generation["probes"]] == ["extraction"]
    assert generation["token_s"] > 0
    assert least < generation["minutes"] < most


def test_an_audit_that_generates_for_too_long_is_refused_with_the_way_out(tmp_path: Path) -> None:
    # 1,200 documents of 2,048 tokens are 19 batches on 8 GPUs, of which each adds 50 tokens.
    study = {"num_repetitions": [0, 1, 4], "documents_per_bucket": 400}
    run = write_run(
        tmp_path,
        parallel={"z": 8},
        data={"train": ["documents.jsonl"], "seq_len": 2048, "study": study},
        audit={"continuation_tokens": 50, "dtype": "bf16"},
    )
    model = write_model(tmp_path, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80)
    adapter = ("adapter.name=lora", "adapter.r=8")
    arguments = (run, "--no-documents", "--model", model, *adapter)
    shown = plan(*arguments, "--machine", "dgx-h100", "audit.max_generation_minutes=20")
    assert shown.code == 0, shown.err
    assert "the audit of 1,200 documents gathers 140 GB for each token" in flatten(shown.out)
    assert "extraction: at most 1,920 tokens one after the other" in flatten(shown.out)
    refused = plan(*arguments, "--machine", "dgx-h100", "audit.max_generation_minutes=3")
    assert refused.code == 2
    assert "'audit.max_generation_minutes' is 3: it gathers 140 GB" in flatten(refused.err)
    assert "Use a larger 'parallel.x', audit fewer documents" in flatten(refused.err)
    without = plan(*arguments, "--machine", "dgx-h100", "audit.enabled=false", "--json")
    assert json.loads(without.out)["generation"] is None


@pytest.mark.parametrize(("name", "num_gpus"), [("8b", 8), ("70b", 64), ("405b", 256)])
def test_a_shipped_run_ends_with_its_command_and_its_audit_generates(
    tmp_path: Path, name: str, num_gpus: int
) -> None:
    sizes = {
        "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        "405b": {},
    }[name]
    heads = {} if name == "405b" else {"num_attention_heads": sizes["hidden_size"] // 128}
    model = write_model(tmp_path, **sizes, **heads)
    shown = plan(
        f"llama31-{name}", "--no-documents", "--model", model, "--machine", "dgx-h100",
        "--gpus", num_gpus, "--json", "optim.lr=3e-5",
    )  # fmt: skip
    assert shown.code == 0, shown.err
    printed = json.loads(shown.out)
    nodes = num_gpus // 8
    assert printed["command"] == (
        f"memguard train llama31-{name} optim.lr=3e-5 --nproc 8"
        if nodes == 1
        else f"torchrun --nnodes={nodes} --nproc-per-node=8 --rdzv-backend=c10d "
        "--rdzv-endpoint=FIRST_NODE:29500 -m memguard train "
        f"llama31-{name} optim.lr=3e-5"
    )
    # Four buckets of 200 documents.
    generation = printed["generation"]
    assert (generation["num_documents"], generation["is_assumed"]) == (800, False)
    assert generation["fits"] or 0 < generation["minutes"] <= 30


def test_the_command_has_the_mesh_that_was_asked_for(tmp_path: Path) -> None:
    model = write_model(tmp_path, hidden_size=1024, num_hidden_layers=2, intermediate_size=2816)
    run = write_run(tmp_path, data={"train": "a file.jsonl"})
    arguments = (run, "--no-documents", "--model", model, "--machine", "dgx-h100", "--gpus", 4)
    shown = plan(*arguments, "--mesh", "z=2,x=2")
    assert shown.code == 0, shown.err
    mesh = "parallel.data=1 parallel.z=2 parallel.y=1 parallel.x=2"
    # In one line, however narrow the screen.
    assert shown.out.splitlines()[-1] == f"  memguard train {run} {mesh} --nproc 4"
    # A mesh that does not fit is refused; the command in the record is that of one which does.
    small = write_machine(tmp_path, memory_gib=5)
    refused = plan(*arguments[:-4], "--machine", small, "--gpus", 4, "--mesh", "data=4", "--json")
    assert refused.code == 2
    command = json.loads(refused.out)["command"]
    assert command.endswith("parallel.data=1 parallel.z=1 parallel.y=1 parallel.x=4 --nproc 4")
