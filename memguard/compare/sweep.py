"""Expands a sweep into runs and checks all of them before the first one starts.

    <output_dir>/<sweep>/base/            the model every setting starts from, with 'pretrain'
    <output_dir>/<sweep>/goldfish-k4/     one run for each setting ...
    <output_dir>/<sweep>/plain-seed1/     ... and seed, where there are several seeds

Paths inside `run` and `pretrain` are relative to the current directory, as in the file of a single
run, not to the sweep's file.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from memguard import __version__
from memguard.compare.expansion import (
    BASE,
    build_base,
    build_setting,
    check_sweep,
    list_kept_shares,
)
from memguard.config import Document, RunConfig, SweepConfig, apply_overrides, load_yaml, validate
from memguard.data.source_files import list_files
from memguard.errors import ConfigError, DataError, RecordError, list_first
from memguard.records.folders import AuditFolder, RunFiles
from memguard.records.run_files import has_trained
from memguard.records.sealed import SealedRecord, load_sealed, save_sealed

# A run's content hash: everything that decides its outcome.


def compute_key(config: RunConfig, inputs_sha256: str, pretrain_key: str | None = None) -> str:
    """Return the content hash (32 hex digits) of everything that decides a run's outcome.

    The hash covers every setting except 'output_dir' (a sweep may be moved) and 'parallel' (all
    meshes train the same model), the version of memguard, and the arguments. A checkpoint at
    'model.path' is hashed by its path, not its content; ``pretrain_key`` replaces that path.
    """
    content = config.model_dump(mode="json", exclude={"output_dir", "parallel"})
    if pretrain_key is not None:
        content["model"]["path"] = pretrain_key
    text = json.dumps([__version__, content, inputs_sha256], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def hash_inputs(config: RunConfig) -> str:
    """Return the SHA-256 over the local documents, tokenizer, suite and tasks that a run reads.

    Names that are not local files or folders (a hub id, a shipped suite) are not hashed here; they
    are part of the settings. Missing files are reported by the run itself.
    """
    data, scratch = config.data, config.model.scratch
    sources = (data.train, data.control, data.background, data.heldout, data.forget)
    inputs = [*(name for names in sources for name in names), config.audit.suite]
    inputs += [name for task in config.audit.utility for name in task.list_files()]
    if scratch is not None and scratch.tokenizer is not None:
        inputs.append(scratch.tokenizer)
    digest = hashlib.sha256()
    for name in inputs:
        place: str | Path = name
        try:
            for place in list_files(name):
                with place.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
        except OSError as error:
            raise DataError(f"'{place}' cannot be read: {error.strerror}") from error
    return digest.hexdigest()


ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRun:
    """One run of a sweep: a setting with a seed, or the model all of them start from."""

    name: str
    """Name that is unique in the sweep; also the folder's name."""
    setting: str
    seed: int
    folder: Path
    config: RunConfig
    """Complete configuration for the child process."""
    key: str
    """Content hash of all that decides the run's outcome; see `compute_key`."""
    overrides: Mapping[str, Any]
    """Settings that differ from the common run, besides mitigations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """All runs of a sweep."""

    name: str
    folder: Path
    config: SweepConfig
    pretrain: SweepRun | None
    """Run that is trained first; None if the settings start from a checkpoint."""
    runs: tuple[SweepRun, ...]
    """Runs ordered by setting, then by seed."""

    @property
    def in_order(self) -> tuple[SweepRun, ...]:
        """All runs in the order in which they are trained, 'pretrain' first."""
        return self.runs if self.pretrain is None else (self.pretrain, *self.runs)


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep's YAML, apply the overrides, then expand and check every run.

    ConfigError lists every problem of the sweep and its runs, one line each, with its place.
    """
    document = apply_overrides(load_yaml(path), overrides)
    if "run" not in document.values and {"model", "data"} <= document.values.keys():
        raise ConfigError(f"{path} contains a run, not a sweep: use 'memguard train {path}'")
    problems: list[str] = []
    config = _attempt(problems, partial(validate, SweepConfig, document.values, document))
    # If the sweep itself is wrong, its blocks are still checked, to report all problems together.
    sketch = _sketch(document.values) if config is None else config
    configs = [] if sketch is None else _build_configs(sketch, document, problems)
    if config is None or problems:
        raise ConfigError(*problems)
    return _assemble(config, configs)


def _sketch(values: Mapping[str, Any]) -> SweepConfig | None:
    """Return a sweep of one plain setting with the blocks of a sweep that is wrong elsewhere."""
    blocks = {k: values[k] for k in ("pretrain", "run") if isinstance(values.get(k), Mapping)}
    try:
        return SweepConfig.model_validate(
            {"name": "sketch", "settings": [{"name": "sketch"}], **blocks}
        )
    except ValidationError:  # no 'run', or a block with invalid keys: already reported
        return None


def _build_configs(config: SweepConfig, document: Document, problems: list[str]) -> list[RunConfig]:
    """Check all runs in the order of training; append what is wrong to ``problems``."""
    folder = _find_folder(config)
    problems.extend(check_sweep(config, document))
    builds = [
        partial(build_setting, config, document, folder, index, number, kept_share)
        for index, kept_share in enumerate(list_kept_shares(config))
        for number in range(len(config.seeds))
    ]
    if config.pretrain is not None:
        builds.insert(0, partial(build_base, config, document, folder))
    built = (_attempt(problems, build) for build in builds)
    return [config for config in built if config is not None]


def _assemble(config: SweepConfig, configs: list[RunConfig]) -> Sweep:
    """Add folder and key to each checked run."""
    folder = _find_folder(config)
    pretrain = None
    if config.pretrain is not None:
        base, *configs = configs
        key = compute_key(base, hash_inputs(base))
        pretrain = _make_run(folder, base, key, BASE, {})
    inputs = hash_inputs(configs[0])  # the same for all: no setting changes the files that are read
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
    """Return the result of ``check``; if it fails, append its problems and return None."""
    try:
        return check()
    except ConfigError as error:
        problems.extend(problem for problem in error.problems if problem not in problems)
        return None


# The state of a sweep's runs, by two files in the folder of each:
#
#     finished.json   written last: the content hash of the completed run
#     started.json    written first: the content hash of the run that was started in the folder
#
# A damaged finished.json costs little: the run's own process finds that nothing is left to do. With
# a damaged started.json, the content of the folder is unknown.

RunState = Literal["finished", "continues", "starts", "replaced", "unknown"]
"""
finished    nothing to do
continues   started under the same content hash: the child process resumes
starts      the folder does not exist yet
replaced    the folder contains another run; it is renamed and the run starts from the beginning
unknown     started.json is damaged; the folder is renamed in the same way
"""

_SENTENCES: dict[RunState, str] = {
    "finished": "already finished",
    "continues": "resume",
    "starts": "start",
    "replaced": "start again (settings, documents or version changed; old folder kept)",
    "unknown": "start again (started.json is damaged; old folder kept)",
}


_NAMED = 8


class _Mark(SealedRecord):
    """The content of both files."""

    key: str


def is_finished(run: SweepRun) -> bool:
    """Return whether a run was completed under its present key and its results are intact."""
    if _read_key(run.folder / "finished.json") != run.key:
        return False
    # The next stage reads the audit of a setting, and the model of the base run.
    if run.config.audit.enabled:
        return not AuditFolder(run.folder / "audit").find_damage()
    return has_trained(run.folder) and not RunFiles(run.folder).find_damage("trained")


def find_state(run: SweepRun) -> RunState:
    """Return the state of a run, which determines what is to be done for it."""
    if is_finished(run):
        return "finished"
    path = run.folder / "started.json"
    started = _read_key(path)
    if started == run.key:
        return "continues"
    if started is None and path.exists():
        return "unknown"
    return "replaced" if run.folder.is_dir() and any(run.folder.iterdir()) else "starts"


def prepare_folder(run: SweepRun) -> RunState:
    """Prepare a run's folder for its child process and return the run's state.

    A folder that was started under another key is renamed (``plain.replaced-1``), never deleted: a
    process started in it would resume from checkpoints of another run.
    """
    state = find_state(run)
    if state in ("replaced", "unknown"):
        run.folder.rename(_find_free_name(run.folder))
    if state in ("starts", "replaced", "unknown"):
        save_sealed(_Mark(key=run.key), run.folder / "started.json")
    return state


def mark_finished(folder: Path, key: str) -> None:
    """Record that the run in ``folder`` was completed under ``key``; written last."""
    save_sealed(_Mark(key=key), folder / "finished.json")


def describe_sweep(sweep: Sweep) -> tuple[str, ...]:
    """Return a line for each state with at least one run: ``2 of 4 runs start: plain, k4``."""
    states = {run.name: find_state(run) for run in sweep.in_order}
    lines = []
    for state, sentence in _SENTENCES.items():
        names = [name for name, of_run in states.items() if of_run == state]
        if names:
            listed = list_first(names, _NAMED)
            lines.append(f"{len(names)} of {len(states)} runs {sentence}: {listed}")
    return tuple(lines)


def _read_key(path: Path) -> str | None:
    try:
        return load_sealed(_Mark, path).key
    except RecordError:
        return None  # A file that cannot be read counts as missing.


def _find_free_name(folder: Path) -> Path:
    number = 1
    while (renamed := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
        number += 1
    return renamed
