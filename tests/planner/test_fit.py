"""What fits: choices of settings, ranking, remedies that work, the fewest GPUs that do."""

from dataclasses import replace
from typing import Any

import pytest

from memguard.parallel.mesh_shape import MeshShape, list_meshes
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.assumptions import list_assumptions
from memguard.planner.cost import estimate_step
from memguard.planner.fit import (
    Fit,
    find_enough_gpus,
    find_fit,
    list_remedies,
    needs_mask,
    rank_meshes,
)
from memguard.planner.machine import Machine, load_machine
from memguard.planner.plan import make_mesh_plan
from memguard.planner.step_settings import Work

pytestmark = pytest.mark.slow

# Of 1.1 B parameters, with head dimensions and proportions of Llama.
SIZES = ModelSizes(
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=5632,
    vocab_size=32000,
    num_layers=22,
)
MESH = MeshShape(z=2, x=2)
WORK = Work(seq_len=1024, batch_size=32)
_GIB = 2**30


def make_machine(gib: float, *, gpus_per_node: int = 4, **changes: Any) -> Machine:
    """A machine whose GPUs have so much for tensors, all of which `auto` may use."""
    return Machine(
        name="small",
        gpu="small GPU",
        memory_gib=gib,
        reserved_gib=0,
        gpus_per_node=gpus_per_node,
        link_gb_per_s=300,
        network_gb_per_s=100,
        memory_gb_per_s=2000,
        peak_tflops=300,
        matmul_share=0.8,
        attention_share=0.5,
        is_measured=True,
        **changes,
    )


PLENTY = make_machine(1000)


def needs_gib(mesh: MeshShape = MESH, work: Work = WORK) -> float:
    """What the first choice of settings takes where there is plenty."""
    return find_fit(SIZES, mesh, work, PLENTY).needed_bytes / _GIB


def test_with_ample_memory_nothing_is_recomputed() -> None:
    fit = find_fit(SIZES, MESH, WORK, PLENTY)
    assert fit.fits
    assert fit.settings.checkpointing == "none"
    assert (fit.micro_batch_size, fit.settings.num_micro_batches) == (16, 1), "all rows at once"
    assert (fit.settings.num_tokens, fit.settings.num_labels) == (16 * 1024, 16 * 1023)
    # What is needed is the peak, and an allowance for temporary buffers.
    peak = fit.memory.peak
    going = peak.activations + peak.nll_chunk + peak.buffers
    assert fit.allowance_bytes == pytest.approx(PLENTY.fragmentation * going, abs=1)
    assert fit.needed_bytes == peak.total + fit.allowance_bytes
    assert fit.headroom_bytes == PLENTY.usable_bytes - fit.needed_bytes


def test_the_fastest_of_the_modes_that_fit_is_taken() -> None:
    least = needs_gib(work=replace(WORK, micro_batch_size=1, checkpointing="full"))
    most = needs_gib()
    modes: set[str] = set()
    speeds: list[float] = []
    for number in range(50):
        machine = make_machine(least + (most - least) * number / 49)
        fit = find_fit(SIZES, MESH, WORK, machine)
        assert fit.fits
        modes.add(fit.settings.checkpointing)
        alone = {}
        for mode in ("none", "selective", "full"):
            choice = find_fit(SIZES, MESH, replace(WORK, checkpointing=mode), machine)
            if choice.fits:
                alone[mode] = estimate_step(
                    SIZES, MESH, choice.settings, machine, seq_len=WORK.seq_len
                ).tokens_per_s
        speeds.append(alone[fit.settings.checkpointing])
        assert speeds[-1] == max(alone.values())
    assert speeds == sorted(speeds), "never slower with more memory"
    assert modes == {"none", "selective", "full"}


def test_flash_attention_needs_no_mask_and_no_repeated_keys() -> None:
    gpu, cpu = (
        find_fit(SIZES, MESH, WORK, PLENTY.model_copy(update={"has_flash": has_flash})).memory.peak
        for has_flash in (True, False)
    )
    tokens, heads = 16 * WORK.seq_len, SIZES.num_heads // MESH.x
    mask = tokens * WORK.seq_len * (1 + 2)
    repeated = 2 * (heads - SIZES.num_kv_heads // MESH.x) * SIZES.head_dim * tokens * 2
    assert cpu.activations - gpu.activations == mask + SIZES.num_layers * repeated


def test_flash_attention_runs_in_bf16_on_gpus_with_heads_it_knows() -> None:
    assert not needs_mask(SIZES, WORK, PLENTY)
    assert needs_mask(SIZES, replace(WORK, compute_bytes=4), PLENTY)
    assert needs_mask(replace(SIZES, head_dim=512), WORK, PLENTY)
    assert needs_mask(replace(SIZES, head_dim=20), WORK, PLENTY)
    assert needs_mask(SIZES, WORK, load_machine("frontier"))
    assert find_fit(SIZES, MESH, WORK, load_machine("frontier")).settings.has_mask


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_the_micro_batch_is_the_largest_that_fits(mode: Any, share: float) -> None:
    work = replace(WORK, checkpointing=mode)
    least = needs_gib(work=replace(work, micro_batch_size=1))
    machine = make_machine(least + (needs_gib(work=work) - least) * share)
    fit = find_fit(SIZES, MESH, work, machine)
    assert fit.fits
    assert fit.settings.checkpointing == mode
    assert fit.settings.num_micro_batches * fit.micro_batch_size == 16
    assert fit.micro_batch_size < 16
    larger = find_fit(
        SIZES, MESH, replace(work, micro_batch_size=2 * fit.micro_batch_size), machine
    )
    assert not larger.fits


def test_a_given_micro_batch_is_used_up_to_the_rows_of_a_rank() -> None:
    for requested, taken, num_micro_batches in ((4, 4, 4), (16, 16, 1), (32, 16, 1)):
        fit = find_fit(SIZES, MESH, replace(WORK, micro_batch_size=requested), PLENTY)
        assert (fit.micro_batch_size, fit.settings.num_micro_batches) == (taken, num_micro_batches)
    # Without a batch each rank has one row.
    fit = find_fit(SIZES, MESH, Work(seq_len=1024), PLENTY)
    assert (fit.micro_batch_size, fit.settings.num_micro_batches) == (1, 1)
    assert fit.settings.num_tokens == 1024


def test_a_mesh_that_does_not_fit_has_the_settings_that_need_least() -> None:
    fit = find_fit(SIZES, MESH, WORK, make_machine(0.5))
    assert not fit.fits
    assert fit.headroom_bytes < 0
    every = [
        find_fit(SIZES, MESH, replace(WORK, checkpointing=mode, micro_batch_size=rows), PLENTY)
        for mode in ("none", "selective", "full")
        for rows in (1, 2, 4, 8, 16)
    ]
    assert fit.needed_bytes == min(each.needed_bytes for each in every)


def test_fitting_meshes_are_ranked_by_speed_and_the_others_by_missing_memory() -> None:
    machine = make_machine(8, gpus_per_node=8)
    meshes = list_meshes(8, SIZES, batch_size=WORK.batch_size)
    ranked, others = rank_meshes(SIZES, meshes, WORK, machine)
    assert ranked
    assert others
    shapes = [fit.mesh for fit in (*ranked, *others)]
    assert sorted(map(str, shapes)) == sorted(map(str, meshes))
    assert all(fit.fits for fit in ranked)
    assert not any(fit.fits for fit in others)
    speeds = [fit.tokens_per_s for fit in ranked]
    assert speeds == sorted(speeds, reverse=True)
    needed = [fit.needed_bytes for fit in others]
    assert needed == sorted(needed)
    first = ranked[0]
    assert first.step == estimate_step(
        SIZES, first.mesh, first.settings, machine, seq_len=WORK.seq_len
    )


def test_of_equally_fast_meshes_the_one_that_needs_less_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meshes = [MeshShape(data=2, z=1), MeshShape(data=1, z=2)]
    same = rank_meshes(SIZES, meshes, WORK, PLENTY)[0][0].step
    monkeypatch.setattr("memguard.planner.fit.estimate_step", lambda *_, **__: same)
    ranked, _ = rank_meshes(SIZES, meshes, WORK, PLENTY)
    assert [choice.mesh.z for choice in ranked] == [2, 1]


def apply(work: Work, remedy: str) -> Work:
    setting, _, value = remedy.partition("=")
    if setting == "train.precision":
        assert value == "bf16"
        return replace(work, compute_bytes=2)
    if setting == "train.activation_checkpointing":
        return replace(work, checkpointing=value)  # type: ignore[arg-type]
    name = {"train.micro_batch_size": "micro_batch_size", "data.seq_len": "seq_len"}[setting]
    return replace(work, **{name: int(value)})


@pytest.mark.parametrize(
    "work",
    [
        replace(WORK, checkpointing="none", micro_batch_size=16),
        replace(WORK, checkpointing="none", micro_batch_size=16, compute_bytes=4),
        replace(WORK, checkpointing="selective", micro_batch_size=8, compute_bytes=4),
        replace(WORK, checkpointing="full", micro_batch_size=16),
        replace(WORK, checkpointing="none", micro_batch_size=1, seq_len=8192),
        replace(WORK, checkpointing="full", micro_batch_size=1, seq_len=16384),
    ],
    ids=str,
)
def test_each_remedy_alone_lets_it_fit(work: Work) -> None:
    kinds = set()
    for share in (0.35, 0.5, 0.7, 0.9, 0.99):
        machine = make_machine(needs_gib(work=work) * share)
        assert not find_fit(SIZES, MESH, work, machine).fits
        remedies = list_remedies(SIZES, MESH, work, machine)
        for remedy in remedies:
            assert find_fit(SIZES, MESH, apply(work, remedy), machine).fits, remedy
            kinds.add(remedy.partition("=")[0])
    assert "data.seq_len" in kinds


def test_remedies_change_no_more_than_they_must() -> None:
    work = replace(WORK, checkpointing="none", micro_batch_size=16)
    machine = make_machine(needs_gib(work=work) * 0.99)
    assert list_remedies(SIZES, MESH, work, machine) == [
        "train.activation_checkpointing=selective",
        "train.micro_batch_size=8",
        "data.seq_len=512",
    ]


@pytest.mark.quick
def test_rows_are_shortened_to_128_tokens_at_least() -> None:
    work = replace(WORK, checkpointing="full", micro_batch_size=1, compute_bytes=2)
    for shorter, longer, told in ((128, 256, ["data.seq_len=128"]), (64, 128, [])):
        enough, more = (needs_gib(work=replace(work, seq_len=size)) for size in (shorter, longer))
        machine = make_machine((enough + more) / 2)
        assert list_remedies(SIZES, MESH, work, machine) == told


def test_where_weights_alone_are_too_much_no_setting_helps() -> None:
    work = replace(WORK, checkpointing="none", micro_batch_size=16, compute_bytes=4)
    assert list_remedies(SIZES, MESH, work, make_machine(1)) == []


def fits_on(num_gpus: int, work: Work, machine: Machine) -> list[Fit]:
    meshes = list_meshes(num_gpus, SIZES, batch_size=work.batch_size)
    return [fit for mesh in meshes if (fit := find_fit(SIZES, mesh, work, machine)).fits]


@pytest.mark.parametrize("gib", [0.5, 1, 2, 5])
@pytest.mark.parametrize("gpus_per_node", [1, 4])
@pytest.mark.parametrize("batch_size", [None, 48])
def test_the_fewest_gpus_are_enough_and_fewer_are_not(
    gib: float, gpus_per_node: int, batch_size: int | None
) -> None:
    machine = make_machine(gib, gpus_per_node=gpus_per_node)
    work = Work(seq_len=256, batch_size=batch_size)
    found = find_enough_gpus(SIZES, work, machine)
    enough = found.mesh.num_ranks
    assert found.fits
    assert enough % gpus_per_node == 0
    if batch_size is not None:
        assert batch_size % found.mesh.num_batch_ways == 0
    # Of all meshes, also those that hold several copies of the model.
    for fewer in range(gpus_per_node, enough, gpus_per_node):
        assert not fits_on(fewer, work, machine)


def test_of_the_meshes_on_the_fewest_gpus_the_fastest_is_taken() -> None:
    machine = make_machine(4, gpus_per_node=8)
    found = find_enough_gpus(SIZES, WORK, machine)
    meshes = list_meshes(found.mesh.num_ranks, SIZES, batch_size=WORK.batch_size)
    ranked, _ = rank_meshes(SIZES, [mesh for mesh in meshes if mesh.data == 1], WORK, machine)
    assert found == ranked[0]
    assert len(ranked) > 1


def test_where_one_row_is_too_long_no_number_is_found() -> None:
    work = Work(seq_len=10**6, checkpointing="none")
    assert find_enough_gpus(SIZES, work, make_machine(4)) is None


def test_the_record_of_a_mesh_is_complete() -> None:
    fit = find_fit(SIZES, MESH, WORK, PLENTY)
    step = estimate_step(SIZES, MESH, fit.settings, PLENTY, seq_len=WORK.seq_len)
    plan = make_mesh_plan(fit)
    assert plan.describe() == str(MESH) == "(data=1, z=2, y=1, x=2)"
    memory = plan.memory
    kinds = ("weights", "optimizer", "gradients", "activations", "nll_chunk", "buffers")
    assert memory.needed == memory.allowance + sum(getattr(memory, kind) for kind in kinds)
    assert memory.needed == fit.needed_bytes
    assert memory.usable == PLENTY.usable_bytes
    assert plan.headroom_bytes == fit.headroom_bytes
    assert plan.speed.tokens_per_s == step.tokens_per_s
    assert plan.speed.step_s >= plan.speed.compute_s + plan.speed.exposed_communication_s
    assert make_mesh_plan(replace(fit, step=None)).speed is None


def test_assumptions_name_figures_without_a_source() -> None:
    def unsourced(machine: Machine) -> list[str]:
        assumptions = list_assumptions(machine, has_mask=False, seq_len=2048)
        return [text for text in assumptions if "assumed" in text]

    assert unsourced(PLENTY) == []
    assert unsourced(make_machine(1, assumed=("peak_tflops",))) == [
        "small's peak_tflops: assumed, not published"
    ]
    fields = PLENTY.model_dump(exclude={"memory_gb_per_s"})
    assert unsourced(Machine.model_validate(fields)) == [
        "small's memory_gb_per_s: assumed, not published"
    ]
