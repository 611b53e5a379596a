"""Settings of torch for GPUs: allocator, cuBLAS, TF32; a CPU sees none of them."""

import os
from collections.abc import Iterator

import pytest
import torch

from memguard.runtime import (
    deterministic_algorithms,
    fast_matmuls,
    set_allocator_defaults,
    set_deterministic_defaults,
)

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*NAMES, "CUBLAS_WORKSPACE_CONFIG"):
        # Set first, so that the value of before comes back whatever a test does.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_segments_grow_unless_the_user_has_another_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    set_allocator_defaults()
    assert os.environ[NAMES[0]] == "expandable_segments:True"
    for name in NAMES:
        monkeypatch.delenv(NAMES[0], raising=False)
        with monkeypatch.context() as patched:
            patched.setenv(name, "backend:native")
            set_allocator_defaults()
            # The first name would win over the user's.
            assert {n: os.environ[n] for n in NAMES if n in os.environ} == {name: "backend:native"}


def test_cublas_has_a_fixed_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    set_deterministic_defaults()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_deterministic_defaults()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_tf32_is_for_the_block_on_a_gpu_only() -> None:
    def now() -> tuple[str, bool, str]:
        matmul = torch.backends.cuda.matmul
        return torch.get_float32_matmul_precision(), matmul.allow_tf32, matmul.fp32_precision

    with fast_matmuls(torch.device("cpu")):
        assert now()[:2] == ("highest", False)
    with fast_matmuls(torch.device("cuda")):
        # torch's old and its new interface agree.
        assert now() == ("high", True, "tf32")
    assert now()[:2] == ("highest", False)
    with pytest.raises(ZeroDivisionError), fast_matmuls(torch.device("cuda")):
        _ = 1 / 0
    assert now()[:2] == ("highest", False)


def test_a_program_that_uses_the_other_interface_keeps_its_choice() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = "tf32"
    try:
        with fast_matmuls(torch.device("cuda")):
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = "ieee"


def test_deterministic_algorithms_end_with_the_block() -> None:
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
