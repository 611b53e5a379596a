"""memguard as a plugin of axolotl: goldfish in its batches, and audits of the model it trains.

    register                     checks the block `memguard:` before axolotl loads anything
    add_callbacks_post_trainer   adds the audits
    post_trainer_create          puts a `GoldfishCollator` around the trainer's collator
    on_train_begin               looks at the loader of the batches, and prints what is active

axolotl only logs a plugin whose import fails, and trains without it. Here such a failure is a
ConfigError, which ends axolotl, and the line printed when training begins proves that memguard is
active: if it is missing, nothing was mitigated. axolotl evaluates with another collator, so that
its evaluation loss covers all labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from memguard.errors import ConfigError, shorten

try:
    from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found]
    from pydantic import BaseModel
    from transformers import TrainerCallback

    from memguard.config import AuditConfig, GoldfishConfig
    from memguard.integrations.goldfish import (
        SUPERVISED,
        GoldfishCollator,
        validate_mitigations,
        wrap_collator,
    )
    from memguard.integrations.trainer_audit import MemorizationAuditCallback
    from memguard.runtime import Console
except ImportError as error:
    raise ConfigError(
        f"memguard.integrations.axolotl: one of its imports fails: {error}. Install axolotl and "
        "memguard in one environment, or remove the plugin"
    ) from error

_EXAMPLE = "e.g. memguard: {goldfish: {k: 4}}"
_PATHS = ("members", "nonmembers")
"""Settings that name documents: a string in YAML is never a document itself."""
_NOT_SUPERVISED = ("rl", "reward_model", "process_reward_model")
_INNER = ("data_collator", "collate_fn", "collator", "_collator")
"""Attributes in which libraries keep the collator that they wrap."""


class MemguardArguments(BaseModel):
    """The block that the plugin adds to axolotl's configuration; `read_settings` checks it."""

    memguard: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AxolotlSettings:
    """The checked block ``memguard:``."""

    goldfish: Mapping[str, Any] | None = None
    """Arguments of `wrap_collator`; None: labels stay as they are."""
    audit: Mapping[str, Any] | None = None
    """Arguments of `MemorizationAuditCallback`; None: no audit."""

    def describe(self) -> str:
        """Return what is active, for the line that says so."""
        parts = []
        if self.goldfish is not None:
            values = {"k": GoldfishConfig.model_fields["k"].default, **self.goldfish}
            listed = ", ".join(f"{name} {value}" for name, value in values.items())
            parts.append(f"goldfish drops labels from every batch ({listed})")
        if self.audit is not None:
            moments = ["at the end"]
            if self.audit.get("on_evaluate"):
                moments.insert(0, "after each evaluation")
            if self.audit.get("every_steps"):
                moments.insert(0, f"every {self.audit['every_steps']} steps")
            when = ", ".join(moments)
            parts.append(f"the model is audited {when}, with reports in {self.audit['out']}")
        return "; ".join(parts)


class MemguardPlugin(BasePlugin):  # type: ignore[misc]
    """What axolotl calls, for ``plugins: [memguard.integrations.axolotl.MemguardPlugin]``.

    It keeps nothing: each call reads the configuration that axolotl passes.
    """

    def get_input_args(self) -> str:
        """Return the path of the model of the plugin's configuration."""
        return f"{MemguardArguments.__module__}.{MemguardArguments.__qualname__}"

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Check the configuration before axolotl loads data and model."""
        settings = read_settings(cfg)
        if settings.audit is not None:
            # Checks its arguments; the one that is used needs the trainer.
            MemorizationAuditCallback(**settings.audit)

    def add_callbacks_post_trainer(
        self, cfg: Mapping[str, Any], trainer: Any
    ) -> list[TrainerCallback]:
        """Return the audits, and the callback that prints what is active."""
        settings = read_settings(cfg)
        callbacks: list[TrainerCallback] = [ActiveLine(settings)]
        if settings.audit is not None:
            callbacks.insert(0, MemorizationAuditCallback(trainer=trainer, **settings.audit))
        return callbacks

    def post_trainer_create(self, cfg: Mapping[str, Any], trainer: Any) -> None:
        """Put the mask around the collator of the trainer."""
        settings = read_settings(cfg)
        if settings.goldfish is not None:
            wrap_collator(trainer, **settings.goldfish)


class ActiveLine(TrainerCallback):  # type: ignore[misc]
    """Prints one line when training begins, after looking at the loader that feeds it."""

    def __init__(self, settings: AxolotlSettings) -> None:
        self._settings = settings

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print what is active.

        Raises:
            ConfigError: batches do not go through the `GoldfishCollator`.
        """
        loader = kwargs.get("train_dataloader")
        if self._settings.goldfish is not None and not _masks(loader):
            raise ConfigError(
                "'memguard.goldfish' is set, but the batches are not made by memguard's collator: "
                "another plugin or trainer replaced it. Remove that, or the setting"
            )
        console = Console(quiet=not state.is_world_process_zero)
        # A line of its own: the Trainer has begun a progress bar.
        console.info(f"\nmemguard is active: {self._settings.describe()}")


def read_settings(cfg: Mapping[str, Any]) -> AxolotlSettings:
    """Return the checked block ``memguard:`` of axolotl's configuration, itself validated or not.

    Raises:
        ConfigError: all problems: no block, unknown keys, invalid values, or training that goldfish
            does not fit (preferences, rewards, packing without boundaries).
    """
    block: Any = cfg.get("memguard")
    problems = _find_unknown(block, "memguard", [field.name for field in fields(AxolotlSettings)])
    if not problems:
        if not block:
            problems.append(f"'memguard' needs 'goldfish' or 'audit'; {_EXAMPLE}")
        if "goldfish" in block:
            problems += _find_goldfish_problems(block["goldfish"], cfg)
        if "audit" in block:
            problems += _find_audit_problems(block["audit"])
    if problems:
        raise ConfigError(*problems)
    audit = block.get("audit")
    if audit is not None:
        audit = dict(audit)
        for name in _PATHS:
            if (paths := audit.get(name)) is not None:
                audit[name] = [*map(Path, [paths] if isinstance(paths, str) else paths)]
    return AxolotlSettings(goldfish=block.get("goldfish"), audit=audit)


def _find_goldfish_problems(block: Any, cfg: Mapping[str, Any]) -> list[str]:
    known = ("seed", *(name for name in GoldfishConfig.model_fields if name != "name"))
    problems = _find_unknown(block, "memguard.goldfish", known)
    if problems:
        return problems
    seed = block.get("seed", 0)
    if not isinstance(seed, int):
        problems.append(f"'memguard.goldfish.seed' should be an integer; got {seed!r}")
    given = {name: value for name, value in block.items() if name != "seed"}
    try:
        validate_mitigations([{"name": "goldfish", **given}])
    except ConfigError as error:
        problems += [f"in 'memguard': {each}" for each in error.problems]
    problems += [
        f"'memguard.goldfish' does not fit '{name}': {SUPERVISED}"
        for name in _NOT_SUPERVISED
        if cfg.get(name)
    ]
    is_packed = cfg.get("pretraining_dataset") and cfg.get("sample_packing")
    if is_packed and cfg.get("pretrain_multipack_attn") is False:
        problems.append(
            "'pretrain_multipack_attn' false packs documents into rows that do not show where one "
            "begins, which 'memguard.goldfish' needs. Remove that setting"
        )
    return problems


def _find_audit_problems(block: Any) -> list[str]:
    parameters = signature(MemorizationAuditCallback.__init__).parameters.values()
    own = {each.name for each in parameters if each.kind is Parameter.KEYWORD_ONLY} - {"trainer"}
    known = (*sorted(own), *sorted(set(AuditConfig.model_fields) - own - {"enabled"}))
    problems = _find_unknown(block, "memguard.audit", known)
    if problems:
        return problems
    for name in ("members", "out"):
        if block.get(name) is None:
            example = "e.g. audit: {members: train.jsonl, out: audits}"
            problems.append(f"'memguard.audit' needs '{name}'; {example}")
    for name in _PATHS:
        paths = block.get(name, ())
        is_list = isinstance(paths, Sequence) and all(isinstance(path, str) for path in paths)
        if paths is not None and not is_list:
            got = _show(paths)
            problems.append(
                f"'memguard.audit.{name}' should be a path or a list of paths; got {got}"
            )
    return problems


def _find_unknown(block: Any, name: str, known: Sequence[str]) -> list[str]:
    """Return what keeps a block from being read: another type, or keys that are no settings."""
    if not isinstance(block, Mapping):
        return [f"'{name}' should hold settings; got {_show(block)}. {_EXAMPLE}"]
    listed = ", ".join(known)
    wrong = [key for key in block if key not in known]
    return [f"'{name}.{key}' is not a setting; it may be {listed}" for key in wrong]


def _show(value: Any) -> str:
    return "null" if value is None else shorten(repr(value))


def _masks(loader: Any) -> bool:
    """Return whether the collator of a loader is memguard's, also inside of others."""
    collator = getattr(loader, "collate_fn", None)
    while collator is not None and not isinstance(collator, GoldfishCollator):
        inner = [getattr(collator, name, None) for name in _INNER]
        collator = next((each for each in inner if each is not None), None)
    return collator is not None
