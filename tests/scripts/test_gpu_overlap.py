"""Overlap of collectives with computation, from traces made by hand."""

from types import ModuleType
from typing import Any

import pytest
from script_calls import load_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overlap() -> ModuleType:
    module: ModuleType = load_script("bench/gpu_overlap")
    return module


def kernel(name: str, begin_us: float, end_us: float, **arguments: str) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": begin_us,
        "dur": end_us - begin_us,
        "args": arguments,
    }


def test_the_share_of_each_axis_is_that_of_its_own_kernels(overlap: ModuleType) -> None:
    gather = {"Process Group Name": "3", "Process Group Description": "undefined"}
    reduce = {"Process Group Name": "7", "Process Group Description": "mesh_x"}
    events = [
        # Computation from 0 to 100 with a hole from 40 to 60; two kernels overlap.
        kernel("sm90_xmma_gemm_bf16", 0, 30),
        kernel("flash_fwd_kernel", 20, 40),
        kernel("sm90_xmma_gemm_bf16", 60, 100),
        # z: 10 to 50, in two kernels that touch: 30 of 40 us hidden.
        kernel(
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10, 30, **gather
        ),
        kernel(
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 30, 50, **gather
        ),
        # x: 40 to 60 and 90 to 110: 10 of 40 us hidden.
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 40, 60, **reduce),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 90, 110, **reduce),
        # Neither a kernel nor a duration.
        {"ph": "X", "cat": "cpu_op", "name": "c10d::allreduce_", "ts": 0, "dur": 110},
        {"ph": "M", "name": "process_name"},
    ]
    axes = overlap.measure_overlap({"traceEvents": events}, {"3": "z"})
    assert set(axes) == {"z", "x"}
    assert axes["z"].total_ms == pytest.approx(0.04)
    assert axes["z"].share == pytest.approx(0.75)
    assert axes["x"].total_ms == pytest.approx(0.04)
    assert axes["x"].share == pytest.approx(0.25)


def test_a_collective_of_another_group_is_not_lost(overlap: ModuleType) -> None:
    event = kernel("ncclDevKernel_AllReduce", 0, 10, **{"Process Group Description": "default_pg"})
    axes = overlap.measure_overlap({"traceEvents": [event]}, {"3": "z"})
    assert axes[overlap.OTHER].share == 0.0


def test_a_trace_of_torch_is_read(overlap: ModuleType, tmp_path: Any) -> None:
    """The computation of a CPU trace is found; no collective runs, so no axis has a share."""
    import torch

    square = torch.ones(64, 64)
    trace = overlap.profile_step(lambda: square @ square, tmp_path)
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    assert overlap.measure_overlap(trace, {}) == {}
