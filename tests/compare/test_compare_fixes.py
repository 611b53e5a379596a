"""The table of fixes: what an audit found decides what is changed, one thing at a time."""

from typing import Any

import pytest
from compare_examples import CORRECT, make_report

from memguard.compare import Fix, find_fix
from memguard.config import GoldfishConfig, RunConfig, apply_settings
from memguard.records import AuditReport


def make_config(mitigations: list[Any], **changes: Any) -> RunConfig:
    values = {
        "name": "run",
        "model": {"path": "m"},
        "data": {"train": "a.jsonl"},
        "mitigations": mitigations,
    }
    return RunConfig.model_validate(values | changes)


def find(config: RunConfig, level: str = "recites") -> Fix | None:
    values = make_report(CORRECT)
    values["verdict"]["level"] = level
    return find_fix(config, AuditReport.model_validate(values))


def goldfish(k: int, **settings: Any) -> dict[str, Any]:
    return {"name": "goldfish", "k": k, **settings}


@pytest.mark.parametrize(
    ("k", "lower"), [(None, 4), (100, 8), (9, 8), (8, 4), (5, 4), (4, 3), (3, 2)]
)
def test_the_next_lower_k(k: int | None, lower: int) -> None:
    config = make_config([] if k is None else [{"name": "focal"}, goldfish(k, context_width=5)])
    fix = find(config)
    assert fix is not None
    values = apply_settings(config.model_dump(mode="json"), fix.settings)
    changed = RunConfig.model_validate(values)
    (mitigation,) = (one for one in changed.mitigations if one.name == "goldfish")
    assert mitigation.k == lower
    assert fix.change == f"goldfish k: {k or 'none'} -> {lower}"
    if k is not None:
        assert mitigation.context_width == 5, "all else stays"
        assert [one.name for one in changed.mitigations] == ["focal", "goldfish"]


def test_doses_that_have_a_lower_k_keep_it() -> None:
    config = make_config([goldfish(8, k_by_dose={4: 5, 16: 4, 64: 2})])
    fix = find(config)
    assert fix is not None
    values = apply_settings(config.model_dump(mode="json"), fix.settings)
    (changed,) = RunConfig.model_validate(values).mitigations
    assert isinstance(changed, GoldfishConfig)
    assert (changed.k, changed.k_by_dose) == (4, {64: 2})


@pytest.mark.parametrize(("epochs", "fewer"), [(9, 4), (2, 1), (1, None)])
def test_fewer_epochs_where_k_is_at_its_lowest(epochs: int, fewer: int | None) -> None:
    fix = find(make_config([goldfish(2)], train={"epochs": epochs}))
    if fewer is None:
        assert fix is None
    else:
        assert fix is not None
        assert fix.settings == {"train.epochs": fewer}


def test_a_studys_repetitions_are_left_alone() -> None:
    data = {"train": "a.jsonl", "study": {"num_repetitions": [0, 4]}}
    assert find(make_config([goldfish(2)], data=data, train={"epochs": 4})) is None
    assert find(make_config([goldfish(3)], data=data)) is not None


@pytest.mark.parametrize("level", ["not-above-control", "no-control", "inconclusive"])
def test_nothing_is_changed_for_what_was_not_found(level: str) -> None:
    assert find(make_config([]), level) is None
