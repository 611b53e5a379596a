"""Collectives of fake ranks, recorded rank by rank, and what would go wrong if the ranks were real.

    recordings = []
    for rank in range(num_ranks):
        with record(num_ranks, rank, after=recordings) as recorded:
            ...                              the engine's own code; nothing is sent
        recordings.append(recorded)
    find_faults(recordings)                  groups, calls of each group, deadlock

Every group is one of torch's fake process group. A collective is blocking here: a rank is at its
next one until all members of the group are. Asynchronous ones (FSDP2 prefetches weights) begin in
the order of the host, on one stream for each group; if the ranks end when each begin blocks, they
end as well when only the wait does. The reverse does not hold, so this is the stricter rule.

Ranks run one after the other, so a collective cannot return what the others give. Sums and objects
that all ranks agree on by `torch.distributed` have the value of the first rank on every rank: what
is decided from them is decided alike, as in reality, and what a rank decides alone is not.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from memguard.simulation.fake_mesh import find_tensors


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
    """With its reduction, where torch shows it to a dispatch mode."""
    tensors: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Shape and dtype of each tensor; none of pickled objects."""
    peer: int | None = None
    """The other rank of a message, by its rank among all."""
    stage: str = field(default="", compare=False)
    """What the rank was doing."""

    def __str__(self) -> str:
        sizes = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in self.tensors)
        peer = "" if self.peer is None else f" with {self.peer}"
        return f"{self.operation}({sizes}){peer} in '{self.stage}'"


@dataclass(kw_only=True, slots=True)
class Recording:
    """What one rank has created and called, in order."""

    rank: int
    created: list[Group] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    stage: str = ""
    """What the rank does from now on."""
    agreed: dict[tuple[Group, int], Any] = field(default_factory=dict)
    """Results that all ranks share, by group and number of the call among these."""

    def copy(self, **changes: Any) -> "Recording":
        """Return a copy whose calls can be edited, without the results."""
        return replace(self, calls=list(self.calls), agreed={}, **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What a rank does otherwise than the other members of a group."""

    rank: int
    group: str
    index: int
    """Number of the group among those created, or of the call in the group, from 0."""
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank}, group {self.group}, index {self.index}: {self.text}"


@contextmanager
def record(
    num_ranks: int,
    rank: int,
    *,
    after: Sequence[Recording] = (),
    stand_in: Callable[[Any], Any] = lambda value: value,
) -> Iterator[Recording]:
    """Act as one of some ranks and record its groups and collectives.

    Args:
        num_ranks: number of ranks.
        rank: this one; rank 0 runs first.
        after: recordings of the ranks that ran before.
        stand_in: takes what the first rank gives, an object that is gathered or a tensor that is
            summed, and returns what each of the others could give, or what the sum could be.
    """
    recording = Recording(rank=rank)
    first = after[0].agreed if after else None
    watch = _Watch(recording, num_ranks, first, stand_in)
    with ExitStack() as stack:
        for module, name, stand in (
            (distributed_c10d, "_new_process_group_helper", watch.create),
            (dist, "all_gather_object", watch.gather_objects),
            (dist, "broadcast_object_list", watch.broadcast_objects),
        ):
            stack.enter_context(mock.patch.object(module, name, stand))
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.enter_context(watch)
        yield recording


class _Watch(TorchDispatchMode):
    """Sees the groups and the collectives of a rank."""

    def __init__(
        self,
        recording: Recording,
        num_ranks: int,
        first: dict[tuple[Group, int], Any] | None,
        stand_in: Callable[[Any], Any],
    ) -> None:
        super().__init__()
        self._recording, self._num_ranks = recording, num_ranks
        self._first, self._stand_in = first, stand_in
        self._groups: dict[str, Group] = {}
        self._num_created: Counter[tuple[int, ...]] = Counter()
        self._num_agreed: Counter[Group] = Counter()
        self._create = distributed_c10d._new_process_group_helper

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled here, and the guard takes a third of the time.

    # -- stand for functions of torch.distributed --------------------------------------------------

    def create(
        self, size: int, rank: int, ranks: list[int], _: Any, store: Any, name: str, **options: Any
    ) -> Any:
        members = tuple(ranks) or tuple(range(self._num_ranks))
        group = Group(
            ranks=members,
            description=options.get("group_desc") or "control",
            number=self._num_created[members],
        )
        self._num_created[members] += 1
        self._groups[name] = group
        self._recording.created.append(group)
        fake = dist.Backend("fake")
        return self._create(size, rank, ranks, fake, store, name, **options)

    def gather_objects(self, values: list[Any], value: Any, group: Any = None) -> None:
        found = self._find(group)
        self._note(Call(group=found, operation="all_gather_object"))
        others = [self._stand_in(value)] * len(values)
        values[:] = self._agree(found, others)

    def broadcast_objects(
        self, values: list[Any], src: int | None = None, group: Any = None
    ) -> None:
        assert src == 0, "the rank that runs first is the one that has the objects"
        found = self._find(group)
        self._note(Call(group=found, operation="broadcast_object_list"))
        values[:] = self._agree(found, list(values))

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
        names = [arg.name for arg in operation._schema.arguments]
        words = [one for one in given if isinstance(one, str) and one not in self._groups]
        peers = [one for key, one in zip(names, given, strict=False) if key in ("dst", "src")]
        tensors = list(find_tensors(given))
        self._note(
            Call(
                group=group,
                operation=" ".join([name.strip("_"), *words]),
                tensors=tuple((tuple(t.shape), str(t.dtype).split(".")[1]) for t in tensors),
                peer=group.ranks[peers[0]] if peers else None,
            )
        )
        # Of the functional ones only sums of losses and gradients are over all ranks.
        if name == "allreduce_" and len(group.ranks) == self._num_ranks:
            values = self._agree(group, [self._stand_in(tensor.clone()) for tensor in tensors])
            for tensor, value in zip(tensors, values, strict=True):
                if tensor.shape == value.shape:
                    tensor.copy_(value)

    def _find_given(self, value: Any) -> Group | None:
        if isinstance(value, str):
            return self._groups.get(value)
        if isinstance(value, torch.ScriptObject):
            try:
                return self._groups[dist.ProcessGroup.unbox(value).group_name]
            except RuntimeError:  # Another object, such as the reduction operation.
                return None
        return None

    def _find(self, group: Any) -> Group:
        return self._groups[(group or dist.group.WORLD).group_name]

    def _note(self, call: Call) -> None:
        self._recording.calls.append(replace(call, stage=self._recording.stage))

    def _agree(self, group: Group, own: list[Any]) -> list[Any]:
        """Return the results that the first rank had, or keep these if this is the first."""
        key = group, self._num_agreed[group]
        self._num_agreed[group] += 1
        if self._first is None:
            self._recording.agreed[key] = own
            return own
        found: list[Any] = self._first.get(key, own)
        return found if len(found) == len(own) else own


# -- checks ----------------------------------------------------------------------------------------


def find_faults(recordings: Sequence[Recording]) -> list[Fault]:
    """Return what some ranks, all that there are in their order, do otherwise than others."""
    return [
        *_find_group_faults(recordings),
        *_find_order_faults(recordings),
        *_find_message_faults(recordings),
        *_find_deadlock(recordings),
    ]


def _find_group_faults(recordings: Sequence[Recording]) -> Iterator[Fault]:
    """Compare the groups: the n-th has the same purpose on all ranks, members agree on members.

    NCCL splits the communicator of all ranks for each group, so that all must create one at once.
    """
    for index in range(max(len(recording.created) for recording in recordings)):
        groups = [_get(recording.created, index) for recording in recordings]
        usual = _most_common([None if group is None else group.description for group in groups])
        for recording, group in zip(recordings, groups, strict=True):
            name = "missing" if group is None else group.description
            if group is None or group.description != usual:
                text = f"creates {name} where others create {usual}"
                yield Fault(rank=recording.rank, group=str(usual), index=index, text=text)
            elif any(groups[member] != group for member in group.ranks):
                text = "its members do not create the same group at the same time"
                yield Fault(rank=recording.rank, group=str(group), index=index, text=text)


def _find_order_faults(recordings: Sequence[Recording]) -> Iterator[Fault]:
    """Compare the calls of each group; the first that differs on a rank is a fault."""
    calls: dict[Group, dict[int, list[Call]]] = {}
    for recording in recordings:
        for group in recording.created:
            calls.setdefault(group, {})[recording.rank] = []
        for call in recording.calls:
            if call.peer is None:
                calls[call.group][recording.rank].append(call)
    for group, of_rank in calls.items():
        faulty: set[int] = set()
        for index in range(max(map(len, of_rank.values()))):
            usual = _most_common(
                [_get(of, index) for rank, of in of_rank.items() if rank not in faulty]
            )
            for rank in of_rank.keys() - faulty:
                own = _get(of_rank[rank], index)
                if own != usual:
                    faulty.add(rank)
                    text = f"calls {own or 'nothing'} where others call {usual or 'nothing'}"
                    yield Fault(rank=rank, group=str(group), index=index, text=text)


def _find_message_faults(recordings: Sequence[Recording]) -> Iterator[Fault]:
    """Compare what each rank sends to another with what that one receives from it."""
    sent: dict[tuple[Group, int, int], list[Call]] = {}
    received: dict[tuple[Group, int, int], list[Call]] = {}
    for recording in recordings:
        for call in recording.calls:
            if call.peer is not None and call.operation == "send":
                sent.setdefault((call.group, recording.rank, call.peer), []).append(call)
            elif call.peer is not None:
                received.setdefault((call.group, call.peer, recording.rank), []).append(call)
    for group, source, target in dict.fromkeys([*sent, *received]):
        key = group, source, target
        given, taken = sent.get(key, []), received.get(key, [])
        for index in range(max(len(given), len(taken))):
            one, other = _get(given, index), _get(taken, index)
            if one is None or other is None or one.tensors != other.tensors:
                text = f"{one or 'nothing'} to {target}, which calls {other or 'nothing'}"
                yield Fault(rank=source, group=str(group), index=index, text=text)
                break


def _find_deadlock(recordings: Sequence[Recording]) -> Iterator[Fault]:
    """Let all ranks run, each blocked at its next call until its members are at the same one."""
    places = [0] * len(recordings)

    def find_next(rank: int) -> Call | None:
        return _get(recordings[rank].calls, places[rank])

    ready = list(range(len(recordings)))
    while ready:
        rank = ready.pop()
        call = find_next(rank)
        if call is None:
            continue
        members = call.group.ranks if call.peer is None else (rank, call.peer)
        if all(_meets(call, rank, find_next(member), member) for member in members):
            for member in members:
                places[member] += 1
            ready = [*dict.fromkeys([*ready, *members])]
    for rank, recording in enumerate(recordings):
        call = find_next(rank)
        if call is not None:
            before = recording.calls[: places[rank]]
            index = sum(one.group == call.group for one in before)
            text = f"waits for ever in {call}"
            yield Fault(rank=rank, group=str(call.group), index=index, text=text)


def _meets(call: Call, rank: int, other: Call | None, member: int) -> bool:
    """Return whether what a member is at ends the wait of a rank for it."""
    if other is None or other.group != call.group:
        return False
    if call.peer is None or member == rank:
        return other.operation == call.operation
    return other.peer == rank and {call.operation, other.operation} == {"send", "recv"}


def _get(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _most_common(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
