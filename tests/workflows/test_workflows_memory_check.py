"""A run that cannot fit is refused before documents; out-of-memory errors name what helps."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_examples import run_cli, write_run
from memory_errors import OUT_OF_MEMORY
from published_sizes import CONFIG_FIELDS, LLAMA_8B

from memguard import api
from memguard.config import RunConfig
from memguard.errors import ConfigError, is_lost_peer, is_out_of_memory
from memguard.hf.checkpoint import explained
from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.machine import Machine, detect_machine, load_machine
from memguard.runtime import Runtime
from memguard.workflows.training import memory as memory_check
from memguard.workflows.training.checks import read_local_sizes
from memguard.workflows.training.memory import (
    apply_less_memory,
    check_memory,
    check_memory_early,
    explain_out_of_memory,
    find_half,
    find_less_memory,
    keep_precision,
    list_free,
    resolve_auto,
    resolve_auto_settings,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# As a run of a user: name, model, data, batch_size and seq_len.
RUN: dict[str, Any] = {"data": {"seq_len": 4096}, "train": {"batch_size": 64}}
CHOSEN = {"train": {"batch_size": 64, "micro_batch_size": 8, "activation_checkpointing": "none"}}
NO_GPU = Runtime(device=torch.device("cpu"))


@pytest.fixture
def large(folder: Path) -> Path:
    """A folder whose model has the configuration of Llama-3.1-8B."""
    (folder / "model").unlink()
    return write_large(folder)


def write_large(folder: Path, name: str = "Llama-3.1-8B", **fields: Any) -> Path:
    model = folder / "model"
    model.mkdir()
    changes = {"max_position_embeddings": 131072, "architectures": ["LlamaForCausalLM"]}
    (model / "config.json").write_text(json.dumps({**CONFIG_FIELDS[name], **changes, **fields}))
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy all of a model but its configuration."""
    for file in (source / "model").iterdir():
        if file.name != "config.json":
            shutil.copy(file, folder / "model" / file.name)


def make(folder: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate_json(write_run(folder, **{**RUN, **changes}).read_text())


def test_8b_on_this_machine_is_refused_before_torch_and_documents(
    tiny_folder: Path, tmp_path: Path
) -> None:
    write_large(tmp_path)
    copy_tokenizer(tiny_folder, tmp_path)
    (tmp_path / "documents.jsonl").write_text("this is read later\n")
    # More than any machine on which this runs has.
    path = write_run(tmp_path, **RUN, parallel={"y": 1})
    program = (
        "import sys, memguard.cli.errors as errors\n"
        "end = errors._end\n"
        "def check(words):\n"
        "    assert 'torch' not in sys.modules\n"
        "    end(words)\n"
        "errors._end = check\n"
        "errors.run_app()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(path)],
        env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("it does not fit: the mesh (data=1, z=1, y=1, x=1) needs ")
    assert "are available for tensors on each CPU process" in line
    assert not (tmp_path / "runs").exists()


def test_python_is_refused_the_same(
    large: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_tokenizer(tiny_folder, large)
    with pytest.raises(ConfigError, match=r"the mesh .* needs .* are available for tensors"):
        api.train(write_run(large, **RUN))
    assert not (large / "runs").exists()


def gpus(count: int, memory_gib: float) -> Machine:
    return detect_machine(count, gpus=[("H100", memory_gib)] * count)


@pytest.mark.parametrize(
    ("changes", "num_gpus", "way_out"),
    [
        ({}, 1, "GPUs as (data="),
        ({"parallel": {"data": -1}}, 8, "or use the mesh (data="),
        (CHOSEN, 8, "set train.activation_checkpointing="),
        (CHOSEN, 8, "set train.micro_batch_size="),
    ],
)
def test_what_would_fit_is_named(
    large: Path, changes: dict[str, Any], num_gpus: int, way_out: str
) -> None:
    config = make(large, **changes)
    with pytest.raises(ConfigError) as error:
        check_memory(config, LLAMA_8B, gpus(num_gpus, 79.6), num_gpus)
    assert way_out.removeprefix("or ") in str(error.value)


def test_what_fits_passes(large: Path) -> None:
    check_memory(make(large), LLAMA_8B, gpus(8, 79.6), 8)
    check_memory(make(large), LLAMA_8B, load_machine("dgx-h100"), 8)


def test_fragmentation_alone_refuses_nothing(large: Path) -> None:
    config = make(large, train={"batch_size": 64, "micro_batch_size": 1})
    machine = load_machine("dgx-h100")
    check_memory(config, LLAMA_8B, machine.model_copy(update={"fragmentation": 1000.0}), 8)


def test_finished_runs_and_unknown_families_are_not_refused(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "count_gpus", lambda: 0)
    config = make(large, data={"seq_len": 4096 * 16})

    def check(config: RunConfig) -> None:
        check_memory_early(config, read_local_sizes(config), 1)

    with pytest.raises(ConfigError, match="needs"):
        check(config)
    with monkeypatch.context() as patched:
        # An AMD GPU, whose memory is known to torch only.
        patched.setattr(memory_check, "_AMD_DRIVER", large)
        check(config)
    check(make(large, model={"attn_implementation": "eager"}))
    run = large / "runs" / "run"
    run.mkdir(parents=True)
    (run / "trained.json").touch()
    check(config)
    (run / "trained.json").unlink()
    file = large / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "gemma2"}))
    check(config)
    file.unlink()
    check(config)


def test_documents_are_prepared_where_the_model_does_not_fit(
    large: Path, tiny_folder: Path
) -> None:
    copy_tokenizer(tiny_folder, large)
    path = write_run(large, data={"seq_len": 4096}, audit={"min_documents": 1})
    assert run_cli("prepare", path, "data.control_fraction=0").code == 0


@pytest.mark.quick
def test_a_run_keeps_the_precision_it_began_with(folder: Path) -> None:
    path = write_run(folder, train={"max_steps": 1}, audit={"enabled": False})
    assert run_cli("train", path, "train.precision=bf16").code == 0
    config = RunConfig.model_validate_json(path.read_text())
    run = folder / "runs" / "run"
    assert keep_precision(config, run).train.precision == "bf16"
    assert resolve_auto_settings(config, NO_GPU).train.precision == "bf16"
    # Auto would be fp32 here; the same command goes on with the run as it is.
    assert run_cli("train", path).code == 0
    fp32 = config.model_copy(
        update={"train": config.train.model_copy(update={"precision": "fp32"})}
    )
    assert keep_precision(fp32, run) == fp32
    assert "train.precision ('bf16' there" in run_cli(
        "train", path, "train.precision=fp32"
    ).err.replace('"', "'")


def test_only_what_can_help_is_named(large: Path) -> None:
    def explain(shape: MeshShape, device: str = "cuda", **train: Any) -> str:
        config = make(large, train={"batch_size": 64, **train})
        resolved = resolve_auto(config, device_type="cpu", sizes=None, machine=None, world_size=1)
        return explain_out_of_memory(resolved, shape, device, is_loaded=True)

    text = explain(MeshShape(data=4, z=2))
    assert text == (
        "out of memory with 8 rows of 4,096 tokens at a time: set 'train.micro_batch_size' to 4, "
        "or set 'train.activation_checkpointing' to full, or set 'parallel.data' to 1 and "
        "'parallel.z' to 8, which shares the weights, or use more than 8 GPUs. The same command "
        "resumes the run"
    )
    text = explain(MeshShape(z=8), micro_batch_size=1, activation_checkpointing="full")
    assert text.startswith("out of memory with 1 row of 4,096 tokens at a time: use more than 8 G")
    assert "parallel" not in text
    assert "micro_batch" not in text
    text = explain(MeshShape(), "cpu", activation_checkpointing="full")
    assert "GPU" not in text
    assert "use a machine with more memory" in text
    assert "GPU with more memory" in explain(MeshShape(), dropout=0.1)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("micro", "half"), [(None, 6), (6, 3), (4, 2), (3, 1), (2, 1), (1, None), (12, 6)]
)
def test_half_of_a_micro_batch_divides_the_rows(
    large: Path, micro: int | None, half: int | None
) -> None:
    config = make(large, train={"batch_size": 24, "micro_batch_size": micro})
    shape = MeshShape(z=2)
    assert find_half(config, shape) == half
    private = make(large, train={"batch_size": 24}, mitigations=[{"name": "dp_sgd"}])
    assert find_half(private, shape) is None


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        ({}, [(4, "none"), (2, "none"), (1, "none"), (1, "selective"), (1, "full")]),
        ({"micro_batch_size": 8}, [(8, "selective"), (8, "full")]),
        ({"activation_checkpointing": "none"}, [(4, "none"), (2, "none"), (1, "none")]),
        ({"micro_batch_size": 2, "activation_checkpointing": "selective"}, []),
        ({"micro_batch_size": 1, "compile": True}, [(1, "full")]),
    ],
    ids=["auto", "own rows", "own mode", "own", "compiled"],
)
def test_a_step_needs_less_until_nothing_is_left(
    large: Path, train: dict[str, Any], steps: list[tuple[int, str]]
) -> None:
    """Only what `auto` chose is changed."""
    config = make(large, train={"batch_size": 8, **train})
    free = list_free(config)
    now = resolve_auto(config, device_type="cpu", sizes=None, machine=None, world_size=1)
    seen = []
    while (error := find_less_memory(now, MeshShape(), free)) is not None:
        assert str(error).startswith("out of memory with ")
        now = apply_less_memory(now, free, json.dumps(error.settings))
        seen.append((now.train.micro_batch_size, now.train.activation_checkpointing))
    assert seen == steps


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_out_of_memory_of_each_kind(kind: str) -> None:
    error = OUT_OF_MEMORY[kind]
    assert is_out_of_memory(error)
    # It names no other rank as the cause, and no fault of the checkpoint.
    assert not is_lost_peer(error)
    with pytest.raises(type(error)), explained("model 'm' cannot be loaded"):
        raise error


def test_other_errors_are_not_out_of_memory() -> None:
    # torch 2.13's message; it is a plain RuntimeError.
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: device-side assert triggered"))
    lost = torch.distributed.DistBackendError("NCCL error: remote process exited")
    assert is_lost_peer(lost)
    assert not is_out_of_memory(lost)


def test_adapters_are_named_where_they_fit_and_the_weights_do_not(large: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check_memory(make(large), LLAMA_8B, gpus(1, 79.6), 1)
    assert (
        "or train LoRA adapters instead of the weights, adapter.name=lora adapter.r=16, on the "
        "mesh (data=1, z=1, y=1, x=1) with activation_checkpointing " in str(error.value)
    )
    adapter = {"name": "lora", "r": 16}
    check_memory(make(large, adapter=adapter), LLAMA_8B, gpus(1, 79.6), 1)
    # Where the base alone is too large, adapters are no way out.
    with pytest.raises(ConfigError) as error:
        check_memory(make(large), LLAMA_8B, gpus(1, 15.0), 1)
    assert "LoRA" not in str(error.value)
    # The run already trains adapters.
    with pytest.raises(ConfigError) as error:
        check_memory(make(large, adapter=adapter), LLAMA_8B, gpus(1, 15.0), 1)
    assert "LoRA" not in str(error.value)


def test_storage_that_cannot_fit_is_refused_for_any_family(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 16 bytes of 470.6 million parameters are 7.0 GiB.
    fields = {"model_type": "bloom", "hidden_size": 1024, "n_layer": 32, "n_head": 16}
    model = {"path": None, "scratch": {"config": fields, "vocab_size": 65536}}
    machine = load_machine("dgx-h100", num_processes=1)
    memory_gib = machine.reserved_gib + 7
    monkeypatch.setattr(
        memory_check,
        "_describe_machine",
        lambda *_: machine.model_copy(update={"memory_gib": memory_gib}),
    )
    config = make(folder, model=model)
    with pytest.raises(ConfigError, match=r"needs at least 7\.0 GiB for weights, gradients and"):
        resolve_auto_settings(config, NO_GPU)
    # Activations may not fit either, but that is not certain.
    memory_gib += 0.1
    assert resolve_auto_settings(config, NO_GPU).model == config.model
    # Frozen weights have neither gradients nor moments.
    memory_gib -= 5
    part = {"trainable_modules": ["lm_head"], "precision": "bf16"}
    frozen = make(folder, model=model, train=part)
    assert resolve_auto_settings(frozen, NO_GPU).model == config.model
    # They are stored in fp32, also where the arithmetic is bf16.
    memory_gib -= 1
    with pytest.raises(ConfigError, match=r"needs at least 1\.8 GiB for weights"):
        resolve_auto_settings(frozen, NO_GPU)
