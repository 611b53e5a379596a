"""A sweep's blocks into checked run configurations."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memguard.config import (
    Document,
    GoldfishConfig,
    MitigationConfig,
    RunConfig,
    SweepConfig,
    TokenDropoutConfig,
    apply_settings,
    parse_key,
    validate,
)
from memguard.config.yaml_text import KeyPath, format_key
from memguard.errors import ConfigError

# Settings that drop labels, with background added until as many labels receive loss.
#
# At equal steps a setting that drops labels learns from fewer. Every step has r background rows for
# each row of the study; with r' = (1 + r) / share - 1 of them, where ``share`` of the labels is
# kept, a run has (1 + r') / (1 + r) = 1 / share times as many labels and keeps as many as one that
# drops none. Each studied document is trained as often as before, in more steps, so its repetitions
# lie further apart. Goldfish's authors compare so too (more rows a step); adding background is
# ours.


def list_kept_shares(config: SweepConfig) -> list[float]:
    """Return for each setting the share of labels that more background makes up for; 1 for none."""
    if config.equal == "steps":
        return [1.0] * len(config.settings)
    return [compute_kept_share(setting.mitigations) for setting in config.settings]


def compute_kept_share(mitigations: Sequence[MitigationConfig]) -> float:
    """Return the share of labels that mitigations keep by their settings.

    What is really kept differs a little: a document's first labels have no tokens before them to
    decide by, and a hash is even only on average.
    """
    shares = [1.0]
    for mitigation in mitigations:
        match mitigation:
            case GoldfishConfig(k=k):
                shares.append(1 - 1 / k)
            case TokenDropoutConfig(rate=rate):
                shares.append(1 - rate)
    return math.prod(shares)


def raise_background_ratio(ratio: float, kept_share: float) -> float:
    """Return the background rows a studied row with which as many labels are kept."""
    return (1 + ratio) / kept_share - 1


def check_equal(config: SweepConfig, document: Document) -> Iterator[str]:
    """Yield why labels cannot be made equal in this sweep, or why that would do nothing."""
    if config.equal == "steps":
        return
    place = document.locate(("equal",))
    asked = f"{place} 'equal' cannot be '{config.equal}'"
    data = config.run.get("data")
    if isinstance(data, Mapping) and not (data.get("study") and data.get("background")):
        yield (
            f"{asked} without 'run.data.study' and 'run.data.background': it adds background rows, "
            "and without them every document would be trained more often"
        )
    for index, setting in enumerate(config.settings):
        if any(isinstance(one, GoldfishConfig) and one.k_by_dose for one in setting.mitigations):
            yield (
                f"{asked} where 'settings[{index}]' has a goldfish with 'k_by_dose': what share of "
                "the labels it drops is not known before its documents are read"
            )
    if all(compute_kept_share(setting.mitigations) == 1 for setting in config.settings):
        yield f"{asked}: no setting drops labels (goldfish, token_dropout), so it would do nothing"


BASE = "base"
"""Name of the run whose model every setting starts from."""

# What the sweep decides, and where to say it instead.
_DECIDED = {
    "name": "the sweep names its runs",
    "output_dir": "set the sweep's own 'output_dir'",
    "mitigations": "set them in 'settings'",
    "seed": "set 'seeds'",
}
# What no setting may change: the runs could not be put side by side.
_SHARED = {
    "data": "settings are compared on the same documents; set it in 'run'",
    "model": "settings start from the same weights; set it in 'run'",
    "audit": "settings are compared under the same probes; set it in 'run'",
    "seed": "settings are compared with the same seeds; set 'seeds'",
    "name": "the setting has a 'name' of its own",
    "output_dir": "set the sweep's own 'output_dir'",
    "mitigations": "the setting has 'mitigations' of its own",
}
_STARTING_POINT = ("path", "revision", "scratch")


def check_sweep(config: SweepConfig, document: Document) -> Iterator[str]:
    """Yield what may stand in a run, or in a list of runs, but not in this sweep."""
    for number, seed in enumerate(config.seeds):
        if seed in config.seeds[:number]:
            yield f"{document.locate(('seeds', number))} 'seeds[{number}]' is {seed} a second time"
    for index, setting in enumerate(config.settings):
        if setting.name == BASE:
            place = document.locate(("settings", index, "name"))
            yield f"{place} 'settings[{index}].name' must not be '{BASE}': 'pretrain' is called so"
    yield from check_equal(config, document)
    yield from _check_decided(document, "run", tuple(_DECIDED))
    model, audit = config.run.get("model"), config.run.get("audit")
    if isinstance(audit, Mapping) and audit.get("enabled") is False:
        place = document.locate(("run", "audit", "enabled"))
        yield f"{place} 'run.audit.enabled' must be true: settings are compared by their audits"
    if config.pretrain is None:
        return
    yield from _check_decided(document, "pretrain", ("name", "output_dir"))
    for key in _STARTING_POINT:
        if isinstance(model, Mapping) and model.get(key) is not None:
            yield (
                f"{document.locate(('run', 'model', key))} 'run.model.{key}' must not be set "
                "beside 'pretrain': settings start from the model it leaves"
            )


def _check_decided(document: Document, block: str, keys: tuple[str, ...]) -> Iterator[str]:
    for key in keys:
        if key in document.values[block]:
            place = document.locate((block, key))
            yield f"{place} '{block}.{key}' must not be set here: {_DECIDED[key]}"


def build_base(config: SweepConfig, document: Document, folder: Path) -> RunConfig:
    """Build the run whose model every setting starts from; audited only if asked for.

    Args:
        config: a sweep with 'pretrain'.
        document: its file.
        folder: the sweep's folder.

    Raises:
        ConfigError: with every problem found in 'pretrain'.
    """
    assert config.pretrain is not None, "a sweep without 'pretrain' has no base"
    values = {**config.pretrain, "name": BASE, "output_dir": str(folder)}
    audit = config.pretrain.get("audit")
    if audit is None or isinstance(audit, Mapping):
        values["audit"] = {"enabled": False, **(audit or {})}
    return validate(RunConfig, values, document, prefix=("pretrain",))


def build_setting(
    config: SweepConfig,
    document: Document,
    folder: Path,
    *,
    index: int,
    number: int,
    kept_share: float,
) -> RunConfig:
    """Put a setting and a seed into the common run.

    Args:
        config: the sweep.
        document: its file.
        folder: the sweep's folder.
        index: position in 'settings'.
        number: position in 'seeds'.
        kept_share: of the labels; background makes up for the rest. 1: as the file says.

    Raises:
        ConfigError: with every problem found, placed in the setting where that is what is wrong.
    """
    setting, seed = config.settings[index], config.seeds[number]
    name = f"{setting.name}-seed{seed}" if len(config.seeds) > 1 else setting.name
    decided = {"name": name, "output_dir": str(folder), "seed": seed}
    values = {**config.run, **decided, "mitigations": setting.mitigations}
    model = config.run.get("model")
    if config.pretrain is not None and (model is None or isinstance(model, Mapping)):
        kept = {k: v for k, v in (model or {}).items() if k not in _STARTING_POINT}
        values["model"] = {**kept, "path": str(folder / BASE / "model")}
    document = document.place(("run", "name"), document.locate(("settings", index, "name")))
    document = document.place(("run", "seed"), document.locate(("seeds", number)))
    problems = []
    for override in _flatten(setting.overrides, ("settings", index, "overrides")):
        place = document.locate(override.origin)
        dotted = format_key(override.key_path)
        reason = _SHARED.get(dotted.partition(".")[0].partition("[")[0])
        if not dotted:
            problems.append(f"{place} '{format_key(override.origin)}' names no setting")
            continue
        if reason:
            problems.append(f"{place} '{dotted}' must not differ between settings: {reason}")
            continue
        try:
            values = apply_settings(values, {dotted: override.value})
        except ConfigError as error:
            problems.append(f"{place} {error}")
        document = document.place(("run", *override.key_path), place)
    try:
        checked = validate(RunConfig, values, document, prefix=("run",))
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from error
    if ends_early := find_early_end(checked):
        place = document.locate(("settings", index))
        problems.append(
            f"{place} '{ends_early}' ends training early: such a run has other doses than the "
            "rest, and cannot be compared with it. Train it by itself"
        )
    if problems:
        raise ConfigError(*problems)
    return _equalise(checked, kept_share, document)


def find_early_end(config: RunConfig) -> str:
    """Name what may end a run before its documents have had their doses; "" for nothing."""
    stops = config.budget is not None and config.budget.action == "stop"
    return "budget.action: stop" if stops else ""


def _equalise(checked: RunConfig, kept_share: float, document: Document) -> RunConfig:
    """Add the background that makes up for dropped labels."""
    if kept_share == 1:
        return checked
    place = document.locate(("equal",))
    if checked.train.max_steps is not None:
        raise ConfigError(
            f"{place} 'equal' cannot add background beside 'train.max_steps', which cuts added "
            "rows off, and with them repetitions of the studied documents"
        )
    if checked.budget is not None:
        raise ConfigError(
            f"{place} 'equal' cannot add background beside 'budget', which may drop more labels, "
            "or end a run, while it is trained"
        )
    ratio = raise_background_ratio(checked.data.background_ratio, kept_share)
    values = apply_settings(checked.model_dump(mode="json"), {"data.background_ratio": ratio})
    document = document.place(("run", "data", "background_ratio"), place)
    return validate(RunConfig, values, document, prefix=("run",))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Override:
    """One value that a setting changes."""

    key_path: KeyPath
    """Where in the run."""
    origin: KeyPath
    """Where in the sweep's file."""
    value: Any


def _flatten(values: Mapping[str, Any], at: KeyPath) -> Iterator[_Override]:
    """Yield each change, of ``{optim.lr: 1}`` and ``{optim: {lr: 1}}`` alike."""
    for key, value in values.items():
        key_path, origin = parse_key(str(key)), (*at, str(key))
        # An empty one is a value: a section of which everything is left as it is by default.
        if isinstance(value, Mapping) and value:
            for inner in _flatten(value, origin):
                yield replace(inner, key_path=(*key_path, *inner.key_path))
        else:
            yield _Override(key_path=key_path, origin=origin, value=value)
