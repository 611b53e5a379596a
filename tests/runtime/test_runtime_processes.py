"""What ranks agree on; how they find their places."""

import time

import pytest
import torch
from ranks import RankPool
from torch import distributed as dist

from memguard.errors import ConfigError, DataError, OtherRankFailed
from memguard.runtime import Runtime, detect_runtime, start_runtime


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


def _raise() -> None:
    raise DataError("none")


def test_places_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    # A cluster's own numbers: nobody has started ranks.
    assert detect_runtime().world_size == 1
    monkeypatch.setenv("LOCAL_RANK", "1")
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
