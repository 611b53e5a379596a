"""`memguard plan` of a run: documents and machines, other families, what its audit generates."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import rich.console
from cli_examples import write_run
from plan_examples import check_refusal, flatten, plan, write_machine, write_model
from published_sizes import CONFIG_FIELDS

from memguard.cli.plan_screen import render_plan
from memguard.planner import machine as machine_module
from memguard.planner.machine import load_machine
from memguard.planner.plan import Plan

pytestmark = pytest.mark.slow


def test_options_change_the_settings_of_a_run(folder: Path) -> None:
    outcome = plan(write_run(folder), "--no-documents", "--batch", 3, "--seq-len", 64)
    assert (outcome.code, outcome.err) == (0, "")
    assert "a step of 3 rows, 64 tokens per row, fp32" in outcome.out


def test_a_run_with_its_documents(folder: Path) -> None:
    path = write_run(folder)
    outcome = plan(path)
    assert outcome.code == 0
    assert "a step of 8 rows, 128 tokens per row, fp32" in outcome.out
    text = flatten(outcome.out)
    assert re.search(r"It fits: [\d.]+( MiB)? of [\d.]+ GiB per process; .* to train: ", text)
    assert "tokens/s" not in text, "the speed of a CPU is not known"
    for title in ("First row", "Training", "Documents and audit"):
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
    shown = flatten(plan(*arguments).out)
    mesh = ", ".join(f"{axis}={first[axis]}" for axis in ("data", "z", "y", "x"))
    text = f"GiB per GPU as ({mesh}), about {seconds} s without loading, saving and the audit"
    assert text in shown
    assert "tokens/s" in shown


def test_on_a_cpu_no_time_is_planned_and_memory_is_that_of_a_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "_list_gpus", lambda: ())
    text = flatten(plan(write_run(folder)).out)
    assert "; the time is not predicted, because the speed of a CPU is not known" in text
    assert "available per process" in text
    assert "per GPU" not in text


def test_on_a_gpu_of_no_machine_file_no_time_is_planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "_list_gpus", lambda: (("Unknown 1", 80.0),))
    text = flatten(plan(write_run(folder)).out)
    assert "; the time is not predicted, because the speed of 'Unknown 1' is not known" in text
    assert "available per GPU" in text


def test_a_run_as_json(folder: Path) -> None:
    path = write_run(folder)
    printed = json.loads(plan(path, "train.batch_size=4", "--json").out)
    assert printed["batch_size"] == 4
    assert printed["dry_run"]["length"]["batch_size"] == 4
    without = json.loads(plan(path, "--no-documents", "--json").out)
    assert "dry_run" not in without
    assert without["num_parameters"] == printed["dry_run"]["num_trained"]


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
    assert line.startswith("it does not fit: the mesh (data=2, z=1, y=1, x=1) needs ")
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
    assert "It may fit: memory and time are not predicted" in outcome.out
    assert "Training" in outcome.out


def test_of_another_family_the_least_memory_is_shown_and_what_is_not_predicted(
    tmp_path: Path,
) -> None:
    path = write_bloom(tmp_path)
    outcome = plan("--model", path, "--machine", "dgx-h100", "--gpus", 4)
    assert outcome.code == 0, outcome.err
    text = flatten(outcome.out)
    assert "470.2 M parameters on 4 × H100 SXM 80 GB" in text
    said = "Not predicted: memory and tokens/s of a step, and which of 3 valid meshes it fits, "
    assert f"{said}{NO_FORMULA}" in text
    # 4 + 4 + 8 bytes of a quarter of the parameters.
    assert "A rank stores at least 1.8 GiB of weights, gradients and moments on (data=1" in text
    assert "77.0 GiB are available, and a step needs more." in text
    assert "meshes fit" not in text


def test_json_of_another_family_has_null_and_the_reason(tmp_path: Path) -> None:
    path = write_bloom(tmp_path)
    printed = json.loads(plan("--model", path, "--machine", "h200", "--json").out)
    assert printed["kind"] == "plan"
    assert (printed["num_fitting"], printed["meshes"], printed["requested"]) == (None, [], None)
    assert NO_FORMULA.removeprefix("because ") in printed["least"]["not_predicted"]
    assert printed["least"]["at_least"] == 16 * printed["num_parameters"] // 8


def test_what_certainly_cannot_fit_is_refused(tmp_path: Path) -> None:
    path = write_bloom(tmp_path)
    small = write_machine(tmp_path, memory_gib=5)
    outcome = plan("--model", path, "--machine", small, "--gpus", 2)
    assert outcome.code == 2
    assert "Not predicted: " in outcome.out
    (line,) = outcome.err.splitlines()
    assert "the mesh (data=1, z=2, y=1, x=1) needs at least 3.5 GiB for weights, gradients" in line
    assert "are available for tensors on each H100 SXM 80 GB; train LoRA adapters" in line
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
def test_a_plan_of_another_family_is_not_cut_off(width: int, tmp_path: Path) -> None:
    path = write_bloom(tmp_path)
    outcome = plan("--model", path, "--machine", "h200", "--mesh", "data=8,z=128", "--json")
    screen = io.StringIO()
    out = rich.console.Console(file=screen, width=width)
    render_plan(Plan.model_validate_json(outcome.out), out, load_machine("h200"))
    assert max(map(len, screen.getvalue().splitlines())) <= width
    assert "…" not in screen.getvalue()


def test_another_model_for_a_run(folder: Path) -> None:
    outcome = plan(
        write_run(folder), "--no-documents", "--model", write_model(folder), "--machine", "h200"
    )
    assert outcome.code == 2, "405B on the one GPU that the run asks for"
    assert "llama-405b  405.9 B parameters" in outcome.out


# -- the audit, and the command -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_gpus"), [("8b", 8), ("70b", 64), ("405b", 256)])
def test_a_shipped_run_ends_with_its_command(tmp_path: Path, name: str, num_gpus: int) -> None:
    model = write_model(tmp_path, **CONFIG_FIELDS[f"Llama-3.1-{name.upper()}"])
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


def test_a_line_says_what_the_audit_measures_and_how_long_it_may_generate(tmp_path: Path) -> None:
    model = write_model(tmp_path, hidden_size=1024, num_hidden_layers=2, intermediate_size=2816)
    run = write_run(tmp_path, data={"train": "a file.jsonl"}, audit={"utility": "hellaswag:200"})
    arguments = (run, "--no-documents", "--model", model, "--machine", "dgx-h100", "--gpus", 1)
    text = flatten(plan(*arguments).out)
    assert (
        "the audit scores each document with 2 models and generates text where it may be "
        "extracted, with the tasks hellaswag; where weights are gathered for each token it "
        "generates for at most 30 minutes"
    ) in text
    text = flatten(plan(*arguments, "audit.base=false", "audit.max_generation_minutes=null").out)
    assert "scores each document with the model and" in text
    assert "it generates without a limit" in text
    assert "the audit" not in flatten(plan(*arguments, "audit.enabled=false").out)


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
