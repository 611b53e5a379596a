"""Every rank of a mesh creates the same groups and calls the same collectives, in one order.

What the ranks run, and what cannot be run on fake ranks, stands in `recorded_ranks`; what is
compared, in `collective_faults`.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from collective_faults import Fault, find_faults
from ranks import RankPool
from recorded_collectives import Call, Recording
from recorded_ranks import NUM_KV_HEADS, STAGES, Case, record_ranks

from memguard.parallel.mesh_shape import AXES

pytestmark = pytest.mark.slow

CASES = [
    # More ranks along x than key/value heads, which ranks then share.
    Case(degrees=(1, 1, 1, 4), samples=True),
    Case(degrees=(1, 3, 1, 1), fits=False),
    Case(degrees=(2, 1, 1, 2), order=("x", "z", "data", "y")),
    Case(degrees=(1, 1, 2, 1)),
]
MORE = [
    Case(degrees=(2, 1, 1, 1)),
    Case(degrees=(1, 2, 1, 1), is_bf16=False),
    Case(degrees=(2, 2, 1, 1), is_bf16=False, fits=False),
    Case(degrees=(1, 1, 2, 2), samples=True, is_bf16=False),
    Case(degrees=(1, 2, 2, 1)),
    Case(degrees=(1, 8, 1, 1), fits=False),
    Case(degrees=(2, 2, 1, 2)),
    Case(degrees=(1, 2, 2, 2), order=("y", "data", "x", "z"), fits=False),
]

Record = Callable[[Case], list[Recording]]


@pytest.fixture(scope="module")
def recordings_of(fresh_ranks: RankPool) -> Iterator[Record]:
    """Records a mesh, once, in one process for all meshes, whose default group is the fake one."""
    with fresh_ranks.keep() as kept:

        @functools.cache
        def record_once(case: Case) -> list[Recording]:
            (recordings,) = kept(record_ranks, 1, case)
            return recordings

        yield record_once


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in MORE)],
    ids=lambda case: case.name,
)
def test_all_ranks_do_the_same_in_one_order(recordings_of: Record, case: Case) -> None:
    recordings = recordings_of(case)
    assert [str(fault) for fault in find_faults(recordings, mesh=case.name)] == []
    for recording in recordings:
        check_complete(case, recording)


def check_complete(case: Case, recording: Recording) -> None:
    """Check that a rank has recorded every stage, over every axis."""
    sent = {stage: [call for call in recording.calls if call.stage == stage] for stage in STAGES}
    assert [stage for stage in STAGES if sent[stage]] == [
        stage for stage in STAGES if stage != "sampling" or case.samples
    ]
    groups = {call.group.description for call in sent["training"]}
    for axis, degree in zip(AXES, case.degrees, strict=True):
        # An axis of all ranks has the default group.
        name = "default_pg" if degree == case.num_ranks else f"mesh_{axis}"
        assert degree == 1 or name in groups, axis
    _, z, _, x = case.degrees
    assert ("mesh_kv_replicas" in groups) == (x > NUM_KV_HEADS)
    if z > 1:
        in_one_forward, in_look = (
            sum(call.operation == "allgather_base" for call in sent[stage])
            for stage in ("held-out", "budget")
        )
        # Documents are scored in one forward. Then all weights are gathered for each of three
        # tokens and, except the head's, for the four forwards that check the cache.
        without_head = in_one_forward - 1
        in_decoding = 3 * in_one_forward + 4 * without_head
        if case.fits:
            # Or once for the document that rank 0 continues from its pass, after a check of two
            # forwards and of what the root has for the first rows; and once for the others, because
            # a fake rank does not receive what other ranks have continued.
            num_decodings = 2 if case.degrees[0] * z > 2 else 1
            in_decoding = 2 * without_head + 1 + num_decodings * in_one_forward
        assert in_one_forward > 1
        assert in_look == in_one_forward + in_decoding


# -- what is found ---------------------------------------------------------------------------------

SMALL = Case(degrees=(1, 2, 2, 1))


def count_before(calls: Sequence[Call], place: int) -> int:
    """Return the index of a call among those of its group that are no messages."""
    return sum(call.group == calls[place].group and call.peer is None for call in calls[:place])


def find_call(recording: Recording, is_wanted: Callable[[Call], bool]) -> int:
    """Return the place of the third call of training that is wanted."""
    places = [
        place
        for place, call in enumerate(recording.calls)
        if call.stage == "training" and is_wanted(call)
    ]
    return places[2]


def edit(recordings: Sequence[Recording], rank: int, **changes: Any) -> list[Fault]:
    """Return the faults if one rank had recorded something else."""
    edited = [
        recording.copy(**(changes if recording.rank == rank else {})) for recording in recordings
    ]
    return find_faults(edited, mesh=SMALL.name)


def test_a_rank_that_skips_a_collective_is_found(recordings_of: Record) -> None:
    recordings = recordings_of(SMALL)
    calls = recordings[2].calls
    # The call after it, of the same group, is another one.
    place = find_call(
        recordings[2],
        lambda call: call.group.description == "mesh_z" and call.operation != "allgather_base",
    )
    index = count_before(calls, place)
    found = edit(recordings, 2, calls=[*calls[:place], *calls[place + 1 :]])
    (order,) = [fault for fault in found if fault.kind == "order"]
    assert (order.mesh, order.rank, order.group) == ("data=1 z=2 y=2 x=1", 2, "mesh_z [0, 2]")
    assert order.index >= index
    waiting = [fault for fault in found if fault.kind == "deadlock"]
    assert {fault.rank for fault in waiting} == {0, 1, 2, 3}, "each waits for the one before it"


def test_a_call_with_another_dtype_is_found(recordings_of: Record) -> None:
    recordings = recordings_of(SMALL)
    calls = list(recordings[1].calls)
    place = find_call(recordings[1], lambda call: call.group.description == "mesh_y")
    ((shape, dtype),) = calls[place].tensors
    calls[place] = replace(calls[place], tensors=((shape, "float64"),))
    (fault,) = edit(recordings, 1, calls=calls)
    index, operation, size = count_before(calls, place), calls[place].operation, list(shape)
    assert str(fault) == (
        f"mesh data=1 z=2 y=2 x=1, rank 1, group mesh_y [0, 1], index {index}: order: calls "
        f"{operation}(float64{size}) in training where others call {operation}({dtype}{size}) in "
        "training"
    )


def test_collectives_of_two_groups_in_another_order_are_a_deadlock(recordings_of: Record) -> None:
    recordings = recordings_of(SMALL)
    calls = list(recordings[3].calls)
    place = next(
        place
        for place, (one, other) in enumerate(itertools.pairwise(calls))
        if one.stage == other.stage == "training"
        and one.group != other.group
        and len({*one.group.ranks} & {*other.group.ranks}) > 1
    )
    calls[place : place + 2] = calls[place + 1], calls[place]
    found = edit(recordings, 3, calls=calls)
    assert {fault.kind for fault in found} == {"deadlock"}, "for each group the order is the same"
    (fault,) = [fault for fault in found if fault.rank == 3]
    index = sum(call.group == calls[place].group for call in calls[:place])
    assert (fault.group, fault.index) == (str(calls[place].group), index)


def test_groups_in_another_order_are_found(recordings_of: Record) -> None:
    recordings = recordings_of(SMALL)
    created = list(recordings[1].created)
    (z,) = [index for index, group in enumerate(created) if group.description == "mesh_z"]
    created[z], created[-1] = created[-1], created[z]
    found = [fault for fault in edit(recordings, 1, created=created) if fault.kind == "groups"]
    assert (found[0].rank, found[0].index) == (1, z)
    assert "where others create mesh_z" in found[0].text


def test_groups_with_other_members_are_found(recordings_of: Record) -> None:
    recordings = recordings_of(SMALL)
    created = [
        replace(group, ranks=(0, 3)) if group.description == "mesh_y" else group
        for group in recordings[0].created
    ]
    found = [fault for fault in edit(recordings, 0, created=created) if fault.kind == "groups"]
    # Rank 1 is in a group with rank 0, which is not in one with it.
    assert [fault.rank for fault in found] == [0, 1]


def test_a_message_that_is_not_received_is_found(recordings_of: Record) -> None:
    recordings = recordings_of(SMALL)
    calls = recordings[0].calls
    lost = replace(calls[-1], operation="send", peer=1)
    found = edit(recordings, 0, calls=[*calls, lost])
    (fault,) = [fault for fault in found if fault.kind == "messages"]
    assert fault.rank == 0
    assert any(fault.kind == "deadlock" for fault in found)


def test_a_rank_that_trains_in_another_way_is_found(recordings_of: Record) -> None:
    case = Case(degrees=(1, 1, 1, 2), has_step_only=True, odd_rank=1)
    found = find_faults(recordings_of(case), mesh=case.name)
    assert [(fault.kind, fault.rank) for fault in found] == [
        ("order", 1),
        ("deadlock", 0),
        ("deadlock", 1),
    ]
    order = found[0]
    assert (order.mesh, order.group) == ("data=1 z=1 y=1 x=2", "default_pg [0, 1]")
    # Others gather the input of a block, of which each has stored a part, to compute it again.
    assert "in training where others call all_gather_into_tensor" in order.text
