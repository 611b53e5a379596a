"""Memory of each optimizer by hand; a plan that does not fit names a change that does."""

from dataclasses import replace

import pytest
from published_sizes import CONFIG_FIELDS, LLAMA_8B

from memguard.config import Document, ParallelConfig, RunConfig, apply_overrides
from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import MeshShape, list_meshes, resolve_mesh
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.cost import estimate_step
from memguard.planner.fit import PlanInputs, count_parameters
from memguard.planner.machine import load_machine
from memguard.planner.memory import estimate_memory
from memguard.planner.plan import Plan, make_plan
from memguard.planner.step_settings import StepSettings
from memguard.workflows.training.checks import check_processes
from memguard.workflows.training.memory import find_half, list_free, resolve_auto

LLAMA_70B = ModelSizes.from_json(CONFIG_FIELDS["Llama-3.1-70B"])
H100 = load_machine("dgx-h100")
STEP = StepSettings(num_tokens=4096, num_labels=4095, checkpointing="full", has_mask=False)
ONE = MeshShape()
RUN = {
    "name": "x",
    "model": {"path": "m"},
    "data": {"train": "a.jsonl", "seq_len": 4096},
    "train": {"batch_size": 16},
}


def make_run(*settings: str) -> RunConfig:
    document = Document(path="", values=RUN, places={})
    return RunConfig.model_validate(apply_overrides(document, settings).values)


def plan(sizes: ModelSizes, num_gpus: int, *settings: str) -> Plan:
    inputs = replace(PlanInputs.for_run(make_run(*settings), H100, num_gpus), mesh=None)
    return make_plan(sizes, inputs)


# -- bytes by hand -------------------------------------------------------------------------------

TABLE = 128256 * 4096
NUM = count_parameters(LLAMA_8B)
WIDE = TABLE + (2 * 32 + 1) * 4096
"""The embedding and the norms, which are not quantised."""


@pytest.mark.parametrize(
    ("optimizer", "weight_bytes", "num_micro_batches", "state", "gradients"),
    [
        ("adamw", 4, 1, 8 * NUM, 4 * NUM),
        ("adamw", 2, 1, 8 * NUM, 2 * NUM),
        ("adamw_8bit", 4, 1, 2.125 * (NUM - WIDE) + 8 * WIDE, 4 * NUM),
        ("adamw_8bit", 2, 2, 2.125 * (NUM - WIDE) + 8 * WIDE, 4 * NUM),
        ("adalomo", 4, 1, 0, 4 * TABLE),
        ("lomo", 2, 1, 0, 2 * TABLE),
        ("mezo", 4, 2, 0, 0),
    ],
)
@pytest.mark.parametrize("mesh", [ONE, MeshShape(z=8), MeshShape(z=2, y=2, x=2)], ids=str)
def test_weights_gradients_and_state(
    optimizer: str,
    weight_bytes: int,
    num_micro_batches: int,
    state: float,
    gradients: int,
    mesh: MeshShape,
) -> None:
    settings = replace(
        STEP,
        optimizer=optimizer,
        weight_bytes=weight_bytes,
        num_micro_batches=num_micro_batches,
        trained_modules=() if optimizer == "mezo" else None,
    )
    memory = estimate_memory(LLAMA_8B, mesh, settings, seq_len=4096)
    # Norms are stored by every rank along x.
    assert memory.peak.weights == pytest.approx(weight_bytes * NUM / mesh.num_ranks, rel=1e-3)
    assert memory.peak.optimizer == pytest.approx(state / mesh.num_ranks, rel=1e-3)
    assert memory.gradient_bytes == pytest.approx(gradients / mesh.num_ranks, rel=1e-3)
    assert memory.saved_bytes == memory.peak.weights + memory.peak.optimizer


def test_weights_in_bf16_are_not_cast_by_one_process() -> None:
    # With all gradients stored the peak is at the head, where autocast has copies of all blocks.
    settings = replace(STEP, num_micro_batches=2)
    wide, narrow = (
        estimate_memory(LLAMA_8B, ONE, replace(settings, weight_bytes=width), seq_len=4096)
        for width in (4, 2)
    )
    assert wide.peak.buffers == 2 * (NUM - 2 * TABLE - 4096)
    assert narrow.peak.buffers == 0
    # The residual stream that blocks keep is in the type of the weights.
    assert wide.peak.activations > 1.8 * narrow.peak.activations


def test_without_a_backward_no_activations_are_kept_and_each_row_has_two_forwards() -> None:
    plain, forward = (
        replace(STEP, checkpointing="none", trained_modules=modules) for modules in (None, ())
    )
    memories = [estimate_memory(LLAMA_8B, ONE, each, seq_len=4096) for each in (plain, forward)]
    assert memories[1].peak.activations < memories[0].peak.activations / 8
    steps = [estimate_step(LLAMA_8B, ONE, each, H100, seq_len=4096) for each in (plain, forward)]
    assert steps[0].num_tokens == steps[1].num_tokens
    assert 0.5 < steps[1].compute_s / steps[0].compute_s < 0.8


# -- the smallest change that fits ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "num_gpus"),
    [
        (LLAMA_8B, 1),
        pytest.param(LLAMA_70B, 8, marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_does_not_fit_names_a_change_that_does(
    sizes: ModelSizes, num_gpus: int
) -> None:
    plain = plan(sizes, num_gpus)
    with pytest.raises(ConfigError, match="nearest: set optim"):
        plain.refuse_misfit()
    assert plain.change is not None
    changed = plan(sizes, num_gpus, *plain.change.split())
    changed.refuse_misfit()
    assert changed.meshes[0] == plain.with_change
    # Less is not enough.
    for less in ("optim.name=adamw_8bit", "train.weights=bf16"):
        assert plan(sizes, num_gpus, less).num_fitting == 0


@pytest.mark.slow
def test_70b_on_eight_gpus_with_adalomo_has_one_micro_batch() -> None:
    settings = ("optim.name=adalomo", "optim.max_grad_norm=null", "train.weights=bf16")
    planned = plan(LLAMA_70B, 8, *settings)
    planned.refuse_misfit()
    assert {mesh.num_micro_batches for mesh in planned.meshes} == {1}


def test_a_change_is_one_that_the_other_settings_allow() -> None:
    large = replace(LLAMA_8B, num_layers=40)
    assert plan(large, 1, "train.micro_batch_size=1").change == (
        "optim.name=adalomo optim.max_grad_norm=null train.micro_batch_size=null train.weights=bf16"
    )
    private = "mitigations=[{name: dp_sgd, noise_multiplier: 1.0}]"
    assert plan(large, 1, private).change is None


def test_auto_takes_all_rows_where_backward_updates_and_recomputes_nothing_without_one() -> None:
    for name, rows, mode in (("adalomo", None, "full"), ("mezo", 1, "none")):
        config = make_run(f"optim.name={name}", "optim.max_grad_norm=null")
        resolved = resolve_auto(config, device_type="cuda", sizes=None, machine=None, world_size=1)
        train = resolved.train
        assert (train.micro_batch_size, train.activation_checkpointing) == (rows, mode)
        RunConfig.model_validate(resolved.model_dump())
        # After an out-of-memory error.
        assert (find_half(resolved, ONE) is None) == (name == "adalomo" or rows == 1)
        assert ("activation_checkpointing" in list_free(config)) == (name == "adalomo")


def test_experts_are_refused_where_backward_updates() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 4}
    for name, changes in (
        ("adalomo", ()),
        ("adamw", ()),
        ("lomo", ("train.trainable_modules=[x]",)),
    ):
        values = {**RUN, "model": {"scratch": {"config": experts}}}
        settings = (f"optim.name={name}", "optim.max_grad_norm=null", *changes)
        document = apply_overrides(Document(path="", values=values, places={}), settings)
        config = RunConfig.model_validate(document.values)
        if name == "adalomo":
            with pytest.raises(ConfigError, match="does not update experts, which this model has"):
                check_processes(config, 1)
        else:
            check_processes(config, 1)


# -- meshes --------------------------------------------------------------------------------------


def test_a_mesh_that_cuts_a_block_is_refused_and_not_chosen() -> None:
    sizes = replace(LLAMA_8B, hidden_size=896, num_heads=14, num_kv_heads=2, head_dim=64)
    quantised = sizes.for_optimizer("adamw_8bit")
    resolve_mesh(ParallelConfig(z=2, y=4), 8, sizes)
    with pytest.raises(ConfigError) as caught:
        resolve_mesh(ParallelConfig(z=2, y=4), 8, quantised)
    problem, way_out = caught.value.problems
    assert problem.startswith("'parallel.y' must divide the 14 blocks of 64 columns that adamw_8")
    assert "nearest first: (data=2, z=2, y=2, x=1)" in way_out
    chosen, possible = list_meshes(8, quantised), list_meshes(8, sizes)
    assert [mesh for mesh in possible if mesh.y < 4] == chosen
    assert list_meshes(8, quantised.for_optimizer("adamw")) == possible
