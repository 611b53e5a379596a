"""What a machine can train by estimate: the largest shape that the planner's own plan accepts."""

from dataclasses import replace
from typing import Any

import pytest
from capacity import KINDS, SHAPES, Capacity, describe_capacity, list_capacities
from published_sizes import CONFIG_FIELDS

from memguard.config import RunConfig, apply_settings, validate
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.fit import PlanInputs, count_parameters
from memguard.planner.machine import detect_machine
from memguard.planner.plan import make_plan
from memguard.planner.step_settings import describe_work
from memguard.workflows.plan import MODEL_ALONE

pytestmark = pytest.mark.slow

GIB = 2**30
PUBLISHED = {
    "SmolLM2 135M": 134_515_008,
    "SmolLM2 360M": 361_821_120,
    "Llama 3.2 1B": 1_235_814_400,
    "Llama 3.2 3B": 3_212_749_824,
    "Llama 3.1 8B": 8_030_261_248,
    "Qwen2.5 14B": 14_770_033_664,
    "Qwen2.5 32B": 32_763_876_352,
    "Llama 3.1 70B": 70_553_706_496,
    "Llama 3.1 405B": 405_853_388_800,
}
"""Parameters that the Hugging Face hub shows for the weights of each model."""


def test_the_shapes_have_the_published_numbers_of_parameters() -> None:
    assert {name: count_parameters(sizes) for name, sizes in SHAPES.items()} == PUBLISHED
    assert list(PUBLISHED.values()) == sorted(PUBLISHED.values()), "the smallest first"
    for name in ("8B", "70B", "405B"):
        fields = CONFIG_FIELDS[f"Llama-3.1-{name}"]
        assert SHAPES[f"Llama 3.1 {name}"] == ModelSizes.from_json(fields)


def fits(name: str, capacity: Capacity, gpus: list[tuple[str, int]]) -> bool:
    """Return whether `memguard plan` finds a mesh for a shape trained in this way."""
    values = apply_settings(MODEL_ALONE.values, KINDS[capacity.kind])
    work = describe_work(validate(RunConfig, values, MODEL_ALONE), device_type="cuda")
    inputs = PlanInputs(
        name=name,
        machine=detect_machine(gpus=[(gpu, memory / GIB) for gpu, memory in gpus]),
        num_gpus=len(gpus),
        work=replace(work, batch_size=None),
        mesh=None,
    )
    return make_plan(SHAPES[name], inputs).num_fitting > 0


@pytest.mark.parametrize(("num_gpus", "memory_gib"), [(1, 79.6), (2, 23.5)])
def test_the_largest_that_fits_is_named(num_gpus: int, memory_gib: float) -> None:
    gpus = [("NVIDIA H100 80GB HBM3", round(memory_gib * GIB))] * num_gpus
    names = list(SHAPES)
    capacities = list(list_capacities(gpus, missing={}))
    assert [each.kind for each in capacities] == ["all weights", "LoRA", "QLoRA"]
    for capacity in capacities:
        assert capacity.model is not None
        assert capacity.num_gpus == num_gpus
        assert capacity.num_parameters == PUBLISHED[capacity.model]
        assert (capacity.needed_bytes or 0) <= (capacity.usable_bytes or 0) < memory_gib * GIB
        assert (capacity.tokens_per_s or 0) > 0, "the speed of this GPU is known"
        assert fits(capacity.model, capacity, gpus)
        following = names[names.index(capacity.model) + 1]
        assert not fits(following, capacity, gpus)
    sizes = [each.num_parameters or 0 for each in capacities]
    assert sizes == sorted(sizes), "adapters need less, and less over a base in 4 bits"


def test_nothing_is_claimed_where_nothing_is_known() -> None:
    missing: Any = {"QLoRA": "without bitsandbytes"}
    unknown = list(list_capacities([("A GPU of no file", 24 * GIB)], missing=missing))
    assert [each.tokens_per_s for each in unknown] == [None] * 3
    assert describe_capacity(unknown[0]).startswith(f"up to {unknown[0].model}, ")
    assert describe_capacity(unknown[2]) == "nothing: without bitsandbytes"
    assert [each.reason for each in unknown] == [None, None, "without bitsandbytes"]
    assert unknown[2].model is None
    # Hardly more memory than the driver takes, and less.
    for memory_gib in (2.5, 0.5):
        gpu = ("A GPU of no file", round(memory_gib * GIB))
        (small, *_) = list_capacities([gpu], missing={})
        assert small.model is None
        assert small.reason == "not even SmolLM2 135M fits"


def test_a_cpu_has_no_speed() -> None:
    for capacity in list_capacities([], missing={}):
        assert capacity.num_gpus == 0
        assert capacity.tokens_per_s is None
        assert capacity.model is not None or capacity.reason
