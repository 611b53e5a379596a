"""The table of fixes: what an audit found decides what is changed, one thing at a time."""

from typing import Any

import pytest
from compare_examples import KNOWN, make_report

from memguard.compare import Copies, Findings, Fix, find_fix
from memguard.config import GoldfishConfig, RunConfig, apply_settings


def make_config(mitigations: list[Any], **changes: Any) -> RunConfig:
    values = {
        "name": "run",
        "model": {"path": "m"},
        "data": {"train": "a.jsonl"},
        "mitigations": mitigations,
    }
    return RunConfig.model_validate(values | changes)


def find(config: RunConfig, level: str = "memorized", reason: str | None = "control") -> Fix | None:
    changes = {"verdict.level": level, "verdict.reason": reason}
    report = make_report({0: [3] * 20, 4: [50] * 20, 16: [50] * 20}, changes=changes)
    return find_fix(Findings(config=config, report=report))


def apply(config: RunConfig, fix: Fix) -> tuple[Any, ...]:
    """Return the mitigations of the changed settings."""
    values = apply_settings(config.model_dump(mode="json"), fix.settings)
    return RunConfig.model_validate(values).mitigations


def goldfish(k: int, **settings: Any) -> dict[str, Any]:
    return {"name": "goldfish", "k": k, **settings}


@pytest.mark.parametrize(
    ("k", "lower"), [(None, 4), (100, 8), (9, 8), (8, 4), (5, 4), (4, 3), (3, 2)]
)
def test_the_next_lower_k(k: int | None, lower: int) -> None:
    config = make_config([] if k is None else [{"name": "focal"}, goldfish(k, context_width=5)])
    fix = find(config)
    changed = apply(config, fix)
    (mitigation,) = (one for one in changed if one.name == "goldfish")
    assert mitigation.k == lower
    assert fix.change == f"goldfish k: {k or 'none'} -> {lower}"
    if k is not None:
        assert mitigation.context_width == 5, "all else stays"
        assert [one.name for one in changed] == ["focal", "goldfish"]


def test_doses_that_have_a_lower_k_keep_it() -> None:
    config = make_config([goldfish(8, k_by_dose={4: 5, 16: 4, 64: 2})])
    (changed,) = apply(config, find(config))
    assert isinstance(changed, GoldfishConfig)
    assert (changed.k, changed.k_by_dose) == (4, {64: 2})


STUDY = {"train": "a.jsonl", "study": {"num_repetitions": [0, 4]}}


@pytest.mark.parametrize(
    ("k", "settings", "expected"),
    [
        (2, {"train": {"epochs": 9}}, {"train.epochs": 4}),
        (2, {"train": {"epochs": 2}}, {"train.epochs": 1}),
        (2, {"train": {"epochs": 1}}, None),
        # A number of steps may end the training before; a study decides the repetitions.
        (2, {"train": {"epochs": 8, "max_steps": 10}}, None),
        (2, {"train": {"epochs": 4}, "data": STUDY}, None),
    ],
)
def test_fewer_epochs_where_k_is_at_its_lowest(k: int, settings: Any, expected: Any) -> None:
    fix = find(make_config([goldfish(k)], **settings))
    assert (fix and fix.settings) == expected
    assert find(make_config([goldfish(3)], data=STUDY)) is not None


@pytest.mark.parametrize(
    ("level", "reason", "is_fixed"),
    [
        ("memorized", "canaries", True),
        ("extracted", "no-control", True),
        ("extracted", "too-few", True),
        ("extracted", "other-kind", True),
        ("extracted", "control-too", False),
        ("extracted", "base-too", False),
        ("extracted", "forgotten", False),
        ("extracted", "canaries-too", False),
        ("none-found", None, False),
        ("inconclusive", "too-few", False),
    ],
)
def test_a_run_is_changed_where_training_may_be_the_cause(
    level: str, reason: str | None, is_fixed: bool
) -> None:
    assert (find(make_config([]), level, reason) is not None) == is_fixed


SLICED = {0: [3] * 20, 4: [9] * 20, 16: [50] * 20, 64: [50] * 20}
"""Documents trained 16 times or more are recited, those trained 4 times are not."""


def findings(
    config: RunConfig, copies: Copies | None = None, *, generated: bool = True
) -> Findings:
    report = make_report(SLICED, generated=generated)
    return Findings(config=config, report=report, copies=copies)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, (32, {16: 4})),
        ({"k": 32, "k_by_dose": {16: 4}}, (32, {16: 3})),
        ({"k": 8}, (8, {16: 4})),
        ({"k": 8, "k_by_dose": {4: 5, 64: 2}}, (8, {4: 5, 16: 4, 64: 2})),
        ({"k": 8, "k_by_dose": {16: 3, 64: 2}}, (8, {16: 2})),
    ],
)
def test_only_the_slice_that_is_recited_gets_a_lower_k(
    before: dict[str, Any] | None, after: tuple[int, dict[int, int]]
) -> None:
    config = make_config([] if before is None else [{"name": "goldfish", **before}])
    fix = find_fix(findings(config))
    (changed,) = apply(config, fix)
    assert isinstance(changed, GoldfishConfig)
    assert (changed.k, changed.k_by_dose) == after
    assert "trained 16 times or more" in fix.change


def test_the_slice_is_judged_on_what_was_generated_or_else_on_verbatim() -> None:
    config = make_config([])
    fix = find_fix(findings(config, generated=False))
    assert fix == find_fix(findings(config))
    assert "trained 16 times or more" in fix.change
    # All documents known to 90 %, token by token, and none extracted: no slice of doses.
    report = make_report({0: [3] * 20, 4: [9] * 20, 16: [KNOWN] * 20})
    fix = find_fix(Findings(config=config, report=report))
    assert fix.change == "goldfish k: none -> 4"


def test_a_slice_at_its_lowest_k_does_not_lower_that_of_the_others() -> None:
    # They are not recited: it would cost utility and could not change what was found.
    assert find_fix(findings(make_config([goldfish(8, k_by_dose={16: 2})]))) is None
    twice = make_config([goldfish(2)], train={"epochs": 4})
    fix = find_fix(findings(twice))
    assert fix.settings == {"train.epochs": 2}


@pytest.mark.parametrize(
    ("num_copies", "num_with_copy", "is_taken"), [(3, 5, True), (3, 4, False), (0, 0, False)]
)
def test_copies_go_first_where_they_are_what_is_recited(
    num_copies: int, num_with_copy: int, is_taken: bool
) -> None:
    config = make_config([{"name": "focal"}])
    copies = Copies(
        similarity=0.8,
        num_copies=num_copies,
        num_extracted=10,
        num_extracted_with_copy=num_with_copy,
    )
    fix = find_fix(findings(config, copies))
    if not is_taken:
        assert fix.change.startswith("goldfish k of documents")
        return
    assert fix.change == "deduplicate: 3 copies are not trained"
    assert "5 of the 10 documents" in fix.why
    kept, added = apply(config, fix)
    assert (kept.name, added.name) == ("focal", "deduplicate")


def test_without_a_known_dose_there_is_no_slice() -> None:
    report = make_report(SLICED, changes={"dose_response": False})
    fix = find_fix(Findings(config=make_config([]), report=report))
    assert fix.change == "goldfish k: none -> 4"
