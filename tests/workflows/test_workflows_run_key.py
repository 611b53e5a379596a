"""The schedule of the learning rate is in a run's key."""

from pathlib import Path
from typing import Any

import pytest
from corpus_examples import summarise

from memguard.config import RunConfig, dump_yaml
from memguard.errors import ConfigError
from memguard.records.run_files import add_hash_line
from memguard.runtime import Console
from memguard.workflows.common.folder import check_same_settings, compute_run_key

KEY_OF_DEFAULTS = "6ccacc746a3a3b3a069a7e6094d037c8e796318abc4d38d589dc666225c050cb"
"""Key of `make()`, as this version computes it: another one refuses to resume every run."""


def make(**optim: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "model": {"path": "start"},
            "data": {"train": "documents.jsonl"},
            "optim": {"lr": 1e-3, "min_lr_fraction": 0.02, **optim},
        }
    )


def begin(config: RunConfig, folder: Path) -> None:
    (folder / "config.yaml").write_text(add_hash_line(dump_yaml(config)))
    (folder / "metrics.jsonl").touch()


def test_the_key_is_stable_and_that_of_the_default_schedule() -> None:
    assert compute_run_key(make(), summarise(1)) == KEY_OF_DEFAULTS
    assert compute_run_key(make(schedule="cosine"), summarise(1)) == KEY_OF_DEFAULTS


def test_other_schedules_have_keys_of_their_own() -> None:
    constant = make(schedule="constant", min_lr_fraction=0.1)
    configs = (make(), make(min_lr_fraction=0.1), make(schedule="linear"), constant)
    assert len({compute_run_key(config, summarise(1)) for config in configs}) == len(configs)


def test_a_run_goes_on_with_its_schedule_only(tmp_path: Path) -> None:
    begin(make(), tmp_path)
    check_same_settings(make(), tmp_path, Console())
    check_same_settings(make(schedule="cosine"), tmp_path, Console())
    with pytest.raises(ConfigError) as caught:
        check_same_settings(make(schedule="linear"), tmp_path, Console())
    assert 'optim.schedule ("cosine" there, "linear" here)' in caught.value.problems[0]


def test_another_schedule_goes_on_with_itself(tmp_path: Path) -> None:
    begin(make(schedule="linear"), tmp_path)
    check_same_settings(make(schedule="linear"), tmp_path, Console())
    with pytest.raises(ConfigError, match=r'schedule \("linear" there, "cosine" here\)'):
        check_same_settings(make(), tmp_path, Console())
