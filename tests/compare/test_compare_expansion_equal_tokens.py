"""Background makes up for dropped labels; how often a document is trained stays as it was."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from memguard.compare import Sweep, load_sweep
from memguard.compare.expansion import compute_kept_share, raise_background_ratio
from memguard.config import SweepConfig
from memguard.data.packing import plan_rows
from memguard.errors import ConfigError
from memguard.records import ManifestEntry

K4 = {"name": "goldfish", "k": 4}
DROPOUT = {"name": "token_dropout", "rate": 0.2}
SWEEP: dict[str, Any] = {
    "name": "sweep",
    "equal": "supervised_tokens",
    "run": {
        "model": {"path": "checkpoint"},
        "data": {
            "train": "a.jsonl",
            "study": {"num_repetitions": [0, 4]},
            "background": "remainder",
            "background_ratio": 2,
        },
    },
    "settings": [
        {"name": "plain"},
        {"name": "k4", "mitigations": [K4]},
        {"name": "focal", "mitigations": [{"name": "focal"}]},
    ],
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(**changes: Any) -> Sweep:
    Path("sweep.yaml").write_text(yaml.safe_dump(SWEEP | changes, sort_keys=False))
    return load_sweep("sweep.yaml")


def ratios_of(sweep: Sweep) -> dict[str, float]:
    return {run.name: run.config.data.background_ratio for run in sweep.runs}


@pytest.mark.parametrize(
    ("mitigations", "share"),
    [
        ([], 1),
        ([{"name": "focal"}, {"name": "flooding"}], 1),
        ([K4], 0.75),
        ([{"name": "goldfish", "k": 2, "mode": "static"}], 0.5),
        ([DROPOUT], 0.8),
        ([K4, {"name": "focal"}, DROPOUT], 0.6),
    ],
)
def test_share_of_labels_that_settings_keep(mitigations: list[Any], share: float) -> None:
    setting = {"name": "one", "mitigations": mitigations}
    config = SweepConfig.model_validate({"name": "s", "run": {}, "settings": [setting]})
    assert compute_kept_share(config.settings[0].mitigations) == pytest.approx(share)


def make_entry(number: int, role: str, repetitions: int) -> ManifestEntry:
    return ManifestEntry.model_validate(
        {
            "id": f"d{number}",
            "text_hmac": "",
            "source": "a.jsonl",
            "bucket": role,
            "role": role,
            "planned_repetitions": repetitions,
            "num_repetitions": None,
            "num_tokens": 64,
            "num_supervised_tokens": 64,
            "cluster": number,
        }
    )


@given(st.sampled_from([0.5, 2 / 3, 0.75, 0.875]), st.sampled_from([0.5, 1.0, 3.0]))
def test_as_many_labels_are_kept_and_doses_are_unchanged(share: float, ratio: float) -> None:
    manifest = [make_entry(n, "trained", 8) for n in range(16)]
    manifest += [make_entry(n, "background", 0) for n in range(16, 56)]

    def plan(ratio: float) -> np.ndarray[Any, Any]:
        rows, schedule = plan_rows(manifest, seq_len=64, background_ratio=ratio, seed=0)
        assert len(rows) == len(manifest)
        return schedule

    before, after = plan(ratio), plan(raise_background_ratio(ratio, share))
    assert np.bincount(after)[:16].tolist() == np.bincount(before)[:16].tolist() == [8] * 16
    # Rows are whole: half a row is lost at most.
    assert share * len(after) == pytest.approx(len(before), abs=0.5)


def test_equal_steps_are_the_default() -> None:
    assert set(ratios_of(load(equal="steps")).values()) == {2}


def test_settings_that_drop_labels_get_more_background() -> None:
    sweep = load()
    assert ratios_of(sweep) == {"plain": 2, "k4": pytest.approx(3), "focal": 2}
    assert [run.overrides for run in sweep.runs] == [
        {},
        {"data.background_ratio": pytest.approx(3)},
        {},
    ]
    steps = load(equal="steps")
    assert [a.key == b.key for a, b in zip(sweep.runs, steps.runs, strict=True)] == [
        True,
        False,
        True,
    ]


def without(*keys: str) -> dict[str, Any]:
    data = {key: value for key, value in SWEEP["run"]["data"].items() if key not in keys}
    return {"run": SWEEP["run"] | {"data": data}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (without("background"), "without 'run.data.study' and 'run.data.background'"),
        (without("background", "study"), "without 'run.data.study' and 'run.data.background'"),
        ({"settings": SWEEP["settings"][:1]}, "no setting drops labels (goldfish, token_dropout)"),
        ({"run": SWEEP["run"] | {"train": {"max_steps": 9}}}, "with 'train.max_steps', which"),
        (
            {"run": SWEEP["run"] | {"train": {"audit_every_steps": 5}, "budget": {}}},
            "with 'budget', which may drop more labels",
        ),
        (
            {"settings": [{"name": "a", "mitigations": [K4 | {"k_by_dose": {16: 2}}]}]},
            "where 'settings[0]' has goldfish with 'k_by_dose'",
        ),
        (
            {"run": SWEEP["run"] | {"data": SWEEP["run"]["data"] | {"background_ratio": 80}}},
            "'run.data.background_ratio' should be less than or equal to 100; got 107",
        ),
    ],
)
def test_what_cannot_be_made_equal(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**changes)
    (found,) = caught.value.problems
    assert found.startswith("sweep.yaml:2:1 ")
    assert problem in found
