"""A sweep's settings as runs, checked before the first one starts.

    <output_dir>/<sweep>/base/            the model every setting starts from, with 'pretrain'
    <output_dir>/<sweep>/goldfish-k4/     one run for each setting ...
    <output_dir>/<sweep>/plain-seed1/     ... and seed, where there are several seeds

Paths inside `run` and `pretrain` are relative to the current directory, as they are in a run's own
file, and not to the sweep's file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from memguard.compare.equal_tokens import list_kept_shares
from memguard.compare.expansion import BASE, build_base, build_setting, check_sweep
from memguard.compare.keys import compute_key, hash_inputs
from memguard.config import (
    Document,
    RunConfig,
    SweepConfig,
    apply_overrides,
    load_yaml,
    validate,
)
from memguard.errors import ConfigError

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRun:
    """One run of a sweep: a setting with a seed, or the model all of them start from."""

    name: str
    """Unique in the sweep; also the folder's name."""
    setting: str
    seed: int
    folder: Path
    config: RunConfig
    """Complete: what the child process is given."""
    key: str
    """Content hash of all that decides the run's outcome; see `compute_key`."""
    overrides: Mapping[str, Any]
    """What the setting changes in the common run, beside its mitigations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """All runs of a sweep."""

    name: str
    folder: Path
    config: SweepConfig
    pretrain: SweepRun | None
    """Trained first; None where the settings start from a checkpoint."""
    runs: tuple[SweepRun, ...]
    """Setting by setting, and in each seed by seed."""

    @property
    def in_order(self) -> tuple[SweepRun, ...]:
        """All runs in the order in which they are trained, 'pretrain' first."""
        return self.runs if self.pretrain is None else (self.pretrain, *self.runs)


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep's YAML, put the overrides in, expand and check every run.

    Args:
        path: the sweep's file.
        overrides: ``key=value`` for keys of the file, e.g. ``run.train.batch_size=8``.

    Raises:
        ConfigError: with every problem of the sweep and its runs, one line each, with its place.
        DataError: a local document file cannot be read.
    """
    document = apply_overrides(load_yaml(path), overrides)
    if "run" not in document.values and {"model", "data"} <= document.values.keys():
        raise ConfigError(f"{path} holds a run, not a sweep: use 'memguard train {path}'")
    problems: list[str] = []
    config = _attempt(problems, partial(validate, SweepConfig, document.values, document))
    # Where the sweep itself is wrong, its blocks are checked all the same: all problems together.
    sketch = _sketch(document.values) if config is None else config
    configs = [] if sketch is None else _build_configs(sketch, document, problems)
    if config is None or problems:
        raise ConfigError(*problems)
    return _assemble(config, configs)


def _sketch(values: Mapping[str, Any]) -> SweepConfig | None:
    """Return a sweep of one plain setting around the blocks of one that is wrong elsewhere."""
    blocks = {k: values[k] for k in ("pretrain", "run") if isinstance(values.get(k), Mapping)}
    try:
        return SweepConfig.model_validate(
            {"name": "sketch", "settings": [{"name": "sketch"}], **blocks}
        )
    except ValidationError:  # no 'run', or a block whose keys are no words: told already
        return None


def _build_configs(config: SweepConfig, document: Document, problems: list[str]) -> list[RunConfig]:
    """Check all runs, in the order of training; add what is wrong to ``problems``."""
    folder = _find_folder(config)
    problems.extend(check_sweep(config, document))
    builds = [
        partial(
            build_setting,
            config,
            document,
            folder,
            index=index,
            number=number,
            kept_share=kept_share,
        )
        for index, kept_share in enumerate(list_kept_shares(config))
        for number in range(len(config.seeds))
    ]
    if config.pretrain is not None:
        builds.insert(0, partial(build_base, config, document, folder))
    built = (_attempt(problems, build) for build in builds)
    return [config for config in built if config is not None]


def _assemble(config: SweepConfig, configs: list[RunConfig]) -> Sweep:
    """Give each checked run its folder and its key."""
    folder = _find_folder(config)
    pretrain = None
    if config.pretrain is not None:
        base, *configs = configs
        key = compute_key(base, hash_inputs(base))
        pretrain = _make_run(folder, base, key, BASE, {})
    inputs = hash_inputs(configs[0])  # of all: no setting changes the files that are read
    kept_shares = list_kept_shares(config)
    runs = []
    for number, run in enumerate(configs):
        index = number // len(config.seeds)
        setting = config.settings[index]
        overrides = dict(setting.overrides)
        if kept_shares[index] < 1:
            overrides["data.background_ratio"] = run.data.background_ratio
        key = compute_key(run, inputs, pretrain.key if pretrain else None)
        runs.append(_make_run(folder, run, key, setting.name, overrides))
    return Sweep(
        name=config.name, folder=folder, config=config, pretrain=pretrain, runs=tuple(runs)
    )


def _make_run(
    folder: Path, config: RunConfig, key: str, setting: str, overrides: Mapping[str, Any]
) -> SweepRun:
    return SweepRun(
        name=config.name,
        setting=setting,
        seed=config.seed,
        folder=folder / config.name,
        config=config,
        key=key,
        overrides=overrides,
    )


def _find_folder(config: SweepConfig) -> Path:
    return Path(config.output_dir) / config.name


def _attempt(problems: list[str], check: Callable[[], ConfigT]) -> ConfigT | None:
    """Return what ``check`` returns; where it fails, add its problems, each once."""
    try:
        return check()
    except ConfigError as error:
        problems.extend(problem for problem in error.problems if problem not in problems)
        return None
