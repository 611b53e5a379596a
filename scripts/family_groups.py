"""Which meshes each causal language model of transformers can use, found without training.

    python scripts/families.py --groups       prints this table

A family is tried, not looked up: a model of its default configuration with few layers is built on
the meta device, and sharded on meshes of 4 simulated ranks by the functions that training uses.

    any mesh       `build_meta_layer` splits the layers over y and x
    data and z     it shards only the storage, on (data=2, z=2, y=1, x=1)
    one process    neither, but the model is built
    none           memguard refuses it everywhere, or its forward pass fails
    unknown        its default configuration cannot be built here

A narrow model with random weights also runs, where one can be made: it shows that the family is
causal and that its head is supported.
"""

import copy
import difflib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import transformers
from default_configs import FEW_LAYERS, make_default_config, set_no_dropout
from fake_mesh import simulated_mesh
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from memguard.errors import ConfigError, ModelError
from memguard.hf.assembly import Assembly, build_meta_layer
from memguard.hf.checkpoint import say_in_one_line
from memguard.hf.from_config import RUNNABLE, build_on_meta, reduce_config
from memguard.hf.load import count_parameters
from memguard.model.checks import build_causal_lm, explain_head
from memguard.model.trainable import list_dropout
from memguard.parallel.hf_plan import plan_sharding
from memguard.parallel.mesh_shape import MeshShape, list_meshes
from memguard.parallel.model_sizes import COMPARED_FAMILIES, ModelSizes
from memguard.records.record import Record

Group = Literal["any mesh", "data and z", "one process", "none", "unknown"]
GROUPS: tuple[Group, ...] = get_args(Group)

_NUM_RANKS = 4
_STORAGE = MeshShape(data=2, z=2)
_MAX_REASON = 160
_RUN_PARAMETERS = 110_000_000
"""Parameters of a model that may be built with storage (440 MB)."""


class Family(Record):
    """What one model type can use."""

    model_type: str
    """Key in transformers' mapping of causal language models."""
    model_class: str
    group: Group
    is_compared: bool
    """Whether tests compare its numbers on meshes with those of one process."""
    has_run: bool
    """Whether a narrow model of the family has run on this machine."""
    reason: str | None
    """Why it is not in the group above; null for "any mesh"."""
    condition: str | None
    """What a checkpoint or a run must set for this group; null if the defaults do."""


class Families(Record):
    """All model types, by group and then by name."""

    kind: Literal["families"] = "families"
    version: Literal[1] = 1
    transformers: str
    counts: dict[str, int]
    """Number of types in each group."""
    num_compared: int
    families: tuple[Family, ...]


def list_model_types() -> list[str]:
    """Return every causal language model type of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def check_model_types(names: Sequence[str]) -> None:
    """Reject names that are not model types.

    Raises:
        ConfigError: names the nearest ones.
    """
    known = list_model_types()
    problems = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "leave out all names for a list"
            problems.append(
                f"'--groups' takes types of causal language models that transformers "
                f"{transformers.__version__} has; got {name!r}: {hint}"
            )
    if problems:
        raise ConfigError(*problems)


def survey_families(
    names: Sequence[str] = (), on_done: Callable[[str], None] = lambda name: None
) -> Families:
    """Try families.

    Args:
        names: model types; all if empty.
        on_done: called with each type after its trial.

    Raises:
        ConfigError: a name is not a model type.
    """
    check_model_types(names)
    families = []
    with _without_noise():
        for name in names or list_model_types():
            families.append(try_family(name))
            on_done(name)
    families.sort(key=lambda family: (GROUPS.index(family.group), family.model_type))
    counts = Counter(family.group for family in families)
    return Families(
        transformers=transformers.__version__,
        counts={group: counts[group] for group in GROUPS},
        num_compared=sum(family.is_compared for family in families),
        families=tuple(families),
    )


def list_lines(table: Families) -> Iterator[str]:
    """Yield the table as text: each group with its types, and why they are not in the one above."""
    for group in GROUPS:
        members = [family for family in table.families if family.group == group]
        if members:
            yield f"{group} ({len(members)})"
        for family in members:
            why = "compared with one process by tests" if family.is_compared else family.reason
            only = f"; only with {family.condition}" if family.condition else ""
            yield f"  {family.model_type:<26}{why or 'not compared'}{only}"
    counts = ", ".join(f"{count} {group}" for group, count in table.counts.items() if count)
    yield f"{len(table.families)} model types of transformers {table.transformers}: {counts}"


def try_family(model_type: str) -> Family:
    """Try one family; see the module's docstring."""
    try:
        default = make_default_config(model_type)
        config, model = _build_first(reduce_config(default, FEW_LAYERS), default)
    except Exception as error:  # Each family checks its fields in its own way.
        return Family(
            model_type=model_type,
            model_class=_name_class(model_type),
            group="unknown",
            is_compared=False,
            has_run=False,
            reason=shorten_reason(f"{say_in_one_line(error)}"),
            condition=None,
        )
    trial = _run_small(default)
    try:
        group, reason = _find_group(config, model, trial)
    except Exception as error:  # A defect for one family must not end the survey of all.
        group, reason = "none", f"memguard fails: {type(error).__name__}: {say_in_one_line(error)}"
    family = config.get_text_config().model_type
    return Family(
        model_type=model_type,
        model_class=type(model).__name__,
        group=group,
        is_compared=group == "any mesh" and family in COMPARED_FAMILIES,
        has_run=trial.has_run,
        reason=None if reason is None else shorten_reason(reason),
        condition=_find_condition(default, model, group),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """Result of a run of a narrow model."""

    has_run: bool
    refusal: str | None = None
    """Why memguard cannot use the family at all."""
    has_known_head: bool = True


def _find_group(config: Any, model: Any, trial: _Trial) -> tuple[Group, str | None]:
    """Return the group, and why it is not the one above."""
    if trial.refusal is not None:
        return "none", trial.refusal
    config = set_no_dropout(config)
    not_split = _try_split(config, model, trial)
    if not_split is None:
        return "any mesh", None
    not_stored = _try_mesh(config, _STORAGE)
    return ("data and z", not_split) if not_stored is None else ("one process", not_stored)


def _try_split(config: Any, model: Any, trial: _Trial) -> str | None:
    """Return why the layers cannot be split over y and x; None if they can."""
    try:
        plan_sharding(model)
        # Default sizes may not be divisible by 2 along both axes.
        sizes = ModelSizes.from_config(config)
    except ModelError as error:
        return str(error)
    meshes = [mesh for mesh in list_meshes(_NUM_RANKS, sizes) if mesh.y * mesh.x > 1]
    if not meshes:
        return f"its default sizes allow no split over {_NUM_RANKS} ranks"
    reason = _try_mesh(config, max(meshes, key=lambda mesh: (mesh.x > 1) + (mesh.y > 1)))
    if reason is None and not trial.has_known_head:
        return explain_head(model)
    return reason


def _try_mesh(config: Any, shape: MeshShape) -> str | None:
    """Return why a model cannot be sharded on a mesh; None if it can."""
    try:
        with simulated_mesh(shape) as mesh:
            build_meta_layer(config, Assembly(mesh=mesh, device=torch.device("cpu")))
    except ModelError as error:
        return str(error)
    except Exception as error:
        return f"sharding fails with {type(error).__name__}: {say_in_one_line(error)}"
    return None


def _build_first(*configs: Any) -> tuple[Any, Any]:
    """Return the first configuration that can be built on the meta device, and its model."""
    failure: Exception | None = None
    for config in configs:
        try:
            return config, build_on_meta(config)
        except Exception as error:
            failure = error
    assert failure is not None, "there is a configuration"
    raise failure


def _run_small(config: Any) -> _Trial:
    """Run a small model of the family, of the first sizes that work."""
    for limits in RUNNABLE:
        model = _build_small(reduce_config(config, limits))
        if model is None:
            continue
        try:
            layer = build_causal_lm(model)
            return _Trial(has_run=True, has_known_head=layer.own_head)
        except ModelError as error:
            return _Trial(has_run=True, refusal=str(error))
        except Exception as error:
            if limits is RUNNABLE[-1]:
                # Of the default widths and with all experts: sizes are not the reason.
                failure = f"{type(error).__name__}: {say_in_one_line(error)}"
                return _Trial(has_run=False, refusal=f"its forward pass fails with {failure}")
    return _Trial(has_run=False)


def _build_small(config: Any) -> Any:
    """Return a model with random weights; None if it is large or the sizes do not match."""
    try:
        if count_parameters(build_on_meta(config)) > _RUN_PARAMETERS:
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model.eval()
    except Exception:  # Each family checks its sizes in its own way.
        return None


def _find_condition(default: Any, model: Any, group: Group) -> str | None:
    """Return what a checkpoint's configuration or a run must set, if the default is another."""
    conditions = []
    if group != "none" and _needs_decoder(default):
        conditions.append("is_decoder: true in config.json")
    rates = list_dropout(model)
    # A rank that leaves out a layer would not take part in its collectives.
    layers = [name for name in rates if "layerdrop" in name]
    if layers and group in ("any mesh", "data and z"):
        conditions.append(
            f"{layers[0]}: 0 in config.json, which is {rates[layers[0]]:g} by default"
        )
    if len(rates) > len(layers) and group == "any mesh":
        conditions.append("train.dropout: 0 in a run that splits layers, if the checkpoint drops")
    return ", ".join(conditions) or None


def _needs_decoder(default: Any) -> bool:
    """Whether a model whose configuration does not say that it is a decoder is refused.

    Some families have the field and do not read it, or set it themselves.
    """
    if getattr(type(default)(), "is_decoder", None) is not False:
        return False
    config = copy.deepcopy(default)
    config.is_decoder = False
    trial = _run_small(config)
    return not trial.has_run or trial.refusal is not None


def _name_class(model_type: str) -> str:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return names if isinstance(names, str) else names[0]


# What messages say of every family, and what is left of it.
_SHORTER = (
    (r"(?<=\.)\d+(?=\.|\b)", "*"),
    (r"\. (It can|Encoders|Set it) .*", ""),
    (r"; got .*", ""),
    (r" and \d+ more$", ""),
    (r" in this version of transformers", ""),
    (r"^\w+ cannot be split over x and y: ", ""),
    (r"^\w+ has no plan", "no plan"),
    (r"^\w+ (?=is not a causal|must not drop|transforms the output)", ""),
    (r"its plan for tensor parallelism has styles that memguard does not support", "other styles"),
    (r"\b(?:\w+\.)+\*\.", ""),
)


def shorten_reason(message: str) -> str:
    """Shorten the message of a refusal to what differs between families.

    The name of the class, the way out and the numbers of layers are left out, and a list has each
    kind of module once.
    """
    text = message
    for pattern, replacement in _SHORTER:
        text = re.sub(pattern, replacement, text)
    lead = re.match(r".*?(: | defined for | form of |$)", text)
    assert lead is not None, "the end of the text matches"
    items = text[lead.end() :].rstrip(".").split(", ")
    text = lead[0] + ", ".join(dict.fromkeys(items))
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 3]}..."


@contextmanager
def _without_noise() -> Iterator[None]:
    """Silence advice about configurations that are only tried."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
