"""The diagnosis of a machine: what is missing, and what is only reported."""

import importlib.metadata
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from unusable_gpus import LINE, pretend_old_driver

from memguard.errors import DISTRIBUTION, OPTIONAL, MemguardError
from memguard.workflows import doctor
from memguard.workflows.collective_checks import Backend, Check, skip_backend
from memguard.workflows.doctor import EXTRAS, diagnose, refuse_problems

ROOT = Path(__file__).resolve().parents[2]


def make_backend(name: Any = "gloo", **changes: Any) -> Backend:
    check = {
        "operation": "all-reduce",
        "dtype": "fp32",
        "state": "ok",
        "reason": None,
        "is_needed": True,
    }
    return Backend(name=name, num_ranks=2, reason=None, checks=(Check(**check | changes),))


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, Backend]:
    """Results of backends by name; no ranks are started."""
    results = {"gloo": make_backend(), "nccl": make_backend("nccl")}
    monkeypatch.setattr(doctor, "check_backend", lambda name, count, limit_s: results[name])
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=2.11", "rich>=14"])
    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)
    return results


def test_this_machine_has_all_that_is_needed(backends: dict[str, Backend]) -> None:
    steps: list[str] = []
    diagnosis = diagnose(on_step=steps.append)
    assert diagnosis.problems == ()
    refuse_problems(diagnosis)
    assert steps == ["2 processes test the collectives of gloo"]
    (library, _) = diagnosis.libraries
    assert (library.name, library.required, library.is_ok) == ("torch", ">=2.11", True)
    assert library.version == importlib.metadata.version("torch")
    assert 0 < (diagnosis.available_bytes or 0) < diagnosis.memory_bytes


def test_a_collective_that_is_needed_and_fails_is_a_problem(backends: dict[str, Backend]) -> None:
    backends["gloo"] = make_backend(state="hung", reason="no answer in 15 s")
    diagnosis = diagnose()
    (problem,) = diagnosis.problems
    assert problem == "gloo: all-reduce in fp32 is hung (no answer in 15 s)"
    with pytest.raises(MemguardError, match="gloo: all-reduce in fp32") as caught:
        refuse_problems(diagnosis)
    # An internal error, or something of the machine, as in the guide.
    assert caught.value.exit_code == 1


def test_one_that_is_not_needed_is_only_reported(backends: dict[str, Backend]) -> None:
    backends["gloo"] = make_backend(state="not supported", reason="no", is_needed=False)
    assert diagnose().problems == ()


def test_ranks_that_do_not_connect_are_one_problem(backends: dict[str, Backend]) -> None:
    reason = "the ranks did not connect: no answer in 120 s"
    failed = make_backend(state="not tested", reason="no ranks")
    backends["gloo"] = failed.model_copy(update={"reason": reason})
    assert diagnose().problems == (f"gloo: {reason}",)


def test_an_old_or_missing_library_is_a_problem(
    backends: dict[str, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    required = ["torch>=99", "no-such-library>=1", "nothing; extra == 'dp'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    problems = diagnose().problems
    version = importlib.metadata.version("torch")
    assert problems == (
        f"torch>=99 is required; got {version}",
        "no-such-library>=1 is required; got not installed",
    )


def test_gpus_and_their_backend(
    backends: dict[str, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_gpu(index: int) -> doctor.Gpu:
        return doctor.Gpu(
            index=index,
            name="G",
            capability="9.0",
            memory_bytes=2**30,
            free_bytes=2**29,
            bf16="ok" if index == 0 else "no kernel image",
            flash="ok",
            varlen="needs capability 8.0",
        )

    monkeypatch.setattr(doctor, "_try_gpu", make_gpu)
    monkeypatch.setattr(doctor.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    backends["nccl"] = make_backend("nccl", dtype="bf16", state="wrong", reason="it is wrong")
    # Other kernels replace those of attention; products in bf16 are needed.
    assert diagnose().problems == (
        "GPU 1 (G) cannot multiply in bf16: no kernel image",
        "nccl: all-reduce in bf16 is wrong (it is wrong)",
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    one = diagnose()
    assert one.problems == ()
    assert one.backends[1] == skip_backend("nccl", "not tested: it connects GPUs, and there is one")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor.dist, "is_nccl_available", lambda: False)
    assert "nccl: this build of torch has no NCCL" in diagnose().problems


@pytest.mark.usefixtures("backends")
def test_gpus_that_torch_cannot_use_are_one_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_old_driver(monkeypatch, tmp_path)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [])
    diagnosis = diagnose()
    assert (diagnosis.problems, diagnosis.gpus, diagnosis.cuda) == ((LINE,), (), "13.0")
    # Collectives of the CPU are tested as on a machine without GPUs.
    assert [backend.name for backend in diagnosis.backends] == ["gloo"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert diagnose().problems == ()


def test_a_computation_that_fails_is_one_line() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("No available kernel.\nAborting")

    assert doctor._try(fail) == "No available kernel."
    assert doctor._try(lambda: torch.tensor([float("nan")])) == "the result is not finite"
    assert doctor._try(lambda: doctor._multiply(torch.device("cpu"))) == "ok"


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {*EXTRAS} == {*extras} - {"test"}
    for name, (libraries, _) in EXTRAS.items():
        assert extras[name] == [OPTIONAL[library] for library in libraries]
        assert {*extras[name]} <= {*extras["test"]}


@pytest.mark.usefixtures("backends")
def test_another_project_with_the_package_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners = {"memguard": [DISTRIBUTION, "memguard", "memguard"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: owners)
    (problem,) = diagnose().problems
    assert problem.startswith("the distribution 'memguard' provides another package 'memguard': ")
    assert len(problem) <= 160


@pytest.mark.usefixtures("backends")
def test_a_checkout_that_pip_did_not_install_has_no_requirements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_nothing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", find_nothing)
    diagnosis = diagnose()
    assert (diagnosis.libraries, diagnosis.problems) == ((), ())
