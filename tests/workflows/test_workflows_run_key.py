"""The schedule of the learning rate is in a run's key, but runs from before there was one go on."""

import re
from pathlib import Path
from typing import Any

import pytest

from memguard.config import RunConfig, dump_yaml
from memguard.errors import ConfigError
from memguard.records.run_files import add_hash_line
from memguard.runtime import Console
from memguard.workflows.common.folder import check_same_settings, hash_run

KEY_OF_DEFAULTS = "f53fac2295b289d06ae9e2cd77110e2fe883ad123b21f1a94a1e5b762834a176"
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


def begin(config: RunConfig, folder: Path, *, is_old: bool = False) -> None:
    text = dump_yaml(config)
    if is_old:
        text, count = re.subn(r"(?m)^  schedule: .*\n", "", text)
        assert count == 1
    (folder / "config.yaml").write_text(add_hash_line(text))
    (folder / "metrics.jsonl").touch()


def test_the_key_is_stable_and_without_the_default_schedule() -> None:
    assert hash_run(make(), "0") == KEY_OF_DEFAULTS
    assert hash_run(make(schedule="cosine"), "0") == KEY_OF_DEFAULTS


def test_other_schedules_have_keys_of_their_own() -> None:
    constant = make(schedule="constant", min_lr_fraction=0.1)
    configs = (make(), make(min_lr_fraction=0.1), make(schedule="linear"), constant)
    assert len({hash_run(config, "0") for config in configs}) == len(configs)


@pytest.mark.parametrize("is_old", [True, False])
def test_a_run_goes_on_with_a_cosine_only(tmp_path: Path, is_old: bool) -> None:
    begin(make(), tmp_path, is_old=is_old)
    check_same_settings(make(), tmp_path, Console())
    check_same_settings(make(schedule="cosine"), tmp_path, Console())
    with pytest.raises(ConfigError) as caught:
        check_same_settings(make(schedule="linear"), tmp_path, Console())
    # Also where the file does not say it.
    assert 'optim.schedule ("cosine" there, "linear" here)' in caught.value.problems[0]


def test_another_schedule_goes_on_with_itself(tmp_path: Path) -> None:
    begin(make(schedule="linear"), tmp_path)
    check_same_settings(make(schedule="linear"), tmp_path, Console())
    with pytest.raises(ConfigError, match=r'schedule \("linear" there, "cosine" here\)'):
        check_same_settings(make(), tmp_path, Console())
