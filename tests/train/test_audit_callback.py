"""Audits during training: what counts as learnt, what a budget does about it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from record_examples import make_entry

from memguard.config import BudgetConfig
from memguard.mitigation.k_schedule import KSchedule, build_k_schedule
from memguard.records import ManifestEntry, ResultRow, Role, WatchedLine
from memguard.train.audit_callback import MemorizationMonitor, MemorizationSnapshot, Sample

EXTRACTED = 0.9
"""Share of right tokens from which on these made-up documents are extracted."""
ROLES: dict[str, Role] = {"control": "control", "background": "background"}


def entry(index: int, bucket: str, cluster: int | None = None) -> ManifestEntry:
    return make_entry(
        f"d{index}",
        bucket=bucket,
        role=ROLES.get(bucket, "trained"),
        planned_repetitions=0 if bucket == "control" else 4,
        cluster=index if cluster is None else cluster,
    )


# Two of the control, four of x4 in the sample, four more that nobody asks about.
MANIFEST = [entry(i, "control" if i < 2 else "x4") for i in range(10)]
DOCUMENTS = np.arange(6)


def recited(shares: Sequence[float]) -> MemorizationSnapshot:
    share_N = np.array(shares)
    return MemorizationSnapshot(
        token_accuracy_N=share_N, verbatim_N=share_N == 1, near_verbatim_N=share_N >= EXTRACTED
    )


class Story:
    """A model that gives back what the story says, audit by audit."""

    def __init__(self, *steps: Sequence[float]) -> None:
        self._logit_transforms = iter(steps)

    def __call__(self) -> MemorizationSnapshot:
        return recited([0.2, 0.2, *next(self._logit_transforms)])


def make(
    *steps: Sequence[float], manifest: Sequence[ManifestEntry] = MANIFEST, **budget: Any
) -> tuple[MemorizationMonitor, KSchedule]:
    k_schedule = build_k_schedule([], manifest, can_tighten=True, special_ids=[])
    sample = Sample(document_N=DOCUMENTS, sha256="", ask=Story(*steps))
    config = BudgetConfig(**budget) if budget else None
    return MemorizationMonitor(
        sample, manifest, k_schedule, every_steps=5, budget=config
    ), k_schedule


def row_of(line: WatchedLine, metric: str, bucket: str = "x4") -> ResultRow:
    (row,) = (row for row in line.results if (row.metric, row.bucket) == (metric, bucket))
    assert row.step == line.step
    return row


def levels(k_schedule: KSchedule) -> list[int]:
    found: NDArray[np.int8] = k_schedule.level_of
    return found.tolist()


def audit_each(
    *steps: Sequence[float], **budget: Any
) -> tuple[WatchedLine, MemorizationMonitor, list[list[int]]]:
    """Audit before training and every five steps; also return the levels after each audit."""
    monitor, k_schedule = make(*steps, **budget)
    seen = []
    for number in range(len(steps)):
        line = monitor.audit(5 * number)
        seen.append(levels(k_schedule))
    return line, monitor, seen


def test_what_came_back_before_training_is_not_learnt() -> None:
    monitor, _ = make([0.95, 0.2, 0.2, 0.2], [1.0, 0.92, 0.2, 0.2])
    before, after = monitor.audit(0), monitor.audit(5)
    assert dict.fromkeys(row.bucket for row in after.results) == dict.fromkeys(("control", "x4"))
    assert after.trained == ["x4"]
    control = row_of(after, "learned", "control")
    assert (control.num_documents, control.num_matched) == (2, 0)
    rates = [row_of(after, name).num_matched for name in ("near_verbatim", "verbatim", "learned")]
    assert rates == [2, 1, 1]
    assert row_of(after, "token_accuracy").value == pytest.approx((1 + 0.92 + 0.4) / 4)
    assert row_of(before, "learned").num_matched == 0
    assert (after.over_limit, after.step) == ([], 5)


def test_documents_halfway_there_go_up_a_rung_each_time() -> None:
    # From 0.2, halfway to 0.9 is 0.55.
    found, _, seen = audit_each(
        [0.2] * 4, [0.54, 0.56, 0.2, 0.2], [0.2, 0.6, 0.2, 0.2], limit=0.5, action="tighten"
    )
    assert not any(seen[0])
    assert seen[1:] == [[0, 0, 0, up, 0, 0, 0, 0, 0, 0] for up in (1, 2)]
    assert found.num_tightened == {"control": 0, "x4": 1}


@pytest.mark.parametrize(
    ("metric", "before", "after"),
    [
        ("near_verbatim", 0.5, 0.7),
        ("verbatim", 0.5, 0.75),
        # Exactly halfway to 90 % in tokens, of 50 and of 20, but not in floating point.
        ("near_verbatim", 13 / 50, 29 / 50),
        ("near_verbatim", 16 / 20, 17 / 20),
    ],
)
def test_exactly_halfway_goes_up(metric: str, before: float, after: float) -> None:
    # One token of a thousand less does not.
    shares = [after, after - 0.001, before, before]
    _, _, seen = audit_each([before] * 4, shares, metric=metric, limit=0.5, action="tighten")
    assert seen[-1] == [0, 0, 1, *[0] * 7]


@pytest.mark.parametrize(
    ("steps", "budget", "expected"),
    [
        # Near-verbatim before training, and nothing has changed; from 0.2, halfway to 1 is 0.6.
        (
            [[0.96, 0.2, 0.2, 0.2], [0.96, 0.58, 0.62, 0.2]],
            {"metric": "verbatim"},
            [0, 0, 0, 0, 1, 0, 0, 0, 0, 0],
        ),
        # Documents that nobody asks about follow the sample,
        ([[0.2] * 4, [0.6, 0.6, 0.6, 0.2]], {}, [0, 0, 1, 1, 1, 0, 1, 1, 1, 1]),
        # and stay where it stays.
        ([[0.2] * 4, [0.6] * 4, [0.2] * 4, [0.2] * 4], {}, [0, 0, *[1] * 8]),
        # What was known before is not tightened.
        ([[1.0] * 4, [1.0] * 4], {"limit": 0.0}, [0] * 10),
    ],
    ids=["the budget's metric", "others follow", "all stay", "known before"],
)
def test_levels(steps: list[list[float]], budget: dict[str, Any], expected: list[int]) -> None:
    found, _, seen = audit_each(*steps, **{"limit": 0.5, "action": "tighten", **budget})
    assert seen[-1] == expected
    assert found.over_limit == []


def test_after_the_last_step_nothing_is_moved() -> None:
    monitor, k_schedule = make([0.2] * 4, [0.6] * 4, limit=0.5, action="tighten")
    monitor.audit(0)
    assert monitor.audit(5, is_last=True).num_tightened == {"control": 0, "x4": 0}
    assert not any(levels(k_schedule))


def test_others_follow_where_it_is_another_document_each_time() -> None:
    one_each = [[0.6 if at == audit else 0.2 for at in range(4)] for audit in range(4)]
    _, _, seen = audit_each([0.2] * 4, *one_each, limit=0.5, action="tighten")
    # Two of four are at the limit, three are beyond it.
    assert [each[6:] for each in seen[1:]] == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    assert seen[-1][2:6] == [1] * 4


def test_near_duplicates_go_up_together() -> None:
    # Of the first of the sample: another one of it, one of its bucket, one of the background; and
    # one of the control, which is never trained.
    copies = {2: "x4", 3: "x4", 7: "x4", 10: "background", 11: "control"}
    manifest = [
        entry(i, copies.get(i, each.bucket), 2 if i in copies else i)
        for i, each in enumerate([*MANIFEST, *MANIFEST[:2]])
    ]
    _, _, seen = audit_each(
        [0.2] * 4, [0.6, 0.6, 0.2, 0.2], manifest=manifest, limit=0.6, action="tighten"
    )
    assert seen[-1] == [int(i in copies and i != 11) for i in range(12)]


@pytest.mark.parametrize(("metric", "over"), [("near_verbatim", ["x4"]), ("verbatim", [])])
def test_the_limit_is_on_the_metric_asked_for(metric: str, over: list[str]) -> None:
    found, monitor, seen = audit_each(
        [0.2] * 4, [0.95, 0.95, 0.2, 0.2], metric=metric, limit=0.4, action="stop"
    )
    assert found.over_limit == over
    assert monitor.last_good_step == (0 if over else 5)
    assert not any(seen[-1])  # to stop is not to tighten


def test_a_share_at_the_limit_is_within_it() -> None:
    found, _, _ = audit_each([0.2] * 4, [0.95, 0.2, 0.2, 0.2], limit=0.25, action="stop")
    assert found.over_limit == []


def test_a_run_that_goes_on_knows_what_it_knew() -> None:
    settings: dict[str, Any] = {"limit": 0.3, "action": "tighten"}
    _, monitor, seen = audit_each([0.95, 0.2, 0.2, 0.2], [0.95, 0.6, 0.6, 0.2], **settings)
    again, other = make([1.0, 0.95, 0.6, 0.2], **settings)
    for name, array in again.arrays.items():
        array[:] = monitor.arrays[name]
    assert levels(other) == seen[-1]
    found = again.audit(10)
    assert row_of(found, "learned").num_matched == 1
    assert found.over_limit == []  # one of four is within 0.3


def test_audits_fall_due_every_few_steps_and_at_the_end() -> None:
    monitor, _ = make([0.2] * 4)
    due = [step for step in range(1, 13) if monitor.is_due(step, is_last=step == 12)]
    assert due == [5, 10, 12]
