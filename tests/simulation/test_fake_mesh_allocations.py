"""Memory followed operation by operation: peaks by hand, of fake tensors and real ones."""

import torch
from ranks import RankPool
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from memguard.parallel.mesh_shape import MeshShape
from memguard.simulation.fake_mesh import Allocations, observe, simulated_mesh


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
