"""Builds and checks the run configurations of a sweep."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
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
from memguard.config.utility import read_tasks
from memguard.config.yaml_text import KeyPath, format_key
from memguard.errors import ConfigError
from memguard.records.comparison import HELDOUT_LOSS

# 'equal: supervised_tokens' adds background to settings that drop labels, so that all settings have
# the same number of labels with loss.
#
# With equal steps, a setting that drops labels trains on fewer of them. Every step has r background
# rows for each row of the study. With r' = (1 + r) / share - 1 background rows, where ``share`` of
# the labels is kept, a run has (1 + r') / (1 + r) = 1 / share times the labels and keeps as many
# as a setting that drops none. Each document of the study is trained as often as before, in more
# steps, so its repetitions are further apart. The authors of goldfish loss also compare at equal
# labels (with more rows per step); adding background rows is our variant.


def list_kept_shares(config: SweepConfig) -> list[float]:
    """Return the kept share of labels of each setting; 1 if no background is to be added."""
    if config.equal == "steps":
        return [1.0] * len(config.settings)
    return [compute_kept_share(setting.mitigations) for setting in config.settings]


def compute_kept_share(mitigations: Sequence[MitigationConfig]) -> float:
    """Return the share of labels that mitigations keep according to their settings.

    The actual share differs slightly: the first labels of a document have no context to hash, and
    hash values are uniform only on average.
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
    """Return the background rows per row of the study that make up for dropped labels."""
    return (1 + ratio) / kept_share - 1


def check_equal(config: SweepConfig, document: Document) -> Iterator[str]:
    """Yield the reasons why labels cannot be made equal, or why the setting would do nothing."""
    if config.equal == "steps":
        return
    place = document.locate(("equal",))
    refused = f"{place} 'equal' cannot be '{config.equal}'"
    data = config.run.get("data")
    if isinstance(data, Mapping) and not (data.get("study") and data.get("background")):
        yield (
            f"{refused} without 'run.data.study' and 'run.data.background': it adds background "
            "rows, and without them every document would be trained more often"
        )
    for index, setting in enumerate(config.settings):
        if any(isinstance(one, GoldfishConfig) and one.k_by_dose for one in setting.mitigations):
            yield (
                f"{refused} where 'settings[{index}]' has goldfish with 'k_by_dose': the share of "
                "labels that it drops is not known before the documents are read"
            )
    if all(compute_kept_share(setting.mitigations) == 1 for setting in config.settings):
        yield f"{refused}: no setting drops labels (goldfish, token_dropout), it would do nothing"


BASE = "base"
"""Name of the run whose model every setting starts from."""

# Settings that the sweep determines, and where to set them instead.
_DECIDED = {
    "name": "the sweep names its runs",
    "output_dir": "set the sweep's own 'output_dir'",
    "mitigations": "set them in 'settings'",
    "seed": "set 'seeds'",
}
# Settings that must be the same for all runs of a sweep, else the runs are not comparable.
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
    """Yield problems of a sweep whose blocks are valid on their own."""
    for number, seed in enumerate(config.seeds):
        if seed in config.seeds[:number]:
            yield f"{document.locate(('seeds', number))} 'seeds[{number}]' is {seed} a second time"
    for index, setting in enumerate(config.settings):
        if setting.name == BASE:
            place = document.locate(("settings", index, "name"))
            yield f"{place} 'settings[{index}].name' must not be '{BASE}', the name of 'pretrain'"
    yield from check_equal(config, document)
    yield from _check_utility(config, document)
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
                "with 'pretrain': settings start from the model that 'pretrain' trains"
            )


def _check_utility(config: SweepConfig, document: Document) -> Iterator[str]:
    """Yield a problem if the runs do not answer the task that is named as utility."""
    if config.utility == HELDOUT_LOSS:
        return
    audit = config.run.get("audit")
    tasks = read_tasks(audit.get("utility", ())) if isinstance(audit, Mapping) else ()
    given = [
        task.get("task")
        for task in (tasks if isinstance(tasks, list | tuple) else ())
        if isinstance(task, Mapping)
    ]
    names = [_read_task_name(task) for task in given if isinstance(task, str)]
    if config.utility not in names:
        known = ", ".join([HELDOUT_LOSS, *names])
        yield (
            f"{document.locate(('utility',))} 'utility' must be {HELDOUT_LOSS} or a task of "
            f"'run.audit.utility', one of {known}; got '{config.utility}'"
        )


def _read_task_name(task: str) -> str:
    """Return the name of a task, which of a YAML is in the file."""
    if not task.endswith((".yaml", ".yml")):
        return task
    try:
        text = Path(os.path.expanduser(task)).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return task  # The run itself reports a file that is missing.
    found = re.search(r"^task:[ \t]*[\"']?([^\s\"'#]+)", text, re.MULTILINE)
    return task if found is None else found[1]


def _check_decided(document: Document, block: str, keys: tuple[str, ...]) -> Iterator[str]:
    for key in keys:
        if key in document.values[block]:
            place = document.locate((block, key))
            yield f"{place} '{block}.{key}' must not be set here: {_DECIDED[key]}"


def build_base(config: SweepConfig, document: Document, folder: Path) -> RunConfig:
    """Build the run that every setting starts from; audited only if 'pretrain' enables it."""
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
    index: int,
    number: int,
    kept_share: float,
) -> RunConfig:
    """Build the run of the setting and the seed at these positions from the common run.

    ``kept_share`` is the share of labels kept; background makes up for the rest. 1: add none.
    ConfigError lists every problem, with its place in the setting if it is there.
    """
    setting, seed = config.settings[index], config.seeds[number]
    name = f"{setting.name}-seed{seed}" if len(config.seeds) > 1 else setting.name
    decided = {"name": name, "output_dir": str(folder), "seed": seed}
    values = {**config.run, **decided, "mitigations": setting.mitigations}
    model = config.run.get("model")
    if config.pretrain is not None and (model is None or isinstance(model, Mapping)):
        kept = {k: v for k, v in (model or {}).items() if k not in _STARTING_POINT}
        is_adapter = config.pretrain.get("adapter") is not None
        weights = folder / BASE / ("adapter" if is_adapter else "model")
        values["model"] = {**kept, "path": str(weights)}
    document = document.place(("run", "name"), document.locate(("settings", index, "name")))
    document = document.place(("run", "seed"), document.locate(("seeds", number)))
    problems = []
    for key_path, origin, value in _flatten(setting.overrides, ("settings", index, "overrides")):
        place = document.locate(origin)
        dotted = format_key(key_path)
        reason = _SHARED.get(dotted.partition(".")[0].partition("[")[0])
        if not dotted:
            problems.append(f"{place} '{format_key(origin)}' is not a setting")
            continue
        if reason:
            problems.append(f"{place} '{dotted}' must not differ between settings: {reason}")
            continue
        try:
            values = apply_settings(values, {dotted: value})
        except ConfigError as error:
            problems.append(f"{place} {error}")
        document = document.place(("run", *key_path), place)
    checked = None
    try:
        checked = validate(RunConfig, values, document, prefix=("run",))
    except ConfigError as error:
        problems += error.problems
    if checked is not None and (ends_early := find_early_end(checked)):
        place = document.locate(("settings", index))
        problems.append(
            f"{place} '{ends_early}' ends training early: such a run trains documents less often "
            "than the others and cannot be compared with them. Train it as a single run"
        )
    if checked is None or problems:
        raise ConfigError(*problems)
    return _equalise(checked, kept_share, document)


def find_early_end(config: RunConfig) -> str:
    """Return the setting by which a model may lack some of the repetitions; "" if none."""
    ends = {
        "budget.action: stop": config.budget is not None and config.budget.action == "stop",
        "train.stop_after_worse": config.train.stop_after_worse is not None,
        "train.export: best": config.train.export == "best",
    }
    return next((setting for setting, is_set in ends.items() if is_set), "")


def _equalise(checked: RunConfig, kept_share: float, document: Document) -> RunConfig:
    """Add the background rows that make up for dropped labels."""
    if kept_share == 1:
        return checked
    place = document.locate(("equal",))
    why_not = ""
    if checked.budget is not None:
        why_not = "'budget', which may drop more labels or end training early"
    if checked.train.max_steps is not None:
        why_not = "'train.max_steps', which cuts off the added rows, and with them repetitions"
    if why_not:
        raise ConfigError(f"{place} 'equal' cannot add background with {why_not}")
    ratio = raise_background_ratio(checked.data.background_ratio, kept_share)
    values = apply_settings(checked.model_dump(mode="json"), {"data.background_ratio": ratio})
    document = document.place(("run", "data", "background_ratio"), place)
    return validate(RunConfig, values, document, prefix=("run",))


def _flatten(values: Mapping[str, Any], at: KeyPath) -> Iterator[tuple[KeyPath, KeyPath, Any]]:
    """Yield of each override its key in the run, its key in the sweep's file, and its value.

    ``{optim.lr: 1}`` and ``{optim: {lr: 1}}`` are equivalent.
    """
    for key, value in values.items():
        key_path, origin = parse_key(str(key)), (*at, str(key))
        # An empty mapping is a value: a section with all its defaults.
        if isinstance(value, Mapping) and value:
            for inner_path, place, inner in _flatten(value, origin):
                yield (*key_path, *inner_path), place, inner
        else:
            yield key_path, origin, value
