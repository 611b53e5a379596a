"""What would go wrong if recorded ranks were real: other groups, other calls, a deadlock.

    groups      the n-th group has the same purpose on all ranks; its members agree on its members
    order       for each group, all members call the same: operation, shapes, dtypes
    messages    what a rank sends to another is what that one receives from it, in order
    deadlock    all ranks run; each blocks at its next call until the members of its group are there

A collective blocks its rank, also one that the engine waits for later: FSDP2 begins to gather the
weights of the next block while the current one computes. Collectives of one group begin in the
order of their calls, on NCCL's stream for it. Where no rank has to wait for ever although each call
blocks, none has to if it blocks later. The reverse does not hold, so this is the stricter rule: a
fault can be an order that works as long as enough kernels run at the same time, which NCCL does not
promise.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from recorded_collectives import Call, Group, Recording

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What one rank does otherwise than the other members of a group."""

    mesh: str
    rank: int
    group: str
    index: int
    """Number of the group among those that the rank creates, or of the call among those of the
    group, or of the message among those to the same rank; from 0."""
    kind: str
    text: str

    def __str__(self) -> str:
        place = f"mesh {self.mesh}, rank {self.rank}, group {self.group}, index {self.index}"
        return f"{place}: {self.kind}: {self.text}"


def find_faults(recordings: Sequence[Recording], *, mesh: str) -> list[Fault]:
    """Return the faults of some ranks.

    Args:
        recordings: of all ranks, in their order.
        mesh: its name in the faults.
    """
    return [
        *_find_group_faults(recordings, mesh),
        *find_order_faults(recordings, mesh),
        *_find_message_faults(recordings, mesh),
        *_find_deadlock(recordings, mesh),
    ]


def _find_group_faults(recordings: Sequence[Recording], mesh: str) -> Iterator[Fault]:
    """Compare the groups. NCCL splits one communicator, so all ranks create each at one time."""
    for index in range(max(len(recording.created) for recording in recordings)):
        groups = [_get(recording.created, index) for recording in recordings]
        usual = _most_common([group and group.description for group in groups])
        for recording, group in zip(recordings, groups, strict=True):
            place = {"mesh": mesh, "rank": recording.rank, "index": index, "kind": "groups"}
            if group is None or group.description != usual:
                text = f"creates {group or 'nothing'} where others create {usual or 'nothing'}"
                yield Fault(group=str(group or usual), text=text, **place)
            elif any(groups[member] != group for member in group.ranks):
                yield Fault(group=str(group), text="its members create another one", **place)


def find_order_faults(recordings: Sequence[Recording], mesh: str) -> Iterator[Fault]:
    """Compare the calls of each group; the first that differs on a rank is its fault.

    Args:
        recordings: of some ranks.
        mesh: its name in the faults.
    """
    calls: dict[Group, dict[int, list[Call]]] = {}
    for recording in recordings:
        for group in recording.created:
            calls.setdefault(group, {})[recording.rank] = []
        for call in recording.calls:
            if call.peer is None:
                calls.setdefault(call.group, {}).setdefault(recording.rank, []).append(call)
    for group, calls_of in calls.items():
        compared = dict(calls_of)
        for index in range(max(map(len, calls_of.values()))):
            usual = _most_common([_get(of_rank, index) for of_rank in compared.values()])
            for rank in list(compared):
                own = _get(compared[rank], index)
                if own == usual:
                    continue
                del compared[rank]
                yield Fault(
                    mesh=mesh,
                    rank=rank,
                    group=str(group),
                    index=index,
                    kind="order",
                    text=f"calls {own or 'nothing'} where others call {usual or 'nothing'}",
                )


def _find_message_faults(recordings: Sequence[Recording], mesh: str) -> Iterator[Fault]:
    """Compare what ranks send with what is received; the first that differs is the fault."""
    sent: dict[tuple[Group, int, int], list[Call]] = {}
    received: dict[tuple[Group, int, int], list[Call]] = {}
    for recording in recordings:
        for call in recording.calls:
            if call.peer is None:
                continue
            if call.operation == "send":
                sent.setdefault((call.group, recording.rank, call.peer), []).append(call)
            else:
                received.setdefault((call.group, call.peer, recording.rank), []).append(call)
    for group, source, target in dict.fromkeys([*sent, *received]):
        ours, theirs = (calls.get((group, source, target), []) for calls in (sent, received))
        for index in range(max(len(ours), len(theirs))):
            one, other = _get(ours, index), _get(theirs, index)
            if one is None or other is None or one.tensors != other.tensors:
                text = f"calls {one or 'nothing'}, and rank {target} calls {other or 'nothing'}"
                place = {"mesh": mesh, "rank": source, "group": str(group), "index": index}
                yield Fault(kind="messages", text=text, **place)
                break


def _find_deadlock(recordings: Sequence[Recording], mesh: str) -> Iterator[Fault]:
    """Let the ranks run until they have ended or none can go on."""
    places = [0] * len(recordings)

    def find_next(rank: int) -> Call | None:
        return _get(recordings[rank].calls, places[rank])

    ready = [recording.rank for recording in recordings]
    while ready:
        rank = ready.pop()
        call = find_next(rank)
        if call is None:
            continue
        members = call.group.ranks if call.peer is None else (rank, call.peer)
        if all(_meets(call, rank, find_next(member), member) for member in members):
            for member in members:
                places[member] += 1
            # A rank that waits for one of these runs again when that one arrives.
            ready = [*dict.fromkeys([*ready, *members])]
    for rank, recording in enumerate(recordings):
        call = find_next(rank)
        if call is not None:
            earlier = recording.calls[: places[rank]]
            yield Fault(
                mesh=mesh,
                rank=rank,
                group=str(call.group),
                index=sum(other.group == call.group for other in earlier),
                kind="deadlock",
                text=f"waits in {call}",
            )


def _meets(call: Call, rank: int, other: Call | None, member: int) -> bool:
    """Return whether the call at which a member is ends the wait of a rank for that member."""
    if other is None or other.group != call.group:
        return False
    if member == rank:
        return True
    if call.peer is None:
        return other.operation == call.operation
    return other.peer == rank and {call.operation, other.operation} == {"send", "recv"}


def _get(values: Sequence[T], index: int) -> T | None:
    return values[index] if index < len(values) else None


def _most_common(values: Sequence[T]) -> T:
    return Counter(values).most_common(1)[0][0]
