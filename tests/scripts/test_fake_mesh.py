"""One rank without the others: fake groups that are ended, and tensors without values."""

from typing import Any

import pytest
import torch
import transformers
from fake_mesh import Allocations, SentCollectives, find_tensors, observe, simulated_mesh
from ranks import RankPool
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from memguard.parallel.collectives import all_gather, all_reduce, start_all_reduce, wait
from memguard.parallel.mesh_shape import AXES, MeshShape

pytestmark = pytest.mark.slow


class Names:
    """Remembers which operations were seen."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def see(self, operation: Any, given: list[Any], result: Any) -> None:
        self.seen.append(operation._schema.name)


def test_tensors_have_shapes_and_every_number_is_one() -> None:
    with observe():
        zeros = torch.zeros(3, 2)
        assert isinstance(zeros, FakeTensor)
        assert zeros.shape == (3, 2)
        assert zeros.device == torch.device("cpu")
        number = zeros.sum().item()
        assert number == 1.0
        assert isinstance(number, float)
        count = torch.zeros(3, dtype=torch.int64).sum().item()
        assert count == 1
        assert isinstance(count, int)
        assert bool(zeros.any())
        assert float(zeros.norm()) == 1.0
    assert not isinstance(torch.zeros(3), FakeTensor)


def test_terabytes_take_no_memory() -> None:
    with observe():
        assert (torch.zeros(10**6, 10**6) + 1).numel() == 10**12


def test_observers_see_each_operation_in_turn() -> None:
    one, other = Names(), Names()
    with observe(one, other):
        torch.zeros(3).add_(1)
    assert one.seen == other.seen == ["aten::zeros", "aten::add_"]


def test_tensors_are_found_in_what_operations_give() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [t.numel() for t in find_tensors([a, (b, [c, None, 7]), "text"])] == [1, 2, 3]


# -- groups: in a process of their own, because each ends the one before ---------------------------


def look_from(rank: int, shape: MeshShape) -> tuple[bool, int, dict[str, int], bool]:
    had_group = dist.is_initialized()
    with simulated_mesh(shape, rank) as mesh:
        world_size = dist.get_world_size()
        places = {axis: mesh.axis(axis).rank for axis in AXES}
    return had_group, world_size, places, dist.is_initialized()


def test_a_rank_of_many_ends_the_group_before_it_and_its_own(ranks: RankPool) -> None:
    # x fastest: 8 x 1 + 4 x 0 + 2 x 1 + 1.
    (seen,) = ranks(look_from, 1, 11, MeshShape(data=64, z=2, y=2, x=2))
    assert seen == (True, 512, {"data": 1, "z": 0, "y": 1, "x": 1}, False)


def fail_inside() -> tuple[str, bool, int]:
    try:
        with simulated_mesh(MeshShape(x=2)):
            raise ValueError("inside")
    except ValueError as error:
        said = str(error)
    was_ended = not dist.is_initialized()
    with simulated_mesh(MeshShape(x=4)):
        return said, was_ended, dist.get_world_size()


def test_a_group_is_ended_after_an_error_too(ranks: RankPool) -> None:
    assert ranks(fail_inside, 1) == [("inside", True, 4)]


CONFIG = transformers.AutoConfig.for_model(
    "llama", num_attention_heads=4, num_key_value_heads=2, head_dim=4, hidden_size=16
)


def send() -> tuple[dict[Any, int], bool, tuple[int, ...]]:
    with simulated_mesh(MeshShape(data=2, z=2, y=2, x=4)) as mesh:
        sent = SentCollectives(mesh, CONFIG)
        with observe(sent):
            started = start_all_reduce(torch.zeros(5), mesh.axis("x"))
            waited = wait(started)
            is_same = waited is started
            all_reduce(torch.zeros(5, dtype=torch.bfloat16), mesh.axis("y"))
            gathered = all_gather(torch.zeros(3), mesh.axis("z"))
            all_gather(torch.zeros(3), mesh.kv_replicas(2))
            dist.all_reduce(torch.zeros(1, dtype=torch.float64))

            class Sum(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
                    return tensor * 2

                @staticmethod
                def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                    return all_reduce(grad, mesh.axis("data"))

            Sum.apply(torch.zeros(7, requires_grad=True)).sum().backward()
        return dict(sent.calls), is_same, tuple(gathered.shape)


def test_collectives_are_counted_by_phase_axis_and_payload(ranks: RankPool) -> None:
    ((calls, is_same, gathered),) = ranks(send, 1)
    assert calls == {
        ("forward", "x", "all_reduce", 20): 1,
        ("forward", "y", "all_reduce", 10): 1,
        # The payload is the larger buffer, what has been gathered.
        ("forward", "z", "all_gather", 24): 1,
        ("forward", "kv_replicas", "all_gather", 24): 1,
        ("update", "world", "all_reduce", 8): 1,
        ("backward", "data", "all_reduce", 28): 1,
    }
    assert is_same, "as of real tensors"
    assert gathered == (6,)


def test_the_peak_of_a_few_operations() -> None:
    memory = Allocations()
    with observe(memory):
        a = torch.zeros(100)
        assert memory.current_bytes == 400
        b = a + 1
        c = b.to(torch.bfloat16)
        assert memory.current_bytes == 400 + 400 + 200
        del a, b
        assert memory.current_bytes == 200
        d = c * 2
        assert memory.current_bytes == 400
    assert memory.peak_bytes == 1000
    assert memory.peak_origins == {"aten::zeros": 400, "aten::add": 400, "aten::_to_copy": 200}
    del c, d
    assert memory.current_bytes == 0
    assert memory.peak_bytes == 1000


def test_views_and_operations_in_place_take_nothing() -> None:
    memory = Allocations()
    with observe(memory):
        a = torch.zeros(10, 10)
        shown = [a.view(100), a.T, a[2:], a.detach(), *a.split(5), a.expand(3, 10, 10)]
        a.add_(1).mul_(2)
        assert memory.current_bytes == memory.peak_bytes == 400
        # A view keeps what it shows.
        del a
        assert memory.current_bytes == 400
        shown.clear()
        assert memory.current_bytes == 0


def test_every_result_of_an_operation_counts() -> None:
    memory = Allocations()
    with observe(memory):
        values, places = torch.zeros(8).topk(2)
        # Two numbers of 4 bytes, two places of 8; what topk was given is gone.
        assert memory.current_bytes == 2 * 4 + 2 * 8
        assert memory.peak_bytes == 8 * 4 + 2 * 4 + 2 * 8
    del values, places
    assert memory.current_bytes == 0


def test_what_backward_keeps() -> None:
    memory = Allocations()
    with observe(memory):
        weight = torch.zeros(100, requires_grad=True)
        result = (weight * weight).exp().sum()
        # The weight, what exp gave, and the sum; the product is not needed again.
        assert memory.current_bytes == 400 + 400 + 4
        result.backward()
        assert weight.grad is not None
        # The gradient in place of what exp gave.
        assert memory.current_bytes == 400 + 400 + 4


def test_a_storage_that_is_resized_is_followed() -> None:
    memory = Allocations()
    with memory.following_resizes():
        real = torch.zeros(100)
        memory.add(real, "weights")
        assert memory.current_bytes == 400
        real.untyped_storage().resize_(0)
        assert memory.current_bytes == 0
        real.untyped_storage().resize_(400)
        # One that nobody has told of.
        torch.zeros(7).untyped_storage().resize_(280)
        assert memory.current_bytes == memory.peak_bytes == 400
    resize = torch.UntypedStorage.resize_
    real.untyped_storage().resize_(0)
    assert memory.current_bytes == 400, "outside it is not"
    assert resize is torch.UntypedStorage.resize_


def test_fake_storages_that_are_resized_are_followed() -> None:
    memory = Allocations()
    with memory.following_resizes(), observe(memory):
        fake = torch.zeros(100)
        fake.untyped_storage().resize_(0)
        assert memory.current_bytes == 0
        fake.untyped_storage().resize_(400)
        assert memory.current_bytes == 400


def test_real_tensors_are_followed_until_they_are_freed() -> None:
    memory = Allocations()
    a, b = torch.zeros(10), torch.zeros(20)
    for _ in range(2):  # A storage counts once.
        memory.add(a, "a")
    memory.add(a.view(2, 5), "a view")
    memory.add(b, "b")
    assert memory.current_bytes == 120
    del a
    assert memory.current_bytes == 80
    assert memory.peak_bytes == 120
    assert memory.peak_origins == {"a": 40, "b": 80}


def test_a_new_peak_after_the_old_one() -> None:
    memory = Allocations()
    with observe(memory):
        kept = torch.zeros(100)
        torch.zeros(1000)
        assert memory.peak_bytes == 4400
        memory.reset_peak()
        more = kept + 1
    assert memory.peak_bytes == 800
    assert memory.peak_origins == {"aten::zeros": 400, "aten::add": 400}
    del more


def count_dtensor() -> int:
    with simulated_mesh(MeshShape(x=4)) as mesh:
        memory = Allocations()
        local: Tensor = torch.zeros(6)
        parameter = DTensor.from_local(
            local, mesh.tensor_mesh, [Replicate(), Replicate()], run_check=False
        )
        memory.add(parameter, "weights")
        memory.add(local, "weights")
        return memory.current_bytes


def test_of_a_dtensor_its_local_tensor_counts(ranks: RankPool) -> None:
    assert ranks(count_dtensor, 1) == [24]
