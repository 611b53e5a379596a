"""`memguard plan`: what it shows, what it refuses in one line, and how it exits."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import rich.console
from plan_examples import check_refusal, flatten, plan, write_machine, write_model
from tiny_llama import TINY_LLAMA

from memguard.cli.plan_screen import render_plan
from memguard.planner.dry_run import format_bytes
from memguard.planner.machine import load_machine
from memguard.planner.plan import Plan

pytestmark = pytest.mark.slow


H100 = load_machine("dgx-h100")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with sizes of 405B; do not write here."""
    return write_model(tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def made(model: Path) -> Plan:
    """A plan of that model on 128 GPUs."""
    shown = plan("--model", model, "--gpus", 128, "--machine", "dgx-h100", "--json")
    return Plan.model_validate_json(shown.out)


# -- a model alone ---------------------------------------------------------------------------------


def test_405b_on_16384_gpus(model: Path) -> None:
    mesh = "data=8,z=128,y=2,x=8"
    arguments = ("--model", model, "--gpus", 16384, "--machine", "frontier", "--batch", 65536)
    outcome = plan(*arguments, "--mesh", mesh, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    shown = check_widths(Plan.model_validate_json(outcome.out))
    assert "llama-405b  405.9 B parameters on 16,384 × MI250X GCD 64 GB" in shown
    assert "meshes fit; yours, then the fastest" in shown
    assert "memory of (data=8, z=128, y=2, x=8)" in shown


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--gpus", 6, "--mesh", "x=6"),
            "'parallel.x' must divide the model's 128 attention heads; got 6 | meshes that work on "
            "6 ranks, nearest first: (data=",
        ),
        (
            ("--gpus", 8, "--mesh", "z=2"),
            "must be the number of ranks | the requested degrees fit 2 ranks",
        ),
        (("--gpus", 7, "--batch", 9), "no mesh works on 7 ranks | nearest first: 6, 8, 9"),
    ],
)
def test_what_is_no_mesh_of_the_model_is_told_what_is(
    model: Path, arguments: tuple[object, ...], said: str
) -> None:
    outcome = plan("--model", model, "--machine", "dgx-h100", *arguments)
    check_refusal(outcome, 2, *said.split(" | "))
    # Seven times as many GPUs as some mesh takes have one too.
    assert plan("--model", model, "--machine", "dgx-h100", "--gpus", 7 * 32).code == 0


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
    shown = plan("--model", path, "--machine", "h200", "--batch", 32, "--seq-len", 512).out
    assert "a step of 32 rows, 512 tokens per row, bf16" in flatten(shown)


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
        Plan.model_validate_json(plan(*lora, *settings).out)
        for settings in ((), ("adapter.quantization=nf4",))
    )
    assert wide.requested
    assert narrow.requested
    memory = narrow.requested.memory.weights, wide.requested.memory.weights
    assert memory[0] < memory[1] < full["memory"]["weights"]
    assert "weights, bf16; adapters, fp32" in check_widths(wide)
    assert "weights, NF4; adapters, fp32" in check_widths(narrow)


def test_remedies_of_a_model_alone_are_settings(tmp_path: Path) -> None:
    path = write_model(tmp_path, num_hidden_layers=4)
    arguments = ["--model", path, "--machine", "dgx-h100", "--mesh", "x=8"]
    given = {"data.seq_len": "16384", "train.batch_size": "8", "train.micro_batch_size": "8"}
    given["train.activation_checkpointing"] = "none"
    outcome = plan(*arguments, *(f"{setting}={value}" for setting, value in given.items()))
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert line.startswith("it does not fit: the mesh (data=1, z=1, y=1, x=8) needs ")
    remedies = re.findall(r"set ([a-z_.]+)=(\w+)", line)
    assert {("train.micro_batch_size", "1"), ("train.micro_batch_size", "2")} & {*remedies}
    for setting, value in remedies:
        changed = given | {setting: value}
        assert plan(*arguments, *(f"{each}={changed[each]}" for each in changed)).code == 0


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.quick
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


def test_no_such_run_model_or_machine(tmp_path: Path, model: Path) -> None:
    for arguments in ((), ("--gpus", 8), ("train.batch_size=3",)):
        said = "give the CONFIG of a run before its settings, or --model"
        check_refusal(plan(*arguments), 2, said)
    for path in (tmp_path / "nothing.json", tmp_path):
        check_refusal(plan("--model", path), 3, "'--model' must be", "cannot be read: No such file")
    outcome = plan("--model", model, "--machine", write_machine(tmp_path, memory_gb=80))
    check_refusal(outcome, 2, "machine.yaml", "memory_gb")
    check_refusal(plan("nothing.yaml"), 2, "nothing.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{not json", "is not a JSON object"),
        (b"\xff\xfe\x00binary", "is not a JSON object"),
        (b"[1, 2]", "is not a JSON object"),
        (b"{}", "'model_type' must be one that transformers"),
        (b'{"model_type": "t5"}', "cannot be loaded as a causal language model"),
        (b'{"model_type": "llama"}', "must give 'hidden_size' as a whole number"),
    ],
)
def test_a_model_that_is_none(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    outcome = plan("--model", path, "--machine", "dgx-h100")
    check_refusal(outcome, 3, said)
    assert len(outcome.err.splitlines()) == 1


# -- JSON ------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_json_has_what_the_screen_shows(model: Path) -> None:
    arguments = ("--model", model, "--gpus", 128, "--machine", "dgx-h100", "--batch", 512)
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


@pytest.mark.parametrize(
    ("more", "is_said"),
    [
        ((), True),
        (("train.compile=true",), False),
        (("train.compile=false",), False),
        (("train.deterministic=true",), False),
        (("adapter.name=lora", "adapter.r=8"), False),
    ],
)
def test_the_plan_says_that_auto_may_compile(
    model: Path, more: tuple[str, ...], is_said: bool
) -> None:
    printed = json.loads(plan(*more, "--model", model, "--machine", "dgx-h100", "--json").out)
    assert any("'train.compile' at auto" in text for text in printed["assumptions"]) is is_said


def test_json_is_printed_and_the_reason_told_where_nothing_fits(model: Path) -> None:
    outcome = plan("--model", model, "--gpus", 8, "--machine", "dgx-h100", "--json")
    assert outcome.code == 2
    printed = json.loads(outcome.out)
    assert printed["num_fitting"] == 0
    assert printed["enough"]["num_gpus"] == 88
    assert printed["enough"]["mesh"]["fits"]
    assert all(not mesh["fits"] and mesh["speed"] is None for mesh in printed["meshes"])
    assert len(outcome.err.splitlines()) == 1


# -- the screen ------------------------------------------------------------------------------------


def check_widths(made: Plan) -> str:
    """Check that no width of a terminal cuts anything off; return what the wide one shows."""
    for width in (80, 100):
        screen = io.StringIO()
        render_plan(made, rich.console.Console(file=screen, width=width), H100)
        assert "…" not in screen.getvalue()
        assert max(map(len, screen.getvalue().splitlines())) <= width
    return screen.getvalue()


def test_nothing_is_cut_off_where_nothing_fits(model: Path) -> None:
    outcome = plan("--model", model, "--machine", "perlmutter", "--gpus", 4, "--json")
    check_widths(Plan.model_validate_json(outcome.out))


@pytest.mark.parametrize(
    ("num_meshes", "num_fitting", "is_asked", "said"),
    [
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
    changed = made.model_copy(update=changes | requested)
    render_plan(changed, rich.console.Console(file=screen), H100)
    assert said in screen.getvalue().splitlines()


def test_this_machine_is_planned_for_where_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY_LLAMA, "vocab_size": 400}))
    printed = json.loads(plan("--model", path, "--json").out)
    assert printed["machine"] == "this-machine"
    assert printed["num_fitting"] >= 1


# -- without torch ---------------------------------------------------------------------------------


def test_a_model_alone_is_answered_without_torch(bare: Any, model: Path) -> None:
    done = bare("plan", "--model", model, "--gpus", 128, "--machine", "dgx-h100")
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
