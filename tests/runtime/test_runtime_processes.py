"""What ranks agree on; how they find their places."""

import os
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from ranks import RankPool
from torch import distributed as dist
from unusable_gpus import LINE, TOO_OLD, pretend_old_driver

from memguard.errors import ConfigError, DataError, OtherRankFailed
from memguard.runtime import Runtime, detect_runtime, environment, processes, start_runtime


def _raise() -> None:
    raise DataError("no documents")


def here() -> Runtime:
    return Runtime(
        device=torch.device("cpu"), rank=dist.get_rank(), world_size=dist.get_world_size()
    )


def agree() -> dict[str, object]:
    runtime = here()
    rank = runtime.rank
    time.sleep(0.2 * rank)
    came_s = time.monotonic()
    runtime.barrier()
    left_s = time.monotonic()
    return {
        "waited": left_s >= max(runtime.gather_objects(came_s)),
        "max": runtime.agree_max(10 - rank),
        "any": (runtime.agree_any(rank == 2), runtime.agree_any(False)),
        "gathered": runtime.gather_objects({"rank": rank}),
        "broadcast": runtime.broadcast_object("zero" if rank == 0 else None),
        "only": runtime.only_on_main(lambda: rank),
    }


def test_all_ranks_agree(ranks: RankPool) -> None:
    for rank, result in enumerate(ranks(agree, 3)):
        assert result == {
            "waited": True,
            "max": 10,
            "any": (True, False),
            "gathered": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
            "broadcast": "zero",
            "only": 0 if rank == 0 else None,
        }


def fail_on_main() -> tuple[str, int]:
    runtime = here()
    calls = []

    def fail() -> None:
        calls.append(runtime.rank)
        raise DataError("no documents")

    try:
        runtime.only_on_main(fail)
    except (DataError, OtherRankFailed) as error:
        assert calls == ([0] if runtime.is_main else [])
        return type(error).__name__, error.exit_code
    raise AssertionError("it ends everywhere")


def test_an_error_on_rank_0_ends_those_who_wait(ranks: RankPool) -> None:
    other = ("OtherRankFailed", 3)
    assert ranks(fail_on_main, 3) == [("DataError", 3), other, other]


def fail_in_a_block(failing: int, where: str) -> tuple[str, int, list[int]]:
    """One rank fails outside of an operation; afterwards all ranks still agree."""
    try:
        with here().contain() as runtime:
            runtime.agree_max(1)
            if runtime.rank == failing:
                if where == "on main":
                    runtime.only_on_main(_raise)
                raise DataError("no documents")
            runtime.gather_objects("scores")
            runtime.only_on_main(lambda: "a report")
    except (DataError, OtherRankFailed) as error:
        ended = type(error).__name__, error.exit_code
    return *ended, here().gather_objects(here().rank)


@pytest.mark.parametrize(("failing", "where"), [(1, ""), (0, ""), (0, "on main")])
def test_an_error_in_a_block_ends_it_on_all_ranks(
    ranks: RankPool, failing: int, where: str
) -> None:
    results = ranks(fail_in_a_block, 3, failing, where)
    for rank, (name, code, agreed) in enumerate(results):
        assert (name, code) == ("DataError" if rank == failing else "OtherRankFailed", 3)
        assert agreed == [0, 1, 2]


def call_alone() -> str:
    processes._MEETING = timedelta(seconds=1)
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    try:
        with processes.join_program():
            return "joined"
    except ConfigError as error:
        return str(error)


def test_a_call_that_one_rank_does_not_make_is_refused(ranks: RankPool) -> None:
    message = ranks(call_alone, 2)[0]
    assert "every process of this program must make this call" in message
    assert "Call it on all ranks, or save the model and audit the folder" in message


def test_one_process_agrees_with_itself() -> None:
    with start_runtime() as runtime:
        assert not dist.is_initialized()
        runtime.barrier()
        assert runtime.agree_max(-3) == -3
        assert runtime.agree_any(True)
        assert runtime.gather_objects("a") == ["a"]
        assert runtime.broadcast_object("a") == "a"
        assert runtime.only_on_main(lambda: 5) == 5
        with pytest.raises(DataError):
            runtime.only_on_main(_raise)
    assert (runtime.rank, runtime.world_size, runtime.is_main) == (0, 1, True)


def test_places_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    # A cluster's own numbers: nobody has started ranks.
    assert detect_runtime().world_size == 1
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = detect_runtime()
    assert (found.rank, found.world_size, found.local_rank) == (5, 8, 1)
    assert found.device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert detect_runtime().device == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="this machine has 1, and this is process 2"):
        detect_runtime()


def test_gpus_that_torch_cannot_use_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_old_driver(monkeypatch, tmp_path)
    with pytest.raises(ConfigError) as caught:
        detect_runtime()
    # One line; torch's warning, which says the same, would fail this test.
    assert caught.value.problems == (LINE,)
    with pytest.raises(ConfigError), start_runtime():
        pytest.fail("the CPU is used")


def test_what_a_library_finds_before_is_not_said_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The import of torchao looks for GPUs, and torch warns then."""
    pretend_old_driver(monkeypatch, tmp_path)
    with warnings.catch_warnings():
        environment.quiet_kernel_advice()
        torch.cuda.is_available()
    pretend_old_driver(monkeypatch, tmp_path)
    # Without a visible GPU there is no error, and the warning is the only sign.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with warnings.catch_warnings():
        environment.quiet_kernel_advice()
        with pytest.raises(UserWarning, match="too old"):
            torch.cuda.is_available()


def test_a_model_in_memory_stays_where_its_program_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_old_driver(monkeypatch, tmp_path)
    with pytest.warns(UserWarning, match="too old"), processes.join_program() as runtime:
        assert runtime.device == torch.device("cpu")


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", None])
def test_no_visible_gpu_or_a_build_for_cpus_means_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None
) -> None:
    pretend_old_driver(monkeypatch, tmp_path)
    with pytest.raises(ConfigError):
        detect_runtime()
    if visible is None:  # Also of a build for GPUs of another vendor.
        monkeypatch.setattr(torch.version, "cuda", None)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect_runtime().device == torch.device("cpu")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (TOO_OLD, "The NVIDIA driver on your system is too old (found version 12020)"),
        ("No CUDA GPUs are available", "No CUDA GPUs are available"),
        (
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
            "installed a driver from http://www.nvidia.com/Download/index.aspx",
            "Found no NVIDIA driver on your system",
        ),
        (
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
            "calling NumCudaDevices() that might have already set an error? Error 802: system not "
            "yet initialized",
            "Error 802: system not yet initialized",
        ),
        (
            "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. "
            "changing env variable CUDA_VISIBLE_DEVICES after program start. Setting the available "
            "devices to be zero.",
            "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. "
            "changing env variable CUDA_VISIBLE_DEVICES after program start",
        ),
        ("CUDA error: out of memory\nCUDA kernel errors\nmight", "CUDA error: out of memory"),
    ],
)
def test_the_reason_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, said: str
) -> None:
    pretend_old_driver(monkeypatch, tmp_path, reason)
    # A GPU that this machine does not have is visible to no process, and counts.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    (tmp_path / "driver").unlink()
    with pytest.raises(ConfigError) as caught:
        detect_runtime()
    (problem,) = caught.value.problems
    assert problem == LINE.replace(
        "the 8 visible GPUs", "the visible GPU (CUDA_VISIBLE_DEVICES=9)"
    ).replace("535.104.05: " + TOO_OLD.partition(". ")[0], f"of unknown version: {said}")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.86  Tue Oct 26 21:55:45", "470.86"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
            "580.65.06",
        ),
        ("NVRM version: none\nGCC version:  gcc version 12.3.0 (Ubuntu)", None),
    ],
)
def test_the_driver_has_a_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, version: str | None
) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "version")
    assert environment.read_driver_version() == version


def join(monkeypatch: pytest.MonkeyPatch, device: str, world_size: int = 2) -> dict[str, object]:
    """Return what a rank on this device gives to `init_process_group`."""
    given: dict[str, object] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **settings: given.update(settings))
    monkeypatch.setattr(processes, "_find_store", lambda _: None)
    runtime = Runtime(device=torch.device(device), rank=1, world_size=world_size)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")  # So that it is restored.
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    processes._join(runtime, timedelta(minutes=7))
    return given


def test_the_group_connects_its_gpu_at_once_and_has_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu, on_cpu = join(monkeypatch, "cuda:1"), join(monkeypatch, "cpu")
    assert on_gpu["device_id"] == torch.device("cuda", 1)
    assert on_cpu["device_id"] is None
    assert on_gpu["timeout"] == on_cpu["timeout"] == timedelta(minutes=7)


@pytest.mark.parametrize(("world_size", "setting"), [(2, None), (256, None), (4096, "1")])
def test_few_ranks_connect_at_once(
    monkeypatch: pytest.MonkeyPatch, world_size: int, setting: str | None
) -> None:
    """One that waits for a rank that was killed would otherwise wait without an end."""
    join(monkeypatch, "cpu", world_size)
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == setting


def count_sockets() -> int:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("socket" in os.readlink(link) for link in links)


def connect(is_lazy: bool) -> tuple[int, float]:
    """On a rank: sockets that a second group adds, and a sum over it."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1" if is_lazy else "0"
    before = count_sockets()
    group = dist.new_group(backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    added = count_sockets() - before
    dist.barrier()
    return added, float(total)


@pytest.mark.skipif(sys.platform != "linux", reason="counts sockets in /proc")
def test_gloo_connects_those_that_talk_only(ranks: RankPool) -> None:
    """What torch does with the setting of `_join`."""
    lazy, eager = [ranks(connect, 6, is_lazy)[0] for is_lazy in (True, False)]
    assert lazy[1] == eager[1] == 6
    assert lazy[0] < eager[0]


def test_ranks_meet_again_under_a_prefix_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": "1",
    }.items():
        monkeypatch.setenv(name, value)

    def meet(rank: int) -> dist.Store:
        return processes._meet_again(Runtime(rank=rank, world_size=3))

    with ThreadPoolExecutor() as pool:
        # In the second attempt rank 0 comes last, and finds the keys of the first.
        for order in ((0, 1, 2), (2, 1, 0)):
            calls = []
            for rank in order:
                calls.append(pool.submit(meet, rank))
                time.sleep(0.05)
            stores = [call.result(20) for call in calls]
            assert not stores[0].check(["key"])
            stores[0].set("key", "value")
            assert [store.get("key") for store in stores] == [b"value"] * 3
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert meet(0) is None
