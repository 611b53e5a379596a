"""Process groups and collectives of one fake rank, in the order in which it calls them.

    recordings: list[Recording] = []
    for rank in range(num_ranks):
        with record(num_ranks, rank, after=recordings) as recording:
            ...                              the engine's own code
        recordings.append(recording)
    find_faults(recordings, mesh="...")      see `collective_faults`

All groups are torch's fake ones: nothing is sent, nothing waits, and the ranks run one after the
other. Tensors have values, but what a rank receives are copies of what it sends. Results on which
all ranks base decisions (`Runtime.agree_max`, `gather_objects` and the like) are those of rank 0 on
every rank, so that all ranks take the same decisions from them. A decision from any other value is
the rank's own, and the calls that follow from it differ, as they could in reality.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from fake_mesh import find_tensors
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A process group."""

    ranks: tuple[int, ...]
    """Its members, by their rank among all."""
    description: str
    number: int
    """Number of groups with the same members that were created before."""

    def __str__(self) -> str:
        return f"{self.description} {list(self.ranks)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A collective as one rank calls it, or a message to or from one other rank."""

    group: Group
    operation: str
    """With its reduction where it is an argument that torch shows, as in functional collectives."""
    tensors: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Shape and dtype of each tensor; none for pickled objects."""
    peer: int | None = None
    """The other rank of a message, by its rank among all."""
    stage: str = field(default="", compare=False)
    """What the rank was doing."""

    def __str__(self) -> str:
        sizes = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in self.tensors)
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return f"{self.operation}({sizes}){peer} in {self.stage}"


Agreed = dict[tuple[Call, int], list[Any]]
"""Results on which all ranks agree, by call and number of that call among its equals."""


@dataclass(kw_only=True, slots=True)
class Recording:
    """The groups and calls of one rank."""

    rank: int
    created: list[Group] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    stage: str = "setup"
    """What the rank does from now on."""
    agreed: Agreed = field(default_factory=dict)
    """Results of rank 0 that all ranks get."""

    def copy(self, **changes: Any) -> "Recording":
        """Return a copy without the results, with some fields replaced."""
        return replace(self, **{"calls": list(self.calls), "agreed": {}, **changes})


@contextmanager
def record(
    num_ranks: int,
    rank: int,
    *,
    after: Sequence[Recording] = (),
    stand_in: Callable[[Any], Any] = lambda value: value,
) -> Iterator[Recording]:
    """Act as one of some ranks, and record what it creates and calls.

    An existing process group is destroyed.

    Args:
        num_ranks: number of ranks.
        rank: this one; rank 0 runs first.
        after: recordings of the ranks that ran before.
        stand_in: takes what rank 0 contributes, an object that is gathered or a tensor that is
            summed, and returns what every rank could contribute, or what the sum could be.
    """
    recording = Recording(rank=rank)
    watch = _Watch(recording, num_ranks, after[0].agreed if after else None, stand_in)
    if dist.is_initialized():
        dist.destroy_process_group()
    with ExitStack() as stack:
        for module, name, function in (
            (distributed_c10d, "_new_process_group_helper", watch.create),
            (dist, "all_gather_object", watch.gather_objects),
            (dist, "broadcast_object_list", watch.broadcast_objects),
        ):
            stack.enter_context(mock.patch.object(module, name, function))
        dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.enter_context(watch)
        yield recording


class _Watch(TorchDispatchMode):
    """Sees each group that a rank creates and each operator that it calls."""

    def __init__(
        self,
        recording: Recording,
        num_ranks: int,
        first: Agreed | None,
        stand_in: Callable[[Any], Any],
    ) -> None:
        super().__init__()
        self._recording, self._num_ranks = recording, num_ranks
        self._first, self._stand_in = first, stand_in
        self._groups: dict[str, Group] = {}
        self._num_created: Counter[tuple[int, ...]] = Counter()
        self._num_agreed: Counter[Call] = Counter()
        self._create = distributed_c10d._new_process_group_helper

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled, and the guard would take a third of the time.

    # -- functions of torch.distributed ------------------------------------------------------------

    def create(
        self, size: int, rank: int, ranks: list[int], _: Any, store: Any, name: str, **options: Any
    ) -> Any:
        """Create a fake group, whatever its backend was to be."""
        members = tuple(ranks) or tuple(range(self._num_ranks))
        group = Group(
            ranks=members,
            # The engine describes its groups except the one of `Runtime`.
            description=options.get("group_desc") or "control",
            number=self._num_created[members],
        )
        self._num_created[members] += 1
        self._groups[name] = group
        self._recording.created.append(group)
        return self._create(size, rank, ranks, dist.Backend("fake"), store, name, **options)

    def gather_objects(self, values: list[Any], value: Any, group: Any = None) -> None:
        call = Call(group=self._find(group), operation="all_gather_object")
        self._note(call)
        values[:] = self._agree(call, [self._stand_in(value)] * len(values))

    def broadcast_objects(
        self, values: list[Any], src: int | None = None, group: Any = None
    ) -> None:
        assert src == 0, "only rank 0, which runs first, has something to send"
        call = Call(group=self._find(group), operation="broadcast_object_list")
        self._note(call)
        values[:] = self._agree(call, list(values))

    # -- operators ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.namespace in ("c10d", "_c10d_functional"):
            self._see(operation, [*args, *(kwargs or {}).values()])
        return result

    def _see(self, operation: Any, given: list[Any]) -> None:
        name = operation._schema.name.split("::")[1]
        if name == "wait_tensor":
            return
        group = next(filter(None, map(self._find_given, given)))
        words = [value for value in given if isinstance(value, str) and value not in self._groups]
        names = [argument.name for argument in operation._schema.arguments]
        peers = [value for key, value in zip(names, given, strict=False) if key in ("dst", "src")]
        tensors = list(find_tensors(given))
        call = Call(
            group=group,
            operation=" ".join([name.strip("_"), *words]),
            tensors=tuple((tuple(t.shape), str(t.dtype).split(".")[1]) for t in tensors),
            peer=group.ranks[peers[0]] if peers else None,
        )
        self._note(call)
        # `Runtime` agrees by this operator, with these dtypes; gradients have others.
        is_agreed = all(tensor.dtype in (torch.int64, torch.float64) for tensor in tensors)
        if name == "allreduce_" and is_agreed and len(group.ranks) == self._num_ranks:
            agreed = self._agree(call, [self._stand_in(tensor.clone()) for tensor in tensors])
            for tensor, value in zip(tensors, agreed, strict=True):
                tensor.copy_(value)

    def _find_given(self, value: Any) -> Group | None:
        if isinstance(value, str):
            return self._groups.get(value)
        if isinstance(value, torch.ScriptObject):
            try:
                return self._groups[dist.ProcessGroup.unbox(value).group_name]
            except RuntimeError:  # Another object, such as the reduction.
                return None
        return None

    def _find(self, group: Any) -> Group:
        return self._groups[(group or dist.group.WORLD).group_name]

    def _note(self, call: Call) -> None:
        self._recording.calls.append(replace(call, stage=self._recording.stage))

    def _agree(self, call: Call, own: list[Any]) -> list[Any]:
        """Return the results that rank 0 had; on rank 0, or where it made no such call, these."""
        key = call, self._num_agreed[call]
        self._num_agreed[call] += 1
        if self._first is None:
            self._recording.agreed[key] = own
            return own
        return self._first.get(key, own)
